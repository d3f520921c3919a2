"""The profile store, and measuring a tiny model end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from simpart.commands.profile import profile
from simpart.cost import PROVENANCES, Signature, SignatureTable, TensorForm
from simpart.costmodels import default_costs
from simpart.errors import FormatError, UnsupportedError, UserError
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.hardware_profiles import _profile_ops
from simpart.hardware_profiles._environment import local_environment
from simpart.hardware_profiles._profile_links import profile_links
from simpart.hardware_profiles._profile_ops import kernel_counts, profile_graph_ops
from simpart.hardware_profiles._store import (
    KernelRecord,
    LinkRecord,
    OverheadRecord,
    Samples,
    Store,
    signature_from_json,
    signature_to_json,
)
from simpart.model_spec import parse_model
from simpart.model_spec.cache import captured

MODEL = "gpt:layers=1,hidden=16,heads=2,seq=8,vocab=32"
FORM = TensorForm((2, 3), "float32", (0, 1))


def record(number: int, processes: int = 1) -> KernelRecord:
    signature = Signature("aten.relu.default", (TensorForm((number,), "float32", (0,)),), (), "{}")
    return KernelRecord(signature=signature, samples=Samples.of([1.0]), environment=local_environment(processes))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return captured(parse_model(MODEL), "float32", use_cache=False)


# --- the store -------------------------------------------------------------------------------------------------------
def test_records_of_every_kind_survive(tmp_path: Path) -> None:
    here = local_environment(2)
    link = LinkRecord(kind="p2p", bytes=8, ranks=2, busy=True, samples=Samples.of([1.0, 2.0]), environment=here)
    overhead = OverheadRecord(name="kernel", samples=Samples.of([1e-6]), environment=here)
    Store.at(tmp_path).append([record(1), link, overhead])
    found = Store.at(tmp_path).read()
    assert (found.kernels, found.links, found.overheads) == ((record(1),), (link,), (overhead,))


forms = st.builds(TensorForm, st.tuples(st.integers(0, 9), st.integers(0, 9)), st.sampled_from(["float32", "int64"]),
                  st.sampled_from([None, (0, 1), (1, 0)]), st.sampled_from([None, (0, 1)]))  # fmt: skip
signatures = st.builds(Signature, st.text(), st.tuples(forms), st.tuples(forms, forms), st.text(), view=st.booleans())


@given(st.builds(Signature, st.text(), st.tuples(forms), st.tuples(), members=st.tuples(signatures, signatures)))
def test_signatures_survive(signature: Signature) -> None:
    assert signature_from_json(json.loads(json.dumps(signature_to_json(signature)))) == signature


def test_absent_store_is_empty(tmp_path: Path) -> None:
    assert Store.at(tmp_path / "none").read().kernels == ()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("lost", [1, 7, 40])
def test_torn_last_line_is_skipped_and_repaired(tmp_path: Path, lost: int) -> None:
    store = Store.at(tmp_path)
    store.append([record(1)])
    store.append([record(2)])
    store.path.write_bytes(store.path.read_bytes()[:-lost])
    assert Store.at(tmp_path).read().kernels == (record(1),)
    Store.at(tmp_path).append([record(3)])
    assert Store.at(tmp_path).read().kernels == (record(1), record(3))


def test_store_torn_in_its_first_line_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "profiles.jsonl").write_text('{"kind":"simp')
    assert Store.at(tmp_path).read().kernels == ()
    Store.at(tmp_path).append([record(1)])
    assert Store.at(tmp_path).read().kernels == (record(1),)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"kind":"something","version":1}\n', "something else"),
        ('{"kind":"simpart-profiles","version":99}\n', "update simpart"),
        ("no json\n", "something else"),
        ('{"kind":"simpart-profiles","version":1}\n{"kernel":1}\n', "line 2"),
    ],
)
def test_file_that_is_no_store_is_refused_in_one_line(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "profiles.jsonl").write_text(content)
    with pytest.raises(FormatError, match=says) as caught:
        Store.at(tmp_path).read()
    assert "\n" not in str(caught.value)


def test_file_that_is_no_store_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "profiles.jsonl").write_text("precious\n")
    with pytest.raises(FormatError):
        Store.at(tmp_path).append([record(1)])
    assert (tmp_path / "profiles.jsonl").read_text() == "precious\n"


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from simpart.hardware_profiles._store import *; from simpart.cost import *\n"
        "from simpart.hardware_profiles._environment import local_environment as here\n"
        "for i in range(20):\n"
        "    Store.at(sys.argv[1]).append([KernelRecord(signature=Signature(sys.argv[2], (), (), str(i)),\n"
        "        samples=Samples.of([1.0]), environment=here(1))])\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in ("a", "b", "c")]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    found = {(r.signature.target, r.signature.arguments) for r in Store.at(tmp_path).read().kernels}
    assert found == {(name, str(i)) for name in "abc" for i in range(20)}


def test_store_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPART_STORE", str(tmp_path / "environment"))
    assert Store.at().folder == tmp_path / "environment"
    assert Store.at(tmp_path / "option").folder == tmp_path / "option"
    monkeypatch.delenv("SIMPART_STORE")
    assert Store.at().folder.name == "simpart"


def test_quartiles() -> None:
    found = Samples.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.minimum_s, found.lower_s, found.median_s, found.upper_s, found.count) == (1, 2, 3, 4, 5)


# --- replay ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        "unet:image=32,base=4,depth=2",
        pytest.param("resnet50:image=32", marks=pytest.mark.slow),
        pytest.param("llama:layers=1,hidden=16,heads=2,seq=8,vocab=32", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_of_a_model_can_be_called_and_gives_what_capture_saw(model: str) -> None:
    import torch

    from simpart.hardware_profiles._replay import Bench, operator

    bench = Bench(cold_bytes=1)
    for signature in kernel_counts(captured(parse_model(model), "float32", use_cache=False), 2):
        positional, named = bench._call(signature)
        found = operator(signature.target)(*positional, **named)
        tensors = [t for t in (found if isinstance(found, tuple | list) else [found]) if isinstance(t, torch.Tensor)]
        expected = [(form.shape, form.dtype) for form in signature.outputs]
        seen = [
            (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors if t.numel() or len(expected) == 1
        ]
        assert [pair for pair in expected if 0 not in pair[0]] == [pair for pair in seen if 0 not in pair[0]], signature


def test_kernel_unknown_to_torch_is_refused_in_one_line() -> None:
    from simpart.hardware_profiles._replay import Bench

    with pytest.raises(UnsupportedError, match=r"no kernel aten\.nonsense\.default"):
        Bench(1).seconds(Signature("aten.nonsense.default", (FORM,), (FORM,)), 1, 0.0)
    wrong = Signature("aten.mm.default", (FORM, FORM), (FORM,), '{"positional":[{"tensor":0},{"tensor":1}],"named":{}}')
    with pytest.raises(UnsupportedError, match=r"aten.mm.default cannot be replayed"):
        Bench(1).seconds(wrong, 1, 0.0)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_updates_of_all_optimizers_are_timed(name: str) -> None:
    from simpart.hardware_profiles._replay import Bench

    assert min(Bench(1).seconds(Signature(f"simpart.optimizer.{name}", (FORM, FORM), (FORM,)), 2, 0.0)) > 0


def test_overhead_of_a_step_is_some_microseconds_per_kernel() -> None:
    from simpart.hardware_profiles._replay import Bench, kernel_overhead_s

    assert all(0 <= seconds < 1e-2 for seconds in kernel_overhead_s(Bench(1), 5))


# --- end to end ------------------------------------------------------------------------------------------------------
def test_profile_of_a_tiny_model_is_kept_resumed_and_used(tmp_path: Path, graph: Graph) -> None:
    store = Store.at(tmp_path)
    steps: list[tuple[int, int]] = []
    first = profile_graph_ops(
        graph, [2], 2, store, progress=lambda done, total, _: steps.append((done, total)), repeats=1, least_s=0.0
    )
    wanted = first.measured
    assert wanted > 30 and first.left == 0 and not first.refused
    assert steps[-1] == (wanted, wanted)
    again = profile_graph_ops(graph, [2], 2, store)
    assert (again.measured, again.found) == (0, wanted)
    assert again.seconds < 2
    kernels = tuple(kernel_counts(graph, 2))
    cluster = load_cluster("local:2")
    found = default_costs(cluster, tmp_path).compute.estimate(SignatureTable(kernels), cluster.kinds[0])
    assert {PROVENANCES[p] for p in found.provenance} == {"measured"}
    assert (found.mean_s > 0).all()


def test_budget_ends_a_run_that_the_next_one_continues(tmp_path: Path, graph: Graph) -> None:
    found = profile_graph_ops(graph, [2], 1, Store.at(tmp_path), budget_s=0.0)
    assert found.measured == 0 and found.left > 30


def test_worker_that_dies_ends_the_run_with_a_word(
    tmp_path: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = _profile_ops.start_worker
    monkeypatch.setattr(_profile_ops, "start_worker", lambda module, job, on_line: start("_no_such", job, on_line))
    with pytest.raises(UserError, match=r"ended with exit status 1 .* before its work was done"):
        profile_graph_ops(graph, [2], 1, Store.at(tmp_path))


def test_links_between_two_processes(tmp_path: Path) -> None:
    found = profile_links(2, Store.at(tmp_path), sizes=(1024, 4096), repeats=5, most_s=0.1)
    assert (found.measured, found.left) == (6, 0)
    kinds = {(r.kind, r.bytes) for r in Store.at(tmp_path).read().links}
    assert kinds == {(kind, size) for kind in ("p2p", "all_reduce", "broadcast") for size in (1024, 4096)}
    assert profile_links(2, Store.at(tmp_path), sizes=(1024, 4096)).found == 6


def test_command_prints_one_json_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["ops", MODEL, "--micro-batch", "2", "--processes", "1", "--repeats", "1", "--budget", "0s", "--json"]
    result = CliRunner().invoke(profile, [*arguments, "--store", str(tmp_path / "store")], standalone_mode=False)
    found = json.loads(result.stdout)
    assert found["left"] > 30 and "timing" in found
    assert "the same command continues" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ops", MODEL, "--micro-batch", "1,x"], "micro-batches are whole numbers"),
        (["ops", MODEL, "--micro-batch", "0"], "micro-batches are whole numbers"),
        (["ops", MODEL, "--processes", "0"], "processes must be at least 1"),
        (["links", "--cluster", "dgx-a100"], "this machine only"),
        (["links", "--cluster", "local:1"], "at least 2 processes"),
    ],
)
def test_bad_input_is_answered_in_one_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(profile, [*arguments, "--store", str(tmp_path)], standalone_mode=False)
    assert isinstance(result.exception, UserError)
    assert says in str(result.exception) and "\n" not in str(result.exception)


def test_interrupted_run_keeps_what_it_has_and_leaves_no_process(
    tmp_path: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[str]] = []
    start = _profile_ops.start_worker

    def remember(*arguments: object) -> subprocess.Popen[str]:
        started.append(start(*arguments))  # type: ignore[arg-type]
        return started[-1]

    def interrupt(done: int, total: int, name: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(_profile_ops, "start_worker", remember)
    found = profile_graph_ops(graph, [2], 1, Store.at(tmp_path), progress=interrupt, repeats=1, least_s=0.0)
    assert found.interrupted and found.measured == 3 and found.left > 0
    assert len(Store.at(tmp_path).read().kernels) == 3
    assert all(worker.poll() is not None for worker in started)
