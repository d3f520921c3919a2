"""The edge that imports torch: an nn.Module and example inputs become a Graph. Importing this package does not
import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simpart.capture._ops import ExportedOps
    from simpart.graph import Graph

__all__ = ["Factory", "capture", "export_ops"]

Factory = Callable[[int], tuple[Any, tuple[Any, ...]]]
"""factory(micro_batch) gives an nn.Module whose forward returns the scalar loss, and a tuple of example inputs."""


def capture(
    factory: Factory,
    micro_batches: Sequence[int] = (2, 3, 5),
    *,
    model: str = "",
    precision: str = "float32",
    shallow: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Graph:
    """Capture one training step of a module as a Graph, without memory for its tensors.

    `factory` is called in fake mode with each micro-batch size and with 1, and with `precision` as default dtype.
    Sizes are
    fitted at the first two micro-batches and checked at the others. `shallow` captures four blocks of a deep stack
    of equal
    ones and expands them when the whole forward is provably regular. `model` is kept in the Graph as the spec it
    came from.

    Raises UserError, in one line: factory or module of a wrong form, control flow that depends on data, a loss that
    is no
    scalar or depends on no parameter, structure that depends on the micro-batch.
    """
    from simpart.capture._capture import capture as run

    return run(factory, micro_batches, model=model, precision=precision, shallow=shallow, progress=progress)


def export_ops(factory: Factory, micro_batch: int, *, real: bool = False, precision: str = "float32") -> ExportedOps:
    """The clean exported forward graph of the whole module, with the op of each node; see `ExportedOps`.

    With `real` the module is built outside fake mode and the graph holds its real parameters and buffers. Ids and
    their order
    equal those of the captured Graph. Raises UserError as `capture` does.
    """
    from simpart.capture._ops import export_ops as run

    return run(factory, micro_batch, real=real, precision=precision)
