"""The dimensions that name each model, their rules, and how many parameters they give. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from simpart.errors import UserError

__all__ = ["Dims", "GPTDims", "LlamaDims", "ResNetDims", "UNetDims"]


def spell(value: object) -> str:
    """A dimension as it is written in a MODEL text.

    >>> spell(True), spell(0.1), spell((3, 4, 6, 3))
    ('true', '0.1', '3-4-6-3')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def positive(dims: Dims) -> None:
    """Raise UserError unless every integer dimension is at least 1 and no float is negative."""
    for item in fields(dims):
        value = getattr(dims, item.name)
        numbers = value if isinstance(value, tuple) else (value,)
        if isinstance(value, float) and value < 0:
            raise UserError(f"{item.name} must not be negative, got {item.name}={value:g}; try {item.name}=0")
        if not isinstance(value, float | bool) and min(numbers, default=1) < 1:
            usual = spell(item.default or 1)
            raise UserError(f"{item.name} must be at least 1, got {item.name}={spell(value)}; try {item.name}={usual}")


def divides(divisor: str, value: int, name: str, whole: int) -> None:
    """Raise UserError unless `value` divides `whole`, naming the nearest divisors."""
    if whole % value:
        fits = [d for d in range(1, min(whole, 2**20) + 1) if whole % d == 0]
        near = [max(d for d in fits if d <= value), *[d for d in fits if d > value][:1]]
        choice = " or ".join(f"{divisor}={d}" for d in near)
        raise UserError(f"{divisor} must divide {name}, got {divisor}={value}, {name}={whole}; try {choice}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTDims:
    """A GPT: learned positions, pre-LN blocks, GELU MLP of width 4 · hidden. Defaults are GPT-2 small."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    seq: int = 1024
    vocab: int = 50257
    tied: bool = False
    dropout: float = 0.0

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
        if self.hidden // self.heads % 2:
            raise UserError(
                f"rotary positions need an even hidden / heads, got hidden={self.hidden}, heads={self.heads}; "
                f"try hidden={2 * self.hidden}"
            )

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
class ResNetDims:
    """A ResNet of bottleneck blocks (expansion 4): so many `blocks` in each stage. Defaults are ResNet-50."""

    image: int = 224
    classes: int = 1000
    width: int = 64
    blocks: Sequence[int] = (3, 4, 6, 3)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        positive(self)
        if len(self.blocks) < 1:
            raise UserError("blocks must name at least one stage, got none; try blocks=3-4-6-3")
        smallest = 2 ** (len(self.blocks) + 1)
        if self.image < smallest:
            raise UserError(
                f"image must be at least 2^(stages + 1), got image={self.image} for {len(self.blocks)} stages; "
                f"try image={smallest}"
            )

    @property
    def tokens_per_sample(self) -> int:
        return 1

    @property
    def parameter_count(self) -> int:
        """Stem 149w; a block of width n on w channels nw + 13n² + 12n, its projection 4nw + 8n; head (w + 1)classes."""
        total, w = 149 * self.width, self.width
        for stage, count in enumerate(self.blocks):
            n = self.width * 2**stage
            for block in range(count):
                total += n * w + 13 * n * n + 12 * n
                total += 4 * n * w + 8 * n if block == 0 else 0
                w = 4 * n
        return total + (w + 1) * self.classes


@dataclass(frozen=True, slots=True, kw_only=True)
class UNetDims:
    """A U-Net: `depth` halvings from `base` channels, doubled at each; skips by concatenation; batch norms."""

    image: int = 256
    channels: int = 3
    base: int = 64
    depth: int = 4
    classes: int = 2

    def __post_init__(self) -> None:
        positive(self)
        step = 2**self.depth
        if self.image % step:
            raise UserError(
                f"image must be a multiple of 2^depth, got image={self.image}, depth={self.depth}; "
                f"try image={max(step, self.image // step * step)}"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels at each level, the bottom last."""
        return tuple(self.base * 2**level for level in range(self.depth + 1))

    @property
    def tokens_per_sample(self) -> int:
        return 1

    @property
    def parameter_count(self) -> int:
        """Double convolutions `9io + 9o² + 4o`, up-convolutions `4io + o` per level, head `(base + 1)·classes`."""

        def double(i: int, o: int) -> int:
            return 9 * i * o + 9 * o * o + 4 * o

        down = sum(double(i, o) for i, o in pairwise((self.channels, *self.widths)))
        up = sum(4 * i * o + o + double(2 * o, o) for o, i in pairwise(self.widths))
        return down + up + (self.base + 1) * self.classes


Dims = GPTDims | LlamaDims | ResNetDims | UNetDims
