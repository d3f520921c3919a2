"""One plan on one rank, ready to run: what is measured of its steps, and how they compare with one process."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from simpart.errors import MismatchError, UnsupportedError
from simpart.plan.format import PlanFile
from simpart.schedule import Rows
from simpart.validate._boundary import Traffic, check_order
from simpart.validate._gradients import Updater, holder_groups
from simpart.validate._inputs import Inputs
from simpart.validate._measure import Clock, peak_bytes, peak_rss_bytes, reset_peak_rss
from simpart.validate._mesh_runner import MeshRunner, mesh_message_shape
from simpart.validate._mesh_share import MeshShare
from simpart.validate._mesh_traffic import MeshTraffic
from simpart.validate._mesh_update import MeshUpdater, shared_groups
from simpart.validate._rank import Share, rank_table
from simpart.validate._reference import TOLERANCE, difference, reference_step
from simpart.validate._runtime import Runner, message_shape
from simpart.validate._transport import Transport, pair_groups

__all__ = ["Session"]


class Session:
    """Process groups, transport, updater and runner of a rank's share. All ranks must make it at the same time.

    `control` is a gloo group of all ranks, for barriers. Raises MismatchError when ranks have built other parameters,
    UserError when the schedule would deadlock.
    """

    def __init__(self, file: PlanFile, share: Share | MeshShare, inputs: Inputs, control: Any) -> None:
        self.file, self.share, self.inputs, self.control = file, share, inputs, control
        plan, device, world = file.plan, share.device, dist.get_world_size()
        rows = plan.schedule.rows(plan.group_of_stage, plan.batch.micro_batches)
        self.clock = Clock(device)
        self.updater: Updater | MeshUpdater
        self.runner: Runner | MeshRunner
        if isinstance(share, MeshShare):
            self._prepare_mesh(share, rows, world)
            return
        sums = {n: float(p.detach().double().sum()) for n, p in share.parameters.items()}
        same_everywhere(sorted(share.holders), sums, control)
        check_order(rows, sorted({(hop.source, hop.destination) for hop in share.hops}))
        traffic = Traffic(plan, share.values, rows, rank_table(plan), share.rank)
        groups = pair_groups(traffic, "nccl" if device.type == "cuda" else "gloo")
        transport = Transport(traffic, share.rank, lambda m: message_shape(share, traffic, m), device, groups)
        self.updater = Updater(
            share.parameters, share.holders, holder_groups(share.holders, world), file.training, world
        )
        self.runner = Runner(plan, share, traffic, transport, self.updater, rows[share.group], self.clock)

    def _prepare_mesh(self, share: MeshShare, rows: Rows, world: int) -> None:
        """As above, of a plan that runs kernel by kernel."""
        plan, device = self.file.plan, share.device
        same_everywhere(sorted(p.name for p in share.graph.parameters.values()), share.checksums, self.control)
        ways = share.needs.ways
        check_order(rows, sorted({(w.source, w.destination) for w in ways if not w.gradient}))
        traffic = MeshTraffic(plan, share.graph, share.flows, ways, rows, share.rank)
        groups = pair_groups(traffic, "nccl" if device.type == "cuda" else "gloo")
        transport = Transport(traffic, share.rank, lambda m: mesh_message_shape(share, traffic, m), device, groups)
        shared = shared_groups(plan, share.holders, share.rank)
        self.updater = updater = MeshUpdater(
            share.parameters, share.resting, share.gradients, self.file.training, share.mesh, shared, world
        )
        self.runner = MeshRunner(plan, share, traffic, transport, updater, rows[share.group], self.clock)

    def measure(self, *, warmup: int, steps: int) -> dict[str, Any]:
        """Times and events of `steps` steps after `warmup` others, then the memory of one more."""
        device, updater = self.share.device, self.updater
        self.inputs.keep_own_only()
        gc.collect()
        reset_peak_rss()
        rows, losses = [], []
        for number in range(warmup + steps):
            dist.barrier(self.control)
            self.clock.start()
            loss = self.runner.step(self.inputs.mine)
            step_s = self.clock.stop()
            if number >= warmup:
                rows.append({"step_s": step_s, "events": self.clock.events()})
            losses.append(0.0 if loss is None else float(loss))
        rss = peak_rss_bytes()
        dist.barrier(self.control)
        held = [*self.share.parameters.values(), *self.share.buffers.values(), *self.inputs.tensors()]
        held += updater.held()
        state = updater.state_bytes()
        memory = peak_bytes(lambda: self.runner.step(self.inputs.mine), held, device)
        if device.type == "cpu":
            memory = {name: size + state for name, size in memory.items()}
        return {
            "group": self.share.group,
            "replica": self.share.replica,
            "micro_batch": self.share.micro_batch,
            "steps": rows,
            "losses": losses,
            "peak_rss_bytes": rss,
            "memory": {**memory, "optimizer_state_bytes": state},
            "collectives": self.collectives(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        }

    def check(self) -> dict[str, Any]:
        """One step here and in one process; the largest relative differences of loss, gradients, parameters and
        buffers."""
        if self.share.draws_random:
            raise UnsupportedError(
                "a model that draws random numbers cannot be checked against one process; set its dropout to 0"
            )
        assert self.share.module is not None
        writes = any(op.mutates_buffer for op in self.file.graph.op_classes)
        wanted = reference_step(
            self.share.module, self.file.training, self.file.plan, self.share.loss_sizes, self.inputs.parts, writes
        )
        gradients: dict[str, torch.Tensor] = {}

        def keep() -> None:
            gradients.update(
                {
                    n: g.detach().cpu().clone()
                    for n in self.updater.trained
                    if (g := self.updater.gradient(n)) is not None
                }
            )

        loss = self.runner.step(self.inputs.mine, before_update=keep)
        total = torch.zeros((), dtype=torch.float64) if loss is None else loss.double().cpu().reshape(())
        dist.all_reduce(total)
        found: dict[str, Any] = {"loss": abs(float(total) - wanted.loss) / max(abs(wanted.loss), 1e-300)}
        found["gradients"], name = difference(gradients, self._mine(wanted.gradients, "optimizer"))
        found["parameters"], _ = difference(
            {n: p.detach() for n, p in self.share.parameters.items()}, self._mine(wanted.parameters, "parameter")
        )
        first = {n: b for n, b in self.share.buffers.items() if n in wanted.buffers} if self.share.replica == 0 else {}
        found["buffers"], buffer = difference(self._written(first), self._written(wanted.buffers))
        found["compared"] = {"gradients": len(gradients), "buffers": len(first)}
        found["collectives"] = self.collectives()
        missing = {n for n, p in self.share.parameters.items() if p.requires_grad and n in wanted.gradients} - set(
            gradients
        )
        if missing:
            raise RuntimeError(f"no gradient reached {sorted(missing)[0]} here, one process has one")
        for what, where in (("loss", ""), ("gradients", name), ("buffers", buffer)):
            if not found[what] <= TOLERANCE:
                raise RuntimeError(
                    f"{what} differ from one process by {found[what]:.3g} relative (allowed "
                    f"{TOLERANCE:g}){' at ' + where if where else ''}"
                )
        return found

    def collectives(self) -> dict[str, int]:
        """How often each collective was issued in the last step, as `phase kind axis`; point-to-point messages and
        reductions of whole models apart."""
        if not isinstance(self.share, MeshShare):
            return {}
        return {" ".join(key): n for key, n in sorted(self.share.mesh.counts.items())}

    def _mine(self, whole: Mapping[str, torch.Tensor], what: str) -> Mapping[str, torch.Tensor]:
        """This rank's parts of gradients (as optimizer state rests) or parameters."""
        share = self.share
        if not isinstance(share, MeshShare):
            return whole
        known = share.resting
        return {n: share.mesh.part(t, getattr(known[n], what)) for n, t in whole.items() if n in known}

    def _written(self, whole: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The parts of buffers that this rank writes."""
        share = self.share
        if not isinstance(share, MeshShare):
            return whole
        layouts = dict(row for stage in share.stages.values() for row in stage.buffers.values())
        return {n: share.mesh.part(t, layouts[n]) if n in layouts else t for n, t in whole.items()}


def same_everywhere(names: Sequence[str], sums: Mapping[str, float], control: Any) -> None:
    """Raise MismatchError unless the ranks that hold a parameter have built the same one; `sums` are over all its
    elements."""
    highest = torch.full((len(names),), -torch.inf, dtype=torch.float64)
    for i, name in enumerate(names):
        if name in sums:
            highest[i] = sums[name]
    lowest = torch.where(highest == -torch.inf, torch.inf, highest)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=control)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=control)
    for name, low, high in zip(names, lowest.tolist(), highest.tolist(), strict=True):
        if low != high:
            raise MismatchError(
                f"parameter {name} is initialised differently on different ranks; let the factory make "
                f"parameters before inputs "
                "and from torch's global seed alone"
            )
