"""What a preset is made of."""

from dataclasses import FrozenInstanceError

import pytest

from mezzo.policy.types import Entry, OpLists, OpNames, Rule

UNLISTED = Entry(Rule.KEEP, "in no list")


def test_lists_without_exemptions_share_no_table():
    one, other = OpLists({}, UNLISTED), OpLists({}, UNLISTED)
    assert one == other
    assert one.exempt_args is not other.exempt_args


@pytest.mark.parametrize(
    ("value", "field"), [(OpLists({}, UNLISTED), "entries"), (OpNames({}, {}), "known")]
)
def test_lists_and_name_maps_are_frozen(value, field):
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, {})
