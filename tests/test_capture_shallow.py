"""A stack captured as four blocks and expanded is the whole capture, byte for byte; what cannot be proved is
captured whole.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from simpart.capture import capture
from simpart.capture._expand import Irregular, Names, Stack, expand_rows, segments
from simpart.graph import Graph
from simpart.zoo import GPTDims, LlamaDims, ZooFactory

Factory = Callable[[int], tuple[nn.Module, tuple[torch.Tensor, ...]]]


def captured(factory: Factory, *, shallow: bool) -> tuple[Graph, bool]:
    """The graph, and whether it was captured with fewer blocks than it has."""
    import simpart.capture._capture as module

    depths: list[int] = []
    original = module.trace_module

    def watched(model: nn.Module, *rest: object) -> object:
        depths.append(sum(len(m) for m in model.modules() if isinstance(m, nn.ModuleList)))
        return original(model, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "trace_module", watched)
        graph = capture(factory, (2, 3), shallow=shallow)
    whole = sum(len(m) for m in factory(2)[0].modules() if isinstance(m, nn.ModuleList))
    return graph, depths[-1] < whole


def expands_exactly(factory: Factory) -> None:
    shallow, was_cut = captured(factory, shallow=True)
    whole, _ = captured(factory, shallow=False)
    assert was_cut
    assert shallow.op_ids == whole.op_ids
    assert shallow.fingerprint == whole.fingerprint


def is_captured_whole(factory: Factory) -> None:
    assert not captured(factory, shallow=True)[1]


def model(kind: type[nn.Module], *arguments: object) -> Factory:
    return lambda b: (kind(*arguments), (torch.zeros(b, 16),))


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gpt(tied: bool) -> None:
    expands_exactly(ZooFactory("gpt", GPTDims(layers=6, hidden=64, heads=4, seq=16, vocab=64, tied=tied)))


@pytest.mark.slow
def test_llama() -> None:
    expands_exactly(ZooFactory("llama", LlamaDims(layers=6, hidden=64, heads=4, kv_heads=2, ffn=96, seq=16, vocab=64)))


class ParentResidual(nn.Module):
    """Residual adds, and a mask that all blocks share, stand in the parent module."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        mask = (x > 0).float()
        for block in self.blocks:
            x = x + block(x.tanh()) * mask
        return x.square().mean()


def test_residuals_in_the_parent_module() -> None:
    expands_exactly(model(ParentResidual, 7))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, y: torch.Tensor, memory: torch.Tensor) -> Any:
        return y + self.linear(y.sin() * memory).tanh()


class TwoStacks(nn.Module):
    """An encoder whose result every block of a decoder reads: gradients accumulate from block to block."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.decoder = nn.ModuleList(Reader() for _ in range(6))
        self.between = between

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.encoder:
            x = block(x).relu()
        y = torch.zeros_like(x)
        for block in self.decoder:
            y = block(y * x, y) if self.between else block(y, x)
        return y.mean()


def test_two_stacks_and_a_value_read_by_every_block() -> None:
    expands_exactly(model(TwoStacks, False))


def test_a_value_read_between_blocks_is_not_proved_and_captured_whole() -> None:
    is_captured_whole(model(TwoStacks, True))


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16, bias=i != 4) for i in range(6))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x).relu()
        return x.mean()


class KnowsItsNumber(nn.Module):
    """Block 4 of the same shape does something else, by its number in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x: torch.Tensor) -> Any:
        for i, block in enumerate(self.blocks):
            x = block(x).relu() if i == 4 else block(x).tanh()
        return x.mean()


class ScalesByDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x).tanh() / len(self.blocks)
        return x.mean()


class Collects(nn.Module):
    """All hidden states meet at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> Any:
        states = []
        for block in self.blocks:
            x = block(x).tanh()
            states.append(x)
        return torch.stack(states).mean()


class NeedsItsDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> Any:
        for i in range(6):
            x = self.blocks[i](x).tanh()
        return x.mean()


class SharesWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.blocks[3].weight = self.blocks[1].weight

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x).tanh()
        return x.mean()


class FreezesBelow(nn.Module):
    """The lower half runs without gradient, which the forward's kernels alone would not show."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x: torch.Tensor) -> Any:
        for i, block in enumerate(self.blocks):
            with torch.set_grad_enabled(i >= 4):
                x = block(x).tanh()
        return x.mean()


@pytest.mark.parametrize(
    "kind", [Shapes, KnowsItsNumber, ScalesByDepth, Collects, NeedsItsDepth, SharesWeights, FreezesBelow]
)
def test_blocks_that_differ_are_captured_whole(kind: type[nn.Module]) -> None:
    is_captured_whole(model(kind))


# --- expansion of rows alone -----------------------------------------------------------------------------------------
STACK = Stack(name="h", depth=7)


def test_a_row_of_a_further_block_reads_the_block_before_and_its_own_source() -> None:
    names = ["x", "h.0.w", "h.1.w", "h.2.w", "h.3.w"]
    paths = ["h.0", "h.1", "h.2", "h.3"]
    inputs = [[(-1, 0), (-1, 1)], [(0, 0), (-1, 2)], [(1, 0), (-1, 3)], [(2, 0), (-1, 4)]]
    deep = ["x", *(f"h.{i}.w" for i in range(7))]
    found = expand_rows(
        ["block"] * 4, inputs, segments(paths, STACK), Names(STACK, names, {n: i for i, n in enumerate(deep)})
    )
    assert found.inputs == [((i - 1, 0) if i else (-1, 0), (-1, i + 1)) for i in range(7)]


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ([[], [(0, 0)], [(1, 0)], [(1, 0)]], "far away"),
        ([[], [(0, 0)], [(0, 0)], [(2, 0)]], None),
        ([[], [(0, 0)], [(0, 1)], [(2, 0)]], "do not correspond"),
        ([[], [(0, 0)], [(1, 0), (0, 0)], [(2, 0)]], "different numbers"),
    ],
)
def test_rows_that_prove_nothing_are_irregular(inputs: list[list[tuple[int, int]]], why: str | None) -> None:
    names = Names(STACK, [], {})
    segment = segments(["h.0", "h.1", "h.2", "h.3"], STACK)
    if why is None:
        assert len(expand_rows([0] * 4, inputs, segment, names).rows) == 7
    else:
        with pytest.raises(Irregular, match=why):
            expand_rows([0] * 4, inputs, segment, names)


def test_blocks_out_of_order_or_run_twice_are_irregular() -> None:
    for paths in (["h.0", "h.2", "h.1", "h.3"], ["h.0", "h.1", "h.2", "h.3", "h.0"], ["h.0", "h.1", "h.3"]):
        with pytest.raises(Irregular):
            segments(paths, STACK)


@pytest.mark.slow
def test_a_deep_gpt_with_dropout_and_uneven_batch() -> None:
    expands_exactly(ZooFactory("gpt", GPTDims(layers=24, hidden=64, heads=4, seq=16, vocab=64, dropout=0.1)))
