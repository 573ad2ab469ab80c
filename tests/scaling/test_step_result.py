"""A result reads its flag once, and only when it is asked."""

from __future__ import annotations

import torch

from mezzo.scaling.step_result import KnownSource, StepResult


def test_nothing_is_read_until_skipped_is_asked_and_then_once(host_reads):
    with host_reads() as reads:
        result = StepResult(3, torch.tensor(1.0), KnownSource("weight"))
        assert result.value == 3
        assert repr(result) == "StepResult(not read yet, value=3)"
        assert reads.count == 0
        assert result.skipped
        assert result.skipped
        assert reads.count == 1
    assert result.first_nonfinite == "weight"
    assert repr(result) == "StepResult(skipped, value=3)"


def test_a_good_step_blames_nobody():
    assert StepResult(None, torch.tensor(0.0), KnownSource("weight")).first_nonfinite is None
    assert StepResult.known(None, skipped=True).first_nonfinite is None
