"""The closed sets of a step."""

from __future__ import annotations

import pytest

import mezzo
from mezzo.step.components import Capture, Layout, Reduction


@pytest.mark.parametrize("kind", [Capture, Layout])
@pytest.mark.parametrize(
    ("word", "name"), [("auto", "AUTO"), (True, "ON"), (False, "OFF")], ids=["auto", "on", "off"]
)
def test_switches_are_read(kind, word, name):
    assert kind.parse(word) is kind[name]


def test_an_unknown_word_is_told_what_is_allowed():
    with pytest.raises(
        mezzo.PolicyError, match=r"Unknown accumulate_reduction 'median'\. Choose one of: mean, sum"
    ):
        Reduction.parse("median")
