"""What the host takes of a training step: fitted on measured runs, tested on hosts left out, written as a page.

    python benchmarks/overheads.py ../shared/data -o docs/accuracy-overheads.md [--csv rows.csv] [--ship]

Every run is predicted by simpart's own path: the zoo's GPT with the run's dims, configured, lowered and simulated with
the shipped learned costs. What the host takes per launch only changes durations, so that a run's step is simulated at
once for a grid of it. `--ship` writes what was fitted on all sources to costmodels/artifacts/overheads.json. Takes
seven minutes on one core.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simpart.configure import Configuration, configure
from simpart.cost import Costs
from simpart.costmodels.learned._adapters import read_measurements
from simpart.costmodels.learned._overheads import (
    GRID_S,
    KIND,
    SHIPPED_OVERHEADS,
    VERSION,
    HostRuns,
    at_launch_times,
    fit_host,
    pooled,
    predicted_s,
    told_by_one,
)
from simpart.engines import compiled
from simpart.errors import UserError
from simpart.files import write_atomically, write_document
from simpart.hardware import Cluster, load_cluster, load_device
from simpart.lowering import lowering_of
from simpart.lowering.ledger import ClassCost
from simpart.model_spec import load_graph_or_model
from simpart.problem import Problem
from simpart.registry import default_costs
from simpart.training import TrainingSpec

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Launches = dict[str, dict[str, float]]
"""Source → host → seconds per launch."""
START = time.monotonic()
SMALL_VOCABULARY, MEGATRON_VOCABULARY = 50304, 51200
"""Of GPT-2's tokenizer, padded to 128 and, as Megatron-LM does over 8 ranks, to 1024: neither file states it."""
BLOOM_VOCABULARY = 250880
JEAN_ZAY_BYTES_PER_S = 50e9 / 8
VTRAIN_BYTES_PER_S = 100e9 / 8
"""A device's part of its node's network: four cards of 100 Gb/s on Jean Zay, 800 Gb/s on vTrain's cluster."""
CI, VTRAIN, OPS = "Megatron-LM CI", "vTrain", "NeuSight ops"
ENGINE = f"{CI}, Transformer Engine"
"""Layers of another library on the hosts of CI: launches that simpart does not count; told apart and not pooled."""
UNITS: dict[str, tuple[float, float, float, float, float]] = {
    "every launch": (1, 1, 1, 1, 1),
    "no accumulation of gradients": (1, 1, 1, 0, 1),
    "no collectives": (1, 1, 1, 1, 0),
    "collectives three times": (1, 1, 1, 1, 3),
    "backward and accumulation half": (1, 0.5, 1, 0.5, 1),
    "forward and recomputation only": (1, 0, 1, 0, 0),
}
"""What to count: how much kernels of forward, of backward, of recomputation, of the accumulation of gradients, and
collectives weigh. The first is what simpart counts."""
COUNTED = next(iter(UNITS))
TABLE_1 = {"GPT-1.7B": 16, "GPT-3.6B": 16, "GPT-7.5B": 16, "GPT-18.4B": 8, "GPT-39.1B": 4}
"""Micro-batches of arXiv:2104.04473's Table 1, from Megatron-LM's examples/sc21/run_table_1.sh."""
LARGE = ("vTrain-multi", "2205.05198", "Megatron-LM 2104.04473", "bigscience-A100", "llm-foundry")
UNFUSED = ("vTrain-single", *LARGE[:-1])
"""Sources whose software keeps attention scores: Megatron-LM before FlashAttention."""
DIMS = ("layers", "hidden", "heads", "tp", "pp", "dp", "seq_len", "micro_batch", "num_gpus", "global_batch")
TINY_S = 2e-6
"""An op whose bytes take less than this at the memory's bandwidth is all launch, at some 30 us."""
MOST_DEVICES = 512


class Measured(NamedTuple):
    """A run as a line of a file has it. `check`: kernels are long, so that it shows what overheads must not spoil.
    `network_bytes_per_s` is a device's part of its node's network where that is not the cluster's."""

    source: str
    host: str
    check: bool
    model: str
    precision: str
    cluster: str
    size: int
    global_batch: int
    configuration: Configuration
    step_s: float
    name: str
    network_bytes_per_s: float | None = None


class Group(NamedTuple):
    """Runs of one host and software that are judged together, with their names, and their steps where launches are
    counted in other UNITS."""

    runs: HostRuns
    check: bool
    names: tuple[str, ...]
    in_units: Mapping[str, HostRuns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--csv", type=Path, help="every run with its predictions")
    parser.add_argument("--ship", action="store_true", help="write what is fitted on all sources as the shipped file")
    arguments = parser.parse_args()
    data = arguments.data
    launches = {OPS: host_launches(data)}
    measured = [*ci_runs(data), *vtrain_runs(data), *large_runs(data)]
    say(f"{len(measured)} measured runs")
    groups, reasons = simulate_all(measured)
    for group in pooled_groups(groups):
        launches.setdefault(group.runs.source, {})[group.runs.host] = fit_host(group.runs)[0]
    shipped, log_sd = pooled({source: list(hosts.values()) for source, hosts in launches.items()})
    text = page(groups, reasons, launches, shipped, log_sd, compiled_bounds(data))
    if arguments.ship:
        ship(groups, launches, shipped, log_sd)
    if arguments.csv:
        write_atomically(arguments.csv, every_run(groups, launches, shipped))
    if arguments.output:
        write_atomically(arguments.output, text)
    else:
        print(text)


# --- runs and ops -----------------------------------------------------------------------------------------------------
def ci_runs(data: Path) -> Iterator[Measured]:
    """GPT of 12 layers of 512 in continuous integration, where the group sizes are known: no experts, no context
    parallelism, no fp8 (whose runs log more)."""
    for row in _lines(data / "e2e_megatron_ci.csv"):
        plain = row["model"].startswith("gpt/") and "experts=None" in row["notes"] and row["cp"] == "1"
        small = row["layers"] == "12" and row["hidden"] == "512" and row["num_gpus"] == "8.0"
        if not (plain and small and row["dp"]) or "fp8" in row["model"]:
            continue
        rounds = int(float(row["vpp"])) if row["vpp"] else None
        configuration = Configuration(
            tp=int(row["tp"]), pp=int(row["pp"]), dp=int(float(row["dp"])), micro_batch=int(row["micro_batch"]),
            sp=row["sequence_parallel"] == "True", recompute=row["recompute"], zero=1 if row["zero_fsdp"] else 0,
            schedule="interleaved-1f1b" if rounds else "1f1b", virtual_stages=rounds,
        )  # fmt: skip
        gpu = row["gpu"].split("-")[0]
        local = not row["model"].startswith("gpt/gpt3_mcore_te")
        model = f"gpt:layers=12,hidden=512,heads=8,seq={row['seq_len']},vocab={SMALL_VOCABULARY}"
        model += ",eager=true" if local or "attention-backend=unfused" in row["notes"] else ""
        precision = {"bf16": "bfloat16", "fp16": "float16"}[row["precision"]]
        step_s = float(row["step_time_s"])
        source = CI if local else ENGINE
        yield Measured(
            source, f"{source}, {gpu}", False, model, precision, f"dgx-{gpu.lower()}", 8, int(row["global_batch"]),
            configuration, step_s, f"{row['model']} {gpu}",
        )  # fmt: skip


def vtrain_runs(data: Path) -> Iterator[Measured]:
    """Single-node runs of vTrain; kernels are short at micro-batch 1 with tensor parallelism, others are a check."""
    for row in _lines(data / "e2e.csv"):
        if row["source"] == "vTrain-single":
            run = _gpt(row, "float16", MEGATRON_VOCABULARY)
            small = run.configuration.micro_batch == 1 and run.configuration.tp > 1
            yield run._replace(source=VTRAIN, host=f"{VTRAIN}, A100", check=not small)


def large_runs(data: Path) -> Iterator[Measured]:
    """Published runs of larger models on A100, up to 512 devices; of llm-foundry those with 2048 tokens."""
    for row in _lines(data / "e2e.csv"):
        if row["source"] not in LARGE or float(row["num_gpus"]) > MOST_DEVICES:
            continue
        if row["source"] == "bigscience-A100":
            stated = row["step_time_s"] and all(row[name] for name in DIMS)
            if stated and float(row["layers"]) % float(row["pp"]) == 0:
                run = _gpt(row, {"bf16": "bfloat16", "fp16": "float16"}[row["precision"]], BLOOM_VOCABULARY)
                yield run._replace(
                    configuration=replace(run.configuration, zero=1 if row["zero_fsdp"] == "zero1" else 0),
                    network_bytes_per_s=JEAN_ZAY_BYTES_PER_S,
                )
        elif row["source"] == "Megatron-LM 2104.04473":
            if row["model"] in TABLE_1:
                yield _gpt(row | {"micro_batch": str(TABLE_1[row["model"]])}, "float16", MEGATRON_VOCABULARY)
        elif row["source"] == "llm-foundry":
            if row["seq_len"] == "2048.0":
                run = _gpt(row, "bfloat16", 50368)
                yield run._replace(configuration=replace(run.configuration, zero=3))
        else:
            network = VTRAIN_BYTES_PER_S if row["source"] == "vTrain-multi" else None
            yield _gpt(row, "float16", MEGATRON_VOCABULARY)._replace(network_bytes_per_s=network)


def _gpt(row: Mapping[str, str], precision: str, vocabulary: int) -> Measured:
    """A row of e2e.csv on A100s."""
    n = {name: int(float(row[name])) for name in DIMS}
    rounds = int(float(row["vpp"])) if row["vpp"] else None
    configuration = Configuration(
        tp=n["tp"], pp=n["pp"], dp=n["dp"], micro_batch=n["micro_batch"], recompute=row["recompute"],
        sp=row["sequence_parallel"] == "True", schedule="interleaved-1f1b" if rounds else "1f1b", virtual_stages=rounds,
    )  # fmt: skip
    model = f"gpt:layers={n['layers']},hidden={n['hidden']},heads={n['heads']},seq={n['seq_len']},vocab={vocabulary}"
    model += ",eager=true" if row["source"] in UNFUSED else ""
    name = f"{row['source']} {row['model']} {row['gpu']} seq{n['seq_len']} {n['num_gpus']} devices: " + " ".join(
        f"{key}={n[key]}" for key in ("tp", "pp", "dp", "micro_batch", "global_batch")
    )
    source = row["source"]
    return Measured(
        source, source, True, model, precision, "dgx-a100", n["num_gpus"], n["global_batch"], configuration,
        float(row["step_time_s"]), name,
    )  # fmt: skip


def host_launches(data: Path) -> dict[str, float]:
    """Median seconds of ops on tensors so small that a host does little but launch them, one at a time."""
    found = {}
    for table in read_measurements(data / "ops" / "op_neusight_elementwise_sample.parquet").tables:
        for device in table.devices() if table.family == "memory32" else ():
            mine = table.at(table.device == device)
            tiny = mine.dims["bytes"] / load_device(device).memory_bytes_per_s < TINY_S
            if tiny.sum() >= 100:
                found[f"{OPS}, {device}"] = float(np.median(mine.latency_s[tiny]))
    return found


# --- simpart's own path -----------------------------------------------------------------------------------------------
def simulate_all(measured: Sequence[Measured]) -> tuple[list[Group], dict[str, int]]:
    """Steps of all runs at each launch time of the grid; runs that cannot be configured are counted by reason."""
    found: dict[tuple[str, str, bool], list[tuple[str, float, dict[str, Floats]]]] = {}
    reasons: dict[str, int] = {}
    problem, key = None, None
    costs: dict[str, Costs] = {}
    for run in sorted(measured, key=lambda run: run[3:8]):
        if run[3:8] != key:
            problem, key = _problem(run, costs), run[3:8]
            say(f"{run.model}, {run.size} devices, global batch {run.global_batch}")
        assert problem is not None
        try:
            steps = steps_of(problem, run.configuration, [COUNTED] if run.check else list(UNITS))
        except UserError as error:
            reasons[str(error)] = reasons.get(str(error), 0) + 1
            continue
        found.setdefault((run.source, run.host, run.check), []).append((run.name, run.step_s, steps))
    groups = []
    for (source, host, check), rows in sorted(found.items(), key=lambda item: (item[0][2], item[0])):
        rows = sorted(rows, key=lambda row: row[:2])
        measured_s = np.array([seconds for _, seconds, _ in rows])
        in_units = {
            unit: HostRuns(
                host=host, source=source, measured_s=measured_s, steps_s=np.stack([steps[unit] for _, _, steps in rows])
            )
            for unit in rows[0][2]
        }
        names = tuple(name for name, _, _ in rows)
        groups.append(Group(in_units[COUNTED], check, names, in_units))
    return groups, reasons


def _problem(run: Measured, costs: dict[str, Costs]) -> Problem:
    whole = load_cluster(run.cluster if run.size <= 8 else f"{run.cluster}:{math.ceil(run.size / 8)}")
    device, _ = whole.devices[0]
    cluster: Cluster = replace(whole, devices=((device, run.size),))
    if run.network_bytes_per_s is not None:
        network = replace(cluster.levels[-1], bytes_per_s=run.network_bytes_per_s)
        cluster = replace(cluster, levels=(*cluster.levels[:-1], network))
    if run.cluster not in costs:
        costs[run.cluster] = default_costs(whole, profiles=False)
    training = TrainingSpec(
        precision=run.precision, master_weights=True, gradient_dtype="float32" if run.precision == "bfloat16" else None,
        optimizer="adam", gradient_clip_norm=1.0,
    )  # fmt: skip
    plain = replace(costs[run.cluster], eager_launch_s=0.0, compiled_launch_s=0.0)
    graph = load_graph_or_model(run.model, precision=run.precision)
    return Problem(graph=graph, training=training, cluster=cluster, costs=plain, global_batch=run.global_batch)


def steps_of(problem: Problem, configuration: Configuration, units: Sequence[str]) -> dict[str, Floats]:
    """The simulated step at each launch time of the grid: what simulate says of costs with `eager_launch_s`, where
    launches are counted in each of these units."""
    plan = configure(problem, configuration)
    lowering = lowering_of(problem)
    costed = lowering.cost(plan)
    topology = lowering.topology(plan, costed, "tasks")
    found = {}
    for unit in units:
        launches = np.array([_counted(cost, c % 4 == 0, UNITS[unit]) for c, cost in enumerate(costed.costs)])
        task_s = at_launch_times(costed.seconds, launches, len(plan.stages), GRID_S)
        found[unit] = compiled.makespans(topology, task_s)
    return found


def _counted(cost: ClassCost, forward: bool, weights: Sequence[float]) -> float:
    """Launches of a stage's action in a unit: a backward's kernels are its own, those run again, and accumulation."""
    if cost.launches == 0:
        return 0.0
    each = [float(amount.launches[0]) for amount, _ in cost.amounts]
    parts = [sum(each), 0.0, 0.0, 0.0] if forward else [0.0, each[0], sum(each[1:-1]), sum(each[1:][-1:])]
    return float(np.dot(weights, [*parts, cost.launches - sum(each)]))


# --- what is said -----------------------------------------------------------------------------------------------------
def without(launches: Launches, *, source: str = "", host: str = "") -> float:
    """Seconds per launch from all hosts but those of a source, or but one host."""
    rest = {s: [v for h, v in hosts.items() if h != host] for s, hosts in launches.items() if s != source}
    return pooled({s: hosts for s, hosts in rest.items() if hosts})[0]


def error_of(runs: HostRuns, launch_s: float, step_s: float = 0.0) -> tuple[float, float]:
    """(mean absolute, median) relative error."""
    error = predicted_s(runs, launch_s, step_s) / runs.measured_s - 1
    return float(np.abs(error).mean()), float(np.median(error))


def pooled_groups(groups: Sequence[Group]) -> list[Group]:
    """Those that the shipped launch time is from."""
    return [group for group in groups if not group.check and group.runs.source != ENGINE]


def _units(groups: Sequence[Group], launches: Launches) -> list[str]:
    """What else could be counted, judged by hosts and sources left out."""
    names = [group.runs.host for group in pooled_groups(groups)]
    lines = ["## What is counted\n", "| unit | " + " | ".join(names) + " | log-sd of sources |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for unit in UNITS:
        of = {group.runs.host: group.in_units[unit] for group in pooled_groups(groups)}
        found: Launches = {OPS: launches[OPS]}
        for runs in of.values():
            found.setdefault(runs.source, {})[runs.host] = fit_host(runs)[0]
        cells = []
        for host, runs in of.items():
            own, other = found[runs.source][host], without(found, source=runs.source)
            errors = f"{_percent(error_of(runs, own)[0])} %, {_percent(error_of(runs, other)[0])} %"
            cells.append(f"{1e6 * own:.0f} us, {errors}")
        spread = pooled({source: list(hosts.values()) for source, hosts in found.items()})[1]
        lines.append(f"| {unit} | " + " | ".join(cells) + f" | {spread:.2f} |")
    return [*lines, "\n" + UNIT_WORDS]


def _software(groups: Sequence[Group], launches: Launches) -> list[str]:
    """Runs of the same hosts with layers written in another way: how much more their launches take, and what another
    host tells of it."""
    of = {group.runs.host.removeprefix(f"{ENGINE}, "): group.runs for group in groups if group.runs.source == ENGINE}
    factor = {host: fit_host(runs)[0] / launches[CI][f"{CI}, {host}"] for host, runs in of.items()}
    lines = [
        "## The same hosts, other layers\n",
        "| host | runs | times its host's launch | error so | from the other host |",
    ]
    lines.append("|---" * 5 + "|")
    for host, runs in of.items():
        base, (other,) = launches[CI][f"{CI}, {host}"], (factor[name] for name in factor if name != host)
        own, told = error_of(runs, factor[host] * base), error_of(runs, other * base)
        lines.append(
            f"| {host} | {runs.measured_s.size} | {factor[host]:.2f} | {_both(own)} | {other:.2f}: {_both(told)} |"
        )
    return [*lines, "\n" + SOFTWARE_WORDS]


class WithStep(NamedTuple):
    """A host predicted with launches and a fixed time per step that other sources' runs tell: error with both, and with
    their launches alone."""

    host: str
    launch_s: float
    step_s: float
    error: tuple[float, float]
    alone: tuple[float, float]


def with_step(groups: Sequence[Group], launches: Launches) -> list[WithStep]:
    """Each host with its source left out."""
    fitted = [group.runs for group in pooled_groups(groups)]
    joint = {runs.host: fit_host(runs, per_step=True) for runs in fitted}
    found = []
    for runs in fitted:
        rest: Launches = {OPS: launches[OPS]}
        steps: dict[str, list[float]] = {}
        for other in fitted:
            if other.source != runs.source:
                rest.setdefault(other.source, {})[other.host] = joint[other.host][0]
                steps.setdefault(other.source, []).append(joint[other.host][1])
        launch_s, step_s = without(rest), float(np.mean([np.mean(hosts) for hosts in steps.values()]))
        alone = error_of(runs, without(launches, source=runs.source))
        found.append(WithStep(runs.host, launch_s, step_s, error_of(runs, launch_s, step_s), alone))
    return found


def step_overhead(groups: Sequence[Group], launches: Launches) -> float:
    """The fixed time per step that is shipped: the mean of the sources' joint fits where it helps every host whose
    source is left out, else none."""
    if any(row.error[0] >= row.alone[0] for row in with_step(groups, launches)):
        return 0.0
    sources: dict[str, list[float]] = {}
    for group in pooled_groups(groups):
        sources.setdefault(group.runs.source, []).append(fit_host(group.runs, per_step=True)[1])
    return float(np.mean([np.mean(hosts) for hosts in sources.values()]))


def _with_step(groups: Sequence[Group], launches: Launches) -> list[str]:
    lines = ["\nWith a fixed time per step, the mean of the other sources' joint fits:\n"]
    lines += ["| host | per launch | per step | error | launches alone |", "|---" * 5 + "|"]
    for row in with_step(groups, launches):
        told = f"{1e6 * row.launch_s:.0f} us | {1e3 * row.step_s:.0f} ms | {_both(row.error)} | {_both(row.alone)}"
        lines.append(f"| {row.host} | {told} |")
    step_s = step_overhead(groups, launches)
    return [*lines, f"\nShipped: {1e3 * step_s:.0f} ms, by the rule that it must help every host left out."]


def _one_run(groups: Sequence[Group]) -> list[str]:
    lines = ["\n## A host told by one run of it\n", "| host | error of the others | 10 % to 90 % of choices | log-sd |"]
    lines.append("|---" * 4 + "|")
    for group in pooled_groups(groups):
        told = told_by_one(group.runs)
        between = f"{_percent(told.low)} to {_percent(told.high)} %"
        lines.append(f"| {group.runs.host} | {_percent(told.error)} % | {between} | {told.log_sd:.2f} |")
    shipped = f"\nShipped for launch times that a user states: log-sd {known_log_sd(groups):.2f}.\n"
    return [*lines, shipped, ONE_RUN_WORDS]


def known_log_sd(groups: Sequence[Group]) -> float:
    """Root mean square over sources of what hosts' runs scatter by where one run of the host has told its launches."""
    found: dict[str, list[float]] = {}
    for group in pooled_groups(groups):
        found.setdefault(group.runs.source, []).append(told_by_one(group.runs).log_sd)
    return float(np.sqrt(np.mean([np.mean(hosts) ** 2 for hosts in found.values()])))


def compiled_bounds(data: Path) -> list[str]:
    """The longest launch time that compiled runs allow: a step is no shorter than the launches of its matrix products
    and attention alone, which no compiler merges."""
    lines = ["\n## Compiled runs: what they exclude\n", "| run | step | least launches | per launch at most |"]
    lines.append("|---" * 4 + "|")
    for row in _lines(data / "e2e.csv"):
        if "torch.compile" in row["notes"] and row["layers"]:
            products, attention = 3 * 7, 2  # q, k, v, o, gate, up, down; forward and backward
            launches = int(float(row["layers"])) * (products + attention)
            step_s = float(row["step_time_s"])
            told = f"{step_s:.2f} s | {launches} | {1e6 * step_s / launches:.0f} us"
            lines.append(f"| {row['source']} {row['model']} {row['gpu']} | {told} |")
    return [*lines, "\n" + COMPILED_WORDS]


def page(
    groups: Sequence[Group],
    reasons: Mapping[str, int],
    launches: Launches,
    shipped: float,
    log_sd: float,
    bounds: Sequence[str],
) -> str:
    fitted = [group.runs for group in pooled_groups(groups)]
    lines = [INTRODUCTION, "## Hosts, each fitted alone\n"]
    lines += [
        "| source | host | rows | per launch | error so | with a fixed time per step: per launch, per step, error |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for host, seconds in launches[OPS].items():
        lines.append(f"| {OPS} | {host.removeprefix(OPS + ', ')} | ops | {1e6 * seconds:.0f} us | - | - |")
    joint = {}
    for runs in fitted:
        alone, both = launches[runs.source][runs.host], fit_host(runs, per_step=True)
        joint[runs.host] = both
        lines.append(
            f"| {runs.source} | {runs.host.removeprefix(runs.source + ', ')} | {runs.measured_s.size} runs "
            f"| {1e6 * alone:.0f} us | {_percent(error_of(runs, alone)[0])} % "
            f"| {1e6 * both[0]:.0f} us, {1e3 * both[1]:.0f} ms, {_percent(error_of(runs, *both)[0])} % |"
        )
    lines.append(
        f"\nShipped: {1e6 * shipped:.0f} us per launch, the mean (in logs) of the sources' means; the log-sd over the "
        f"{len(launches)} sources is {log_sd:.2f}.\n"
    )
    lines += [*_units(groups, launches), *_software(groups, launches)]
    lines += ["## Left out\n", HEAD, "|---" * 6 + "|"]
    for runs in fitted:
        for what, seconds in (
            ("source", without(launches, source=runs.source)), ("host", without(launches, host=runs.host)),
        ):  # fmt: skip
            before, after = error_of(runs, 0.0), error_of(runs, seconds)
            lines.append(
                f"| {runs.host} | its {what} | {1e6 * seconds:.0f} us | {_both(before)} | {_both(after)} "
                f"| {'better' if after[0] < before[0] else 'worse'} |"
            )
    lines += _with_step(groups, launches)
    lines += _one_run(groups)
    lines += ["\n## Runs with longer kernels: what must not get worse\n"]
    lines += [
        "| runs | number | without | with the shipped time | that host's source left out |",
        "|---|---|---|---|---|",
    ]
    for group in groups:
        if group.check:
            checked, left = group.runs, without(launches, source=group.runs.source)
            lines.append(
                f"| {checked.host} | {checked.measured_s.size} | {_both(error_of(checked, 0.0))} "
                f"| {_both(error_of(checked, shipped))} | {_both(error_of(checked, left))} |"
            )
    lines += bounds
    if reasons:
        most_first = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        lines.append("\nNot simulated: " + "; ".join(f"{n} ({reason})" for reason, n in most_first) + ".")
    return "\n".join([*lines, "", LIMITS])


def ship(groups: Sequence[Group], launches: Launches, shipped: float, log_sd: float) -> None:
    """Write the shipped file: what is used, and where it is from."""
    sources: dict[str, Any] = {}
    for source, hosts in launches.items():
        sources[source] = {host: {"launch_s": _short(seconds)} for host, seconds in hosts.items()}
    held_out = {}
    for group in pooled_groups(groups):
        runs = group.runs
        sources[runs.source][runs.host]["runs"] = int(runs.measured_s.size)
        other = without(launches, source=runs.source)
        held_out[runs.host] = {
            "launch_s_without_its_source": _short(other), "error_before": round(error_of(runs, 0.0)[0], 4),
            "error_after": round(error_of(runs, other)[0], 4),
        }  # fmt: skip
    content = {
        "eager_launch_s": _short(shipped), "compiled_launch_s": None,
        "step_overhead_s": step_overhead(groups, launches), "launch_log_sd": round(log_sd, 3),
        "known_log_sd": round(known_log_sd(groups), 3), "sources": sources,
        "held_out": held_out,
    }  # fmt: skip
    write_document(SHIPPED_OVERHEADS, KIND, VERSION, content)


def every_run(groups: Sequence[Group], launches: Launches, shipped: float) -> str:
    rows = ["source,host,check,run,measured_s,without_s,shipped_s,source_left_out_s"]
    for group in groups:
        runs = group.runs
        found = [predicted_s(runs, s) for s in (0.0, shipped, without(launches, source=runs.source))]
        for i, name in enumerate(group.names):
            numbers = ",".join(f"{values[i]:.6g}" for values in (runs.measured_s, *found))
            rows.append(f'{runs.source},"{runs.host}",{group.check},"{name}",{numbers}')
    return "\n".join(rows) + "\n"


def _short(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _both(error: tuple[float, float]) -> str:
    return f"{_percent(error[0])} % ({100 * error[1]:+.0f})"


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def say(text: str) -> None:
    print(f"{text}, {time.monotonic() - START:.0f} s", file=sys.stderr, flush=True)


UNIT_WORDS = """Each cell: seconds per unit, error with the host's own, error with the mean of the other sources (one
op of NeuSight is one unit). Nothing that was tried carries over much better than counting every launch alike: leaving
collectives out is a little better here, yet vTrain's runs on eight-way tensor parallelism with longer kernels are too
fast without them. What made the sources agree was to count the right launches: Megatron-LM of these years keeps
attention scores (`gpt:…,eager=true`, 20 kernels forward per layer in place of 10), as notes in the files say.
"""
SOFTWARE_WORDS = """Layers of Transformer Engine launch what the captured graph does not have: on both hosts they take
the same factor over Megatron-LM's own layers. A factor of software carries over from host to host; it is not shipped,
for simpart's own runs execute the captured graph. State `--launch-time` for such software.
"""
ONE_RUN_WORDS = """`simpart simulate PLAN --measured TIME` does this for any plan and prints the launch time to go on
with.
"""
HEAD = "| host | left out | per launch, from the others | without overheads | with | |"
INTRODUCTION = """# What the host takes of a step

Written by `python benchmarks/overheads.py ../shared/data -o docs/accuracy-overheads.md`. Where kernels are short a
GPU waits for its host to launch them. simpart counts the kernels and collectives that each action (a stage's forward
or backward of a micro-batch) launches, and lets it take at least the host's seconds per launch times that number. The
host runs ahead of the device: of host times Fc, Bc and device times Fg, Bg a stage takes `max(Fc + Bc, max(Fc, Fg) +
Bg)` per micro-batch, in both grains. This page fits the one constant on measured steps and tests it on hosts and
sources left out.

Runs are predicted by simpart's own path: the zoo's GPT with the run's dims and its way of attention, configured,
lowered and simulated with the shipped costs; nothing else is fitted to these runs. Errors are mean |predicted /
measured - 1| of the step time, with the median signed error in brackets. Launch-bound runs: Megatron-LM's continuous
integration (12 layers of 512, plain GPT, group sizes known, on A100 and on H100) and vTrain's single-node runs at
micro-batch 1 with tensor parallelism. "NeuSight ops" are single operators on tensors whose bytes take less than 2 us,
which show how long PyTorch's eager mode takes for one; no step is involved. Kernel times of the other sets are taken
on the device and say nothing of hosts.
"""
COMPILED_WORDS = """A step is no shorter than the launches of its matrix products and attention, which no compiler
merges. These runs are far from bound by launches, so that they exclude only what nobody would believe: no upper bound
is shipped from them. Compiled launches are taken between the device file's `kernel_launch` (what the driver takes)
and eager ones, in the middle of their logs, with the two as the ends of a 90 % interval: a bracket, neither fitted
nor validated.
"""
LIMITS = """## What limits these figures

* **Hosts differ by more than devices do.** The same software takes twice as long per launch on the A100 hosts of
  continuous integration as on vTrain's, which is the spread that intervals carry (`launch_log_sd`), one factor for
  all waiting of a plan. A launch time of the host in question is worth more than any mean: `--launch-time`, `host:`
  of a cluster's file (docs/formats.md). Continuous integration runs kernels in their deterministic versions and logs
  every step.
* **Single ops are no steps.** The tiny ops of NeuSight include its timing; in its files of whole models the shortest
  ops of the same devices take 6 to 14 us beyond an empty interval.
* **A fixed time per step** is 5 ms for vTrain and for the H100 hosts of continuous integration, 22 ms for its A100
  hosts.
* **Longer runs** do not wait for hosts. Those of vTrain-multi with tensor parallelism over two devices and 8192 wide
  are predicted 28 % too fast, its run with micro-batches of 64 43 %; nothing in the files says why. bigscience's runs
  (Megatron-DeepSpeed) are predicted too fast by 19 % where tensor parallelism is over eight devices, 12 % over four,
  8 % over two; why is not known. Attention that keeps its scores was the largest term missing: with one kernel for
  attention vTrain-multi is at 14.4 % (-9).
* Runs of two pipeline stages and more in continuous integration also wait for each other's hosts at every transfer,
  which is not modelled.
"""

if __name__ == "__main__":
    main()
