"""What a host takes can be said: in a cluster's file, by a flag; what is measured here goes before the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from simpart.cli import main
from simpart.commands._problem import costs_of
from simpart.commands.hardware import hardware
from simpart.configure import Configuration, configure
from simpart.cost import Estimate, SignatureTable
from simpart.costmodels import frozen, with_host
from simpart.costmodels.learned._launch_time import launch_time_of
from simpart.costmodels.learned._overheads import shipped_overheads
from simpart.errors import FormatError, UserError
from simpart.hardware import Cluster, Device, Host, load_cluster
from simpart.hardware_profiles._store import OverheadRecord, Samples, Store
from simpart.plan.format import PlanFile, save_plan
from simpart.problem import Problem
from simpart.registry import default_costs
from simpart.simulation import simulate_plan
from simpart.training import TrainingSpec
from tests.test_costmodels import environment
from tests.test_lowering import plan, problem
from tests.toy_graphs import UnitCompute, chain, device
from tests.toy_graphs import costs as toy_costs

HOST = {
    "eager_launch": "12 us", "compiled_launch": "3 us", "step_overhead": "5 ms",
    "source": {"eager_launch": "a trace", "compiled_launch": "a trace", "step_overhead": "assumption: logging"},
}  # fmt: skip


def cluster_file(folder: Path, host: Any = HOST) -> str:
    content = {
        "kind": "cluster", "version": 1, "name": "mine", "nodes": [{"device": "a100", "count": 2}],
        "levels": [{
            "name": "nvlink", "joins": "all", "bandwidth": "300 GB/s", "latency": "3 us",
            "source": {"bandwidth": "sheet", "latency": "sheet"},
        }],
    }  # fmt: skip
    path = folder / "mine.yaml"
    path.write_text(json.dumps(content | ({} if host is None else {"host": host})))
    return str(path)


def options(**more: Any) -> dict[str, Any]:
    return {"store": None, "no_profiles": True, "costs": None, "freeze_costs": None, "launch_time": None, **more}


def test_a_file_tells_its_host(tmp_path: Path) -> None:
    cluster = load_cluster(cluster_file(tmp_path) + ":2")
    assert cluster.host is not None
    assert (cluster.host.eager_launch_s, cluster.host.compiled_launch_s, cluster.host.step_overhead_s) == (
        12e-6, 3e-6, 5e-3,
    )  # fmt: skip
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert "host" not in load_cluster("dgx-a100").to_dict()


def test_what_a_file_tells_goes_before_other_hosts(tmp_path: Path) -> None:
    shipped = shipped_overheads()
    costs = default_costs(load_cluster(cluster_file(tmp_path)), profiles=False)
    assert (costs.eager_launch_s, costs.compiled_launch_s, costs.step_overhead_s) == (12e-6, 3e-6, 5e-3)
    assert costs.launch_log_sd == costs.compiled_launch_log_sd == shipped.known_log_sd < shipped.launch_log_sd
    part = {"eager_launch": "12 us", "source": {"eager_launch": "a trace"}}
    costs = default_costs(load_cluster(cluster_file(tmp_path, part)), profiles=False)
    other = default_costs(load_cluster("dgx-a100"), profiles=False)
    assert costs.eager_launch_s == 12e-6 and costs.compiled_launch_s == other.compiled_launch_s
    assert costs.compiled_launch_log_sd == other.compiled_launch_log_sd


def test_a_flag_goes_before_the_file(tmp_path: Path) -> None:
    cluster = load_cluster(cluster_file(tmp_path))
    costs = costs_of(cluster, options(launch_time="20us"))
    assert costs.eager_launch_s == costs.compiled_launch_s == 20e-6 and costs.step_overhead_s == 5e-3
    assert costs_of(cluster, options()).eager_launch_s == 12e-6


def test_a_profile_of_this_machine_goes_before_the_file(tmp_path: Path) -> None:
    cluster = load_cluster(cluster_file(tmp_path))
    here = environment(cluster.kinds[0].name)
    record = OverheadRecord(name="step", samples=Samples.of([0.001]), environment=here)
    Store.at(tmp_path / "store").append([record])
    assert default_costs(cluster, store=tmp_path / "store").step_overhead_s == pytest.approx(0.001)
    assert default_costs(cluster, store=tmp_path / "store", profiles=False).step_overhead_s == 5e-3


def with_launches(launch_s: float, kind: str = "gpu") -> Problem:
    priced = replace(toy_costs(), eager_launch_s=launch_s, step_overhead_s=1e-6)
    small = replace(priced, compute=Scaled())
    return problem(chain(8), 8, [replace(device(), kind=kind)] * 8, costs=small)  # type: ignore[arg-type]


class Scaled(UnitCompute):
    """Kernels of 20 us."""

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        found = super().estimate(table, device)
        return replace(found, mean_s=2e-5 * found.mean_s)


def test_a_measured_step_tells_its_launch_time() -> None:
    """The launch time that made the step is found again, whatever the problem's own says."""
    for cuts in ([], [4, 8, 12]):
        one = plan(chain(8), cuts, 4)
        for launch_s in (3e-5, 9e-5):
            measured_s = simulate_plan(with_launches(launch_s), one).step_s
            assert launch_time_of(with_launches(7e-5), one, measured_s) == pytest.approx(launch_s, rel=0.02)


def test_steps_that_launches_do_not_explain() -> None:
    one = plan(chain(8), [], 4)
    kernels_s = simulate_plan(with_launches(0.0), one).step_s
    assert launch_time_of(with_launches(0.0), one, 0.9 * kernels_s) is None
    assert launch_time_of(with_launches(0.0), one, 1e3) is None
    assert launch_time_of(with_launches(0.0, "cpu"), one, 2 * kernels_s) is None


def test_frozen_prices_hold_whatever_the_host() -> None:
    cluster = load_cluster("dgx-a100")
    assert frozen._cluster(cluster) == frozen._cluster(replace(cluster, host=Host(eager_launch_s=1e-5)))


def test_without_numbers_nothing_changes() -> None:
    costs = default_costs(load_cluster("dgx-a100"), profiles=False)
    assert with_host(costs, Host()) == costs


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ({"eager_launch": "12 us"}, "source: must be a mapping"),
        ({"eager_launch": "12", "source": {"eager_launch": "a trace"}}, "host.eager_launch: '12' has no unit"),
        ({"eager_lunch": "12 us", "source": {}}, "host.eager_lunch: unknown key; did you mean 'eager_launch'"),
        ({"eager_launch": "12 us", "source": {"step_overhead": "x"}}, "is the source of a number that is not there"),
        ({"source": {}}, "host: must state at least one of eager_launch"),
        ([1], "host: must be a mapping"),
    ],
)  # fmt: skip
def test_faults_of_a_host_are_named(host: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine\.yaml") as caught:
        load_cluster(cluster_file(tmp_path, host))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("dgx-a100", "12", "--launch-time: '12' has no unit"),
        ("dgx-a100", "1 s", "must be below 10 ms"),
        ("dgx-a100", "-3us", "--launch-time: "),
        ("local:2", "12us", "local:2 has none"),
    ],
)
def test_launch_times_that_cannot_be_are_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match="--launch-time") as caught:
        costs_of(load_cluster(name), options(launch_time=text))
    assert message in str(caught.value)


def test_plan_files_with_a_wrong_host_are_refused(tmp_path: Path) -> None:
    content = load_cluster(cluster_file(tmp_path)).to_dict()
    with pytest.raises(UserError, match="host: eager_launch_s must be at least 0"):
        Cluster.from_dict({**content, "host": {"eager_launch_s": -1.0}})
    with pytest.raises(FormatError, match="unknown key 'launch'"):
        Cluster.from_dict({**content, "host": {"launch": 1.0}})


def test_hardware_show_prints_the_host(tmp_path: Path) -> None:
    path = cluster_file(tmp_path)
    text = CliRunner().invoke(hardware, ["show", path], catch_exceptions=False).stdout
    assert "eager launch" in text and "12 us" in text and "assumption: logging" in text
    document = json.loads(CliRunner().invoke(hardware, ["show", path, "--json"], catch_exceptions=False).stdout)
    assert document["cluster"]["host"]["compiled_launch_s"] == 3e-6


# --- the command ------------------------------------------------------------------------------------------------------
def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, error = capsys.readouterr()
    return int(ended.value.code or 0), out, error


def test_simulate_tells_and_takes_a_launch_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from simpart.capture import capture
    from simpart.zoo import GPTDims, ZooFactory

    graph = capture(ZooFactory("gpt", GPTDims(layers=2, hidden=64, heads=4, seq=32, vocab=256)), model="gpt")
    cluster = load_cluster("dgx-a100")
    given = Problem(
        graph=graph, training=TrainingSpec(), cluster=cluster, costs=default_costs(cluster, profiles=False),
        global_batch=16,
    )  # fmt: skip
    found = configure(given, Configuration(dp=8, micro_batch=2))
    path = str(tmp_path / "a.json")
    save_plan(path, PlanFile(plan=found, training=given.training, cluster=cluster, graph=graph.at(2)))
    code, out, _ = run(capsys, "simulate", path, "--no-profiles", "--measured", "30 ms", "--json")
    launch_s = json.loads(out)["measured"]["launch_s"]
    assert code == 0 and launch_s == pytest.approx(30e-3 / 120, rel=0.5)
    code, out, _ = run(capsys, "simulate", path, "--no-profiles", "--launch-time", f"{1e6 * launch_s}us", "--json")
    assert code == 0 and json.loads(out)["predicted"]["step_s"] == pytest.approx(30e-3, rel=0.01)
    _, out, _ = run(capsys, "simulate", path, "--no-profiles", "--measured", "30ms")
    assert f"--launch-time {1e6 * launch_s:.3g}us" in out
    _, out, _ = run(capsys, "simulate", path, "--no-profiles", "--measured", "1us")
    assert "no launch time explains it" in out
    for wrong in ("0s", "30"):
        code, _, error = run(capsys, "simulate", path, "--measured", wrong)
        assert code == 2 and "--measured" in error and error.count("\n") == 1


@pytest.mark.parametrize(("key", "value"), [("eager_launch", "10 h"), ("step_overhead", "1e300 s")])
def test_hosts_that_cannot_be_are_refused(key: str, value: str, tmp_path: Path) -> None:
    path = cluster_file(tmp_path, {key: value, "source": {key: "a trace"}})
    with pytest.raises(UserError, match=f"^{path}: host.{key}: must be below"):
        load_cluster(path)
