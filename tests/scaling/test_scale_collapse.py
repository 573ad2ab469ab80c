"""A collapse is told once an episode, by name and with what to try."""

from __future__ import annotations

import warnings

import pytest
import torch

from mezzo import PolicyError, ScalerError, ScaleRule, ScaleState, _events
from mezzo.scaling.diagnostics import CollapseMonitor
from mezzo.scaling.scale_state import OnCollapse
from mezzo.scaling.scale_tensors import DeviceLossScale, HostLossScale
from mezzo.scaling.step_result import NO_SOURCE, FlaggedSource, KnownSource, ParameterNames

RULE = ScaleRule(min_scale=1.0)


def kinds():
    return [
        pytest.param(HostLossScale, id="host"),
        pytest.param(lambda state: DeviceLossScale(state, torch.device("cpu")), id="device"),
    ]


def told(
    watcher: CollapseMonitor, scale, steps: str, culprit=NO_SOURCE, rule: ScaleRule = RULE
) -> list[str]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in steps:
            scale.advance(torch.tensor(float(step == "x")), rule)
            watcher.observe(scale, rule, culprit)
    return [str(warning.message) for warning in heard]


@pytest.mark.parametrize("kind", kinds())
def test_the_floor_is_told_once_until_a_good_step_ends_the_episode(kind):
    watcher, scale = CollapseMonitor(), kind(ScaleState(4.0))
    messages = told(watcher, scale, "x" * 20 + "." * 12)
    assert len(messages) == 1
    assert "at its floor of 1 (step " in messages[0]
    assert "learning rate" in messages[0]
    assert len(told(watcher, scale, "x" * 10 + ".")) == 1


@pytest.mark.parametrize("kind", kinds())
def test_so_many_skips_in_a_row_are_told_far_from_the_floor(kind):
    watcher, scale = CollapseMonitor(patience=3), kind(ScaleState(2.0**30))
    assert told(watcher, scale, "xx.xx.") == []
    messages = told(watcher, scale, "xxxxxx.")
    assert len(messages) == 1
    assert "3 steps in a row were skipped" in messages[0]


@pytest.mark.parametrize("kind", kinds())
def test_a_static_scale_at_its_floor_is_no_collapse(kind):
    assert (
        told(
            CollapseMonitor(),
            kind(ScaleState(1.0)),
            "xxx",
            rule=ScaleRule(min_scale=1.0, dynamic=False),
        )
        == []
    )


def test_a_good_step_at_the_floor_is_no_collapse():
    assert told(CollapseMonitor(), HostLossScale(ScaleState(1.0)), "...") == []


@pytest.mark.parametrize("kind", kinds())
def test_the_first_bad_parameter_is_named(kind, net):
    assert (
        "'layer.weight'"
        in told(
            CollapseMonitor(patience=1), kind(ScaleState()), "xx.", KnownSource("layer.weight")
        )[0]
    )
    names = ParameterNames()
    names.register(net)
    flagged = FlaggedSource(names, torch.optim.SGD(net.parameters(), lr=0.1))
    flagged.add(torch.tensor([0, 1], dtype=torch.int32), [net.first.weight, net.second.bias])
    assert (
        "'second.bias'" in told(CollapseMonitor(patience=1), kind(ScaleState()), "xx.", flagged)[0]
    )


def test_raising_stops_the_training_with_the_same_words():
    watcher, scale = (
        CollapseMonitor(patience=2, on_collapse=OnCollapse.RAISE),
        HostLossScale(ScaleState()),
    )
    with pytest.raises(ScalerError, match="2 steps in a row were skipped"):
        told(watcher, scale, "xx")


def test_an_event_tells_it_too():
    with _events.listen() as heard:
        told(CollapseMonitor(patience=1), HostLossScale(ScaleState(8.0)), "x")
    assert isinstance(heard[0], _events.ScaleCollapsed)
    assert (heard[0].scale, heard[0].consecutive_skips) == (4.0, 1)


def test_copies_that_do_not_arrive_are_not_waited_for_and_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
):
    from mezzo import _launch

    monkeypatch.setattr(_launch.AsyncCopy, "arrived", lambda _: False)
    watcher, scale = CollapseMonitor(patience=1), DeviceLossScale(ScaleState(), torch.device("cpu"))
    assert told(watcher, scale, "x" * 30) == []
    assert len(watcher._flying) == 8
    assert watcher._pending is None
    monkeypatch.undo()
    assert len(told(watcher, scale, "xx")) == 1


def test_patience_is_a_number_of_steps():
    with pytest.raises(PolicyError, match="patience=0"):
        CollapseMonitor(patience=0)
