"""Models, optimizers, steps, converted programs, policies and regions are freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.autocasting import table_lookup

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def decorated(_: int) -> list[Any]:
    model, optimizer = mezzo.decorate(*pair(), policy="O2", dtype="float16")[:2]
    scaler = mezzo.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(X).float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    moments = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return [model, optimizer, scaler, *model.parameters(), *moments]


def step(_: int) -> list[Any]:
    model, optimizer = pair()
    train = mezzo.TrainStep(model, nn.functional.mse_loss, optimizer, policy="O2", dtype="bfloat16")
    train(X, X)
    return [train, model, optimizer, *model.parameters()]


def free_step(_: int) -> list[Any]:
    model, optimizer = pair()

    @mezzo.train_step(models=model, optimizers=optimizer, policy="O1", dtype="bfloat16")
    def train(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    train(X)
    return [train, model, optimizer, *model.parameters()]


NAMES = sorted(op.name for op in mezzo.ops() if op.name in vars(torch))[:21]
PAIRS = list(combinations(NAMES, 2))


def region(number: int) -> list[Any]:
    autocast = mezzo.autocast(device_type="cpu", dtype="bfloat16", half=set(PAIRS[number]))
    with autocast:
        torch.mm(X, X.T)
    return [autocast, autocast._region.table]


def custom_policy(number: int) -> list[Any]:
    policy = mezzo.Policy("O1", dtype="bfloat16", full=set(PAIRS[number]))
    with mezzo.autocast(policy, device_type="cpu"):
        torch.mm(X, X.T)
    return [policy]


CACHED = 64
"""Maximum size of the caches of policies."""


@pytest.mark.parametrize(
    ("make", "alive"),
    [(decorated, 0), (step, 0), (free_step, 0), (region, CACHED), (custom_policy, CACHED)],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_dropped_objects_are_freed_except_those_in_a_bounded_cache(
    make: Callable[[int], list[Any]], alive: int
) -> None:
    tables_before = len(table_lookup.TABLES)
    references = []
    for number in range(200):
        references += [weakref.ref(one) for one in make(number)]
    gc.collect()
    assert sum(one() is not None for one in references) <= alive
    assert len(table_lookup.TABLES) <= tables_before + CACHED


def test_dropped_converted_programs_are_freed() -> None:
    references = []
    for _ in range(20):
        model = nn.Linear(4, 4)
        converted = mezzo.convert(model, (X,), dtype="bfloat16")
        converted(X)
        references += [weakref.ref(one) for one in (model, converted, *model.parameters())]
    del model, converted
    gc.collect()
    assert not any(one() is not None for one in references)


def test_a_region_applies_its_policy_after_the_cache_has_dropped_it() -> None:
    kept = mezzo.autocast(device_type="cpu", dtype="bfloat16", half={"add", "exp"})
    for number in range(CACHED + 5):
        region(number)
    again = mezzo.autocast(device_type="cpu", dtype="bfloat16", half={"add", "exp"})
    del again
    for number in range(CACHED + 5):
        region(number)
    gc.collect()
    with kept:
        assert torch.exp(X).dtype is torch.bfloat16
