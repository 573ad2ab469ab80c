"""Captured steps equal eager steps.

For many models, both levels and dtypes, layouts, accumulation, clipping and planted overflows; and
for each call shape, optimizer and option of a step with a few of them.
`pytest -m gpu tests/gpu/test_differential.py -n 10` prints a table of all rows; `-k "swin_t and
O2"` selects some.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support import differential_paths as paths
from support.differential import (
    OVERFLOWS,
    Difference,
    Row,
    Trajectory,
    Variant,
    assert_agree,
    deterministic,
    difference,
    in_steps,
    on_the_captured_path,
)
from support.differential_zoo import OWN, TORCHVISION, TRANSFORMERS, vision

import mezzo

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
    # Two variants of each: those of a model with padding are the others.
    *(
        (row, variant)
        for row in TRANSFORMERS
        for place, variant in enumerate(LANGUAGE)
        if place // 2 == ("padded" in row.name)
    ),
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


def compare(
    row: Row, captured: Trajectory, run: Callable[[Any], Trajectory]
) -> tuple[Difference, Trajectory]:
    """Compare a captured run with an eager one; `run` takes the argument `capture` of a step.

    A model of transformers may take another path in a capture. Then both runs take it.
    """
    eager = run(False)
    if row.name in {one.name for one in TRANSFORMERS} and not difference(captured, eager).exact:
        with on_the_captured_path():
            eager = run(False)
            return assert_agree(run("auto"), eager, partial(run, False)), eager
    return assert_agree(captured, eager, partial(run, False)), eager


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

    def run(capture: Any) -> Trajectory:
        return in_steps(row, variant, "cuda", capture=capture)

    how = "captured" if captured.captured else f"eager: {captured.reason}"
    record_property("differential", (row.name, str(variant), how, captured.skipped_steps))
    found, _ = compare(row, captured, run)
    record_property("difference", "bit-equal" if found.exact else f"{found.weight:.1e}")
    if variant.planted == OVERFLOWS:
        assert captured.skipped_steps >= len(OVERFLOWS)


_PATHS = [*paths.PATHS, *([paths.compiled_path()] if TRANSFORMERS else [])]


@pytest.mark.filterwarnings("ignore:.*updates in a row were skipped")
@pytest.mark.filterwarnings("ignore:The step was called with more than")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("path", _PATHS, ids=str)
def test_a_captured_step_of_each_kind_equals_the_eager_one(
    path: paths.Path, record_property: Record
) -> None:
    compiles = "compile" in path.options
    with warnings.catch_warnings():
        if path.captures == "update":
            warnings.filterwarnings("ignore", message="The step cannot be captured")
        if compiles:
            torch._dynamo.reset()
            # Of torch itself, while it compiles.
            warnings.simplefilter("ignore")

        def run(capture: Any) -> Trajectory:
            return paths.in_steps(path, "cuda", capture=capture)

        captured = run("auto")
        how = "captured" if captured.captured else f"eager: {captured.reason}"
        record_property("differential", (path.name, str(path), how, captured.skipped_steps))
        found, eager = compare(path.row, captured, run)
        if compiles:
            torch._dynamo.reset()
    record_property("difference", "bit-equal" if found.exact else f"{found.weight:.1e}")
    assert captured.norms == pytest.approx(eager.norms, rel=1e-4, nan_ok=True)
    assert captured.captured == (path.captures != "update"), captured.reason
    if path.captures == "update":
        assert captured.reason is not None
        assert "the host reads from the device" in captured.reason


@pytest.mark.filterwarnings("ignore:.*updates in a row were skipped")
@pytest.mark.parametrize("path", [one for one in paths.PATHS if one.captures == "update"], ids=str)
def test_the_update_of_a_model_that_cannot_be_captured_is_captured_by_itself(
    path: paths.Path,
) -> None:
    steps: list[mezzo.TrainStep] = []
    with pytest.warns(UserWarning, match="the host reads from the device"):
        paths.in_steps(path, "cuda", capture="auto", prepare=steps.append)
    update = steps[0]._runner._update
    assert update is not None
    assert update._captured is not None
