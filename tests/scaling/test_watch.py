"""A collapse is told once an episode, by name and with what to try."""

from __future__ import annotations

import warnings

import pytest
import torch

from mezzo import PolicyError, ScalerError, ScaleRule, ScaleState, _events
from mezzo.scaling.culprit import NOBODY, Flagged, Known, Names
from mezzo.scaling.device import DeviceScale, HostScale
from mezzo.scaling.watch import Watcher
from mezzo.scaling.words import OnCollapse

RULE = ScaleRule(min_scale=1.0)


def kinds():
    return [pytest.param(HostScale, id="host"), pytest.param(lambda state: DeviceScale(state, torch.device("cpu")), id="device")]


def told(watcher: Watcher, scale, steps: str, culprit=NOBODY, rule: ScaleRule = RULE) -> list[str]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in steps:
            scale.advance(torch.tensor(float(step == "x")), rule)
            watcher.look(scale, rule, culprit)
    return [str(warning.message) for warning in heard]


@pytest.mark.parametrize("kind", kinds())
def test_the_floor_is_told_once_until_a_good_step_ends_the_episode(kind):
    watcher, scale = Watcher(), kind(ScaleState(4.0))
    messages = told(watcher, scale, "x" * 20 + "." * 12)
    assert len(messages) == 1
    assert "at its floor of 1 (step " in messages[0]
    assert "learning rate" in messages[0]
    assert len(told(watcher, scale, "x" * 10 + ".")) == 1


@pytest.mark.parametrize("kind", kinds())
def test_so_many_skips_in_a_row_are_told_far_from_the_floor(kind):
    watcher, scale = Watcher(patience=3), kind(ScaleState(2.0**30))
    assert told(watcher, scale, "xx.xx.") == []
    messages = told(watcher, scale, "xxxxxx.")
    assert len(messages) == 1
    assert "3 steps in a row were skipped" in messages[0]


@pytest.mark.parametrize("kind", kinds())
def test_a_static_scale_at_its_floor_is_no_collapse(kind):
    assert told(Watcher(), kind(ScaleState(1.0)), "xxx", rule=ScaleRule(min_scale=1.0, dynamic=False)) == []


def test_a_good_step_at_the_floor_is_no_collapse():
    assert told(Watcher(), HostScale(ScaleState(1.0)), "...") == []


@pytest.mark.parametrize("kind", kinds())
def test_the_first_bad_parameter_is_named(kind, net):
    assert "'layer.weight'" in told(Watcher(patience=1), kind(ScaleState()), "xx.", Known("layer.weight"))[0]
    names = Names()
    names.watch(net)
    flagged = Flagged(names, torch.optim.SGD(net.parameters(), lr=0.1))
    flagged.add(torch.tensor([0, 1], dtype=torch.int32), [net.first.weight, net.second.bias])
    assert "'second.bias'" in told(Watcher(patience=1), kind(ScaleState()), "xx.", flagged)[0]


def test_raising_stops_the_training_with_the_same_words():
    watcher, scale = Watcher(patience=2, on_collapse=OnCollapse.RAISE), HostScale(ScaleState())
    with pytest.raises(ScalerError, match="2 steps in a row were skipped"):
        told(watcher, scale, "xx")


def test_an_event_tells_it_too():
    with _events.listen() as heard:
        told(Watcher(patience=1), HostScale(ScaleState(8.0)), "x")
    assert isinstance(heard[0], _events.ScaleCollapsed)
    assert (heard[0].scale, heard[0].skipped_in_a_row) == (4.0, 1)


def test_copies_that_do_not_arrive_are_not_waited_for_and_do_not_pile_up(monkeypatch: pytest.MonkeyPatch):
    from mezzo.scaling import copies

    monkeypatch.setattr(copies.Copy, "arrived", lambda _: False)
    watcher, scale = Watcher(patience=1), DeviceScale(ScaleState(), torch.device("cpu"))
    assert told(watcher, scale, "x" * 30) == []
    assert len(watcher._flying) == 8
    assert watcher._pending is None
    monkeypatch.undo()
    assert len(told(watcher, scale, "xx")) == 1


def test_patience_is_a_number_of_steps():
    with pytest.raises(PolicyError, match="patience=0"):
        Watcher(patience=0)
