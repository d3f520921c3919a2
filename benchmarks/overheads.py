"""What the host takes of a training step: fitted on measured runs, tested on hosts left out, written as a page.

    python benchmarks/overheads.py ../shared/data -o docs/accuracy-overheads.md [--csv rows.csv] [--ship]

Every run is predicted by simpart's own path: the zoo's GPT with the run's dims, configured, lowered and simulated with
the shipped learned costs. What the host takes per launch only changes durations, so that a run's step is simulated at
once for a grid of it. `--ship` writes what was fitted on all sources to costmodels/artifacts/overheads.json. Takes five
minutes on one core.
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
)
from simpart.engines import compiled
from simpart.errors import UserError
from simpart.files import write_atomically, write_document
from simpart.hardware import Cluster, load_cluster, load_device
from simpart.lowering import lowering_of
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
CI, VTRAIN, OPS = "Megatron-LM CI", "vTrain", "NeuSight ops"
TINY_S = 2e-6
"""An op whose bytes take less than this at the memory's bandwidth is all launch, at some 30 us."""
MOST_DEVICES = 512


class Measured(NamedTuple):
    """A run as a line of a file has it. `check`: kernels are long, so that it shows what overheads must not spoil."""

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


class Group(NamedTuple):
    """Runs of one host that are judged together, with their names."""

    runs: HostRuns
    check: bool
    names: tuple[str, ...]


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
    for group in groups:
        if not group.check:
            launches.setdefault(group.runs.source, {})[group.runs.host] = fit_host(group.runs)[0]
    shipped, log_sd = pooled({source: list(hosts.values()) for source, hosts in launches.items()})
    text = page(groups, reasons, launches, shipped, log_sd)
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
        model = f"gpt:layers=12,hidden=512,heads=8,seq={row['seq_len']},vocab={SMALL_VOCABULARY}"
        precision = {"bf16": "bfloat16", "fp16": "float16"}[row["precision"]]
        step_s = float(row["step_time_s"])
        yield Measured(
            CI, f"{CI}, {gpu}", False, model, precision, f"dgx-{gpu.lower()}", 8, int(row["global_batch"]),
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
        known = row["source"] in ("vTrain-multi", "2205.05198", "llm-foundry")
        if not known or row["recompute"] == "selective" or float(row["num_gpus"]) > MOST_DEVICES:
            continue
        if row["source"] == "llm-foundry":
            if row["seq_len"] == "2048.0":
                run = _gpt(row, "bfloat16", 50368)
                yield run._replace(configuration=replace(run.configuration, zero=3))
        else:
            yield _gpt(row, "float16", MEGATRON_VOCABULARY)


def _gpt(row: Mapping[str, str], precision: str, vocabulary: int) -> Measured:
    """A row of e2e.csv on A100s."""
    names = ("layers", "hidden", "heads", "tp", "pp", "dp", "seq_len", "micro_batch", "num_gpus", "global_batch")
    n = {name: int(float(row[name])) for name in names}
    rounds = int(float(row["vpp"])) if row["vpp"] else None
    configuration = Configuration(
        tp=n["tp"], pp=n["pp"], dp=n["dp"], micro_batch=n["micro_batch"], recompute=row["recompute"],
        sp=row["sequence_parallel"] == "True", schedule="interleaved-1f1b" if rounds else "1f1b", virtual_stages=rounds,
    )  # fmt: skip
    model = f"gpt:layers={n['layers']},hidden={n['hidden']},heads={n['heads']},seq={n['seq_len']},vocab={vocabulary}"
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
    found: dict[tuple[str, str, bool], list[tuple[str, float, Floats]]] = {}
    reasons: dict[str, int] = {}
    problem, key = None, None
    costs: dict[str, Costs] = {}
    for run in sorted(measured, key=lambda run: run[3:8]):
        if run[3:8] != key:
            problem, key = _problem(run, costs), run[3:8]
            say(f"{run.model}, {run.size} devices, global batch {run.global_batch}")
        assert problem is not None
        try:
            steps = steps_of(problem, run.configuration)
        except UserError as error:
            reasons[str(error)] = reasons.get(str(error), 0) + 1
            continue
        found.setdefault((run.source, run.host, run.check), []).append((run.name, run.step_s, steps))
    groups = []
    for (source, host, check), rows in sorted(found.items(), key=lambda item: (item[0][2], item[0])):
        names, seconds, steps_s = zip(*sorted(rows, key=lambda row: row[:2]), strict=True)
        runs = HostRuns(host=host, source=source, measured_s=np.array(seconds), steps_s=np.stack(steps_s))
        groups.append(Group(runs, check, names))
    return groups, reasons


def _problem(run: Measured, costs: dict[str, Costs]) -> Problem:
    whole = load_cluster(run.cluster if run.size <= 8 else f"{run.cluster}:{math.ceil(run.size / 8)}")
    device, _ = whole.devices[0]
    cluster: Cluster = replace(whole, devices=((device, run.size),))
    if run.cluster not in costs:
        costs[run.cluster] = default_costs(whole, profiles=False)
    training = TrainingSpec(
        precision=run.precision, master_weights=True, gradient_dtype="float32" if run.precision == "bfloat16" else None,
        optimizer="adam", gradient_clip_norm=1.0,
    )  # fmt: skip
    plain = replace(costs[run.cluster], eager_launch_s=0.0, compiled_launch_s=0.0)
    graph = load_graph_or_model(run.model, precision=run.precision)
    return Problem(graph=graph, training=training, cluster=cluster, costs=plain, global_batch=run.global_batch)


def steps_of(problem: Problem, configuration: Configuration) -> Floats:
    """The simulated step at each launch time of the grid: what simulate says of costs with `eager_launch_s`."""
    plan = configure(problem, configuration)
    lowering = lowering_of(problem)
    costed = lowering.cost(plan)
    topology = lowering.topology(plan, costed, "tasks")
    launches = np.array([cost.launches for cost in costed.costs])
    return compiled.makespans(topology, at_launch_times(costed.seconds, launches, len(plan.stages), GRID_S))


# --- what is said -----------------------------------------------------------------------------------------------------
def without(launches: Launches, *, source: str = "", host: str = "") -> float:
    """Seconds per launch from all hosts but those of a source, or but one host."""
    rest = {s: [v for h, v in hosts.items() if h != host] for s, hosts in launches.items() if s != source}
    return pooled({s: hosts for s, hosts in rest.items() if hosts})[0]


def error_of(runs: HostRuns, launch_s: float, step_s: float = 0.0) -> tuple[float, float]:
    """(mean absolute, median) relative error."""
    error = predicted_s(runs, launch_s, step_s) / runs.measured_s - 1
    return float(np.abs(error).mean()), float(np.median(error))


def page(groups: Sequence[Group], reasons: Mapping[str, int], launches: Launches, shipped: float, log_sd: float) -> str:
    fitted = [group.runs for group in groups if not group.check]
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
    lines.append("\nWith a fixed time per step, the mean of the other sources' joint fits:\n")
    lines += ["| host | per launch | per step | after |", "|---|---|---|---|"]
    for runs in fitted:
        others = {h.host: joint[h.host] for h in fitted if h.source != runs.source}
        rest = {s: list(hosts.values()) for s, hosts in launches.items() if s == OPS}
        for other in fitted:
            if other.source != runs.source:
                rest.setdefault(other.source, []).append(joint[other.host][0])
        launch_s, step_s = pooled(rest)[0], float(np.mean([both[1] for both in others.values()]))
        told = _both(error_of(runs, launch_s, step_s))
        lines.append(f"| {runs.host} | {1e6 * launch_s:.0f} us | {1e3 * step_s:.0f} ms | {told} |")
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
    if reasons:
        lines.append("\nNot simulated: " + "; ".join(f"{n} ({reason})" for reason, n in reasons.items()) + ".")
    return "\n".join([*lines, "", LIMITS])


def ship(groups: Sequence[Group], launches: Launches, shipped: float, log_sd: float) -> None:
    """Write the shipped file: what is used, and where it is from."""
    sources: dict[str, Any] = {}
    for source, hosts in launches.items():
        sources[source] = {host: {"launch_s": _short(seconds)} for host, seconds in hosts.items()}
    held_out = {}
    for group in groups:
        runs = group.runs
        if group.check:
            continue
        sources[runs.source][runs.host]["runs"] = int(runs.measured_s.size)
        other = without(launches, source=runs.source)
        held_out[runs.host] = {
            "launch_s_without_its_source": _short(other), "error_before": round(error_of(runs, 0.0)[0], 4),
            "error_after": round(error_of(runs, other)[0], 4),
        }  # fmt: skip
    content = {
        "eager_launch_s": _short(shipped), "compiled_launch_s": None, "step_overhead_s": 0.0,
        "launch_log_sd": round(log_sd, 3), "sources": sources, "held_out": held_out,
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


HEAD = "| host | left out | per launch, from the others | without overheads | with | |"
INTRODUCTION = """# What the host takes of a step

Written by `python benchmarks/overheads.py ../shared/data -o docs/accuracy-overheads.md`. Where kernels are short a GPU
waits for its host to launch them. simpart counts the kernels and collectives that each action (a stage's forward or
backward of a micro-batch) launches, and lets it take at least the host's seconds per launch times that number: the host
runs ahead of the device within an action, so that the longer of the two counts. This page fits the one constant on
measured steps and tests it on hosts and sources left out.

Runs are predicted by simpart's own path: the zoo's GPT with the run's dims, configured, lowered and simulated with the
shipped costs; nothing else is fitted to these runs. Errors are mean |predicted / measured - 1| of the step time, with
the median signed error in brackets. Launch-bound runs: Megatron-LM's continuous integration (12 layers of 512, plain
GPT, group sizes known, on A100 and on H100) and vTrain's single-node runs at micro-batch 1 with tensor parallelism.
"NeuSight ops" are single operators on tensors whose bytes take less than 2 us, which show how long PyTorch's eager mode
takes for one; no step is involved. Kernel times of the other sets are taken on the device and say nothing of hosts.
"""
LIMITS = """## What limits these figures

* **Launches are those of the captured graph.** Megatron-LM launches about three times as many kernels per layer as the
  zoo's GPT, so that its time per launch of this graph is some three times what one of its own kernels takes. Plain
  PyTorch is nearer to the figure of single ops. A launch time measured on the host in question is worth more than any
  mean: `eager_launch_s` of Costs.
* **Hosts differ by more than devices do.** The same software on the A100 and the H100 hosts of one laboratory differs
  by a third, sources by more than four times. That is the spread that intervals carry (`launch_log_sd`), one factor for
  all waiting of a plan.
* **A fixed time per step does not carry over**: fitted jointly it is some ms for vTrain and 40 to 110 ms in continuous
  integration (deterministic kernels, logging). Taken from the other source it takes 3 to 5 points from continuous
  integration and costs vTrain 5, so that none is shipped; a profile of this machine gives its own (`step` and
  `action` overheads).
* **Compiled steps**: no run in these data is compiled and launch-bound at once. The constant of that mode is not known
  and counted as 0; compiled graphs have fewer kernels, which the count of launches sees.
* Runs of two pipeline stages and more in continuous integration also wait for each other's hosts at every transfer,
  which is not modelled.
"""

if __name__ == "__main__":
    main()
