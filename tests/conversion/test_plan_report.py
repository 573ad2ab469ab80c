import re

import torch
from support.graphs import HALF, Calls
from torch import nn

import mezzo

X = torch.randn(2, 4)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.head(x)).float()


def test_every_row_says_where_it_comes_from_and_why():
    plan = mezzo.convert(Head(), (X,), dtype=HALF).plan
    linear, tanh, to = plan.row("linear"), plan.row("tanh"), plan.row("to")
    assert (linear.op, linear.module, linear.dtype) == ("linear", "head", "bfloat16")
    assert linear.reason.startswith("a matrix product")
    assert tanh.source.startswith("test_plan_report.py:")
    assert tanh.where == tanh.source
    assert tanh.reason == "in no list: 16 bits here cast the fewest bytes"
    assert (to.op, to.dtype, to.reason) == ("cast", "float32", "the model's own cast")


def test_weights_have_rows_with_what_they_are_stored_in():
    model = Calls(
        lambda self, x: (self.head(x), torch.cdist(x, self.head.weight)), head=nn.Linear(4, 4)
    )
    plan = mezzo.convert(model, (X,), dtype=HALF).plan
    weight = plan.row("p_head_weight")
    assert weight.where == "head.weight"
    assert (weight.op, weight.dtype) == ("weight", "float32 + bfloat16")
    assert plan.row("p_head_bias").dtype == "bfloat16"


def test_a_model_of_another_dtype_is_said_to_be_left_alone():
    plan = mezzo.convert(nn.Linear(4, 4).double(), (X.double(),), dtype=HALF).plan
    assert (plan.row("linear").dtype, plan.row("linear").reason) == (
        "float64",
        "already float64: left alone",
    )
    assert plan.row("p_weight").reason == "stored as the model has it"


def test_what_a_table_loses_and_how_to_keep_it_exact_is_told():
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
    assert plan.row("embedding").reason == "picks rows of a table that is stored in 16 bits"


def test_what_computes_comes_before_what_is_stored():
    kinds = [row.op == "weight" for row in mezzo.convert(Head(), (X,), dtype=HALF).plan]
    assert kinds == sorted(kinds)
