"""MODEL texts: what they mean, what is wrong with them, and the cache of captured graphs."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from simpart import capture as capture_package
from simpart.commands.capture import capture as capture_command
from simpart.errors import UserError
from simpart.graph import Graph
from simpart.graph.format import load_graph
from simpart.model_spec import UserFactory, canonical, load_graph_or_model, parse_model
from simpart.model_spec.cache import cache_folder, captured
from simpart.zoo import GPTDims, ZooFactory

TINY = "gpt:layers=1,hidden=8,heads=2,seq=4,vocab=11"


def test_a_zoo_text_gives_its_dims() -> None:
    factory = parse_model("gpt:layers=2,hidden=64,heads=4,tied=true,dropout=0.1")
    assert factory == ZooFactory("gpt", GPTDims(layers=2, hidden=64, heads=4, tied=True, dropout=0.1))
    assert parse_model("gpt") == ZooFactory("gpt", GPTDims())


@given(st.permutations(["layers=2", "hidden=64", "heads=4", "vocab=10", "tied=true"]))
def test_order_and_spaces_do_not_matter(parts: list[str]) -> None:
    expected = "gpt:layers=2,hidden=64,heads=4,seq=1024,vocab=10,tied=true,dropout=0,eager=false"
    assert canonical("gpt: " + " , ".join(parts)) == expected
    assert canonical(expected) == expected


@pytest.mark.parametrize("text", ["llama:layers=2,hidden=64,heads=4", "resnet50:blocks=1-2-1", "unet:image=32,depth=2"])
def test_a_canonical_text_means_itself(text: str) -> None:
    assert canonical(canonical(text)) == canonical(text)
    assert parse_model(canonical(text)) == parse_model(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gtp:layers=2", "unknown model 'gtp'; did you mean 'gpt'?"),
        ("gtp:tiny", "unknown model 'gtp'; did you mean 'gpt'?"),
        ("resnet", "unknown model 'resnet'; did you mean 'resnet50'?"),
        ("", "the model is empty"),
        ("gpt:layer=2", "unknown dim of gpt 'layer'; did you mean 'layers'?"),
        ("gpt:layers", "dims of gpt are written dim=value with commas between, got 'layers'; try gpt:layers=12"),
        ("gpt:", "dims of gpt are written dim=value"),
        ("gpt:layers=2,layers=3", "each dim is given once, got layers twice"),
        ("gpt:layers=2.5", "layers must be a whole number of at least 1, got layers=2.5; try layers=2"),
        ("gpt:layers=-1", "got layers=-1; try layers=1"),
        ("gpt:layers=0", "got layers=0; try layers=1"),
        ("gpt:layers=²", "layers must be a whole number"),
        ("llama:kv_heads=0", "kv_heads must be a whole number of at least 1"),
        ("gpt:tied=yes", "tied must be true or false, got tied=yes"),
        ("gpt:dropout=nan", "dropout must be a number from 0 to 1, got dropout=nan"),
        ("resnet50:blocks=3,4", "dims of resnet50 are written"),
        ("resnet50:blocks=a", "blocks must be counts with dashes between, got blocks=a"),
        ("gpt:hidden=10,heads=3", "heads must divide hidden, got heads=3, hidden=10; try heads=2 or heads=5"),
        ("hf:gpt2", "hf: takes a config.json or its folder and downloads nothing, there is no gpt2"),
        ("none.graph", "cannot read none.graph: there is no such file"),
        ("a/b", "a model is a zoo model such as"),
    ],
)
def test_a_bad_text_is_answered_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_graph_or_model(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parsing_imports_neither_torch_nor_the_users_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    code = (
        "import sys; from simpart.model_spec import parse_model\n"
        "parse_model('gpt'), parse_model('mine:make')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env={"PYTHONPATH": ":".join(sys.path)})


# --- factories of users ----------------------------------------------------------------------------------------------
MODULE = """
    import torch
    from torch import nn
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, WIDTH)
        def forward(self, x):
            return self.l(x).square().mean()
    def make(micro_batch):
        return Net(), (torch.zeros(micro_batch, 4),)
    def alone(micro_batch):
        return Net()
    def broken(micro_batch):
        return Net(), torch.zeros(micro_batch, 4).reshape(3, 5, 7)
    number = 3
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the working folder, under a name of its own."""
    name = f"user_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE.replace("WIDTH", "3")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_users_factory_is_called_with_the_micro_batch(user: str) -> None:
    factory = parse_model(f"{user}:make")
    module, inputs = factory(3)
    assert inputs[0].shape == (3, 4)
    assert module(*inputs).shape == ()
    assert factory.model == f"{user}:make"


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("mak", "did you mean 'make'?"),
        ("number", "must be a function of the micro-batch that returns (module, inputs), got an int"),
        ("alone", "must return (module, inputs) with an nn.Module, got a Net"),
        ("broken", ".py:15"),
    ],
)
def test_a_faulty_factory_is_answered_in_one_line(user: str, attribute: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        UserFactory(user, attribute)(2)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_failing_modules_are_told_apart(user: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no module 'no_such.thing'"):
        UserFactory("no_such.thing", "make")(2)
    (tmp_path / f"{user}_b.py").write_text("import no_such_requirement")
    with pytest.raises(UserError, match="No module named 'no_such_requirement'; install no_such_requirement"):
        UserFactory(f"{user}_b", "make")(2)
    (tmp_path / f"{user}_c.py").write_text("\nx = 1 / 0")
    with pytest.raises(
        UserError, match=rf"importing {user}_c failed: ZeroDivisionError: division by zero at .*_c\.py:2"
    ):
        UserFactory(f"{user}_c", "make")(2)


# --- cache -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache; the list grows by the model of each real capture."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SIMPART_NO_CACHE", raising=False)
    done: list[str] = []
    real = capture_package.capture

    def counting(*args: object, model: str, **named: object) -> Graph:
        done.append(model)
        return real(*args, model=model, **named)  # type: ignore[arg-type]  # passed on as they are

    monkeypatch.setattr(capture_package, "capture", counting)
    return done


def test_a_model_is_captured_once(captures: list[str]) -> None:
    first = load_graph_or_model(TINY)
    again = load_graph_or_model("gpt:vocab=11,seq=4,heads=2,hidden=8,layers=1")
    assert captures == [canonical(TINY)] == [first.model]
    assert first.fingerprint == again.fingerprint
    assert again.tokens_per_sample == 4


def test_the_cache_can_be_switched_off_and_damaged(captures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_graph_or_model(TINY)
    load_graph_or_model(TINY, cache=False)
    monkeypatch.setenv("SIMPART_NO_CACHE", "1")
    load_graph_or_model(TINY)
    assert len(captures) == 3
    monkeypatch.delenv("SIMPART_NO_CACHE")
    for entry in cache_folder().iterdir():
        entry.write_bytes(entry.read_bytes()[:50])
    assert load_graph_or_model(TINY).fingerprint == first.fingerprint
    assert len(captures) == 4
    load_graph_or_model(TINY)
    assert len(captures) == 4


def test_a_changed_source_is_captured_again(captures: list[str], user: str, tmp_path: Path) -> None:
    factory = UserFactory(user, "make")
    first = captured(factory, "float32")
    assert captured(factory, "float32").fingerprint == first.fingerprint
    assert len(captures) == 1
    (tmp_path / f"{user}.py").write_text(textwrap.dedent(MODULE.replace("WIDTH", "5")))
    del sys.modules[user]
    assert captured(factory, "float32").parameter_count == 25
    assert len(captures) == 2


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(UserError, match=r"unknown precision 'float23'; did you mean 'float32'\?"):
        load_graph_or_model(TINY, "float23")


# --- command ---------------------------------------------------------------------------------------------------------
def test_the_command_writes_the_file_and_one_document(captures: list[str], tmp_path: Path) -> None:
    path = tmp_path / "g.graph"
    done = CliRunner().invoke(capture_command, [TINY, "-o", str(path), "--json"], catch_exceptions=False)
    document = json.loads(done.stdout)
    assert document["parameters"] == GPTDims(layers=1, hidden=8, heads=2, seq=4, vocab=11).parameter_count
    assert document["file"] == str(path)
    graph = load_graph(path)
    assert document["fingerprint"] == graph.fingerprint
    assert document["ops"] == len(graph.op_ids) == graph.flat.op_class.size
    assert document["kernels"] == graph.flat.kernel_class.size
    with pytest.raises(UserError, match=r"was captured in float32, asked for is bfloat16; say --precision float32 or"):
        load_graph_or_model(str(path), "bfloat16")
    assert replace(graph, model="").fingerprint == graph.fingerprint


def test_a_missing_folder_is_told_before_capturing(captures: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        CliRunner().invoke(
            capture_command,
            [TINY, "-o", str(tmp_path / "no" / "g.graph")],
            standalone_mode=False,
            catch_exceptions=False,
        )
    assert captures == []
