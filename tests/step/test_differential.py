"""`TrainStep` equals the loop by hand on many models: the CPU part of the differential harness."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.differential import Row, Variant, assert_agree, by_hand, in_steps
from support.differential_zoo import OWN

VARIANTS = [
    Variant("O1", "float16", accumulate=3, clip_norm=1.0),
    Variant("O1", "bfloat16", channels_last=True, optimizer="AdamW"),
    Variant("O2", "float16", channels_last=True),
    Variant("O2", "bfloat16", accumulate=3, clip_norm=1.0, optimizer="AdamW"),
]


@pytest.fixture(autouse=True)
def _without_onednn() -> Iterator[None]:
    """Disable oneDNN: it has no 16-bit LSTM on many CPUs, and torch does not fall back."""
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("row", OWN, ids=lambda row: row.name)
def test_a_step_equals_the_loop_by_hand(row: Row, variant: Variant) -> None:
    step, hand = in_steps(row, variant, "cpu", capture=False), by_hand(row, variant, "cpu")
    assert assert_agree(step, hand, lambda: by_hand(row, variant, "cpu")).exact
    assert step.skipped_steps >= len(variant.planted)
