from __future__ import annotations

import pytest

from mezzo._errors import PolicyError
from mezzo.policy.presets._tables import joined, name_map, require_level, translate
from mezzo.policy.rule import Entry, Level, Rule

NAMES = name_map({"reduce_sum": "sum", "concat": "cat stack"}, {"fuses two ops": "fused_a fused_b"}, same="relu exp")


def test_a_name_map_reads_its_three_tables():
    assert NAMES.known == {"relu": ("relu",), "exp": ("exp",), "reduce_sum": ("sum",), "concat": ("cat", "stack")}
    assert NAMES.unknown == {"fused_a": "fuses two ops", "fused_b": "fuses two ops"}


def test_a_group_shares_its_reason_and_what_has_no_counterpart_falls_out():
    entries = translate(Rule.FULL, {"adds up": "reduce_sum fused_a", "copies": "concat"}, NAMES)
    assert entries == {"sum": Entry(Rule.FULL, "adds up"), "cat": Entry(Rule.FULL, "copies"), "stack": Entry(Rule.FULL, "copies")}


def test_an_op_in_two_lists_is_a_mistake_in_the_data():
    table = {"sum": Entry(Rule.FULL, "adds up")}
    with pytest.raises(PolicyError, match="two lists of one preset: sum"):
        joined(table, table)


def test_a_missing_level_is_refused_with_the_ones_there_are():
    require_level("apex", Level.O2, (Level.O1, Level.O2))
    with pytest.raises(PolicyError, match=r"'apex' has no level OD\. Choose one of: O1, O2\."):
        require_level("apex", Level.OD, (Level.O1, Level.O2))
