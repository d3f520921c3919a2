"""Cost models: roofline, tables of measurements, α–β; and the ones that commands use unless told otherwise.

Importing this package imports neither torch nor a fitted model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from simpart.cost import CommModel, ComputeModel, Costs
from simpart.costmodels.alpha_beta import AlphaBeta
from simpart.costmodels.fallback import Calibrated, Fallback, merge
from simpart.costmodels.measured_links import MeasuredLinks
from simpart.costmodels.roofline import Roofline, physical_bound_s
from simpart.costmodels.table import Table, overhead_s, preferred
from simpart.hardware import Cluster, Host
from simpart.hardware_profiles._store import Profiles, Store

LEARNED_HERE = "learned.npz"
"""Beside the profiles of a store: what `simpart fit` learned from them."""

__all__ = [
    "COMM_MODELS", "COMPUTE_MODELS", "AlphaBeta", "Calibrated", "Fallback", "MeasuredLinks", "Roofline", "Table",
    "default_costs", "merge", "physical_bound_s", "with_host",
]  # fmt: skip


def _profiled(
    profiles: Profiles, processes: int | None = None, base: ComputeModel | None = None, learned: Path | None = None
) -> Fallback:
    """What was measured, then what was `learned` from it (a file that simpart fit wrote), then its nearest like."""
    table, base = Table(profiles, processes), base or Roofline()
    calibrated = Calibrated(table, base)
    if learned is None or not learned.exists():
        return Fallback((table, calibrated), base)
    from simpart.costmodels.learned_local import Local, Unseen, load_local

    return Fallback((table, Unseen(Local(load_local(learned), base), calibrated), calibrated), base)


def _learned() -> ComputeModel:
    """Read here, so that importing this package stays cheap."""
    from simpart.costmodels.learned import Learned

    return Learned()


def _host(cluster: Cluster) -> dict[str, float]:
    """What hosts of GPUs take, of Costs: from other hosts."""
    from simpart.costmodels.learned._overheads import compiled_launch, shipped_overheads

    found = shipped_overheads()
    driver_s = max(device.kernel_launch_s for device in cluster.kinds if device.kind == "gpu")
    compiled_s, compiled_log_sd = compiled_launch(found, driver_s)
    return {
        "eager_launch_s": found.eager_launch_s,
        "compiled_launch_s": compiled_s,
        "launch_log_sd": found.launch_log_sd,
        "compiled_launch_log_sd": compiled_log_sd,
        "step_overhead_s": found.step_overhead_s,
    }


def with_host(costs: Costs, host: Host) -> Costs:
    """Costs with what is known of a host in place of what other hosts take."""
    from simpart.costmodels.learned._overheads import shipped_overheads

    spread = shipped_overheads().known_log_sd
    known: dict[str, float] = {}
    if host.eager_launch_s is not None:
        known |= {"eager_launch_s": host.eager_launch_s, "launch_log_sd": spread}
    if host.compiled_launch_s is not None:
        known |= {"compiled_launch_s": host.compiled_launch_s, "compiled_launch_log_sd": spread}
    if host.step_overhead_s is not None:
        known["step_overhead_s"] = host.step_overhead_s
    return replace(costs, **known)  # type: ignore[arg-type]  # all are numbers


def _learned_links() -> CommModel:
    from simpart.costmodels.learned_comm import LearnedComm

    return LearnedComm()


COMPUTE_MODELS: Mapping[str, Callable[[Profiles], ComputeModel]] = {
    "roofline": lambda profiles: Roofline(),
    "profiled": _profiled,
    "learned": lambda profiles: _learned(),
}
COMM_MODELS: Mapping[str, Callable[[Profiles], CommModel]] = {
    "alpha_beta": lambda profiles: AlphaBeta(),
    "in_switch": lambda profiles: AlphaBeta(in_switch=True),
    "learned_comm": lambda profiles: _learned_links(),
    "measured_links": lambda profiles: MeasuredLinks(profiles, AlphaBeta()),
}
"""Name → model on a store's profiles. Each answers every row of any table, and passes the shared suite."""

STEP_LOG_SD = 0.08
"""What whole steps differed by from the sum of their parts, bias included: root mean square 6 % over the repeats of
benchmarks/loop.py and 10 % for its worst model (docs/accuracy-loop.md)."""


def default_costs(cluster: Cluster, store: Path | str | None = None, *, profiles: bool = True) -> Costs:
    """Models learned from published kernels and collectives for GPUs, data sheets for the rest, and in front of them
    what was measured on devices of this cluster, if anything was and `profiles`, and what simpart fit learned from it.

    What the host takes is from its own profile, else from the cluster's file, else from other hosts.
    `store` is a folder, by default SIMPART_STORE or the user's data folder. Raises FormatError if its file is no store.
    """
    place = Store.at(store)
    found = place.read() if profiles else Profiles()
    devices = {device.name for device in cluster.kinds}
    kernels = sum(r.environment.device in devices for r in found.kernels)
    links = sum(r.environment.device in devices for r in found.links)
    overheads = [r for r in found.overheads if r.environment.device in devices]
    known = [name for name, count in (("kernels", kernels), ("links", links)) if count]

    def overhead(name: str) -> float:
        return overhead_s(preferred([r for r in overheads if r.name == name], cluster.size))

    learned = any(device.kind == "gpu" for device in cluster.kinds)
    base = _learned() if learned else Roofline()
    network = _learned_links() if learned else AlphaBeta()
    costs = Costs(
        compute=_profiled(found, cluster.size, base, place.folder / LEARNED_HERE) if kernels else base,
        communication=MeasuredLinks(found, network) if links else network,
        action_overhead_s=overhead("action"),
        step_log_sd=STEP_LOG_SD,
        **(_host(cluster) if learned else {}),
        description=("learned kernels and collectives, data sheets" if learned else "data sheets")
        + (f", with profiles of {' and '.join(known)} measured here" if known else ""),
    )
    if cluster.host is not None:
        costs = with_host(costs, cluster.host)
    return replace(costs, step_overhead_s=step_s) if (step_s := overhead("step")) else costs
