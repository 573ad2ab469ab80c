"""Captured steps equal eager steps.

For many models, both levels and dtypes, layouts, accumulation, clipping and planted overflows.
`pytest -m gpu tests/gpu/test_differential.py -n 10` prints a table of all rows; `-k "swin_t and
O2"` selects some.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from support.differential import (
    OVERFLOWS,
    Row,
    Trajectory,
    Variant,
    assert_agree,
    deterministic,
    in_steps,
)
from support.differential_zoo import OWN, TORCHVISION, TRANSFORMERS, vision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Record = Callable[[str, object], None]

VISION = [
    Variant("O2", "float16", channels_last=True),
    Variant("O2", "bfloat16", channels_last=True, accumulate=3, clip_norm=1.0, optimizer="AdamW"),
    Variant("O1", "float16", channels_last=True, accumulate=3, clip_norm=1.0),
    Variant("O1", "bfloat16", optimizer="AdamW"),
]
LANGUAGE = [
    Variant("O2", "float16", clip_norm=1.0, optimizer="AdamW"),
    Variant("O2", "bfloat16", accumulate=3, optimizer="AdamW"),
    Variant("O1", "float16", accumulate=3, optimizer="AdamW"),
    Variant("O1", "bfloat16", clip_norm=1.0),
]
GRID = [
    Variant(level, dtype, last, accumulate, clip, optimizer)
    for level in ("O1", "O2")
    for dtype in ("float16", "bfloat16")
    for last in (False, True)
    for accumulate in (1, 3)
    for clip, optimizer in ((None, "SGD"), (1.0, "AdamW"))
]
CASES = [
    *((row, variant) for row in TORCHVISION for variant in VISION),
    *((row, variant) for row in TRANSFORMERS for variant in LANGUAGE),
    *(
        (row, variant)
        for row in OWN
        for variant in GRID
        if row.name == "u-net" or not variant.channels_last
    ),
    # With these sizes gradients had other strides than their parameters, and the check once read
    # outside of them.
    *(
        (vision(name, 224, batch), Variant("O2", "float16", channels_last=True))
        for name, batch in (("mobilenet_v3_large", 128), ("squeezenet1_1", 64), ("maxvit_t", 16))
    ),
]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with deterministic():
        yield


# Planted overflows add to those of the initial loss scale.
@pytest.mark.filterwarnings("ignore:.*updates in a row were skipped")
# DeBERTa is scripted at import.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("row", "variant"), CASES, ids=[f"{row.name}, {variant}" for row, variant in CASES]
)
def test_a_captured_step_equals_the_eager_one(
    row: Row, variant: Variant, record_property: Record
) -> None:
    with warnings.catch_warnings():
        # The table shows the reason for rows that cannot be captured.
        warnings.filterwarnings("ignore", message=".*cannot be captured")
        captured = in_steps(row, variant, "cuda", capture="auto")

    def run_eagerly() -> Trajectory:
        return in_steps(row, variant, "cuda", capture=False)

    eager = run_eagerly()
    how = "captured" if captured.captured else f"eager: {captured.reason}"
    record_property("differential", (row.name, str(variant), how, captured.skipped_steps))
    found = assert_agree(captured, eager, run_eagerly)
    record_property("difference", "bit-equal" if found.exact else f"{found.weight:.1e}")
    if variant.planted == OVERFLOWS:
        assert captured.skipped_steps >= len(OVERFLOWS)
