import json
import re

import pytest
import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls
from torch import nn

import mezzo
from mezzo.conversion.plan import CastBytes, Casts, GraphPlan, GraphRow

X = torch.randn(2, 4)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.head(x)).float()


def test_every_row_has_module_source_line_and_reason():
    plan = mezzo.convert(Head(), (X,), dtype=HALF).plan
    linear, tanh, to = plan.row("linear"), plan.row("tanh"), plan.row("to")
    assert (linear.op, linear.module, linear.dtype) == ("linear", "head", "bfloat16")
    assert linear.reason.startswith("a matrix product")
    assert tanh.source.startswith("test_plan_report.py:")
    assert tanh.where == tanh.source
    assert tanh.reason == "in no list: 16 bits here cast the fewest bytes"
    assert (to.op, to.dtype, to.reason) == ("cast", "float32", "the model's own cast")


def test_weights_have_rows_with_their_stored_dtypes():
    model = Calls(
        lambda self, x: (self.head(x), torch.cdist(x, self.head.weight)), head=nn.Linear(4, 4)
    )
    plan = mezzo.convert(model, (X,), dtype=HALF).plan
    weight = plan.row("p_head_weight")
    assert weight.where == "head.weight"
    assert (weight.op, weight.dtype) == ("weight", "float32 + bfloat16")
    assert plan.row("p_head_bias").dtype == "bfloat16"


def test_a_model_of_another_dtype_is_reported_as_left_alone():
    plan = mezzo.convert(nn.Linear(4, 4).double(), (X.double(),), dtype=HALF).plan
    assert (plan.row("linear").dtype, plan.row("linear").reason) == (
        "float64",
        "already float64: left alone",
    )
    assert plan.row("p_weight").reason == "stored as the model has it"


def test_a_tables_row_states_its_error_and_how_to_keep_float32():
    plan = mezzo.convert(
        Calls(lambda self, i: self.table(i), table=nn.Embedding(50, 16)),
        (torch.arange(3),),
        dtype=HALF,
    ).plan
    assert re.fullmatch(
        r"stored in 16 bits: largest relative error of a row [12]\.\de-03; exclude='embedding'"
        r" keeps float32",
        plan.row("p_table_weight").reason,
    )
    assert plan.row("embedding").reason == "selects rows of a table that is stored in 16 bits"


def test_ops_come_before_weights():
    kinds = [row.op == "weight" for row in mezzo.convert(Head(), (X,), dtype=HALF).plan]
    assert kinds == sorted(kinds)


# Counted casts


def _casts(function, **modules):
    return mezzo.convert(Calls(function, **modules), (X,), dtype=HALF).casts


def test_casts_before_are_those_of_autocast_and_casts_after_are_those_left():
    found = _casts(lambda self, x: self.linear(x), linear=nn.Linear(4, 4))
    assert found.before == CastBytes(3, 6 * (8 + 16 + 4))
    assert found.after == CastBytes(2, 6 * (8 + 8))


def test_casts_of_the_model_count_in_both_and_casts_to_the_same_dtype_in_neither():
    found = _casts(lambda _, x: (x.float().to(HALF).sum(), x + 1))
    assert (found.before.count, found.after.count) == (1, 1)


def test_a_16_bit_model_has_no_casts():
    model = nn.Linear(4, 4).to(HALF)
    assert mezzo.convert(model, (X.to(HALF),), dtype=HALF).casts.after == CastBytes()


def test_a_weight_is_cast_once_under_autocast_an_activation_each_time():
    found = _casts(
        lambda self, x: F.linear(x, self.linear.weight) + F.linear(x, self.linear.weight),
        linear=nn.Linear(4, 4),
    )
    assert found.before.count == 3


# The plan as a value


ROW = GraphRow("linear_1", "linear", "blocks.0", "model.py:3", "float16", "a product")
PLAN = GraphPlan(
    (ROW, GraphRow("add", "add", "", "model.py:4", "float32", "reads float32")),
    Casts(CastBytes(5, 100), CastBytes(2, 40)),
)


def test_a_plan_round_trips_through_json():
    assert GraphPlan.from_dict(json.loads(json.dumps(PLAN.to_dict()))) == PLAN


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"rows": [{"node": 3}], "casts": {}},
        {"rows": 5, "casts": None},
        {"rows": [], "casts": {"before": {}, "after": {}}},
    ],
)
def test_an_invalid_plan_raises(plain):
    with pytest.raises(mezzo.CheckpointError, match="not the plan"):
        GraphPlan.from_dict(plain)


def test_a_plan_prints_as_a_table():
    assert str(PLAN).splitlines() == [
        "node      where       dtype    reason",
        "linear_1  blocks.0    float16  a product",
        "add       model.py:4  float32  reads float32",
    ]


def test_a_plan_is_a_sequence_of_rows():
    assert len(PLAN) == 2
    assert PLAN[0] is PLAN.row("linear_1")
    assert list(PLAN[1:]) == [PLAN[1]]
    with pytest.raises(KeyError):
        PLAN.row("missing")


def test_casts_print_both_counts():
    assert str(PLAN.casts) == "2 casts, 4e-05 MB; torch.autocast: 5 casts, 0.0001 MB"
