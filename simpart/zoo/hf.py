"""Models named `hf:config.json`, `hf:folder` or `hf:config.json:seq=512`: a Hugging Face configuration with random
weights. Nothing is downloaded; the optional extra `hf` is needed. No torch here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpart.errors import FormatError, UnknownNameError, UnsupportedError, UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["HFFactory", "parse_hf"]

LONGEST = 2048
"""Tokens of a sample when none are asked for and the model could read more."""


def parse_hf(text: str) -> HFFactory:
    """The factory that `text`, what stands behind `hf:`, names. Raises UserError in one line."""
    place, _, options = (part.strip() for part in text.partition(":"))
    seq = None
    for option in filter(None, (part.strip() for part in options.split(","))):
        key, equals, value = (piece.strip() for piece in option.partition("="))
        if not equals or key != "seq":
            raise UnknownNameError("option of hf:", key, ["seq"])
        if not re.fullmatch(r"\d{1,9}", value, re.ASCII) or int(value) < 2:
            raise UserError(f"seq must be a whole number of at least 2, got seq={value}; try seq=512")
        seq = int(value)
    if not place:
        raise UserError("hf: needs a config.json or its folder; try hf:config.json or hf:config.json:seq=512")
    path = Path(place)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"hf: takes a config.json or its folder and downloads nothing, there is no {path}; save the model's "
            "config.json and say hf:config.json"
        )
    return HFFactory(str(path), seq)


@dataclass(frozen=True)
class HFFactory:
    """`factory(micro_batch)` gives a causal, masked or sequence-to-sequence language model in training, wrapped to
    return its loss, and its tokens and labels. `asked` is the number of tokens asked for; None leaves it to the model:
    the largest power of two that it can read, at most 2048.
    """

    path: str
    asked: int | None = None

    def __call__(self, micro_batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        return self.build(), self.inputs(micro_batch)

    def build(self) -> nn.Module:
        """The module in torch's default dtype. Raises UserError for a configuration that cannot be built."""
        self.check()
        from simpart.zoo._hf_module import build

        return build(self.path, self.content)

    def inputs(self, micro_batch: int, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels (b, seq): zeros, or random with a generator. Raises UserError for too long a `seq`."""
        self.check()
        from simpart.zoo import _hf_module
        from simpart.zoo.inputs import integers

        shape = (micro_batch, self.tokens_per_sample)
        tokens = integers(_hf_module.vocabulary(self.path, self.content), shape, generator)
        if _hf_module.kind_of(self.path, self.content) == "causal":
            return tokens, tokens.clone()
        return tokens, integers(_hf_module.vocabulary(self.path, self.content), shape, generator)

    @property
    def model(self) -> str:
        """`hf:path`, with `:seq=` if it was asked for."""
        return f"hf:{self.path}" + ("" if self.asked is None else f":seq={self.asked}")

    @cached_property
    def content(self) -> dict[str, Any]:
        """The configuration as it stands in the file. Raises FormatError."""
        try:
            content = json.loads(Path(self.path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FormatError(f"cannot read {self.path}: {str(error).splitlines()[0]}; give a config.json") from error
        if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
            raise FormatError(f"{self.path} names no model_type; give the config.json of a Hugging Face model")
        return content

    @cached_property
    def tokens_per_sample(self) -> int:
        """Tokens of one sample. Raises UserError when more are asked for than the model has positions."""
        self.check()
        from simpart.zoo._hf_module import positions

        limit = positions(self.path, self.content)
        if self.asked is None:
            return 1 << (min(limit or 512, LONGEST).bit_length() - 1)
        if limit is not None and self.asked > limit:
            raise UserError(f"seq must be at most the model's {limit} positions, got seq={self.asked}; try seq={limit}")
        return self.asked

    @property
    def digest(self) -> str:
        """Of everything that a capture depends on: the configuration and the version of transformers."""
        self.check()
        content = json.dumps([self.content, importlib.metadata.version("transformers")], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def check(self) -> None:
        """Raise UserError when the configuration cannot be read or transformers is missing."""
        _ = self.content
        if importlib.util.find_spec("transformers") is None:
            raise UnsupportedError("hf: models need transformers, which is not installed; pip install 'simpart[hf]'")
