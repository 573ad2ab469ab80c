"""Short form of `benchmarks/numerics.py`: few steps of a few trainings, on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STEPS = 20


@pytest.fixture(scope="module")
def numerics():
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.append(folder)
    try:
        import numerics
    finally:
        sys.path.remove(folder)
    return numerics


@pytest.mark.parametrize(
    "name", ["mlp", "embedding bag", "mixture of experts", "poisson", "log-sum-exp mixture"]
)
def test_o1_and_o2_end_with_the_loss_of_float32(numerics, name):
    outcome = numerics.outcome_of(name, "cpu", STEPS)
    assert set(outcome.losses) == {numerics.AMP, *numerics.MEZZO}
    assert outcome.passes, str(outcome)
    assert not outcome.found


@pytest.mark.filterwarnings("ignore:The loss scale")
@pytest.mark.filterwarnings("ignore:The loss is")
@pytest.mark.parametrize(
    ("name", "precisions"),
    [
        ("rms norm by hand", {"O1 float16", "O2 float16"}),
        ("variance by hand", {"O1 float16", "O2 float16", "O1 bfloat16", "O2 bfloat16"}),
    ],
)
def test_what_breaks_16_bits_is_named_and_trains_with_the_suggested_policy(
    numerics, name, precisions
):
    outcome = numerics.outcome_of(name, "cpu", STEPS)
    assert set(outcome.cured) == precisions
    assert all("numerics_cases.py:" in text for text in outcome.found.values())
    assert outcome.passes, str(outcome)


def test_there_are_30_trainings_of_which_10_are_delicate(numerics):
    assert len(numerics.CASES) >= 30
    assert sum(case.delicate for case in numerics.CASES.values()) >= 10
