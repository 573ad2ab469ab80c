"""The questions that compiled code asks of a table, answered in strings and booleans."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mezzo.autocasting import table_lookup
from mezzo.autocasting.arguments import region_for
from mezzo.autocasting.op_table import CastAction
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
KEY = REGION.key


def test_a_functions_rule_is_a_word() -> None:
    assert table_lookup.rule_of(KEY, torch.softmax) == "half"
    assert table_lookup.rule_of(KEY, torch.mm) == "full"
    assert table_lookup.rule_of(KEY, torch.exp) == "refuse"
    assert table_lookup.rule_of(KEY, F.gumbel_softmax) == "open"
    assert table_lookup.rule_of(KEY, torch.ops.higher_order.tag_activation_checkpoint) == "carried"
    assert table_lookup.rule_of(KEY, torch.sin) is None
    assert table_lookup.rule_of("", torch.softmax) is None


def test_weights_that_come_from_the_cache_are_no_matter_of_compiled_code() -> None:
    region = region_for(Policy("O1", "bfloat16", cache="versioned"), "cpu")
    key = region.key
    assert table_lookup.TABLES[key][F.linear].weights
    assert table_lookup.rule_of(key, F.linear) is None


def test_arguments_are_told_by_position_and_name() -> None:
    assert table_lookup.is_exempt(KEY, F.batch_norm, 3)
    assert table_lookup.is_exempt(KEY, F.batch_norm, "weight")
    assert not table_lookup.is_exempt(KEY, F.batch_norm, 0)
    assert not table_lookup.is_exempt(KEY, F.batch_norm, "bias")
    assert table_lookup.asks_in_place(KEY, F.relu, "inplace")
    assert table_lookup.asks_in_place(KEY, F.relu, 1)
    assert not table_lookup.asks_in_place(KEY, torch.relu, 1)


def test_whether_an_op_widens_is_told(one_dtype: object) -> None:
    key = region_for(
        Policy(
            "O1",
            "bfloat16",
            half={"layer_norm", "batch_norm"},
            exempt_args={"layer_norm": ["weight"], "batch_norm": ["weight"]},
        ),
        "cpu",
    ).key
    assert table_lookup.computes_in_float32(key, F.layer_norm)
    assert not table_lookup.computes_in_float32(key, F.batch_norm)


def test_whether_a_refused_op_may_be_called_with_float32_is_told() -> None:
    apexs = region_for(Policy("O1", "float16", preset="apex"), "cpu").key
    assert table_lookup.refuses_halves_alone(apexs, F.binary_cross_entropy)
    assert not table_lookup.refuses_halves_alone(KEY, torch.exp)


def test_conditions_are_told_by_position_name_value_and_default() -> None:
    assert table_lookup.has_conditions(KEY, torch.softmax)
    assert not table_lookup.has_conditions(KEY, torch.mm)
    assert table_lookup.is_condition(KEY, torch.softmax, 1, -1)
    assert table_lookup.is_condition(KEY, torch.softmax, "dim", -1)
    assert not table_lookup.is_condition(KEY, torch.softmax, 1, 0)
    assert not table_lookup.is_condition(KEY, torch.softmax, "dtype", -1)
    assert table_lookup.is_condition_by_default(KEY, F.gelu, 1, "")
    assert not table_lookup.is_condition_by_default(KEY, F.gelu, 1, "approximate")
    assert not table_lookup.is_condition_by_default(KEY, torch.softmax, 1, "")


def test_the_rest_are_facts_of_the_action() -> None:
    assert table_lookup.takes_dtype(KEY, torch.softmax)
    assert not table_lookup.takes_dtype(KEY, torch.mm)
    assert table_lookup.disables_torch_autocast(KEY, torch.mm)
    assert "exp" in table_lookup.refusal(KEY, torch.exp)
    assert table_lookup.operator_of(KEY, torch.ops.higher_order.cond) == "cond"
    assert not table_lookup.lacks_kernel(KEY, torch.softmax, torch.bfloat16, "cpu")
    assert isinstance(table_lookup.body_of(F.gumbel_softmax), str)


def test_a_table_that_leaves_nothing_to_torch_keeps_no_region_in_the_graph_of_an_export() -> None:
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
        table_lookup.refused(CastAction("exp", Rule.REFUSE, "it overflows"))
        == "The policy refuses exp: it overflows."
    )
