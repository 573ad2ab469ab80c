"""The words of a policy are read from their spelling, and refused with what is allowed."""

from dataclasses import FrozenInstanceError

import pytest

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
    Rule,
)

WORDS = (Rule, Level, Master, Cache, OnUnsupported)
MEMBERS = [(word, member) for word in WORDS for member in word]


@pytest.mark.parametrize(("word", "member"), MEMBERS, ids=str)
def test_a_member_is_read_from_its_spelling_and_from_itself(word, member):
    assert word.parse(member.value) is member
    assert word.parse(member) is member


@pytest.mark.parametrize(("word", "member"), MEMBERS, ids=str)
def test_a_member_prints_as_what_can_be_pasted_back(word, member):
    assert eval(repr(member), vars(types)) is member


@pytest.mark.parametrize(
    ("word", "said"),
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
def test_what_is_no_member_is_named_with_every_choice(word, said, bad):
    with pytest.raises(PolicyError) as error:
        word.parse(bad)
    assert str(error.value).startswith(
        f"Unknown {said} {bad!r}. Choose one of: {', '.join(member.value for member in word)}."
    )


@pytest.mark.parametrize(
    ("word", "bad", "meant"),
    [
        (Rule, "hlaf", "half"),
        (Level, "o2", "O2"),
        (Master, "kahn", "kahan"),
        (OnUnsupported, "warning", "warn"),
    ],
)
def test_a_misspelt_member_is_answered_with_its_neighbour(word, bad, meant):
    with pytest.raises(PolicyError, match=f"Did you mean '{meant}'"):
        word.parse(bad)


@pytest.mark.parametrize("bad", ["00", "01", "02", "03"])
def test_a_level_written_with_a_zero_is_told_so(bad):
    with pytest.raises(
        PolicyError,
        match=(
            rf"^Unknown level '{bad}'\. Choose one of: O0, O1, O2, O3, OD\. The first character is"
            r" the letter O, not a zero\.$"
        ),
    ):
        Level.parse(bad)


def test_a_member_of_another_set_is_not_taken_for_one_of_this():
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


def test_a_conditional_entry_says_that_the_user_wrote_it_unless_a_reason_is_given():
    assert Conditional("softmax", "dim", (-1,)).reason == BY_USER
