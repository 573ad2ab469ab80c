import json

import pytest

import mezzo
from mezzo.conversion.plan import CastBytes, Casts, GraphPlan, GraphRow

ROW = GraphRow("linear_1", "linear", "blocks.0", "model.py:3", "float16", "a product")
PLAN = GraphPlan(
    (ROW, GraphRow("add", "add", "", "model.py:4", "float32", "reads float32")),
    Casts(CastBytes(5, 100), CastBytes(2, 40)),
)


def test_a_plan_survives_plain_data():
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
def test_what_is_no_plan_is_refused(plain):
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
        PLAN.row("nobody")


def test_casts_print_both_counts():
    assert str(PLAN.casts) == "2 casts, 4e-05 MB; torch.autocast: 5 casts, 0.0001 MB"
