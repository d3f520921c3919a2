"""What one rank holds of a sharded plan: its stages' kernels compiled for its place in the mesh, its parts of
parameters, where their state rests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from simpart.errors import UnsupportedError
from simpart.graph import Graph
from simpart.graph.sizes import DTYPE_BYTES
from simpart.kernels.ops import kind_of
from simpart.placement import Sharding
from simpart.plan import Plan
from simpart.plan.format import PlanFile
from simpart.plan.partition import partition_of
from simpart.schedule import Rows
from simpart.sharding import Flow, flows
from simpart.sharding._state import StateOf
from simpart.sharding.mesh import rest_layout
from simpart.validate._crossings import Needs, needs_of
from simpart.validate._kernel_stage import GradientOf, KernelStage, compile_kernels
from simpart.validate._local_kernels import Draw
from simpart.validate._mesh import Mesh, mesh_ranks
from simpart.validate._mesh_update import Resting
from simpart.validate._rank import built_module, input_shapes

__all__ = ["MeshShare", "build_mesh_share", "runs_kernels"]


@dataclass(frozen=True, kw_only=True)
class MeshShare:
    """One rank's part, as `_rank.Share`. `parameters` are parts as they rest; `checksums` of whole parameters;
    `holders` by name which device groups hold it, and whether it has a gradient."""

    rank: int
    group: int
    replica: int
    micro_batch: int
    device: torch.device
    mesh: Mesh
    graph: Graph
    flows: tuple[Flow, ...]
    needs: Needs
    stages: Mapping[int, KernelStage]
    parameters: Mapping[str, nn.Parameter]
    resting: Mapping[str, Resting]
    holders: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, torch.Tensor]
    constants: Mapping[str, torch.Tensor]
    checksums: Mapping[str, float]
    gradients: tuple[GradientOf, ...]
    module: nn.Module | None
    loss_sizes: tuple[int, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    draws_random: bool
    draw: Draw
    dtype: torch.dtype
    overrides_dtype: bool


def runs_kernels(plan: Plan) -> bool:
    """Whether a plan splits kernels or keeps state in shards, and so is run kernel by kernel."""
    split = any(size > 1 for group in plan.groups for _, size in group.sharding_axes)
    return split or bool(plan.state) or any(stage.sharding for stage in plan.stages)


def build_mesh_share(
    file: PlanFile,
    factory: Callable[[int], Any],
    mesh: Mesh,
    rank: int,
    *,
    precision: str,
    device: torch.device,
    rows: Rows,
    seed: int = 0,
    whole: bool = False,
) -> MeshShare:
    """Build the model from `seed`, keep this rank's parts and compile its kernels. `whole` keeps a copy of the entire
    module too.

    Raises MismatchError when the module is not the one that was captured, UnsupportedError for what is not run.
    """
    plan = file.plan
    group = next(g for g in range(len(plan.groups)) if rank in mesh_ranks(plan, g))
    replica = mesh.coordinate("dp")
    micro_batch = plan.batch.sizes[group][replica]
    graph = file.graph.at(micro_batch)
    others = [file.graph.at(b) for sizes in plan.batch.sizes for b in sizes]
    if any(other is not graph for other in others) or (plan.shardings and graph is not file.graph):
        raise UnsupportedError(
            "kernels at micro-batch 1 are not those of larger ones in this model, which shardings are written for; "
            "give every replica at least 2 samples"
        )
    exported, module = built_module(file, factory, graph, micro_batch, precision=precision, seed=seed, whole=whole)
    names = exported.names
    partition = partition_of(graph, plan)
    sizes = [micro_batch if s.group == group else max(plan.batch.sizes[s.group]) for s in plan.stages]
    try:
        found = flows(plan, graph, sizes)
    except KeyError as error:
        raise UnsupportedError(f"the plan's shardings name kernel {error}, which this graph lacks") from error
    everything = dict(exported.module.named_parameters())
    trained = {s.name for s in graph.parameters.values() if everything[s.name].requires_grad}
    needs = needs_of(graph, found, plan.state, partition.loss_stage, trained)
    draw = Draw(replica=replica, seed=seed)
    floating = getattr(torch, precision) if precision != file.graph.precision else None
    stages = {
        s: compile_kernels(
            graph, found[s], needs, s, mesh,
            sharding=dict(plan.shardings)[stage.sharding] if stage.sharding is not None else Sharding(),
            state=plan.state,
            recompute=[region.indices(graph).tolist() for region in stage.recompute],
            split=any(action.stage == s and action.kind == "I" for row in rows for action in row),
            floating=floating, device=device, draw=draw,
        )
        for s, stage in enumerate(plan.stages) if stage.group == group
    }  # fmt: skip
    holders: dict[str, set[int]] = {}
    for s, held in enumerate(partition.parameters):
        for value in held.tolist():
            if any(value in terms for terms in needs.gradients):
                holders.setdefault(graph.parameters[value].name, set()).add(plan.stages[s].group)
    sources = {source.name: source for stage in stages.values() for _, source in stage.held}
    state = StateOf(graph, plan.state, mesh.axes)
    parameters, resting = {}, {}
    dtype = getattr(torch, precision)
    for name, source in sources.items():
        if source.kind != "parameter":
            continue
        rest = state.rest_of(source)
        own = everything[name]
        resting[name] = Resting(
            shape=tuple(own.shape),
            itemsize=DTYPE_BYTES[source.spec.dtype],
            parameter=rest_layout(rest.parameter, mesh.axes),
            optimizer=rest_layout(rest.optimizer, mesh.axes),
            groups=tuple(sorted(holders.get(name, ()))),
        )
        part = mesh.part(own.detach(), resting[name].parameter).to(device).clone(memory_format=torch.contiguous_format)
        parameters[name] = nn.Parameter(part, requires_grad=own.requires_grad)
    held_buffers = {n: b for n, b in exported.module.named_buffers() if names[n] == n}
    first = {n: held_buffers[names[n]].to(device) for n, s in sources.items() if s.kind == "buffer"}
    constants = {n: _constant(exported, n).to(device) for n, s in sources.items() if s.kind == "constant"}
    return MeshShare(
        rank=rank, group=group, replica=replica, micro_batch=micro_batch, device=device, mesh=mesh, graph=graph,
        flows=found, needs=needs, stages=stages, parameters=parameters, resting=resting,
        holders={n: tuple(sorted(g)) for n, g in holders.items()}, buffers=first, constants=constants,
        checksums={n: float(everything[n].detach().double().sum()) for n in parameters},
        gradients=tuple(dict.fromkeys(g for stage in stages.values() for g in stage.gradients)),
        module=module, input_shapes=input_shapes(exported),
        loss_sizes=plan.batch.sizes[plan.stages[partition.loss_stage].group],
        draws_random=any(kind_of(kernel.target) == "random" for kernel in graph.kernel_classes),
        draw=draw, dtype=dtype, overrides_dtype=floating is not None,
    )  # fmt: skip


def _constant(exported: Any, name: str) -> torch.Tensor:
    found = exported.constants.get(name)
    if found is None:
        raise UnsupportedError(f"the constant tensor {name} is not among the module's; make it a buffer")
    tensor: torch.Tensor = found
    return tensor
