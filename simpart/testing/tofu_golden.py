"""Golden cases of the recursive partition search: one step, the recursion with ties, and the joint optimum.

The cases count elements, simpart bytes: elements of one byte are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpart.errors import FormatError
from simpart.registry import folder

__all__ = ["solve_mlp", "workload_of"]


def solve_mlp(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Costs of the best plans of a small MLP; what is expected of single plans is not asserted, plans may tie."""
    search, steps = folder("searchers._tofu.search"), folder("searchers._tofu.steps")
    joint, counts = folder("searchers._tofu.joint").joint, folder("searchers._tofu.counts")
    rules = folder("searchers._tofu.work").Rules
    work, factors = workload_of(inputs), tuple(inputs["k_factors"])
    made = steps.Steps(work, factors)
    low, high = search.tie_range(made)
    plain = search.recursion(made, beam=1, ties=1)
    if not low <= plain.total <= high:
        raise FormatError(f"a plain recursion gives {plain.total}, outside of {low} to {high}")
    best = joint(made)
    if abs(counts.recount(work, plain) - plain.total) > 0.2 * plain.total:
        raise FormatError("devices receive other amounts than the recursion counts")
    with_whole = search.recursion(steps.Steps(work, factors[:1], rules(whole=True)))
    without = search.recursion(steps.Steps(work, factors[:1]))
    return {
        "one_cut_step1": int(without.total),
        "joint_optimum": int(best.total),
        "joint_optimum_device_level": int(joint(made, by_device=True).total),
        "keep_all_ties_total": int(low),
        "plain_recursion_total_range": [int(low), int(high)],
        "one_cut_step1_if_tensors_may_also_stay_whole": int(with_whole.total),
    }


def workload_of(inputs: Mapping[str, Any]) -> Any:
    """The matrix products and tensors of a case; gradients of weights share the weights' scheme."""
    made = folder("searchers._tofu.work")
    names = list(inputs["tensors"])
    kernels, links = [], []
    for number, op in enumerate(inputs["ops"]):
        left, result = op["einsum"].split("->")
        operands = tuple(left.split(","))
        sizes: dict[str, int] = {}
        for operand, name in zip(operands, op["inputs"], strict=True):
            sizes.update(zip(operand, inputs["tensors"][name], strict=True))
        kernels.append(made.EinsumKernel(operands, result, tuple(sizes.items())))
        for position, name in enumerate(op["inputs"]):
            links.append(made.Link(number, position, names.index(name), 1, False))
        links.append(made.Link(number, 0, names.index(op["output"]), 1, True))
    values = [
        made.Value(name=name, shape=tuple(shape), is_parameter=name.startswith("W"))
        for name, shape in inputs["tensors"].items()
    ]
    return made.Workload(
        names=tuple(op["name"] for op in inputs["ops"]),
        kernels=tuple(kernels),
        counts=(1,) * len(kernels),
        values=tuple(values),
        links=tuple(links),
        groups=tuple((node,) for node in range(len(kernels) + len(values))),
    )
