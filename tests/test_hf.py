"""Hugging Face configurations as models: loss and inputs, capture, stages, and what is answered to bad ones."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from simpart.capture import capture
from simpart.capture._torch import fake_mode
from simpart.errors import UserError
from simpart.hardware.files import load_device
from simpart.model_spec import canonical, parse_model
from simpart.model_spec.cache import captured
from simpart.registry import folder
from simpart.testing.tdl_coverage import coverage_of
from simpart.zoo.hf import HFFactory
from tests.test_zoo_stages import check_random_cut
from tests.toy_graphs import chain

MISSING = importlib.util.find_spec("transformers") is None
needs_transformers = pytest.mark.skipif(MISSING, reason="transformers is not installed (the extra hf)")

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 4,
        "n_positions": 64, "vocab_size": 61, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 61,
        "max_position_embeddings": 64,
    },
    "bert": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "t5": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "num_layers": 2,
        "num_heads": 4, "d_kv": 8, "d_ff": 48, "vocab_size": 61, "dropout_rate": 0.0, "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
    "mixtral": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "num_local_experts": 4,
        "vocab_size": 61, "max_position_embeddings": 64,
    },
}  # fmt: skip
each = pytest.mark.parametrize("name", sorted(CONFIGS))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a configuration as config.json in the working folder, some of it changed; None takes a key out."""
    monkeypatch.chdir(tmp_path)

    def writing(name: str, **changed: Any) -> Path:
        content = {key: value for key, value in {**CONFIGS[name], **changed}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(content))
        return tmp_path / "config.json"

    return writing


@needs_transformers
@each
def test_a_configuration_gives_a_module_that_learns(name: str, write: Any) -> None:
    write(name)
    torch.manual_seed(0)
    factory = parse_model("hf:config.json:seq=16")
    module, zeros = factory(2)
    inputs = factory.inputs(2, torch.Generator().manual_seed(0))
    loss = module(*inputs)
    loss.backward()
    assert module.training
    assert loss.shape == () and 3 < loss.item() < 6
    assert [t.shape for t in inputs] == [t.shape for t in zeros] == [(2, 16), (2, 16)]
    grown = [n for n, p in module.named_parameters() if p.grad is None]
    assert not grown


@needs_transformers
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("gpt2", "float32"),
        ("mixtral", "bfloat16"),
        *(pytest.param(name, "float32", marks=pytest.mark.slow) for name in ("bert", "llama", "mixtral", "t5")),
    ],
)
def test_every_kernel_of_a_captured_configuration_is_described(name: str, precision: str, write: Any) -> None:
    write(name)
    graph = capture(parse_model("hf:config.json:seq=16"), (2, 3), model=name, precision=precision)
    found = coverage_of(graph, 2, folder("costmodels").Roofline(), load_device("h100-sxm-80gb"))
    assert not found.missing
    assert graph.parameter_count == sum(p.numel() for p in parse_model("hf:config.json").build().parameters())


@needs_transformers
@pytest.mark.parametrize("name", [n if n == "gpt2" else pytest.param(n, marks=pytest.mark.slow)
                                  for n in sorted(CONFIGS)])  # fmt: skip
def test_two_stages_of_a_configuration_give_loss_and_gradients_of_the_module(name: str, write: Any) -> None:
    write(name)
    check_random_cut("hf:config.json:seq=16")


@needs_transformers
def test_large_configurations_take_no_memory_in_fake_mode(write: Any) -> None:
    write("llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=4, num_attention_heads=64,
          num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192)  # fmt: skip
    with fake_mode():
        module, inputs = parse_model("hf:config.json")(2)
        assert inputs[0].shape == (2, 2048)
        assert sum(p.numel() for p in module.parameters()) > 5e9


@needs_transformers
def test_a_folder_and_its_file_are_one_model_and_the_text_is_kept(write: Any) -> None:
    path = write("gpt2")
    assert canonical("hf:config.json") == "hf:config.json"
    assert canonical(f"hf: {path.parent} : seq = 32") == f"hf:{path}:seq=32"
    assert parse_model("hf:.") == HFFactory("config.json")
    assert parse_model("hf:config.json").tokens_per_sample == 64
    assert parse_model("hf:config.json:seq=32").tokens_per_sample == 32


@needs_transformers
@pytest.mark.parametrize(
    ("name", "architectures", "kind"),
    [
        ("gpt2", ["GPT2Model"], "causal"),
        ("bert", None, "masked"),
        ("bert", ["BertForPreTraining"], "masked"),
        ("bert", ["BertLMHeadModel"], "causal"),
        ("t5", ["T5Model"], "seq2seq"),
    ],
)
def test_the_task_follows_from_the_architectures(name: str, architectures: Any, kind: str, write: Any) -> None:
    from simpart.zoo._hf_module import kind_of

    factory = parse_model(f"hf:{write(name, architectures=architectures)}")
    assert isinstance(factory, HFFactory)
    assert kind_of(factory.path, factory.content) == kind


@needs_transformers
def test_a_changed_configuration_is_captured_again(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SIMPART_NO_CACHE", raising=False)
    monkeypatch.setattr("simpart.capture.capture", lambda *_, **__: chain(2))
    for width in (32, 16, 32):
        write("gpt2", n_embd=width)
        assert captured(parse_model("hf:config.json:seq=8"), "float32").tokens_per_sample == 8
    assert len(list((tmp_path / "cache" / "simpart" / "graphs").iterdir())) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf:gpt2", "downloads nothing, there is no gpt2; save the model's config.json and say hf:config.json"),
        ("hf:meta-llama/Llama-3-8B", "there is no meta-llama/Llama-3-8B"),
        ("hf:", "hf: needs a config.json or its folder"),
        ("hf:config.json:sq=3", "unknown option of hf: 'sq'; did you mean 'seq'?"),
        ("hf:config.json:seq=1.5", "seq must be a whole number of at least 2, got seq=1.5; try seq=512"),
    ],
)
def test_a_bad_text_is_answered_in_one_line(text: str, message: str, write: Any) -> None:
    write("gpt2")
    with pytest.raises(UserError) as caught:
        parse_model(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@needs_transformers
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gpt3"}, "unknown model_type 'gpt3'; did you mean 'gpt"),
        ({"model_type": None}, "config.json names no model_type"),
        ({"architectures": ["GPT2ForTokenClassification"]}, "set architectures in config.json to GPT2LMHeadModel"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "got ViTModel; vit is none; write a factory for it"),
        ({"n_head": 5}, "building config.json failed: "),
        ({"n_positions": 8}, "seq must be at most the model's 8 positions, got seq=16; try seq=8"),
        ({"n_embd": "wide"}, "config.json"),
    ],
)
def test_a_bad_configuration_is_answered_in_one_line(changed: dict[str, Any], message: str, write: Any) -> None:
    write("gpt2", **changed)
    with pytest.raises(UserError) as caught:
        capture(parse_model("hf:config.json:seq=16"), (2, 3), model="bad")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_extra_is_told_with_how_to_get_it(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write("gpt2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"need transformers, which is not installed; pip install 'simpart\[hf\]'"):
        parse_model("hf:config.json")(2)


def test_an_unreadable_file_is_told(write: Any) -> None:
    write("gpt2").write_text("{")
    with pytest.raises(UserError, match=r"cannot read config.json: .*; give a config.json"):
        parse_model("hf:config.json").check()  # type: ignore[union-attr]  # a HFFactory


def test_parsing_imports_neither_torch_nor_transformers(write: Any) -> None:
    path = write("gpt2")
    code = (
        "import sys; from simpart.model_spec import parse_model\n"
        "parse_model('hf:config.json')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=path.parent, check=True, env={"PYTHONPATH": ":".join(sys.path)})
