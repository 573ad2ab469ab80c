"""Rows of the last steps, and the records that are made of them."""

from __future__ import annotations

from math import nan

import torch

from mezzo.observing.kept_steps import KEPT, KeptSteps


def rows(first, count, *, skipped=(), scale=8.0):
    found = torch.tensor([[0.0, 0.5, 0.0, scale, nan, 0.0, 1.0]]).double().repeat(count, 1)
    found[:, 0] = torch.arange(first, first + count)
    for number in skipped:
        found[number - first, 2], found[number - first, 5] = 1.0, number
    return found


def name(first):
    return f"layer{first:g}"


def test_the_last_steps_are_kept_and_the_oldest_dropped():
    steps = KeptSteps()
    for first in range(1, KEPT + 3001, 1000):
        steps.add(rows(first, 1000), 0.0, name)
    records = steps.records()
    assert (len(records), records[0].step, records[-1].step) == (KEPT, 3001, KEPT + 3000)
    assert steps.last() == records[-1]


def test_calls_that_do_not_change_the_scale_have_the_one_before():
    steps = KeptSteps()
    steps.add(rows(1, 2, scale=4.0), 0.0, name)
    steps.add(rows(3, 2, scale=nan), 0.0, name)
    assert [one.scale for one in steps.records()] == [4.0] * 4
    assert steps.scale == 4.0


def test_skips_are_named_counted_and_logged_beside_every_nth_step():
    steps, found = KeptSteps(), rows(1, 30, skipped=(7, 12))
    steps.add(found, 0.0, name)
    assert [(one.step, one.parameter) for one in steps.skips] == [(7, "layer7"), (12, "layer12")]
    assert steps.skipped == 2
    logged = steps.logged(found, 0.0, 10)
    assert [(one["step"], one["parameter"]) for one in logged] == [
        (7, "layer7"),
        (10, None),
        (12, "layer12"),
        (20, None),
        (30, None),
    ]
    assert steps.records()[6].parameter == "layer7"
