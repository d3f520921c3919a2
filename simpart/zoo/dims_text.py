"""Dimensions of language models and how many parameters they give."""

from __future__ import annotations

import math
from dataclasses import dataclass

from simpart.errors import UserError
from simpart.zoo._rules import divides, positive, rotary

__all__ = ["BERTDims", "GPTDims", "LSTMDims", "LlamaDims", "MoEDims", "T5Dims"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTDims:
    """A GPT: learned positions, pre-LN blocks, GELU MLP of width 4 · hidden. Defaults are GPT-2 small. `eager` keeps
    attention scores, as software did before fused kernels."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    seq: int = 1024
    vocab: int = 50257
    tied: bool = False
    dropout: float = 0.0
    eager: bool = False

    def __post_init__(self) -> None:
        positive(self)
        divides("heads", self.heads, "hidden", self.hidden)
        if not self.dropout < 1:
            raise UserError(f"dropout must be at least 0 and below 1, got dropout={self.dropout:g}; try 0.1")

    @property
    def tokens_per_sample(self) -> int:
        return self.seq

    @property
    def parameter_count(self) -> int:
        """`Vh + sh + L(12h² + 13h) + 2h`, and `Vh` more when the head is not tied to the embedding."""
        h, embedding = self.hidden, self.vocab * self.hidden
        body = embedding + self.seq * h + self.layers * (12 * h * h + 13 * h) + 2 * h
        return body + (0 if self.tied else embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaDims:
    """A Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Defaults are Llama-2 7B.

    `kv_heads` 0 becomes `heads`; `ffn` 0 becomes 8/3 · hidden rounded up to a multiple of 256.
    """

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 0
    ffn: int = 0
    seq: int = 2048
    vocab: int = 32000

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "ffn", self.ffn or -(-8 * self.hidden // (3 * 256)) * 256)
        positive(self)
        divides("heads", self.heads, "hidden", self.hidden)
        divides("kv_heads", self.kv_heads, "heads", self.heads)
        rotary(self.hidden, self.heads)

    @property
    def tokens_per_sample(self) -> int:
        return self.seq

    @property
    def parameter_count(self) -> int:
        """`2Vh + L(2h² + 2h·kv + 3hf + 2h) + h` with kv = h · kv_heads / heads."""
        h, kv = self.hidden, self.hidden * self.kv_heads // self.heads
        block = 2 * h * h + 2 * h * kv + 3 * h * self.ffn + 2 * h
        return 2 * self.vocab * h + self.layers * block + h


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEDims:
    """A Llama whose MLPs are `experts` SwiGLUs of width `ffn`; each token goes to the `top` best. Defaults are
    Mixtral 8×7B.

    Capacity is static, as GShard's: of each sample an expert takes `capacity · top · seq / experts` choices, rounded
    up, first choices before second ones; what is beyond passes by the experts. `balance` weighs the auxiliary loss
    that evens out the load.
    """

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    experts: int = 8
    top: int = 2
    capacity: float = 1.25
    balance: float = 0.01
    seq: int = 2048
    vocab: int = 32000

    def __post_init__(self) -> None:
        positive(self)
        divides("heads", self.heads, "hidden", self.hidden)
        divides("kv_heads", self.kv_heads, "heads", self.heads)
        rotary(self.hidden, self.heads)
        if self.top > self.experts:
            raise UserError(
                f"top must be at most experts, got top={self.top}, experts={self.experts}; try top={self.experts}"
            )
        if self.capacity == 0:
            raise UserError("capacity must be above 0, got capacity=0; try capacity=1.25")

    @property
    def slots(self) -> int:
        """Tokens of one sample that an expert takes."""
        return min(self.seq, math.ceil(self.capacity * self.top * self.seq / self.experts))

    @property
    def tokens_per_sample(self) -> int:
        return self.seq

    @property
    def parameter_count(self) -> int:
        """`2Vh + L(2h² + 2h·kv + Eh + 3Ehf + 2h) + h` with kv = h · kv_heads / heads, E experts."""
        h, kv = self.hidden, self.hidden * self.kv_heads // self.heads
        block = 2 * h * h + 2 * h * kv + self.experts * h + 3 * self.experts * h * self.ffn + 2 * h
        return 2 * self.vocab * h + self.layers * block + h


@dataclass(frozen=True, slots=True, kw_only=True)
class BERTDims:
    """A BERT in pre-training: learned positions and segments, post-LN blocks, masked tokens and next sentence.
    Defaults are BERT base.

    `masked` tokens of each sample are predicted; 0 becomes 15 % of `seq`.
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    seq: int = 512
    vocab: int = 30522
    ffn: int = 3072
    masked: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "masked", self.masked or max(1, self.seq * 15 // 100))
        positive(self)
        divides("heads", self.heads, "hidden", self.hidden)
        if self.masked > self.seq:
            raise UserError(
                f"masked must be at most seq, got masked={self.masked}, seq={self.seq}; "
                f"try masked={max(1, self.seq * 15 // 100)}"
            )

    @property
    def tokens_per_sample(self) -> int:
        return self.seq

    @property
    def parameter_count(self) -> int:
        """`Vh + sh + 4h + L(4h² + 2hf + f + 9h) + 2h² + 6h + V + 2`; the table of words is the head's too."""
        h, f = self.hidden, self.ffn
        block = 4 * h * h + 2 * h * f + f + 9 * h
        heads = 2 * h * h + 6 * h + self.vocab + 2
        return self.vocab * h + self.seq * h + 4 * h + self.layers * block + heads


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Dims:
    """A T5: `layers` in the encoder and as many in the decoder, relative positions shared by the layers of each, ReLU,
    RMSNorm, tied embedding. Defaults are T5 base.

    The encoder reads `seq` tokens, the decoder `target`; `size` is the width of a head.
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    size: int = 64
    ffn: int = 3072
    seq: int = 512
    target: int = 128
    vocab: int = 32128

    def __post_init__(self) -> None:
        positive(self)

    @property
    def tokens_per_sample(self) -> int:
        return self.seq + self.target

    @property
    def parameter_count(self) -> int:
        """`Vh + L(12hi + 4hf + 5h) + 2h + 64·heads` with i = heads · size: 32 distances in either stack."""
        h, inner = self.hidden, self.heads * self.size
        layer = 12 * h * inner + 4 * h * self.ffn + 5 * h
        return self.vocab * h + self.layers * layer + 2 * h + 64 * self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LSTMDims:
    """A language model of stacked LSTM layers with a projection to the vocabulary. Defaults are the large one of
    Zaremba et al., "Recurrent Neural Network Regularization" (2014), without dropout."""

    layers: int = 2
    hidden: int = 1500
    seq: int = 35
    vocab: int = 10000

    def __post_init__(self) -> None:
        positive(self)

    @property
    def tokens_per_sample(self) -> int:
        return self.seq

    @property
    def parameter_count(self) -> int:
        """`2Vh + V + L(8h² + 8h)`: four gates, from input and state, each with a bias."""
        h = self.hidden
        return 2 * self.vocab * h + self.vocab + self.layers * (8 * h * h + 8 * h)
