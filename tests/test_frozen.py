"""Prices in a file: results from it are those of the models, bit for bit, and nothing is made up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpart.cli import main
from simpart.cost import Collective, CollectiveTable, Costs, Estimate, Signature, SignatureTable, TensorForm
from simpart.costmodels import AlphaBeta, Roofline
from simpart.costmodels.frozen import load_frozen, record, save_frozen
from simpart.errors import FormatError, MismatchError
from simpart.graph import Graph
from simpart.graph.format import save_graph
from simpart.hardware import Cluster, load_cluster
from simpart.plan.format import plan_to_json
from simpart.problem import Problem
from simpart.registry import load_searcher
from simpart.searching import Budget, search
from simpart.simulation import simulate_plan
from simpart.training import TrainingSpec

CLUSTERS = ("local:3", "a100-v100", "dgx-a100")


@pytest.fixture(scope="module")
def gpt() -> Graph:
    from simpart.capture import capture
    from simpart.zoo import GPTDims, ZooFactory

    return capture(ZooFactory("gpt", GPTDims(layers=2, hidden=64, heads=4, seq=32, vocab=256)), model="gpt")


def plain(**more: float) -> Costs:
    return Costs(compute=Roofline(), communication=AlphaBeta(), description="data sheets", **more)


def problem_on(graph: Graph, cluster: Cluster, costs: Costs) -> Problem:
    return Problem(graph=graph, training=TrainingSpec(), cluster=cluster, costs=costs, global_batch=6)


def answer(graph: Graph, cluster: Cluster, costs: Costs) -> Any:
    problem = problem_on(graph, cluster, costs)
    result = search(problem, load_searcher("rannc"), Budget(candidates=12))
    assert result.best is not None and result.best.candidate.plan is not None
    plan = result.best.candidate.plan
    return plan_to_json(plan), simulate_plan(problem, plan).to_json(), [e.evaluation for e in result.ranked]


@pytest.mark.parametrize("name", CLUSTERS)
def test_results_are_those_of_the_models_bit_for_bit(gpt: Graph, tmp_path: Path, name: str) -> None:
    cluster = load_cluster(name)
    costs, recorder = record(plain(step_overhead_s=0.001, action_overhead_s=1e-5, step_log_sd=0.1))
    expected = answer(gpt, cluster, costs)
    save_frozen(tmp_path / "t.npz", recorder)
    assert answer(gpt, cluster, load_frozen(tmp_path / "t.npz")) == expected


def test_same_answers_make_the_same_bytes_in_any_order_and_again_from_the_file(tmp_path: Path) -> None:
    form = [TensorForm((n, 8), "float32", (0, 1)) for n in range(1, 6)]
    kernels = [Signature("aten.mm.default", (x, x), (x,)) for x in form]
    messages = [Collective("p2p", 100 * n, (0, 1)) for n in range(1, 6)]
    cluster = load_cluster("local:2")
    paths = [tmp_path / f"{i}.npz" for i in range(3)]

    def ask(costs: Costs, order: list[int]) -> None:
        for i in order:
            costs.compute.estimate(SignatureTable((kernels[i],)), cluster.kinds[0])
            costs.communication.estimate(CollectiveTable((messages[i],)), cluster)

    for path, order in zip(paths, ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3, 3]), strict=False):
        costs, recorder = record(plain())
        ask(costs, order)
        save_frozen(path, recorder)
    costs, recorder = record(load_frozen(paths[0]))
    ask(costs, [3, 4, 0, 1, 2])
    save_frozen(paths[2], recorder)
    assert paths[0].read_bytes() == paths[1].read_bytes() == paths[2].read_bytes()
    assert load_frozen(paths[2]).description == "frozen: data sheets"


def test_families_that_answers_do_not_share_are_joined(tmp_path: Path) -> None:
    class Odd:
        def estimate(self, table: CollectiveTable, cluster: Cluster) -> Estimate:
            n, name = len(table.collectives), f"of {table.collectives[0].bytes}"
            full = np.full(n, 0.5)
            zeros = np.zeros(n, dtype=np.int64)
            return Estimate(
                mean_s=full, family=zeros, families=(name,), shared_log_sd=full, own_log_sd=full, provenance=zeros
            )

    cluster, rows = load_cluster("local:2"), [Collective("p2p", n, (0, 1)) for n in (1, 2)]
    costs, recorder = record(dataclasses.replace(plain(), communication=Odd()))
    for row in rows:
        costs.communication.estimate(CollectiveTable((row,)), cluster)
    save_frozen(tmp_path / "t.npz", recorder)
    found = load_frozen(tmp_path / "t.npz").communication.estimate(CollectiveTable((rows[1], rows[0])), cluster)
    assert [found.families[f] for f in found.family] == ["of 2", "of 1"]


def test_what_was_never_asked_is_refused_with_count_and_the_first(gpt: Graph, tmp_path: Path) -> None:
    cluster, path = load_cluster("local:2"), tmp_path / "t.npz"
    costs, recorder = record(plain())
    problem_on(gpt, cluster, costs).prices([2], cluster.kinds[0])
    save_frozen(path, recorder)
    frozen = load_frozen(path)
    with pytest.raises(MismatchError, match=r"lack \d+ kernels, first embedding of 256×64, 3×32 on"):
        problem_on(gpt, cluster, frozen).prices([3], cluster.kinds[0])
    one = CollectiveTable((Collective("all_reduce", 8, (0, 1)),))
    with pytest.raises(MismatchError, match="they are of nothing, not of local:2"):
        frozen.communication.estimate(one, cluster)


def test_another_data_sheet_is_another_device(gpt: Graph, tmp_path: Path) -> None:
    cluster, path = load_cluster("local:2"), tmp_path / "t.npz"
    costs, recorder = record(plain())
    problem_on(gpt, cluster, costs).prices([2], cluster.kinds[0])
    save_frozen(path, recorder)
    device = dataclasses.replace(cluster.kinds[0], memory_bytes=1 << 33)
    with pytest.raises(MismatchError, match="has another data sheet now"):
        problem_on(gpt, cluster, load_frozen(path)).prices([2], device)
    with pytest.raises(MismatchError, match="not of"):
        problem_on(gpt, cluster, load_frozen(path)).prices([2], load_cluster("dgx-a100").kinds[0])


def damaged(path: Path, change: str) -> None:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays["header"].tobytes())
    if change == "newer":
        header["version"] = 99
    elif change == "kind":
        header["kind"] = "recipe"
    elif change == "overhead":
        header["numbers"]["step_overhead_s"] = -1
    elif change == "nan":
        arrays["kernels.mean_s"][0] = np.nan
    elif change == "negative":
        arrays["kernels.mean_s"][0] = -1.0
    elif change == "short":
        arrays["kernels.on"] = arrays["kernels.on"][1:]
    elif change == "reference":
        arrays["kernels.on"][0] = 7
    elif change == "missing":
        del arrays["collectives.text"]
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    np.savez(path, **arrays)


CHANGES = ("newer", "kind", "overhead", "nan", "negative", "short", "reference", "missing")


@pytest.mark.parametrize("change", [*CHANGES, "text", "noise", "empty", "torn", "absent"])
def test_files_that_are_no_table_are_refused_in_one_line(gpt: Graph, tmp_path: Path, change: str) -> None:
    cluster, path = load_cluster("local:2"), tmp_path / "t.npz"
    costs, recorder = record(plain())
    problem_on(gpt, cluster, costs).prices([2], cluster.kinds[0])
    save_frozen(path, recorder)
    if change in CHANGES:
        damaged(path, change)
    elif change == "absent":
        path.unlink()
    else:
        whole = path.read_bytes()
        noise = bytes(range(128, 256)) * 4
        path.write_bytes({"text": b"hello", "noise": noise, "empty": b"", "torn": whole[: len(whole) // 2]}[change])
    with pytest.raises(FormatError) as caught:
        load_frozen(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, error = capsys.readouterr()
    return int(ended.value.code or 0), json.loads(out) if out.startswith("{") else out, error


def test_commands_freeze_and_reproduce(
    gpt: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_graph(gpt, "g.graph")
    problem = ("search", "g.graph", "--cluster", "local:3", "--global-batch", "6", "--max-candidates", "20", "--json")
    code, first, _ = run(capsys, *problem, "--freeze-costs", "t.npz", "-o", "a.json")
    assert code == 0
    code, again, _ = run(capsys, *problem, "--costs", "t.npz", "-o", "b.json")
    first.pop("timing"), again.pop("timing")
    assert code == 0 and first == again
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
    code, simulated, _ = run(capsys, "simulate", "a.json", "--costs", "t.npz", "--json")
    assert code == 0 and simulated["predicted"] == first["predicted"]
    code, _, error = run(capsys, *problem[:4], "--global-batch", "15", "--costs", "t.npz")
    assert code == 2 and error.startswith("error: the frozen costs lack ") and error.count("\n") == 1
    code, _, error = run(capsys, *problem, "--freeze-costs", "u.npz", "--jobs", "2")
    assert code == 2 and "leave --jobs out" in error
    code, _, error = run(capsys, *problem, "--costs", "t.npz", "--no-profiles")
    assert code == 2 and "leave --store and --no-profiles out" in error
