"""Dimensions of models that see images, and how many parameters they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from simpart.errors import UserError
from simpart.zoo._rules import divides, positive

__all__ = ["ResNetDims", "TwoTowerDims", "UNetDims", "WideResNetDims"]


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


WIDE_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks of each stage by depth: He et al., "Deep Residual Learning for Image Recognition" (2016), table 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WideResNetDims:
    """A ResNet of bottleneck blocks with `factor` times the channels everywhere, as in Wang, Huang and Li, "Supporting
    Very Large Models using Automatic Dataflow Graph Partitioning" (2019). `depth` is 50, 101 or 152."""

    depth: int = 50
    factor: int = 4
    image: int = 224
    classes: int = 1000

    def __post_init__(self) -> None:
        positive(self)
        if self.depth not in WIDE_BLOCKS:
            near = min(WIDE_BLOCKS, key=lambda d: abs(d - self.depth))
            raise UserError(f"depth must be 50, 101 or 152, got depth={self.depth}; try depth={near}")
        _ = self.resnet

    @property
    def resnet(self) -> ResNetDims:
        """The same model as a ResNet."""
        return ResNetDims(
            image=self.image, classes=self.classes, width=64 * self.factor, blocks=WIDE_BLOCKS[self.depth]
        )

    @property
    def tokens_per_sample(self) -> int:
        return 1

    @property
    def parameter_count(self) -> int:
        """That of the ResNet of width 64 · factor."""
        return self.resnet.parameter_count


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoTowerDims:
    """A transformer over image patches and one over text, each to a vector of `embed`; the contrastive loss over all
    pairs of a micro-batch. Defaults are CLIP ViT-B/32 (Radford et al., 2021)."""

    image: int = 224
    patch: int = 32
    image_layers: int = 12
    image_hidden: int = 768
    image_heads: int = 12
    seq: int = 77
    vocab: int = 49408
    text_layers: int = 12
    text_hidden: int = 512
    text_heads: int = 8
    embed: int = 512

    def __post_init__(self) -> None:
        positive(self)
        divides("image_heads", self.image_heads, "image_hidden", self.image_hidden)
        divides("text_heads", self.text_heads, "text_hidden", self.text_hidden)
        divides("patch", self.patch, "image", self.image)

    @property
    def patches(self) -> int:
        """Patches of one image."""
        return (self.image // self.patch) ** 2

    @property
    def tokens_per_sample(self) -> int:
        return 1

    @property
    def parameter_count(self) -> int:
        """Image `3p²w + (n + 6)w + we`, text `Vt + (s + 2)t + te`, blocks `12h² + 13h` in both, one temperature."""
        w, t, n = self.image_hidden, self.text_hidden, self.patches
        image = 3 * self.patch**2 * w + (n + 6) * w + w * self.embed + self.image_layers * (12 * w * w + 13 * w)
        text = self.vocab * t + (self.seq + 2) * t + t * self.embed + self.text_layers * (12 * t * t + 13 * t)
        return image + text + 1
