"""What compiled code looks up in a table, and the calls that it makes from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mezzo
from mezzo.autocasting import table_lookup
from mezzo.autocasting.arguments import region_for
from mezzo.autocasting.composites import decomposed
from mezzo.autocasting.function_mode import apply_rule_traced, decomposed_traced
from mezzo.autocasting.op_table import CastAction
from mezzo.autocasting.table_lookup import rule_of
from mezzo.policy.policy import Policy
from mezzo.policy.types import Rule

REGION = region_for(
    Policy(
        "O1",
        "bfloat16",
        half={"softmax", "relu", "batch_norm"},
        full={"mm"},
        refuse={"exp"},
        exempt_args={"batch_norm": ["weight"]},
        conditional=[("softmax", "dim", [-1]), ("gelu", "approximate", ["none"])],
    ),
    "cpu",
)
KEY = REGION.table_key


def test_rule_of_returns_a_string() -> None:
    assert table_lookup.rule_of(KEY, torch.softmax) == "half"
    assert table_lookup.rule_of(KEY, torch.mm) == "full"
    assert table_lookup.rule_of(KEY, torch.exp) == "refuse"
    assert table_lookup.rule_of(KEY, F.gumbel_softmax) == "decompose"
    assert table_lookup.rule_of(KEY, torch.ops.higher_order.tag_activation_checkpoint) == "wrap"
    assert table_lookup.rule_of(KEY, torch.sin) is None
    assert table_lookup.rule_of("", torch.softmax) is None


def test_weights_from_the_cache_have_no_rule_in_compiled_code() -> None:
    region = region_for(Policy("O1", "bfloat16", cache="versioned"), "cpu")
    key = region.table_key
    assert table_lookup.TABLES[key][F.linear].casts_only_weights
    assert table_lookup.rule_of(key, F.linear) is None


def test_arguments_are_found_by_position_and_name() -> None:
    assert table_lookup.is_exempt(KEY, F.batch_norm, 3)
    assert table_lookup.is_exempt(KEY, F.batch_norm, "weight")
    assert not table_lookup.is_exempt(KEY, F.batch_norm, 0)
    assert not table_lookup.is_exempt(KEY, F.batch_norm, "bias")
    assert table_lookup.is_in_place_argument(KEY, F.relu, "inplace")
    assert table_lookup.is_in_place_argument(KEY, F.relu, 1)
    assert not table_lookup.is_in_place_argument(KEY, torch.relu, 1)


def test_ops_that_compute_in_float32_are_found(one_dtype: object) -> None:
    key = region_for(
        Policy(
            "O1",
            "bfloat16",
            half={"layer_norm", "batch_norm"},
            exempt_args={"layer_norm": ["weight"], "batch_norm": ["weight"]},
        ),
        "cpu",
    ).table_key
    assert table_lookup.computes_in_float32(key, F.layer_norm)
    assert not table_lookup.computes_in_float32(key, F.batch_norm)


def test_ops_that_are_refused_only_in_half_are_found() -> None:
    apex_key = region_for(Policy("O1", "float16", preset="apex"), "cpu").table_key
    assert table_lookup.refuses_only_half(apex_key, F.binary_cross_entropy)
    assert not table_lookup.refuses_only_half(KEY, torch.exp)


def test_conditions_are_found_by_position_name_value_and_default() -> None:
    assert table_lookup.has_conditions(KEY, torch.softmax)
    assert not table_lookup.has_conditions(KEY, torch.mm)
    assert table_lookup.is_condition(KEY, torch.softmax, 1, -1)
    assert table_lookup.is_condition(KEY, torch.softmax, "dim", -1)
    assert not table_lookup.is_condition(KEY, torch.softmax, 1, 0)
    assert not table_lookup.is_condition(KEY, torch.softmax, "dtype", -1)
    assert table_lookup.is_condition_by_default(KEY, F.gelu, 1, "")
    assert not table_lookup.is_condition_by_default(KEY, F.gelu, 1, "approximate")
    assert not table_lookup.is_condition_by_default(KEY, torch.softmax, 1, "")


def test_the_other_lookups_return_fields_of_the_action() -> None:
    assert table_lookup.takes_dtype(KEY, torch.softmax)
    assert not table_lookup.takes_dtype(KEY, torch.mm)
    assert table_lookup.disables_torch_autocast(KEY, torch.mm)
    assert "exp" in table_lookup.refusal(KEY, torch.exp)
    assert table_lookup.operator_of(KEY, torch.ops.higher_order.cond) == "cond"
    assert not table_lookup.lacks_kernel(KEY, torch.softmax, torch.bfloat16, "cpu")
    assert isinstance(table_lookup.decomposed_name(F.gumbel_softmax), str)


def test_a_table_for_export_never_disables_torchs_autocast() -> None:
    key = f"test{table_lookup.EXPORT_KEY}"
    table_lookup.publish(key, {torch.mm: CastAction("mm", Rule.FULL, "why")})
    assert table_lookup.TABLES[key][torch.mm].disables_torch_autocast
    assert not table_lookup.disables_torch_autocast(key, torch.mm)


def test_a_published_table_is_found_by_its_key() -> None:
    made = {torch.add: CastAction("add", Rule.FULL, "why")}
    table_lookup.publish("tests/published", made)
    try:
        assert table_lookup.rule_of("tests/published", torch.add) == "full"
    finally:
        del table_lookup.TABLES["tests/published"]


def test_a_refusal_names_the_op_and_the_reason() -> None:
    assert (
        table_lookup.refusal_message(CastAction("exp", Rule.REFUSE, "it overflows"))
        == "The policy refuses exp: it overflows."
    )


HALF, FULL = torch.bfloat16, torch.float32
X, HALVED = torch.ones(2, 2), torch.ones(2, 2, dtype=HALF)


def traced(fields: dict[str, Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    region = region_for(Policy("O1", HALF, **fields), "cpu")
    key = region.table_key
    with torch.autocast("cpu", dtype=HALF):
        return apply_rule_traced(key, "cpu", rule_of(key, function), function, args, kwargs)


@pytest.mark.parametrize(
    ("fields", "function", "args", "kwargs", "dtype"),
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
def test_a_traced_call_casts_by_its_rule(
    fields: dict[str, Any], function: Any, args: Any, kwargs: Any, dtype: torch.dtype
) -> None:
    assert traced(fields, function, *args, **kwargs).dtype is dtype


def test_a_traced_call_with_out_is_not_cast() -> None:
    out = torch.empty(2, 2)
    assert traced({"half": {"add"}}, torch.add, X, X, out=out) is out


def test_a_traced_refused_op_raises() -> None:
    with pytest.raises(mezzo.RefusedOpError, match="exp"):
        traced({"refuse": {"exp"}}, torch.exp, X)


def test_a_traced_exempt_argument_is_not_cast() -> None:
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


def test_a_traced_call_may_run_another_function_than_the_key() -> None:
    region = region_for(Policy("O1", HALF, half={"add"}), "cpu")
    key = region.table_key
    with torch.autocast("cpu", dtype=HALF):
        assert apply_rule_traced(key, "cpu", "half", torch.add, (X,), {}, lambda x: x.dtype) is HALF


def test_a_decomposed_copy_is_found_by_its_name() -> None:
    made = decomposed(F.normalize)
    assert decomposed_traced(F.normalize) is made
