"""Warnings: scale collapse, and bfloat16 losses that need no loss scaling."""

from __future__ import annotations

import warnings

import pytest
import torch

from mezzo import PolicyError, ScalerError, ScaleRule, ScaleState, _events
from mezzo._launch import AsyncCopy
from mezzo.scaling.diagnostics import CollapseMonitor, half_dtypes, warn_if_not_needed
from mezzo.scaling.scale_state import OnCollapse
from mezzo.scaling.scale_tensors import DeviceLossScale, HostLossScale
from mezzo.scaling.step_result import NO_SOURCE, FlaggedSource, KnownSource, ParameterNames

RULE = ScaleRule(min_scale=1.0)


KINDS = [
    pytest.param(HostLossScale, id="host"),
    pytest.param(lambda state: DeviceLossScale(state, torch.device("cpu")), id="device"),
]


def warned(
    monitor: CollapseMonitor, scale, steps: str, source=NO_SOURCE, rule: ScaleRule = RULE
) -> list[str]:
    """Return the warnings after steps that are skipped (x) or successful (.)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in steps:
            scale.advance(torch.tensor(float(step == "x")), rule)
            monitor.observe(scale, rule, source)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("kind", KINDS)
def test_the_floor_is_warned_about_once_until_a_step_is_successful(kind):
    monitor, scale = CollapseMonitor(), kind(ScaleState(4.0))
    messages = warned(monitor, scale, "x" * 20 + "." * 12)
    assert len(messages) == 1
    assert "at its floor of 1 (step " in messages[0]
    assert "learning rate" in messages[0]
    assert len(warned(monitor, scale, "x" * 10 + ".")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_many_skips_in_a_row_are_warned_about_far_from_the_floor(kind):
    monitor, scale = CollapseMonitor(patience=3), kind(ScaleState(2.0**30))
    assert warned(monitor, scale, "xx.xx.") == []
    messages = warned(monitor, scale, "xxxxxx.")
    assert len(messages) == 1
    assert "3 steps in a row were skipped" in messages[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_static_scale_at_its_floor_has_not_collapsed(kind):
    assert (
        warned(
            CollapseMonitor(),
            kind(ScaleState(1.0)),
            "xxx",
            rule=ScaleRule(min_scale=1.0, dynamic=False),
        )
        == []
    )


def test_a_successful_step_at_the_floor_is_no_collapse():
    assert warned(CollapseMonitor(), HostLossScale(ScaleState(1.0)), "...") == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_parameter_with_a_nonfinite_gradient_is_named(kind, net):
    assert (
        "'layer.weight'"
        in warned(
            CollapseMonitor(patience=1), kind(ScaleState()), "xx.", KnownSource("layer.weight")
        )[0]
    )
    names = ParameterNames()
    names.register(net)
    flagged = FlaggedSource(names, torch.optim.SGD(net.parameters(), lr=0.1))
    flagged.add(torch.tensor([0, 1], dtype=torch.int32), [net.first.weight, net.second.bias])
    assert (
        "'second.bias'"
        in warned(CollapseMonitor(patience=1), kind(ScaleState()), "xx.", flagged)[0]
    )


def test_on_collapse_raise_stops_training_with_the_same_message():
    monitor, scale = (
        CollapseMonitor(patience=2, on_collapse=OnCollapse.RAISE),
        HostLossScale(ScaleState()),
    )
    with pytest.raises(ScalerError, match="2 steps in a row were skipped"):
        warned(monitor, scale, "xx")


def test_a_collapse_emits_an_event():
    with _events.listen() as events:
        warned(CollapseMonitor(patience=1), HostLossScale(ScaleState(8.0)), "x")
    assert isinstance(events[0], _events.ScaleCollapsed)
    assert (events[0].scale, events[0].consecutive_skips) == (4.0, 1)


def test_copies_that_do_not_arrive_are_not_waited_for_and_are_limited(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(AsyncCopy, "arrived", lambda _: False)
    monitor, scale = CollapseMonitor(patience=1), DeviceLossScale(ScaleState(), torch.device("cpu"))
    assert warned(monitor, scale, "x" * 30) == []
    assert len(monitor._copies) == 8
    assert monitor._pending is None
    monkeypatch.undo()
    assert len(warned(monitor, scale, "xx")) == 1


def test_patience_is_a_positive_number_of_steps():
    with pytest.raises(PolicyError, match="patience=0"):
        CollapseMonitor(patience=0)


# -- bfloat16 --------------------------------------------------------------------------------------


def loss(*dtypes: torch.dtype) -> torch.Tensor:
    value = torch.ones(3, requires_grad=True)
    for dtype in dtypes:
        value = (value.to(dtype) * 2).float()
    return value.sum()


@pytest.mark.parametrize(
    "dtypes", [(), (torch.bfloat16,), (torch.float16,), (torch.bfloat16, torch.float16)]
)
def test_the_16_bit_dtypes_of_a_loss_are_those_in_its_graph(dtypes):
    assert half_dtypes(loss(*dtypes)) == set(dtypes)


def test_a_long_graph_is_searched_only_in_part():
    value = torch.ones(1, requires_grad=True).bfloat16().float()
    for _ in range(2000):
        value = value + 1
    assert half_dtypes(value) == set()


def test_bfloat16_losses_warn_once_per_process_and_emit_an_event():
    with _events.listen() as events, pytest.warns(UserWarning, match="bfloat16"):
        warn_if_not_needed(loss(torch.bfloat16))
    assert [type(event) for event in events] == [_events.ScalingNotNeeded]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_not_needed(loss(torch.bfloat16))


@pytest.mark.parametrize("dtypes", [(), (torch.float16,), (torch.float16, torch.bfloat16)])
def test_losses_with_float16_or_float32_alone_do_not_warn(dtypes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_not_needed(loss(*dtypes))
