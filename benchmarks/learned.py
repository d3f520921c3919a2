"""Accuracy of the learned compute models on held-out devices, written as docs/accuracy.md.

    python benchmarks/learned.py ../shared/data -o docs/accuracy.md

Every figure comes from models refitted without the device it is about: constants, trees, the choice of how far the
residual counts, software offsets and spreads; tables of seen devices say so. Takes about ten minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from simpart.costmodels.learned._adapters import read_measurements
from simpart.costmodels.learned._evaluating import _ratio, _roofline
from simpart.costmodels.learned._families import FAMILY_MODELS, REGIMES, Rows, op_codes, regime_of
from simpart.costmodels.learned._generations import generation_of
from simpart.costmodels.learned._measurements import Measurements
from simpart.costmodels.learned._model import FamilyModel
from simpart.costmodels.learned._sheet import sheet_of
from simpart.costmodels.learned._training import (
    errors_on,
    fit_family,
    sheets_for,
    spoken_of,
    train,
    trainable,
    without_slow,
)
from simpart.evaluation import Z90
from simpart.files import write_atomically
from simpart.hardware import load_device

START = time.monotonic()
NVIDIA = ("A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB", "B200-SXM-180GB", "L40S")
INTRODUCTION = """# Accuracy of the learned compute models

Written by `python benchmarks/learned.py ../shared/data -o docs/accuracy.md`. Unless its heading says otherwise, every
table row is about a device that was left out whole: constants, trees, net, shares of the blend, software offsets and
spreads were refitted without it, and it is predicted from its data sheet alone (a measured launch floor only in the
column that says so). Errors are |predicted / measured - 1| in percent, over one row per shape (the median over
software; for attention and experts the fastest that is not Triton's); the cleaning rules are those of
`costmodels/learned/_rules.py`. "In 90 %" is the share of all single measurements (of attention without Triton's), each
software apart, inside the nominal 90 % interval, "± median" the median half-width of that interval. "Ratio" is the same
shape on the nearest other device scaled by the roofline.

How a prediction is made: an analytic core with some ten constants (tiles in waves for products, pairs of tiles for
attention, bytes for the rest) times exp(residual). A device near a trained one (`sibling`) takes the trees of that
one; on a `new` one core, trees, a small net and (between devices with stacked memory) the roofline ratio are blended:
half of the trees and a quarter of the ratio, unless other shares, of seven pairs for trees and net and three for the
ratio, did clearly better (7 % in the mean and no worse on any kind of device; the net: than everything without it) on
devices held out of the training ones; siblings are held out together. A `far` one, 2.5 times beyond the trained peaks
or bandwidths, gets the core alone. Trained devices and their siblings also take trees grown for one device alone.

The spread of a prediction has a part shared by all kernels of a family on a device and an own one. Both come from
devices held out of the training ones, as mean squares over devices (siblings of trained ones count two thirds), by
size of the predicted time; they are a fifth wider where no trained device has memory of that kind.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", nargs="*", help=f"sections to renew: {', '.join(TITLES)}")
    options = parser.parse_args()
    texts = known_sections(options.output) if options.only and options.output else {}
    for title, text in sections(options.data / "ops", options.only):
        say(f"{title} done")
        texts[title] = text
        if options.output:  # what is done stays when the rest is stopped
            write_atomically(options.output, page(texts))
    if not options.output:
        print(page(texts))


def page(texts: Mapping[str, str]) -> str:
    return "\n".join(
        [INTRODUCTION, *(f"## {title}\n{texts[title]}" for title in TITLES.values() if title in texts), LIMITS]
    )


def known_sections(path: Path) -> dict[str, str]:
    """Sections of an earlier run by title, so that some can be renewed."""
    if not path.exists():
        return {}
    parts = path.read_text().split("\n## ")[1:]
    found = {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}
    return {title: text.rstrip("\n") + "\n" for title, text in found.items() if title in TITLES.values()}


TITLES = {
    "gemm16": "bf16 products",
    "gemm8": "fp8 products (per-tensor scales)",
    "attention16": "Attention, forward, causal, bf16, from 64 tokens",
    "attention16full": "Attention, forward, full, bf16, from 64 tokens",
    "gemm32": "fp32 linear (NeuSight)",
    "bgemm32": "fp32 bmm (NeuSight)",
    "memory32": "fp32 elementwise, softmax, norms (NeuSight)",
    "conv32": "conv2d fp32",
    "memory16": "fp16 norms, activations, rope, add: one device from the other",
    "moe16": "Mixture of experts, bf16",
    "generation": "A whole generation left out",
    "speed": "Speed",
}


def sections(ops: Path, only: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    """(title, text) of what is wanted, by the keys of TITLES; all unless `only` says which."""
    wanted = only or tuple(TITLES)

    def one(key: str, file: str, judge: Callable[[Measurements], str]) -> Iterator[tuple[str, str]]:
        if key in wanted:
            yield TITLES[key], judge(without_slow(tables(ops / file)[key]))

    yield from one("gemm16", "op_gemm_aic.parquet", lambda t: lodo(t, floors=True) + transfers(t) + unseen_shapes(t))
    yield from one("gemm8", "op_gemm_aic.parquet", lodo)
    yield from one("attention16", "op_attention_fwd_aic.parquet", lambda t: lodo(t.at(t.dims["seq"] >= 64)))
    yield from one("attention16full", "op_attention_encoder_aic.parquet", lambda t: lodo(t.at(t.dims["seq"] >= 64)))
    for key in ("gemm32", "bgemm32", "memory32"):
        yield from one(key, "op_neusight.parquet", published)
    yield from one("conv32", "op_neusight_conv.parquet", lodo)
    yield from one("memory16", "op_vidur_mlp.parquet", lambda t: lodo(t) + from_one_by_op(t))
    yield from one("moe16", "op_moe_aic.parquet", lodo)
    if "generation" in wanted:
        yield TITLES["generation"], generations(ops)
    if "speed" in wanted:
        yield TITLES["speed"], speed()


def speed() -> str:
    """Time to load the shipped models and to estimate 10,000 signatures, in a process of its own."""
    found = json.loads(subprocess.run([sys.executable, "-c", SPEED], capture_output=True, text=True, check=True).stdout)
    return (
        f"Shipped models, {found['bytes'] / 1e6:.1f} MB, loaded in {found['load_s']:.2f} s; {found['signatures']} "
        f"distinct signatures (products, attention, pointwise, norms; forward and backward) estimated in "
        f"{1e3 * found['estimate_s']:.0f} ms, the same objects again (another device, another plan) in "
        f"{1e3 * found['again_s']:.0f} ms (best of five, {found['machine']}, one thread). Imported meanwhile: "
        f"{', '.join(found['heavy']) or 'neither torch nor scikit-learn nor numba'}.\n"
    )


SPEED = """
import json, os, platform, sys, time
os.environ["OMP_NUM_THREADS"] = "1"
start = time.perf_counter()
from simpart.costmodels.learned import Learned, shipped_models
from simpart.cost import Signature, SignatureTable, TensorForm
from simpart.costmodels.learned._artifact import SHIPPED
from simpart.hardware import load_device
imported = time.perf_counter()
shipped_models()
load_s = time.perf_counter() - imported

def form(*shape, dtype="bfloat16"):
    return TensorForm(shape, dtype, tuple(range(len(shape))))

rows = []
for i in range(2500):
    m, n, k = 128 + 8 * (i % 50), 256 + 64 * (i // 50), 1024
    rows.append(Signature("aten.mm.default", (form(m, k), form(k, n)), (form(m, n),)))
    q = form(1 + i % 8, 8, 64 + 16 * (i // 8), 64)
    rows.append(Signature("aten._scaled_dot_product_flash_attention.default", (q, q, q), (q,), '[[0.0,true]]'))
    rows.append(Signature("aten.gelu.default", (form(m, n),), (form(m, n),)))
    norm = (form(m, n), form(n), form(n))
    rows.append(Signature("aten.native_layer_norm.default", norm, (form(m, n),)))
table, device = SignatureTable(tuple(rows)), load_device("a100")
fresh, again = [], []
for _ in range(5):
    model = Learned()
    for times in (fresh, again):
        start = time.perf_counter()
        model.estimate(table, device)
        times.append(time.perf_counter() - start)
heavy = [name for name in ("torch", "sklearn", "numba", "pandas") if name in sys.modules]
machine = f"{platform.machine()}, {os.cpu_count()} cores"
found = {"load_s": load_s, "estimate_s": min(fresh), "again_s": min(again), "heavy": heavy}
found |= {"signatures": len(set(rows)), "bytes": SHIPPED.stat().st_size, "machine": machine}
print(json.dumps(found))
"""


def tables(path: Path) -> dict[str, Measurements]:
    """Measurements of a file by family."""
    return {table.family: table for table in read_measurements(path).tables}


HEAD = (
    "| device | as | shapes | MAPE | median | bias | launch / memory / compute | core alone | in 90 % | ± median "
    "| roofline | ratio |"
)


def lodo(table: Measurements, *, floors: bool = False) -> str:
    head = HEAD + (" floor given |" if floors else "")
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    means = []
    for name in table.devices():
        say(f"{table.family} without {name}")
        model = fit_family(table.at(table.device != name))
        cells, error = judged(model, table, name)
        if floors:
            given = load_device(name).launch_floor_s
            cells.append(percent(given_floor(model, table, name, given)) if given else "")
        lines.append("| " + " | ".join(cells) + " |")
        means.append(error)
    lines.append(f"\nMean over devices: {percent(float(np.mean(means)))}.\n")
    return "\n".join(lines) + "\n"


PUBLISHED = """### The split as published: all training rows, tested on the test rows

One model, of the training rows of V100, A100-40, P100 and T4; on these the test rows are unseen shapes (`seen`), most
of them larger than any trained one, and H100 and A100-80 are devices that it never saw.
"""
WHOLE = """### Each device left out whole

As above, with the training rows of the device in question left out too.
"""


def published(table: Measurements) -> str:
    training = table.at(np.array([s.startswith("train") for s in table.split.tolist()], dtype=bool))
    test = table.at(np.array([s == "test" for s in table.split.tolist()], dtype=bool))
    say(f"{table.family}, published split")
    every = fit_family(training)
    models = {}
    for name in test.devices():
        say(f"{table.family} without {name}")
        known = name in training.devices()
        models[name] = fit_family(training.at(training.device != name)) if known else every
    text = ""
    for words, chosen in ((PUBLISHED, dict.fromkeys(models, every)), (WHOLE, models)):
        lines = [words, HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
        means = []
        for name in test.devices():
            cells, error = judged(chosen[name], test, name)
            lines.append("| " + " | ".join(cells) + " |")
            means.append(error)
        lines.append(f"\nMean over devices: {percent(float(np.mean(means)))}.\n")
        text += "\n".join(lines) + "\n" + (by_op(chosen, test) if table.family.startswith("memory") else "")
    return text


def by_op(models: Mapping[str, FamilyModel], test: Measurements) -> str:
    """Mean over ops of elementwise kernels and layer norm, softmax apart."""
    head = "| device | elementwise, mean over ops | worst of these | layer norm | softmax |"
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    for name, model in models.items():
        found = {op: float(np.abs(error).mean()) for op, (error, _) in op_errors(model, test, name).items()}
        plain = {op: value for op, value in found.items() if op not in ("softmax", "layer_norm")}
        worst = max(plain, key=lambda op: plain[op])
        cells = [name, percent(np.mean([*plain.values()])), f"{worst} {percent(plain[worst])}"]
        cells += [percent(found[op]) for op in ("layer_norm", "softmax")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n"


def op_errors(model: FamilyModel, table: Measurements, device: str) -> dict[str, tuple[Any, Any]]:
    """Errors of each op on a device, of the model and of roofline ratios from the nearest other one."""
    family, learn = FAMILY_MODELS[table.family], trainable(table)
    mine = learn.device == device
    part = learn.at(mine)
    rows = Rows(op=op_codes(part.op), dims=part.dims, sheet=sheets_for([device], family)[device])
    error = np.exp(model.predict(rows, device).log_seconds) / part.latency_s - 1
    sheets = {name: sheet_of(load_device(name), family.dtype)[0] for name in learn.devices()}
    ratio = (_ratio(learn, sheets, _roofline(learn, sheets)) / learn.latency_s - 1)[mine]
    return {op: (error[part.op == op], ratio[part.op == op]) for op in sorted(set(part.op.tolist()))}


def from_one_by_op(table: Measurements) -> str:
    """Each op of one device told from the other one."""
    devices = table.devices()
    lines = [
        "### By op, rows of at least 8 µs (the timer's step is 1 µs)\n",
        "| op | " + " | ".join(f"without {name}: MAPE | bias | ratio" for name in devices) + " |",
        "|---" * (1 + 3 * len(devices)) + "|",
    ]
    found = {name: op_errors(fit_family(table.at(table.device != name)), table, name) for name in devices}
    for op in found[devices[0]]:
        cells = [op]
        for name in devices:
            error, ratio = found[name][op]
            cells += [percent(np.abs(error).mean()), percent(np.median(error)), percent(np.nanmean(np.abs(ratio)))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n"


def generations(ops: Path) -> str:
    """H100 and H200 left out together: neither may tell the other. Other generations have one device here, so that
    leaving them out is what the tables above do."""
    head = "| kernels | device | as | shapes | MAPE | median | bias | core alone | in 90 % | ± median | ratio |"
    lines = [
        "Hopper: neither H100 nor H200 is trained on, so that none is the sibling of the other. Each other generation "
        "has one device in these tables: for those see above.\n",
        head,
        "|---" * (head.count("|") - 1) + "|",
    ]
    for key, file in (
        ("gemm16", "op_gemm_aic.parquet"),
        ("attention16", "op_attention_fwd_aic.parquet"),
        ("moe16", "op_moe_aic.parquet"),
    ):
        table = without_slow(tables(ops / file)[key])
        if key == "attention16":
            table = table.at(table.dims["seq"] >= 64)
        out = np.array([generation_of(name) == "hopper" for name in table.device.tolist()], dtype=bool)
        say(f"{key} without Hopper")
        model = fit_family(table.at(~out))
        for name in table.at(out).devices():
            cells, _ = judged(model, table.at(~out | (table.device == name)), name)
            lines.append("| " + " | ".join([TITLES[key].split(",")[0], *cells[:6], *cells[7:10], cells[11]]) + " |")
    return "\n".join(lines) + "\n"


def judged(model: FamilyModel, table: Measurements, device: str) -> tuple[list[str], float]:
    """Cells of one row: shapes judged as the models learn them, intervals on every measurement."""
    family = FAMILY_MODELS[table.family]
    learn = trainable(table)
    mine = learn.device == device
    part = learn.at(mine)
    rows = Rows(op=op_codes(part.op), dims=part.dims, sheet=sheets_for([device], family)[device])
    found = model.predict(rows, device)
    error = np.exp(found.log_seconds) / part.latency_s - 1
    core = np.exp(model.analytic(rows)) / part.latency_s - 1
    regime = regime_of(family, rows)
    by = [percent(np.abs(error[regime == i]).mean()) if (regime == i).any() else "-" for i in range(len(REGIMES))]
    every = spoken_of(table.at(table.device == device))
    asked = Rows(op=op_codes(every.op), dims=every.dims, sheet=rows.sheet)
    answer = model.predict(asked, device)
    offset = model.software_offset(every.software, regime_of(family, asked))
    half = Z90 * np.hypot(answer.shared, answer.own)
    inside = np.abs(answer.log_seconds + offset - np.log(every.latency_s)) <= half
    sheets = {n: sheet_of(load_device(n), family.dtype)[0] for n in learn.devices()}
    roofline = _roofline(learn, sheets)
    ratio = (_ratio(learn, sheets, roofline) / learn.latency_s - 1)[mine]
    cells = [
        device, found.status, str(len(part)), percent(np.abs(error).mean()), percent(np.median(np.abs(error))),
        percent(np.median(error)), " / ".join(by), percent(np.abs(core).mean()), percent(inside.mean()),
        percent(np.median(np.expm1(half))), percent(np.abs(roofline / learn.latency_s - 1)[mine].mean()),
        percent(np.nanmean(np.abs(ratio))) if np.isfinite(ratio).any() else "-",
    ]  # fmt: skip
    return cells, float(np.abs(error).mean())


def given_floor(model: FamilyModel, table: Measurements, device: str, floor_s: float) -> float:
    part = trainable(table.at(table.device == device))
    sheet = sheets_for([device], FAMILY_MODELS[table.family])[device]
    rows = Rows(op=op_codes(part.op), dims=part.dims, sheet=replace(sheet, floor_s=np.array([floor_s])))
    return float(np.abs(np.exp(model.predict(rows, device).log_seconds) / part.latency_s - 1).mean())


def transfers(table: Measurements) -> str:
    """From one measured device to another."""
    learn = trainable(table)
    lines = ["### From one measured device only\n", "| pair | MAPE | roofline ratio |", "|---|---|---|"]
    sheets = {n: sheet_of(load_device(n), "bfloat16")[0] for n in learn.devices()}
    for source, goal in (
        ("A100", "H100"),
        ("H100", "H200"),
        ("H100", "B200"),
        ("A100", "B200"),
        ("H100", "L40S"),
        ("H100", "A100"),
    ):
        one, other = (next(n for n in NVIDIA if n.startswith(name)) for name in (source, goal))
        model = train(learn.at(learn.device == one))
        error = errors_on(model, learn.at(learn.device == other), other).error
        pair = learn.at((learn.device == one) | (learn.device == other))
        two = {name: sheets[name] for name in (one, other)}
        ratio = (_ratio(pair, two, _roofline(pair, two)) / pair.latency_s - 1)[pair.device == other]
        lines.append(
            f"| {source} → {goal} | {percent(np.abs(np.expm1(error)).mean())} | {percent(np.nanmean(np.abs(ratio)))} |"
        )
    return "\n".join(lines) + "\n\n"


def unseen_shapes(table: Measurements) -> str:
    """Trained devices, shapes that were not trained on (a fifth of them held back)."""
    model = fit_family(table)
    held: Any = model.facts["held_out"]
    lines = [
        "### Seen device, unseen shapes (random fifth; beside the tables above, not instead)\n",
        "| device | MAPE | median |",
        "|---|---|---|",
    ]
    for name, row in held.items():
        if row["status"] == "seen":
            lines.append(
                f"| {name.removesuffix(' (unseen shapes)')} | {percent(row['mape'])} | {percent(row['median'])} |"
            )
    return "\n".join(lines) + "\n\n"


def percent(value: float | np.floating[Any]) -> str:
    return f"{100 * float(value):.1f}"


def say(text: str) -> None:
    print(f"{text}, {time.monotonic() - START:.0f} s", file=sys.stderr, flush=True)


LIMITS = """## What limits these figures, and what was tried

* **Launch floors are software.** The smallest bf16 product takes 2.8 µs on A100, 2.5 on H100 and H200, 1.8 on B200
  and 2.1 on L40S. Told in clocks these agree best (floor exponent in the clock 0, ½, 1: core 14.7, 13.4, 12.7 % mean
  over the five devices), and B200 stays the odd one. A measured floor in the device file helps where that is the
  error.
* **A peak on a data sheet is no rate.** L40S reaches 66 % of it, A100 87 %. The power share (cube root of watts per
  multiprocessor and hertz; the best published products of other boards fit it) takes the core from 12.7 to 11.8 % and
  compute-bound L40S rows from -21 % bias to 0. In fp32 the same holds by watts per FLOP/s; T4, at 0.54 of its peak,
  is beyond the rule, and no rule from one such board is worth writing down.
* **Residuals don't carry over between generations.** Full, half, none, averaged over trained devices, of the nearest,
  or weighted by distance: 10.1, 10.5, 11.8, 11.3, 11.4, 11.4 %. Full for siblings and half else: 9.8 %.
  scikit-learn's histogram boosting in place of oblivious trees: 10.6 to 10.7. Per-device offsets of the constants: no
  better than pooled constants (12.95 against 12.65).
* **A quarter of the roofline ratio** from the nearest device with stacked memory takes B200 from 13.8 to 10.4 % (it
  errs low where the core errs high), attention and experts by one to two points, A100 from 11.4 to 12.2 and fp8 on
  B200 from 17.6 to 20.5: kept, for devices of that kind only; on GDDR it is 120 to 145 % off. Not where latencies
  hold what the host takes (fp32 here): without it V100 goes from 35 to 24 %, A100-40 from 8 to 12, convolutions from
  20.3 to 19.5.
* **From one measured device** the priors of the constants are four times as narrow (A100 → H100: core 13.3 → 10.1;
  twice as narrow 11.4). The centres of these priors were set when all five devices had been seen.
* **Intervals.** With the worst held-out device in place of the mean over devices, and spreads by what limits a
  kernel, coverage of bf16 products was 88, 98, 98, 96 and 84 % at half-widths of 27, 58, 26, 26 and 30 %: four
  devices say little about a fifth, and which summary of them is best (mean squares, siblings at two thirds, by size)
  was chosen on these tables. fp8, attention (±30 to 44) and experts don't reach ±30 %: their frameworks alone
  differ by 1.3 to 1.6 times. Where one device has a bias that no other shows (fp32 on P100), coverage falls to 72 %.
* **A small net** (two layers of 48 that see the work alone; ten epochs, as four times as many fit the trained devices
  better and new ones worse) does not tell new devices better than trees where four kinds of devices say so: means over
  held-out kinds 13.1 against 12.5 % in bf16 products, 23.6 against 19.8 in convolutions, 48.5 against 41.5 for experts.
  Chosen by the mean alone it would do harm: fp32 linear layers without V100 prefer it (28.5 to 33.1 %) and tell V100
  by 30 % in place of 9.5, batched ones P100 by 15.3 in place of 11.1; hence "no worse on any kind" and "than everything
  without it". So no table above has it, and its figures are those of the fixed shares but where trees count full
  (convolutions; fp32 memory on P100). With two kinds left after holding one out there is nothing to choose by: fp8 on
  B200, 20.5 %, would be 15.0 with the net alone. Fitted on all devices, fp8
  products drop the ratio (held-out mean 22.4 to 17.4 %), fp8 attention has the core alone (29.9 to 21.8), and only
  block-scaled fp8 takes the net (143 to 80).
* **fp32 products: one figure for what holds a device back, or none.** Of their sustained peak (the rule of power per
  peak) the devices reach a median of 0.6 to 0.9, and no number of the data sheets tells which. Constants fitted to
  their middle told T4 by 21 and P100 by 26 %, but everything newer by 16 to 33 (linear layers, core alone). Now the
  one that gets nearest to its sustained peak stands for all: H100 18.2 to 7.6 %, V100 32.8 to 6.5, A100-40 25.7 to 7.0,
  and T4 21 to 32, P100 26 to 33, of which the residual takes part. Middle or fastest, with the exponent of the power
  rule at 0, 1/2 or 1, was put to leaving out one device among the training ones only: each of the six splits chose
  the fastest for linear layers, and four of six for batched ones. The exponent stayed at 1/2, as it was; chosen in each
  split too, it would be 1/2 for H100, P100 and A100-80, 1 for A100-40 (core 12.0 %) and 0 for V100 (14.8) and T4 (46).
  Convolutions gain nothing by it (mean 19.5 to 20.0 %) and stay as they were.
* **Trees of single devices** take shapes that a trained device never ran from 5.5, 5.3, 3.5, 3.4 and 6.7 % to the
  figures above; siblings from 4.8 to 4.6 and 4.5 to 4.3. L40S stays above 5 %: its frameworks differ by 11 to 13 %,
  and small products of 32 columns take 15 to 45 µs on some shapes and 3 on their neighbours.
* **Attention: what was wrong was the data first.** Of the causal rows with 16-bit products from 64 tokens on, 43 %
  had a cache of keys and values in fp8: there products run in fp8 (up to 1.8 times as fast) or a cast comes on top
  (1.2 times as slow). Left out they took A100 from 19.5 to 17.1, B200 from 20.1 to 18.1 and L40S from 34.6 to 28.6
  before anything else changed. Then the form (figures of the core alone, A100 / B200 / L40S, causal): keys and values
  are moved three times, read, written into a cache and read back (short rows with one key per query head run at a
  third of the bandwidth on every device), and exponentials take clocks, 16 a multiprocessor, which no peak shortens
  (17.3 / 18.7 / 26.7, and full attention on L40S 27.1 to 16.6); what fits into L2 is read from there
  (L40S 24.8 to 20.3); siblings count as one device where constants are fitted (B200 18.7 to 16.6; products
  and experts gain nothing by it, 8.9 to 9.0 and 29.0 to 29.6, and stay); tiles of 64 keys (mean 17.5 to 17.0); the
  two forms that are averaged differ in whether exponentials are hidden, in the peak under a power cap and in whether
  the floor is told in clocks or seconds (A100
  16.9 to 14.8: told in seconds alone A100 is better and L40S worse). The quarter of the ratio scales by products and
  exponentials: by the peak alone B200 has 13.2 on full attention, so 10.0; causal A100 13.7 to 13.2, B200 15.9 to 16.3.
* **Attention, tried without gain**: bytes per clock as a limit besides memory (B200 20.5 from 18.7); a price for a row
  alone on its multiprocessor (A100 and B200 the same, L40S 18.5 to 20.9, though every device wants it on rows of one to
  four waves); tiles that share their start; a sharper or softer turn from arithmetic to memory; narrower priors (means
  within 0.5); query tiles of 64 in one form and of 128 in the other (mean 18.5 from 17.5); trees with times as
  shares and without device numbers (B200 16.7 from 15.5), the residual as on the nearest device (A100 13.4, B200 27.0).
* **Attention, what is left.** H100 and H200 differ by half of what memory traffic says, so that each is told 1 point
  worse from the other than by the form before. L40S has head dim 256 at 0.44 of its peak where others have 0.6 (its
  shared memory is small) and a floor of 7.5 µs where its clock says 11. Kernels of Triton (3 % of causal rows, 8 % of
  full ones) and rows that take more than twice the fastest software of the same shape don't count for the width of
  intervals; the former are not in the coverage above, the latter are: on B200 one framework has no kernel for head dim
  72 and takes 3.5 times as long (11 % of the rows there), which no interval of ±36 % holds; of the others it holds
  89.8 %.
* **Software.** One shape differs by 6 to 8 % between frameworks (L40S 11 to 13), fp8 by 1.4 times, block-scaled fp8
  and experts by several times. Offsets per framework, kernel and regime are learned and carry over; what is left is
  in the own spread of the intervals.
* Of backward kernels no 16-bit measurement is held out anywhere: they are told through the forward ones with a stated
  prior spread and provenance `analytic`.
* **Two protocols for NeuSight's data.** The split as published trains on training rows of the tested devices too; the
  figures that others give (elementwise 16 % on A100-40 and 17 on V100, products 6 to 23, batched ones 10 to 30) are of
  that one. Leaving each device out whole is harder, and what a new device will see. T4 runs the larger test shapes at
  0.49 of its peak and ran the smaller training ones at 0.38, another thermal state: no model of the training rows tells
  that (bias +16 % on linear layers, half of the rows inside the interval).
* **Batched fp32 products step through the inner dim by 128 elements** on A100, P100 and T4, by 64 on H100 and finer on
  V100: 65 take as long as 128. Told to the trees and, at 64, to the core: published split 14.8 to 12.0 % (A100-40 11.8
  to 7.7, P100 11.4 to 6.4, H100 14.5 to 12.3), devices left out 17.8 to 15.1. Steps of 128 in the core: H100 17.9.
* **Kernels that read a row more than once** (softmax three times, layer norm twice) do so from L2 if the rows under way
  fit there: softmax reaches 0.8 of A100's bandwidth up to rows of 32 KB and 0.45 at 64 KB; V100, P100 and T4 pay for
  wide rows in the same way, earlier. With that, how a row fills the turns of its block, and host time that adds to a
  kernel's rather than hides it: published split 6.3 to 4.6 %, devices left out 12.1 to 10.2.
* **The share of its bandwidth that a device reaches is on no data sheet**: plain elementwise kernels reach 0.92 on
  V100, 0.87 on both A100, 0.74 on P100 and T4. Bandwidth per multiprocessor and clock, L2, stacked or not and error
  correction don't order them; V100 left out is told 19 % too slow by what the others reach.
* **fp16 norms, activations, rope, add**: what one device's kernels leave of its bandwidth, by size and op, is carried
  to the other (core and a quarter of the ratio before: activations A100 13.9 and H100 16.7 %, now 12.1 and 14.2). The
  ratio alone does as well but scales launches too: rows below 15 µs on A100 15.5 against 12.1 %. H100 reaches a share 7
  to 16 % higher than A100 in all but norms, of which multiprocessors and clocks would explain 5.
* **Convolutions** (3×3, stride 1) are told as direct products or as Winograd's sixteen smaller ones, with the side of
  the image: 19.5 to 18.0 %. With smaller trees: neither 19.8, Winograd 19.5, side 19.3, both 18.4, both without the
  device's numbers in the trees 20.0. With the median error of each device taken out 15 to 20 % would be left:
  libraries choose between algorithms by measuring.
* fp32 latencies of NeuSight hold some 25 µs of launch and events; estimates of captured graphs take the device's own
  floor instead.
* These choices were made looking at these devices; a device of another vendor or memory class may be worse than its
  interval says.
"""

if __name__ == "__main__":
    main()
