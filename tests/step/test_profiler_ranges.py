"""Profiler ranges: the parts of a step by name, and nothing without a profiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.step_models import Made, batches, in_steps
from torch import nn
from torch.profiler import ProfilerActivity, profile

import mezzo
from mezzo.step import profiler_ranges
from mezzo.step.cuda_graph import CapturedGraph

PARTS = ["mezzo::forward", "mezzo::backward", "mezzo::update"]


def ranges(profiler: profile) -> list[Any]:
    """Return mezzo's ranges in the order in which they began."""
    found = [event for event in profiler.events() if event.name.startswith("mezzo::")]
    return sorted(found, key=lambda event: event.time_range.start)


def contains(outer: Any, inner: Any) -> bool:
    return (
        outer.time_range.start <= inner.time_range.start
        and inner.time_range.end <= outer.time_range.end
    )


@pytest.mark.parametrize(("level", "dtype"), [("O1", "bfloat16"), ("O2", "float16")])
def test_a_step_shows_forward_backward_and_update(level, dtype):
    _, step = in_steps(Made("mlp"), batches("mlp", 1), level, dtype)
    ((x, y),) = batches("mlp", 1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(x, y)
    found = ranges(profiler)
    assert [event.name for event in found] == PARTS
    forward, backward, _ = found
    ops = {event.name: event for event in profiler.events()}
    assert contains(forward, ops["aten::addmm"])
    assert contains(backward, ops["autograd::engine::evaluate_function: AddmmBackward0"])


def test_calls_that_accumulate_show_an_update_at_the_last_only():
    _, step = in_steps(Made("mlp"), batches("mlp", 2), "O1", "bfloat16", accumulate=2)
    ((x, y),) = batches("mlp", 1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(x, y)
        step(x, y)
    assert [event.name for event in ranges(profiler)] == [*PARTS[:2], *PARTS]


def test_backward_in_a_body_is_inside_forward():
    model = nn.Linear(2, 1)

    @mezzo.train_step(models=model, optimizers=torch.optim.SGD(model.parameters()), policy="O0")
    def step(x: torch.Tensor) -> None:
        model(x).mean().backward()

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(torch.ones(3, 2))
    forward, backward, update = ranges(profiler)
    assert [forward.name, backward.name, update.name] == PARTS
    assert contains(forward, backward)
    assert not contains(forward, update)


def test_a_replay_is_one_range():
    class Graph:
        def replay(self) -> None:
            torch.ones(1).add(1)

    captured = CapturedGraph(Graph(), [torch.zeros(2)], torch.ones(1))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        captured.replay([torch.ones(2)])
    assert [event.name for event in ranges(profiler)] == ["mezzo::replay"]


def test_without_a_profiler_no_range_is_recorded(monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(profiler_ranges, "record_function", refuse)
    in_steps(Made("mlp"), batches("mlp", 2), "O1", "bfloat16")
