"""Stages cut from the exported graph equal the uncut module, whatever the cut; what crosses is divided by samples."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from simpart.capture import capture, export_ops
from simpart.capture._ops import ExportedOps
from simpart.errors import UnsupportedError, UserError
from simpart.graph import Graph
from simpart.graph.sizes import Affine, TensorSpec
from simpart.model_spec import parse_model
from simpart.plan.partition import Partition, partition
from simpart.schedule import parse_rows
from simpart.validate._boundary import BoundaryValue, batch_dim, boundary_values, check_order, pieces, split
from simpart.validate._compile import StageProgram, compile_stage
from simpart.validate._program import StageError

GPT = "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=61,tied=true"
RESNET = "resnet50:image=16,classes=5,width=8,blocks=1-1"
UNET = "unet:image=16,base=4,depth=2"


class Case:
    """A model captured and exported with real parameters in float64, ready to be cut."""

    def __init__(self, model: str, micro_batch: int = 2) -> None:
        factory = parse_model(model)
        torch.manual_seed(0)
        self.graph: Graph = capture(factory, (2, 3), precision="float64", shallow=False).at(micro_batch)
        self.exported: ExportedOps = export_ops(factory, micro_batch, real=True, precision="float64")
        torch.set_default_dtype(torch.float64)
        self.inputs = list(factory.inputs(micro_batch, torch.Generator().manual_seed(1)))
        torch.set_default_dtype(torch.float32)
        self.module: nn.Module = copy.deepcopy(self.exported.module)

    def stages(
        self, cuts: Sequence[int], recompute: Sequence[Sequence[int]] = ()
    ) -> tuple[list[StageProgram], Partition, tuple[BoundaryValue, ...]]:
        ops = len(self.graph.op_ids)
        groups = self.graph.flat.op_group
        stage_of = np.searchsorted(np.array(sorted(cuts)), groups, side="right")
        found = partition(self.graph, stage_of[:ops], len(cuts) + 1)
        values = boundary_values(self.graph, found)
        module = copy.deepcopy(self.module)
        parameters = dict(module.named_parameters())
        buffers = {**dict(module.named_buffers()), **self.exported.constants}
        programs = [
            compile_stage(
                self.exported, found.ops[s].tolist(), inputs=[v.key for v in values if s in v.destinations],
                outputs=[v.key for v in values if v.source == s], parameters=parameters, buffers=buffers,
                recompute=[r for r in recompute if set(r) <= set(found.ops[s].tolist())], loss=s == found.loss_stage,
            )
            for s in range(len(cuts) + 1)
        ]  # fmt: skip
        return programs, found, values

    def reference(self) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        module = copy.deepcopy(self.module)
        loss = module(*self.inputs)
        loss.backward()
        return (
            float(loss.detach()),
            {n: p.grad for n, p in module.named_parameters() if p.grad is not None},
            dict(module.named_buffers()),
        )


def run_chain(
    programs: Sequence[StageProgram], inputs: Sequence[Any]
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All stages in one process, gradients passed by hand."""
    leaves: list[list[torch.Tensor]] = []
    made: dict[Any, torch.Tensor] = {}
    loss = torch.zeros(())
    for program in programs:
        leaves.append([made[key].detach().requires_grad_(made[key].requires_grad) for key in program.inputs])
        results = program.run(leaves[-1], inputs)
        made |= dict(zip(program.outputs, results, strict=False))
        loss = results[-1] if program.has_loss else loss
    back: dict[Any, torch.Tensor] = {}
    for program, held in reversed(list(zip(programs, leaves, strict=True))):
        targets = [made[key] for key in program.outputs if made[key].requires_grad]
        gradients = [back[key] for key in program.outputs if made[key].requires_grad]
        if program.has_loss:
            targets, gradients = [*targets, loss], [*gradients, torch.ones_like(loss)]
        torch.autograd.backward(targets, gradients)
        for key, leaf in zip(program.inputs, held, strict=True):
            if leaf.requires_grad:
                assert leaf.grad is not None
                back[key] = leaf.grad + back[key] if key in back else leaf.grad
    parameters = {n: p for program in programs for n, p in program.parameters.items()}
    gradients_of = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    return float(loss.detach()), gradients_of, {n: b for program in programs for n, b in program.buffers.items()}


def assert_same(found: Any, wanted: Any) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-12)
    assert set(found[1]) == set(wanted[1])
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, wanted[1][name], rtol=1e-9, atol=1e-14)
    for name, buffer in found[2].items():
        if name in wanted[2]:
            torch.testing.assert_close(buffer, wanted[2][name], rtol=1e-12, atol=0)


@pytest.fixture(scope="module", params=[GPT, RESNET, UNET], ids=["gpt", "resnet", "unet"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture(scope="module")
def gpt() -> Case:
    return Case(GPT)


@pytest.fixture(scope="module")
def resnet() -> Case:
    return Case(RESNET)


def test_stages_cut_anywhere_give_loss_gradients_and_buffers_of_the_module(case: Case) -> None:
    wanted = case.reference()
    ops = len(case.graph.op_ids)
    for fraction in (0.2, 0.45, 0.7):
        programs, _, _ = case.stages([int(ops * fraction)])
        assert_same(run_chain(programs, case.inputs), wanted)
    programs, _, _ = case.stages([ops // 3, 2 * ops // 3])
    assert_same(run_chain(programs, case.inputs), wanted)


def test_a_clone_comes_with_what_is_written_into_it() -> None:
    case = Case("tests.models:shifted")
    programs, _, _ = case.stages([len(case.graph.op_ids) - 4])
    assert any("copy_" in op for op in case.graph.op_ids)
    assert_same(run_chain(programs, case.inputs), case.reference())


def test_micro_batch_one_runs_on_its_own_structure() -> None:
    case = Case(GPT, micro_batch=1)
    programs, _, _ = case.stages([len(case.graph.op_ids) // 2])
    assert_same(run_chain(programs, case.inputs), case.reference())


def test_a_stage_holds_its_own_parameters_and_a_tied_one_is_held_by_both(gpt: Case) -> None:
    (first, second), _, _ = gpt.stages([len(gpt.graph.op_ids) // 2])
    assert set(first.parameters) & set(second.parameters) == {"wte.weight"}
    assert set(first.parameters) | set(second.parameters) == {n for n, _ in gpt.module.named_parameters()}
    assert not any(n.startswith("h.1.mlp") for n in first.parameters)


def test_what_leaves_a_stage_is_contiguous_and_shares_no_storage(gpt: Case) -> None:
    for cut in range(8, 14):  # between the views of the attention
        (first, _), _, _ = gpt.stages([cut])
        for tensor in first.run([], gpt.inputs):
            assert tensor.is_contiguous()
            assert tensor.grad_fn is not None and tensor.grad_fn.name() == "CloneBackward0"


def test_a_failing_op_is_named(gpt: Case) -> None:
    programs, _, _ = gpt.stages([len(gpt.graph.op_ids) // 2])
    with pytest.raises(StageError, match=r"op h\.\d+/aten\.add\.Tensor#\d+ failed|op h\.\d+.*failed"):
        programs[1].run([torch.zeros(2, 16, 31, dtype=torch.float64)] * len(programs[1].inputs), gpt.inputs)


def test_a_recomputed_region_keeps_its_inputs_only_and_changes_nothing_else(gpt: Case) -> None:
    ops = len(gpt.graph.op_ids)
    region = range(4, ops // 2 - 1)
    plain, _, _ = gpt.stages([ops // 2])
    again, _, _ = gpt.stages([ops // 2], recompute=[list(region)])
    assert_same(run_chain(again, gpt.inputs), run_chain(plain, gpt.inputs))
    assert saved_bytes(again[0], gpt.inputs) < 0.25 * saved_bytes(plain[0], gpt.inputs)


def test_recomputing_updates_batch_statistics_once(resnet: Case) -> None:
    ops = len(resnet.graph.op_ids)
    programs, _, _ = resnet.stages([], recompute=[list(range(2, ops - 4))])
    assert_same(run_chain(programs, resnet.inputs), resnet.reference())


def test_a_region_around_an_op_it_leaves_out_is_refused(gpt: Case) -> None:
    ids = list(gpt.graph.op_ids)
    before, after = ids.index("h.0.mlp.fc/aten.linear.default#0"), ids.index("h.0.mlp.proj/aten.linear.default#0")
    with pytest.raises(UserError, match=r"recomputed region at op .* end the region before it"):
        gpt.stages([], recompute=[[before, after]])


def saved_bytes(program: StageProgram, inputs: Sequence[Any]) -> int:
    held = {p.untyped_storage().data_ptr() for p in program.parameters.values()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        keep = program.run([], inputs)
    assert keep
    return sum(found.values())


# --- torch's own runtime drives the same stages -----------------------------------------------------------------------
class AsModule(nn.Module):
    """A stage as torch's pipeline runtime wants it: positional tensors in, a tensor of at least one dim out."""

    def __init__(self, program: StageProgram, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.program, self.inputs = program, inputs
        self.held = nn.ParameterList(program.parameters.values())

    def forward(self, *boundary: torch.Tensor) -> Any:
        made = self.program.run([] if not self.program.inputs else list(boundary), self.inputs)
        return made[-1].reshape(1) if self.program.has_loss else (made[0] if len(made) == 1 else made)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("rows", ["0F0,0F1,1F0,1F1,1B0,0B0,1B1,0B1", "0F0,0F1,1F0,1I0,1F1,1I1,1W0,1W1,0B0,0B1"])
@pytest.mark.usefixtures("alone")
def test_torchs_schedule_runtime_gives_the_same_gradients(gpt: Case, rows: str, tmp_path: Path) -> None:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    programs, _, values = gpt.stages([next(i for i, n in enumerate(gpt.graph.op_ids) if n.startswith("h.1"))])
    assert len(values) == 1
    shape = torch.zeros(values[0].spec.shape(2), dtype=torch.float64)
    token, one = torch.zeros(2, 1), torch.zeros(1, dtype=torch.float64)
    cpu = torch.device("cpu")
    first = PipelineStage(
        AsModule(programs[0], gpt.inputs),
        0,
        2,
        cpu,
        input_args=(token,),
        output_args=(shape.clone().requires_grad_(),),
        output_grads=(shape,),
        input_grads=(None,),
    )
    second = PipelineStage(
        AsModule(programs[1], gpt.inputs), 1, 2, cpu, input_args=(shape.clone().requires_grad_(),),
        output_args=(one.clone().requires_grad_(),), input_grads=(shape,),
    )  # fmt: skip
    schedule = _PipelineScheduleRuntime([first, second], 2, loss_fn=lambda out, _: out.sum() / 2, scale_grads=False)
    (tmp_path / "rows.csv").write_text(rows + "\n")
    schedule._load_csv(str(tmp_path / "rows.csv"))
    losses: list[torch.Tensor] = []
    schedule.step(torch.zeros(4, 1), target=torch.zeros(2), losses=losses)
    loss, gradients, _ = gpt.reference()  # both micro-batches are the same samples
    assert float(torch.stack(losses).sum().detach()) == pytest.approx(loss, rel=1e-12)
    for program in programs:
        for name, parameter in program.parameters.items():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-14)


# --- what crosses -----------------------------------------------------------------------------------------------------
def value_with(dims: tuple[Any, ...]) -> BoundaryValue:
    spec = TensorSpec(dims, "float32", tuple(range(len(dims))))
    return BoundaryValue(key=("op", 0), spec=spec, source=0, destinations=(1,), carries_gradient=True)


@pytest.mark.parametrize(
    ("dims", "dim", "slope"),
    [((Affine(0, 1), 4), 0, 1), ((Affine(0, 6), 2), 0, 6), ((3, Affine(0, 1), 2), 1, 1)],
    ids=["batch first", "batch and sequence flattened", "sequence first"],
)
@pytest.mark.parametrize(
    ("have", "want"), [((4,), (3, 1)), ((3, 1), (4,)), ((1, 2, 3), (4, 2)), ((2, 2), (1, 1, 1, 1))]
)
def test_pieces_carry_every_sample_once_to_whoever_needs_it(
    dims: tuple[Any, ...], dim: int, slope: int, have: tuple[int, ...], want: tuple[int, ...]
) -> None:
    total = sum(have)
    shape = value_with(dims).spec.shape(total)
    whole = np.arange(np.prod(shape)).reshape(shape)
    mine = np.split(whole, np.cumsum(np.array(have) * slope)[:-1], axis=dim)
    theirs = np.split(whole, np.cumsum(np.array(want) * slope)[:-1], axis=dim)
    received = [np.full_like(part, -1) for part in theirs]
    found = pieces(value_with(dims), range(len(have)), have, range(10, 10 + len(want)), want)
    for piece in found:
        source, target = mine[piece.source], received[piece.destination - 10]
        at = tuple(slice(*r) for r in piece.destination_box) if piece.destination_box else ()
        assert (target[at] == -1).all()
        target[at] = source[tuple(slice(*r) for r in piece.source_box)] if piece.source_box else source
    for part, wanted in zip(received, theirs, strict=True):
        np.testing.assert_array_equal(part, wanted)


def test_equal_divisions_pass_whole_tensors_between_replicas() -> None:
    found = pieces(value_with((Affine(0, 1), Affine(0, 1))), [0, 1], [2, 3], [2, 3], [2, 3])
    assert [(p.source, p.destination, p.source_box) for p in found] == [(0, 2, None), (1, 3, None)]


def test_a_tensor_without_samples_goes_from_one_replica_to_all_and_not_from_several() -> None:
    assert [p.destination for p in pieces(value_with((7,)), [0], [4], [1, 2], [3, 1])] == [1, 2]
    with pytest.raises(UnsupportedError, match=r"without a batch dim on 2 replicas"):
        pieces(value_with((7,)), [0, 1], [2, 2], [2], [4])


def test_a_tensor_with_two_batch_dims_cannot_be_divided() -> None:
    assert batch_dim(TensorSpec((Affine(0, 1), Affine(0, 1)), "float32")) is None
    with pytest.raises(UnsupportedError, match=r"dims \(b, b\) cannot be divided by samples"):
        split(TensorSpec((Affine(0, 1), Affine(0, 1)), "float32"), [3, 1])


def test_rows_that_wait_for_each_other_are_refused() -> None:
    check_order(parse_rows("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"), [(0, 1)])
    with pytest.raises(UserError, match=r"group 0 waits at 0B0"):
        check_order(parse_rows("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), [(0, 1)])


def test_a_rank_keeps_only_the_parameters_of_its_stage(gpt: Case) -> None:
    import gc

    from simpart.hardware import load_cluster
    from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage
    from simpart.plan.format import PlanFile
    from simpart.training import TrainingSpec
    from simpart.validate._rank import build_share

    count = len(gpt.graph.op_ids)
    halves = (range(count // 2), range(count // 2, count))
    plan = Plan(
        graph=gpt.graph.fingerprint,
        groups=tuple(DeviceGroup(devices=Devices.of([d])) for d in (0, 1)),
        stages=tuple(Stage(ops=OpSet.of(gpt.graph, half), group=s) for s, half in enumerate(halves)),
        batch=Batch(micro_batches=1, sizes=((2,), (2,))),
    )
    file = PlanFile(plan=plan, training=TrainingSpec(), cluster=load_cluster("local"), graph=gpt.graph)
    built: list[Any] = []

    def factory(micro_batch: int) -> Any:
        module, inputs = parse_model(GPT)(micro_batch)
        built.append(weakref.ref(module.get_parameter("h.1.mlp.fc.weight")))
        return module, inputs

    share = build_share(file, factory, 0, precision="float64", device=torch.device("cpu"))
    gc.collect()
    assert "h.0.mlp.fc.weight" in share.parameters and "h.1.mlp.fc.weight" not in share.parameters
    assert share.holders["wte.weight"] == (0, 1) and share.holders["h.1.mlp.fc.weight"] == (1,)
    assert built[-1]() is None
