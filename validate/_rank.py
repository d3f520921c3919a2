"""What one rank holds of a plan: its stages compiled at its own micro-batch size, their parameters, who else holds
these."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from simpart.capture import export_ops
from simpart.capture._ops import ExportedOps
from simpart.errors import MismatchError, UnsupportedError
from simpart.graph import Graph
from simpart.kernels.ops import kind_of
from simpart.plan import Plan
from simpart.plan.format import PlanFile
from simpart.plan.partition import Partition, partition_of
from simpart.validate._boundary import BoundaryValue, Hop, boundary_values, hops_of
from simpart.validate._compile import Key, StageProgram, compile_stage, paths, value_of

__all__ = ["Share", "build_share", "built_module", "input_shapes", "rank_table"]


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part. `tensors` gives local shape and dtype of every boundary value; `holders` the ranks of every
    parameter; `input_shapes` are those of the
    model's inputs at this micro-batch size; `module` is a copy of the whole model, kept only when it is asked for."""

    rank: int
    group: int
    replica: int
    micro_batch: int
    device: torch.device
    programs: Mapping[int, StageProgram]
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    values: tuple[BoundaryValue, ...]
    hops: tuple[Hop, ...]
    tensors: Mapping[Key, tuple[tuple[int, ...], torch.dtype]]
    holders: Mapping[str, tuple[int, ...]]
    module: nn.Module | None
    loss_sizes: tuple[int, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    draws_random: bool


def rank_table(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Ranks of each group's replicas: the plan's devices in the cluster's order are ranks 0, 1, …"""
    order = {device: rank for rank, device in enumerate(sorted(d for group in plan.groups for d in group.devices))}
    return tuple(tuple(order[group.replica_devices(r)[0]] for r in range(group.replicas)) for group in plan.groups)


def structure(file: PlanFile, micro_batch: int) -> tuple[Graph, Partition]:
    """Graph and partition that hold at a replica's micro-batch size."""
    graph = file.graph.at(micro_batch)
    return graph, partition_of(graph, file.plan)


def built_module(
    file: PlanFile,
    factory: Callable[[int], Any],
    graph: Graph,
    micro_batch: int,
    *,
    precision: str,
    seed: int,
    whole: bool,
) -> tuple[ExportedOps, nn.Module | None]:
    """The module built from `seed` and its ops, parameters that the recipe freezes frozen; with `whole` a copy of the
    module too. Raises MismatchError when it is not the one that was captured."""

    def seeded(size: int) -> Any:
        torch.manual_seed(seed)
        return factory(size)

    exported = export_ops(seeded, micro_batch, real=True, precision=precision)
    if exported.ids != graph.op_ids:
        differ = next((pair for pair in zip(exported.ids, graph.op_ids, strict=False) if pair[0] != pair[1]), None)
        what = (
            f"op {differ[0]} where the graph has {differ[1]}"
            if differ
            else f"{len(exported.ids)} ops, the graph {len(graph.op_ids)}"
        )
        raise MismatchError(f"the module is not the one the plan was made for: it has {what}; capture and plan again")
    for name, parameter in exported.module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and file.training.trains(name))
    return exported, copy.deepcopy(exported.module) if whole else None


def input_shapes(exported: ExportedOps) -> tuple[tuple[int, ...], ...]:
    """Of the model's inputs, at the micro-batch it was exported at."""
    placeholders = (n for n in exported.graph.graph.nodes if n.op == "placeholder")
    return tuple(tuple(getattr(value_of(n), "shape", ())) for n in placeholders)


def build_share(
    file: PlanFile,
    factory: Callable[[int], Any],
    rank: int,
    *,
    precision: str,
    device: torch.device,
    seed: int = 0,
    whole: bool = False,
) -> Share:
    """Build the model from `seed`, keep and compile what the rank runs. `whole` keeps a copy of the entire module too.

    Raises MismatchError when the module is not the one that was captured.
    """
    plan, table = file.plan, rank_table(file.plan)
    group, replica = next((g, r) for g, ranks in enumerate(table) for r, other in enumerate(ranks) if other == rank)
    micro_batch = plan.batch.sizes[group][replica]
    graph, partition = structure(file, micro_batch)

    exported, module = built_module(file, factory, graph, micro_batch, precision=precision, seed=seed, whole=whole)
    names = exported.names
    all_parameters = {n: p for n, p in exported.module.named_parameters() if names[n] == n}
    all_buffers = {**{n: b for n, b in exported.module.named_buffers() if names[n] == n}, **exported.constants}

    values = boundary_values(*(structure(file, max(max(sizes) for sizes in plan.batch.sizes))))
    hops = hops_of(values, plan.skips)
    own = boundary_values(graph, partition)
    if {v.key for v in own} != {v.key for v in values}:
        raise UnsupportedError(
            "other values cross the cuts at micro-batch 1 than at larger ones; give all replicas at least 2 "
            "samples, or all 1"
        )
    tensors: dict[Key, tuple[tuple[int, ...], torch.dtype]] = {}
    number = {op: i for i, op in enumerate(exported.ids)}
    for value in values:
        made = value_of(exported.nodes[number[value.key[0]]])
        for pick in paths(made)[value.key[1]]:
            made = made[pick]
        tensors[value.key] = (tuple(made.shape), made.dtype)
    stages = [s for s, stage in enumerate(plan.stages) if stage.group == group]
    parameters = {n: _moved(all_parameters[n], device) for n in all_parameters}
    buffers = {n: b.to(device) for n, b in all_buffers.items()}
    programs = {
        s: compile_stage(
            exported,
            partition.ops[s].tolist(),
            inputs=[v.key for v in values if s in v.destinations],
            outputs=[v.key for v in values if s == v.source],
            parameters=parameters,
            buffers=buffers,
            recompute=[region.indices(graph).tolist() for region in plan.stages[s].recompute],
            loss=s == partition.loss_stage,
            device=device,
        )
        for s in stages
    }
    return Share(
        rank=rank,
        group=group,
        replica=replica,
        micro_batch=micro_batch,
        device=device,
        programs=programs,
        parameters={n: p for program in programs.values() for n, p in program.parameters.items()},
        buffers={n: b for program in programs.values() for n, b in program.buffers.items()},
        values=values,
        hops=hops,
        tensors=tensors,
        holders=holders_of(graph, partition, plan, table, names),
        module=module,
        input_shapes=input_shapes(exported),
        loss_sizes=plan.batch.sizes[plan.stages[partition.loss_stage].group],
        draws_random=any(kind_of(kernel.target) == "random" for kernel in graph.kernel_classes),
    )


def _moved(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if parameter.device == device:
        return parameter
    return nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)


def holders_of(
    graph: Graph, partition: Partition, plan: Plan, table: Sequence[Sequence[int]], names: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """The ranks that hold each parameter, by its first name; the same on every rank."""
    found: dict[str, set[int]] = {}
    for s, held in enumerate(partition.parameters):
        for value in held.tolist():
            source = graph.parameters[value]
            found.setdefault(names.get(source.name, source.name), set()).update(table[plan.stages[s].group])
    return {name: tuple(sorted(ranks)) for name, ranks in found.items()}
