"""`TrainStep` equals the loop by hand on many models: the CPU part of the differential harness."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from support import differential_paths as paths
from support.differential import Row, Variant, assert_agree, by_hand, in_steps
from support.differential_zoo import OWN
from support.fake_graphs import FakeCapturer, fake_captures, use_capture

import mezzo
from mezzo.scaling import captured_scaler

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


@pytest.fixture
def capturer(monkeypatch: pytest.MonkeyPatch) -> FakeCapturer:
    monkeypatch.setattr(captured_scaler, "is_warmed_up", lambda _: True)
    return fake_captures(monkeypatch)


# Models without a loss function compute it themselves: transformers is imported for seconds.
_PATHS = [
    pytest.param(path, marks=pytest.mark.slow if path.loss is None else ()) for path in paths.PATHS
]


# Overflows are planted, and paths of several lengths have few graphs.
@pytest.mark.thinned(2)
@pytest.mark.filterwarnings("ignore:.*updates in a row were skipped")
@pytest.mark.filterwarnings("ignore:The step was called with more than")
@pytest.mark.parametrize("path", _PATHS, ids=str)
def test_a_step_of_each_kind_equals_the_loop_by_hand(
    path: paths.Path, capturer: FakeCapturer
) -> None:
    capturer.fails_for_calls = path.captures == "update"

    def prepare(step: mezzo.TrainStep) -> None:
        use_capture(step, captures_update=path.captures != "body")

    with warnings.catch_warnings():
        if path.captures == "update":
            warnings.filterwarnings("ignore", message="The step cannot be captured")
        step = paths.in_steps(path, "cpu", capture=False, prepare=prepare)
    hand = paths.by_hand(path, "cpu")
    assert step.captured == (path.captures != "update")
    assert any(graph.replays > 1 for graph in capturer.graphs)
    assert assert_agree(step, hand, lambda: paths.by_hand(path, "cpu")).exact
    assert step.norms == pytest.approx(hand.norms, rel=1e-4, nan_ok=True)
