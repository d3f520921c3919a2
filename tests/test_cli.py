"""Bad input is answered by one line and exit status 2, nothing is half-written; documents have the same keys always."""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simpart.cli import main

MODEL = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=512"
PREDICTED = {
    "step_s", "interval_s", "samples_per_s", "tokens_per_s", "mfu", "peak_bytes", "memory", "limits", "provenance",
    "gains", "contention_s",
}  # fmt: skip


class Answer(NamedTuple):
    status: Any
    out: str
    err: str


def simpart(*arguments: str) -> Answer:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        main(list(arguments))
    return Answer(end.value.code, out.getvalue(), err.getvalue())


def document(*arguments: str) -> dict[str, Any]:
    answer = simpart(*arguments, "--json")
    assert answer.status == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a graph and a plan of it."""
    folder = tmp_path_factory.mktemp("made")
    assert simpart("capture", MODEL, "-o", str(folder / "g.graph")).status == 0
    plan = ["plan", str(folder / "g.graph"), "--cluster", "local:2", "--global-batch", "8", "--pp", "2"]
    assert simpart(*plan, "--micro-batch", "2", "--no-profiles", "-o", str(folder / "plan.json")).status == 0
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the graph, the plan, and files that are neither."""
    for name in ("g.graph", "plan.json"):
        shutil.copy(made / name, tmp_path)
    graph, plan = (tmp_path / "g.graph").read_bytes(), (tmp_path / "plan.json").read_text()
    content = json.loads(plan)
    files: dict[str, bytes | str] = {
        "empty.json": b"",
        "empty.graph": b"",
        "cut.graph": graph[: len(graph) // 2],
        "cut.json": plan[: len(plan) // 2],
        "noise.json": bytes(range(256)) * 8,
        "noise.graph": bytes(range(256)) * 8,
        "list.json": "[]",
        "bare.json": json.dumps({"kind": "simpart plan", "version": 1}),
        "newer.json": json.dumps({**content, "version": 99}),
        "newer.graph": json.dumps({"kind": "simpart graph", "version": 99}),
        "graph.json": graph,
        "plan.graph": plan,
        "deep.json": "[" * 100_000,
        "op.json": plan.replace('"h.0/aten.add.Tensor#1"', '"h.0/aten.add.Tensor#7"', 1),
        "other.json": plan.replace(content["plan"]["graph"], "0" * 32, 1),
        "yaml.json": "kind: cluster\nname: x\n",
        "bad.yaml": "kind: cluster\nversion: 1\nname: x\nnodes: []\nlevels: []\n",
        "key.yaml": "kind: cluster\nversion: 1\nname: x\nnods: []\n",
        "mods.py": MODULES,
        "broken.py": "def f(:",
        "leaving.py": "raise SystemExit(5)",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
    (tmp_path / "folder.json").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for name in ("mods", "broken", "leaving"):
        sys.modules.pop(name, None)


MODULES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, end=torch.mean):
        super().__init__()
        self.linear, self.end = nn.Linear(4, 4), end
    def forward(self, x):
        return self.end(self.linear(x))

def x(b): return (torch.zeros(b, 4),)
def branch(y):
    if y.sum() > 0:
        return y.mean()
    return y.sum()

number = 5
def loud(b): print("noise"); return Net(), x(b)
def raising(b): raise RuntimeError("two\\nlines")
def leaving(b): raise SystemExit(3)
def three(b): return 3
def depends(b): return Net(branch), x(b)
def vector(b): return Net(lambda y: y), x(b)
def detached(b): return Net(lambda y: y.detach().mean()), x(b)
def complex_loss(b): return Net(lambda y: (y + 0j).mean()), x(b)
def empty(b): return nn.Flatten(0), x(b)
def meta(b): return Net().to("meta"), x(b)
def named(b): return Net(), {"x": torch.zeros(b, 4)}
def constant(b): return Net(), x(4)
def half(b): return Net().to(torch.bfloat16), (torch.zeros(b, 4, dtype=torch.bfloat16),)
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.h = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.h.weight = self.e.weight
    def forward(self, t):
        return nn.functional.cross_entropy(self.h(self.e(t)).flatten(0, 1).float(), t.flatten())
def tied_half(b): return Tied().half().to(torch.bfloat16), (torch.zeros(b, 3, dtype=torch.long),)
"""

ON = "--cluster local:2 --global-batch 4"
BAD = [
    ("captre g.graph", "did you mean 'capture'?"),
    ("hardware", "needs a command: check, detect, list, show"),
    ("capture", "Missing argument 'MODEL'"),
    ("capture g.graph --nope", "No such option '--nope'"),
    ("capture ''", "the model is empty"),
    ("capture gtp:layers=2", "did you mean 'gpt'?"),
    ("capture gpt:layrs=2", "did you mean 'layers'?"),
    ("capture gpt:layers=-3", "layers must be a whole number of at least 1, got layers=-3"),
    ("capture gpt:hidden=65,heads=4", "heads must divide hidden, got heads=4, hidden=65"),
    ("capture gpt:layers=2,layers=3", "got layers twice"),
    ("capture nosuch:factory", "there is no module 'nosuch'"),
    ("capture x.graph", "there is no such file"),
    ("capture empty.graph", "empty.graph is empty"),
    ("capture cut.graph", "truncated"),
    ("capture noise.graph", "is not a simpart graph"),
    ("capture newer.graph", "update simpart"),
    ("capture plan.graph", "is a simpart plan, not a simpart graph"),
    ("capture g.graph --full", "captured already"),
    ("capture g.graph --precision float8", "say --precision float32"),
    ("capture g.graph -o nowhere/x.graph", "cannot write nowhere/x.graph: there is no folder nowhere"),
    ("capture g.graph -o folder.json", "cannot write folder.json: it is a folder"),
    ("capture g.graph -o ''", "empty name"),
    ("capture g.graph -o /dev/full", "cannot write /dev/full: No space left on device"),
    (f"plan g.graph {ON} --cluster ''", "unknown cluster ''"),
    (f"plan g.graph {ON} --cluster dgx-a10", "did you mean 'dgx-a100'?"),
    (f"plan g.graph {ON} --cluster a100", "is a device, not a cluster"),
    (f"plan g.graph {ON} --cluster local:0", "a whole number from 1 to 99999, got '0'"),
    (f"plan g.graph {ON} --cluster dgx-a100:999999999", "a whole number from 1 to 99999"),
    (f"plan g.graph {ON} --cluster bad.yaml", "bad.yaml: nodes: must be a list of mappings"),
    (f"plan g.graph {ON} --cluster key.yaml", "nods: unknown key; did you mean 'nodes'?"),
    (f"plan g.graph {ON} --global-batch 0", "global batch must be from 1 to"),
    (f"plan g.graph {ON} --global-batch -4", "got -4"),
    (f"plan g.graph {ON} --global-batch 99999999999999999999", "global batch must be from 1 to"),
    (f"plan g.graph {ON} --global-batch 3", "dp must divide the global batch, got dp=2, global batch 3"),
    (f"plan g.graph {ON} --micro-batch 8", "try micro-batch 1, 2"),
    (f"plan g.graph {ON} --pp 3", "pp must divide the 2 devices"),
    (f"plan g.graph {ON} --dp 3", "local:2 has 2"),
    (f"plan g.graph {ON} --pp 0", "pp must be at least 1, got 0"),
    ("plan g.graph --cluster local:64 --global-batch 64 --pp 64", "pp must be at most"),
    (f"plan g.graph {ON} --schedule 1f1", "did you mean '1f1b'?"),
    (f"plan g.graph {ON} --optimizer adm", "'adm' is not one of"),
    (f"plan g.graph {ON} --clip nan", "must be positive"),
    (f"plan g.graph {ON} --store g.graph", "give another --store"),
    (f"search g.graph {ON} --searcher ranc", "did you mean 'rannc'?"),
    (f"search g.graph {ON} --budget 3d", "a time is written 60s, 5m or 1h"),
    (f"search g.graph {ON} --max-candidates 0", "at least 1, got 0"),
    (f"search g.graph {ON} --min-stages 3 --max-stages 2", "1 <= min <= max"),
    (f"search g.graph {ON} --seed -1", "-1 is not in the range"),
    (f"search g.graph {ON} --log plan.json", "not a search log"),
    (f"search g.graph {ON} --log /dev/full", "no plain file"),
    (f"search g.graph {ON} -o nowhere/x", "there is no folder nowhere"),
    ("simulate missing.json", "No such file"),
    ("simulate empty.json", "is empty"),
    ("simulate cut.json", "truncated"),
    ("simulate noise.json", "is not a simpart plan"),
    ("simulate list.json", "something else, not a simpart plan"),
    ("simulate bare.json", "lacks model"),
    ("simulate newer.json", "update simpart"),
    ("simulate graph.json", "is a simpart graph, not a simpart plan"),
    ("simulate yaml.json", "is not a simpart plan"),
    ("simulate deep.json", "is not a simpart plan"),
    ("simulate folder.json", "Is a directory"),
    ("simulate op.json", "h.0/aten.add.Tensor#7"),
    ("simulate other.json", "0000"),
    ("simulate plan.json --pp 2", "leave --pp out"),
    ("simulate plan.json --global-batch 8", "leave --global-batch out"),
    ("simulate plan.json --trace nowhere/t.json", "there is no folder nowhere"),
    ("simulate g.graph", "a model needs --cluster"),
    ("validate missing.json", "No such file"),
    ("validate g.graph", "is a simpart graph, not a simpart plan"),
    ("validate plan.json --nproc 3", "leave --nproc out"),
    ("validate plan.json --steps 0", "at least 1 step"),
    ("validate plan.json --timeout nan", "must be positive"),
    ("validate plan.json --trace nowhere/t.json", "there is no folder nowhere"),
    ("validate plan.json --prepare mods.py", "is a file"),
    ("validate plan.json --log-dir mods.py/x", "is a file"),
    ("validate plan.json --collect nowhere", "holds no run"),
    ("hardware show nosuch", "unknown device or cluster 'nosuch'"),
    ("hardware check plan.json", "has kind 'simpart plan'"),
    ("hardware check noise.json", "is not UTF-8"),
    ("hardware check deep.json", "not valid YAML"),
    ("profile links --cluster dgx-a100", "say local or local:N"),
    ("profile links --cluster local:1", "at least 2 processes"),
    ("profile ops g.graph --micro-batch ²", "whole numbers"),
    ("profile ops g.graph --processes 0", "at least 1, got 0"),
    ("profile ops g.graph --store plan.json", "give another --store"),
    ("capture mods:nothing", "unknown factory in mods 'nothing'"),
    ("capture mods:number", "must be a function"),
    ("capture mods:raising", "RuntimeError: two lines"),
    ("capture mods:leaving", "SystemExit"),
    ("capture leaving:f", "SystemExit"),
    ("capture broken:f", "broken.py:1"),
    ("capture mods:three", "got an int"),
    ("capture mods:depends", "mods.py:14 'if y.sum() > 0:'"),
    ("capture mods:vector", "shape [2, 4]"),
    ("capture mods:detached", "must depend on a trainable parameter"),
    ("capture mods:complex_loss", "must be a real number"),
    ("capture mods:empty", "must have trainable parameters"),
    ("capture mods:meta", "on meta"),
    ("capture mods:named", "by position"),
    ("capture mods:constant", "use its argument"),
]


@pytest.mark.parametrize(("command", "says"), BAD, ids=[command for command, _ in BAD])
def test_a_mistake_is_answered_by_one_line(here: Path, command: str, says: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    answer = simpart(*shlex.split(command))
    assert answer.status == 2
    *progress, line, end = answer.err.split("\n")
    assert line.startswith("error: ") and says in line and not end and not answer.out
    assert all(text.startswith("capturing ") for text in progress)
    after = {path: path.stat().st_mtime_ns for path in here.rglob("*") if "__pycache__" not in path.parts}
    assert after == before


def test_a_device_file_is_written_to_and_stays_one() -> None:
    assert not Path("/dev/full").is_file()


# --- plans edited by hand --------------------------------------------------------------------------------------------
VALUES: list[Any] = [None, True, 0, 1, -1, 2, 10**30, 1.5, 1e308, "", "x", "0:2", "0:0", [], {}, [[]], [0], {"a": 1}]


def places(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_plan_edited_at_random_is_read_or_refused(here: Path, data: st.DataObject) -> None:
    whole = json.loads((here / "plan.json").read_text())
    part = data.draw(st.sampled_from(["plan", "training", "cluster", "graph", "graph"]))
    path = data.draw(st.sampled_from(list(places({part: whole[part]}))))
    content = copy.deepcopy(whole)
    *way, key = path
    holder = content
    for step in way:
        holder = holder[step]
    if data.draw(st.booleans()):
        holder[key] = data.draw(st.sampled_from(VALUES))
    else:
        del holder[key]
    (here / "edited.json").write_text(json.dumps(content))
    answer = simpart("simulate", "edited.json", "--no-profiles")
    assert answer.status in (0, 2), answer
    assert answer.status == 0 or (answer.err.startswith("error: ") and answer.err.count("\n") == 1)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_damaged_graph_is_read_or_refused(here: Path, place: int, byte: int) -> None:
    raw = bytearray(gzip.decompress((here / "g.graph").read_bytes()))
    raw[place % len(raw)] = byte
    (here / "damaged.graph").write_bytes(raw)
    answer = simpart("capture", "damaged.graph")
    assert answer.status in (0, 2) and answer.err.count("\n") <= 1, answer


# --- documents -------------------------------------------------------------------------------------------------------
def test_documents_have_the_same_keys_with_and_without_a_plan(here: Path) -> None:
    keys = {"plan", "feasible", "why_infeasible", "predicted", "bound", "evaluated"}
    for command in (
        f"plan g.graph {ON}",
        "simulate plan.json",
        f"search g.graph {ON}",
        f"search g.graph {ON} --min-stages 3",
    ):
        found = document(*shlex.split(command), "--no-profiles")
        assert keys <= set(found) and set(found["predicted"]) == PREDICTED
        assert found["feasible"] == (found["plan"] is not None)
        assert bool(found["why_infeasible"]) != found["feasible"]


def test_a_search_that_had_too_little_time_says_so_and_is_no_error(here: Path) -> None:
    answer = simpart(*shlex.split(f"search g.graph {ON} --no-profiles --budget 0.000001s"))
    assert answer.status == 0
    assert answer.out.startswith("no plan evaluated: the time budget was too short: ")
    assert answer.out.splitlines()[-1].startswith("search ended by its budget after ")


def test_what_a_users_module_prints_is_no_part_of_the_document(here: Path) -> None:
    assert document("capture", "mods:loud", "--no-cache")["parameters"] == 20


def test_a_users_module_may_convert_its_parameters(here: Path) -> None:
    assert document("capture", "mods:half", "--no-cache")["parameters"] == 20
    assert document("capture", "mods:tied_half", "--no-cache")["parameters"] == 128


def test_the_plan_a_search_wrote_simulates_to_what_the_search_predicted(here: Path) -> None:
    searched = document(*shlex.split(f"search g.graph {ON} --no-profiles -o best.json"))
    simulated = document("simulate", "best.json", "--no-profiles")
    assert simulated["plan"] == searched["plan"] and simulated["predicted"] == searched["predicted"]
    reference = document("simulate", "best.json", "--no-profiles", "--engine", "simpy")
    assert reference["predicted"]["step_s"] == pytest.approx(simulated["predicted"]["step_s"], rel=1e-9)


def test_twice_the_speed_takes_half_the_time_and_more_memory_is_never_worse(here: Path) -> None:
    content = json.loads((here / "plan.json").read_text())
    slow = document("simulate", "plan.json", "--no-profiles")["predicted"]["step_s"]
    scaled = copy.deepcopy(content)
    for part in (*scaled["cluster"]["devices"], *scaled["cluster"]["levels"]):
        part.update({key: faster(key, value) for key, value in part.items()})
    (here / "fast.json").write_text(json.dumps(scaled))
    assert document("simulate", "fast.json", "--no-profiles")["predicted"]["step_s"] == pytest.approx(slow / 2)
    for device in content["cluster"]["devices"]:
        device["memory_bytes"] = device["reserved_bytes"] + 1_000_000
    (here / "small.json").write_text(json.dumps(content))
    small = document("simulate", "small.json", "--no-profiles")
    assert not small["feasible"] and "more than" in small["why_infeasible"]
    assert small["predicted"]["step_s"] == pytest.approx(slow)


def faster(key: str, value: Any) -> Any:
    """Twice the rate, half the latency; anything else as it is."""
    if key == "peak_flops_per_s":
        return {dtype: 2 * rate for dtype, rate in value.items()}
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    return 2 * value if key.endswith("_per_s") else value / 2 if key.endswith("_s") else value


@pytest.mark.parametrize("devices", [1, 3, 5, 7])
def test_odd_numbers_of_devices_get_plans(here: Path, devices: int) -> None:
    command = f"search g.graph --cluster local:{devices} --global-batch {2 * devices} --no-profiles --max-candidates 4"
    assert document(*shlex.split(command))["feasible"]


def test_a_plan_for_a_cluster_elsewhere_is_not_run_here(here: Path) -> None:
    command = "plan g.graph --cluster p2.8xlarge --global-batch 8 --pp 2 --dp 1 --no-profiles -o far.json"
    assert document(*shlex.split(command))["feasible"]
    answer = simpart("validate", "far.json", "--no-profiles")
    assert answer.status == 2 and "torchrun" in answer.err, answer.err


# --- processes -------------------------------------------------------------------------------------------------------
def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "simpart", *arguments]
    return subprocess.run(command, capture_output="stdout" not in more, check=False, timeout=60, **more)


def test_the_same_command_gives_the_same_bytes(here: Path) -> None:
    files, documents = [], []
    for seed in ("0", "1"):
        command = shlex.split(f"search g.graph {ON} --no-profiles --json --max-candidates 6 -o {seed}.json")
        answer = run(*command, env={**os.environ, "PYTHONHASHSEED": seed})
        found = json.loads(answer.stdout)
        del found["timing"]
        documents.append(found)
        files.append((here / f"{seed}.json").read_bytes())
    assert documents[0] == documents[1] and files[0] == files[1]


def test_odd_surroundings_do_no_harm(here: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    bare = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **ascii_only}
    answer = run("simulate", "plan.json", "--timeline", env={**bare, "COLUMNS": "30", "NO_COLOR": "1"})
    assert answer.returncode == 0 and not answer.stderr and b"\x1b" not in answer.stdout
    with open("/dev/full", "wb") as full:
        answer = run("simulate", "plan.json", "--json", stdout=full, stderr=subprocess.PIPE)
    assert answer.returncode == 2 and answer.stderr.count(b"\n") == 1 and b"No space left" in answer.stderr


def test_a_saved_plan_is_simulated_without_torch(here: Path) -> None:
    code = (
        "import sys\nfrom simpart.cli import main\ntry: main(['simulate', 'plan.json'])\nexcept SystemExit: pass\n"
        "print({name.partition('.')[0] for name in sys.modules} & {'torch', 'sklearn', 'pandas', 'matplotlib'})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.splitlines()[-1] == "set()"


@pytest.mark.slow
def test_ctrl_c_ends_a_search_with_its_answer(here: Path) -> None:
    command = "search g.graph --cluster local:16 --global-batch 256 --no-profiles --json -o best.json"
    process = subprocess.Popen([sys.executable, "-m", "simpart", *shlex.split(command)], stdout=subprocess.PIPE)
    time.sleep(5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    found = json.loads(out)
    if process.returncode != 0:  # else it was done before
        assert process.returncode == 130 and found["stopped"] == "interrupted"
    assert (here / "best.json").exists() == found["feasible"]
    assert not [path for path in here.iterdir() if path.name.startswith(".best")]
