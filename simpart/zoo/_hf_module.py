"""Hugging Face configurations turned into modules whose forward returns the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from simpart.errors import UnknownNameError, UnsupportedError, UserError

__all__ = ["WithLoss", "build", "kind_of", "positions", "vocabulary"]

Kind = Literal["causal", "masked", "seq2seq"]

KINDS: Mapping[Kind, tuple[str, str, tuple[str, ...]]] = {
    "seq2seq": (
        "AutoModelForSeq2SeqLM",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        ("ForConditionalGeneration",),
    ),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", ("ForMaskedLM", "ForPreTraining")),
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", ("ForCausalLM", "LMHeadModel")),
}
"""Class that builds, table of the model types it builds, endings of architectures. A bare model is of the first kind
that knows it. Names, for transformers may be missing."""


class WithLoss(nn.Module):
    """`forward(tokens, labels)` is the loss of the wrapped model; `named` are further arguments of its forward."""

    def __init__(self, model: nn.Module, named: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.named = dict(named)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=labels, **self.named).loss
        return loss


def classes(kind: Kind) -> Mapping[str, str]:
    """Model types of a kind, each with the name of its class."""
    from transformers.models.auto import modeling_auto

    found: Mapping[str, str] = getattr(modeling_auto, KINDS[kind][1])
    return found


def known_type(content: Mapping[str, Any]) -> str:
    """The model's type. Raises UserError for one that the library does not know."""
    from transformers import CONFIG_MAPPING

    name: str = content["model_type"]
    if name not in CONFIG_MAPPING:
        raise UnknownNameError("model_type", name, {n for kind in KINDS for n in classes(kind)})
    return name


def configuration(path: str, content: Mapping[str, Any]) -> Any:
    """The library's object. Raises UserError for values that it refuses."""
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[known_type(content)]
    try:
        return kind.from_dict(dict(content))
    except Exception as error:
        raise UserError(f"{path} is refused by transformers: {' '.join(str(error).split())[:300]}") from error


def kind_of(path: str, content: Mapping[str, Any]) -> Kind:
    """What the model is trained for, from its architectures. Raises UnsupportedError for another task."""
    name, architectures = known_type(content), content.get("architectures") or []
    able = [kind for kind in KINDS if name in classes(kind)]
    named = [kind for kind in able for a in architectures if str(a).endswith(KINDS[kind][2])]
    bare = not architectures or all(
        str(a).endswith("Model") and not str(a).endswith("LMHeadModel") for a in architectures
    )
    if named or (able and bare):
        return (named or able)[0]
    which = ", ".join(classes(kind)[name] for kind in able)
    way = f"set architectures in {path} to {which}" if able else f"{name} is none; write a factory for it"
    asked = ", ".join(map(str, architectures)) or name
    raise UnsupportedError(f"hf: reads causal, masked and sequence-to-sequence language models, got {asked}; {way}")


def build(path: str, content: Mapping[str, Any]) -> nn.Module:
    """The model with random weights in torch's default dtype, in training mode. Raises UserError.

    Experts are grouped products, what GPUs run, in bfloat16; torch has none for fake tensors or the CPU in other
    precisions, where each token's matrices are gathered instead.
    """
    import transformers

    kind, config = kind_of(path, content), configuration(path, content)
    dtype = torch.get_default_dtype()
    implementation = "grouped_mm" if dtype == torch.bfloat16 else "batched_mm"
    experts = {"experts_implementation": implementation} if _has_experts(config) else {}
    try:
        model: nn.Module = getattr(transformers, KINDS[kind][0]).from_config(config, dtype=dtype, **experts)
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise UserError(f"building {path} failed: {' '.join(str(error).split())[:300]}; check its sizes") from error
    return WithLoss(model, {} if kind == "masked" else {"use_cache": False}).train()


def _has_experts(config: Any) -> bool:
    return any("expert" in name for name in config.to_dict())


def vocabulary(path: str, content: Mapping[str, Any]) -> int:
    """Number of tokens that the model knows."""
    return int(configuration(path, content).get_text_config().vocab_size)


def positions(path: str, content: Mapping[str, Any]) -> int | None:
    """The longest sample the model can read; None if it has no limit."""
    found = getattr(configuration(path, content).get_text_config(), "max_position_embeddings", None)
    return int(found) if found else None
