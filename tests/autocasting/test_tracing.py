"""The words that dynamo traces decide as eager does, when they are run as plain Python too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mezzo
from mezzo.autocasting.arguments import region_for
from mezzo.autocasting.composites import opened
from mezzo.autocasting.function_mode import apply_rule_traced, traced_body
from mezzo.autocasting.table_lookup import rule_of
from mezzo.policy.policy import Policy

HALF, FULL = torch.bfloat16, torch.float32
X, HALVED = torch.ones(2, 2), torch.ones(2, 2, dtype=HALF)


def traced(words: dict[str, Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    region = region_for(Policy("O1", HALF, **words), "cpu")
    key = region.key
    with torch.autocast("cpu", dtype=HALF):
        return apply_rule_traced(key, "cpu", rule_of(key, function), function, args, kwargs)


@pytest.mark.parametrize(
    ("words", "function", "args", "kwargs", "dtype"),
    [
        ({"half": {"add"}}, torch.add, (X, X), {}, HALF),
        ({"half": {"add"}}, torch.add, (X,), {"other": X}, HALF),
        ({"full": {"mm"}}, torch.mm, (HALVED, HALVED), {}, FULL),
        ({"keep": {"mm"}}, torch.mm, (X, X), {}, FULL),
        ({"promote": {"add"}}, torch.add, (HALVED, X), {}, FULL),
        ({"half": {"cat"}}, torch.cat, ([X, X],), {}, HALF),
        ({"half": {"add"}}, torch.add, (X.double(), X.double()), {}, torch.float64),
        ({"full": {"softmax"}}, torch.softmax, (HALVED, -1, HALF), {}, HALF),
        ({"half": {"relu"}}, F.relu, (X.clone(), True), {}, FULL),
        ({"half": {"relu"}}, F.relu, (X.clone(),), {"inplace": True}, FULL),
        ({"half": {"relu"}}, F.relu, (X,), {"inplace": False}, HALF),
        ({"conditional": [("softmax", "dim", [-1])]}, torch.softmax, (HALVED, -1), {}, FULL),
        ({"conditional": [("softmax", "dim", [-1])]}, torch.softmax, (HALVED,), {"dim": 0}, HALF),
        ({"conditional": [("gelu", "approximate", ["none"])]}, F.gelu, (HALVED,), {}, FULL),
    ],
)
def test_a_call_is_carried_out_under_its_rule(
    words: dict[str, Any], function: Any, args: Any, kwargs: Any, dtype: torch.dtype
) -> None:
    assert traced(words, function, *args, **kwargs).dtype is dtype


def test_a_given_output_is_left_alone() -> None:
    out = torch.empty(2, 2)
    assert traced({"half": {"add"}}, torch.add, X, X, out=out) is out


def test_a_refused_op_is_refused() -> None:
    with pytest.raises(mezzo.RefusedOpError, match="exp"):
        traced({"refuse": {"exp"}}, torch.exp, X)


def test_an_exempt_argument_is_left_alone() -> None:
    mean, var = torch.zeros(2), torch.ones(2)
    result = traced(
        {"half": {"batch_norm"}, "exempt_args": {"batch_norm": ["running_mean", "running_var"]}},
        F.batch_norm,
        X,
        mean,
        var,
        training=True,
    )
    assert result.dtype is HALF
    assert mean.any()


def test_what_is_called_may_be_another_function_than_the_table_knows() -> None:
    region = region_for(Policy("O1", HALF, half={"add"}), "cpu")
    key = region.key
    with torch.autocast("cpu", dtype=HALF):
        assert apply_rule_traced(key, "cpu", "half", torch.add, (X,), {}, lambda x: x.dtype) is HALF


def test_a_body_is_found_under_its_name() -> None:
    made = opened(F.normalize)
    assert traced_body(F.normalize) is made
