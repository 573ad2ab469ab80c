"""Enums, entries, selectors and op lists."""

import re
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

from mezzo import NORMS
from mezzo._errors import PolicyError
from mezzo.policy import types
from mezzo.policy.types import (
    BY_USER,
    Cache,
    Conditional,
    Entry,
    Level,
    Master,
    OnUnsupported,
    OpLists,
    OpNames,
    Rule,
    Selector,
)

ENUMS = (Rule, Level, Master, Cache, OnUnsupported)
MEMBERS = [(enum, member) for enum in ENUMS for member in enum]


@pytest.mark.parametrize(("enum", "member"), MEMBERS, ids=str)
def test_a_member_is_parsed_from_its_value_and_from_itself(enum, member):
    assert enum.parse(member.value) is member
    assert enum.parse(member) is member


@pytest.mark.parametrize(("enum", "member"), MEMBERS, ids=str)
def test_the_repr_of_a_member_evaluates_to_it(enum, member):
    assert eval(repr(member), vars(types)) is member


@pytest.mark.parametrize(
    ("enum", "argument"),
    [
        (Rule, "rule"),
        (Level, "level"),
        (Master, "master"),
        (Cache, "cache"),
        (OnUnsupported, "on_unsupported"),
    ],
    ids=str,
)
@pytest.mark.parametrize("bad", ["nonsense", "", None, 3, [], True])
def test_an_unknown_value_raises_with_all_choices(enum, argument, bad):
    with pytest.raises(PolicyError) as error:
        enum.parse(bad)
    assert str(error.value).startswith(
        f"Unknown {argument} {bad!r}. Choose one of: {', '.join(member.value for member in enum)}."
    )


@pytest.mark.parametrize(
    ("enum", "bad", "meant"),
    [
        (Rule, "hlaf", "half"),
        (Level, "o2", "O2"),
        (Master, "kahn", "kahan"),
        (OnUnsupported, "warning", "warn"),
    ],
)
def test_a_misspelt_value_raises_with_the_closest_one(enum, bad, meant):
    with pytest.raises(PolicyError, match=f"Did you mean '{meant}'"):
        enum.parse(bad)


@pytest.mark.parametrize("bad", ["00", "01", "02", "03"])
def test_a_level_with_a_zero_raises_with_a_hint(bad):
    with pytest.raises(
        PolicyError,
        match=(
            rf"^Unknown level '{bad}'\. Choose one of: O0, O1, O2, O3, OD\. The first character is"
            r" the letter O, not a zero\.$"
        ),
    ):
        Level.parse(bad)


def test_a_member_of_another_enum_raises():
    with pytest.raises(PolicyError, match=r"Unknown master Cache\.AUTO"):
        Master.parse(Cache.AUTO)


@pytest.mark.parametrize(
    "value",
    [Entry(Rule.FULL, "why"), Conditional("softmax", "dim", (-1,))],
    ids=lambda value: type(value).__name__,
)
def test_an_entry_is_frozen_and_hashable(value):
    with pytest.raises(FrozenInstanceError):
        value.reason = "other"
    assert hash(value) == hash(eval(repr(value), vars(types)))


def test_the_default_reason_of_a_conditional_entry_is_the_user():
    assert Conditional("softmax", "dim", (-1,)).reason == BY_USER


class OwnNorm(nn.LayerNorm):
    """A user's subclass."""


@pytest.mark.parametrize(
    ("text", "name", "matched"),
    [
        ("head", "head", True),
        ("head", "encoder.head", False),
        ("encoder.*.norm", "encoder.0.norm", True),
        ("encoder.*.norm", "encoder.0.block.norm", True),
        ("encoder.*.norm", "encoder.norm", False),
        ("layer?", "layer1", True),
        ("layer[12]", "layer3", False),
        ("HEAD", "head", False),
        ("*", "", True),
        ("", "", True),
        ("", "head", False),
    ],
)
def test_a_glob_is_matched_against_the_qualified_name(text, name, matched):
    assert Selector.parse(text).matches(name, nn.Linear(1, 1)) is matched


@pytest.mark.parametrize(
    "value",
    [
        nn.LayerNorm,
        "type:torch.nn.modules.normalization.LayerNorm",
        "type:torch.nn.LayerNorm",
        "type:LayerNorm",
    ],
)
def test_a_class_matches_itself_and_subclasses_by_any_path(value):
    selector = Selector.parse(value)
    assert selector.matches("any", nn.LayerNorm(1))
    assert selector.matches("any", OwnNorm(1))
    assert not selector.matches("any", nn.GroupNorm(1, 1))


def test_a_class_that_does_not_exist_matches_nothing():
    assert not Selector.parse("type:no.such.Thing").matches("any", nn.Linear(1, 1))


def test_matching_a_class_imports_nothing():
    import sys

    assert not Selector.parse("type:imaplib.IMAP4").matches("any", nn.Linear(1, 1))
    assert "imaplib" not in sys.modules


def test_a_class_and_its_text_are_the_same_selector():
    selector = Selector.parse(OwnNorm)
    assert Selector.parse(selector.text) == selector == Selector.parse(selector)
    assert hash(Selector.parse(selector.text)) == hash(selector)


def test_an_exact_name_beats_a_glob_and_a_glob_beats_a_type():
    exact, glob, kind = (
        Selector.parse(value).rank for value in ("head.norm", "head.*", nn.LayerNorm)
    )
    assert exact > glob > kind


@pytest.mark.parametrize("value", ["type:", 3, None, int, nn.Linear(1, 1), torch.add, ["head"]])
def test_other_types_raise_with_what_selects_modules(value):
    with pytest.raises(
        PolicyError,
        match=(
            rf"^{re.escape(repr(value))} does not select modules\. Pass a glob on the qualified"
            r" name \('encoder.\*.norm'\) or a module class \(nn.LayerNorm\)\.$"
        ),
    ):
        Selector.parse(value)


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm1d(1),
        nn.BatchNorm2d(1),
        nn.BatchNorm3d(1),
        nn.SyncBatchNorm(1),
        nn.InstanceNorm2d(1),
        nn.LazyBatchNorm2d(),
        nn.LayerNorm(1),
        nn.GroupNorm(1, 1),
        nn.RMSNorm(1),
        nn.LocalResponseNorm(1),
    ],
    ids=lambda module: type(module).__name__,
)
def test_norms_are_all_normalization_layers(module):
    assert isinstance(module, NORMS)
    assert any(Selector.parse(norm).matches("any", module) for norm in NORMS)


@pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.Conv2d(1, 1, 1), nn.Dropout()])
def test_norms_match_only_normalization_layers(module):
    assert not isinstance(module, NORMS)


UNLISTED = Entry(Rule.KEEP, "in no list")


def test_op_lists_do_not_share_default_tables():
    one, other = OpLists({}, UNLISTED), OpLists({}, UNLISTED)
    assert one == other
    assert one.exempt_args is not other.exempt_args


@pytest.mark.parametrize(
    ("value", "field"), [(OpLists({}, UNLISTED), "entries"), (OpNames({}, {}), "known")]
)
def test_op_lists_and_op_names_are_frozen(value, field):
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, {})
