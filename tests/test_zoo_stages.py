"""The zoo's models and Hugging Face ones captured, cut in two anywhere and run: what the whole module gives."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.test_stage_compiler import Case, assert_same, run_chain

SMALL = {
    "bert": "bert:layers=2,hidden=32,heads=4,seq=16,vocab=61,ffn=72",
    "lstm": "lstm:layers=2,hidden=24,seq=5,vocab=61",
    "moe": "moe:layers=2,hidden=32,heads=4,kv_heads=2,ffn=40,experts=4,seq=16,vocab=61",
    "t5": "t5:layers=2,hidden=32,heads=3,size=8,ffn=72,seq=20,target=12,vocab=61",
    "two_tower": "two_tower:image=16,patch=8,image_layers=2,image_hidden=32,image_heads=4,seq=10,vocab=61,"
    "text_layers=2,text_hidden=24,text_heads=3,embed=20",
    "wide_resnet": "wide_resnet:factor=1,image=32,classes=7",
}
SLOW = {"wide_resnet", "t5", "two_tower"}


def check_random_cut(model: str) -> None:
    """One cut, drawn from the model's name, gives the loss, gradients and buffers of the uncut module."""
    case = Case(model)
    ops = len(case.graph.op_ids)
    cut = random.Random(model).randrange(ops // 5, 4 * ops // 5)
    programs, found, _ = case.stages([cut])
    assert min(len(np.unique(part)) for part in found.ops) > ops // 10
    assert_same(run_chain(programs, case.inputs), case.reference())


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in SMALL])
def test_two_stages_give_loss_gradients_and_buffers_of_the_module(name: str) -> None:
    check_random_cut(SMALL[name])
