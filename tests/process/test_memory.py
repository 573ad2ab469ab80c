"""What is made and dropped is freed: models, optimizers, steps, converted programs, policies and regions."""

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
    made = mezzo.TrainStep(model, nn.functional.mse_loss, optimizer, policy="O2", dtype="bfloat16")
    made(X, X)
    return [made, model, optimizer, *model.parameters()]


def free_step(_: int) -> list[Any]:
    model, optimizer = pair()

    @mezzo.train_step(models=model, optimizers=optimizer, policy="O1", dtype="bfloat16")
    def made(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    made(X)
    return [made, model, optimizer, *model.parameters()]


NAMES = sorted(op.name for op in mezzo.ops() if op.name in vars(torch))[:21]
PAIRS = list(combinations(NAMES, 2))


def region(number: int) -> list[Any]:
    made = mezzo.autocast(device_type="cpu", dtype="bfloat16", half=set(PAIRS[number]))
    with made:
        torch.mm(X, X.T)
    return [made, made._region.owner]


def policy(number: int) -> list[Any]:
    made = mezzo.Policy("O1", dtype="bfloat16", full=set(PAIRS[number]))
    with mezzo.autocast(made, device_type="cpu"):
        torch.mm(X, X.T)
    return [made]


KEPT = 64
"""What the caches of policies may hold."""


@pytest.mark.parametrize(
    ("make", "alive"),
    [(decorated, 0), (step, 0), (free_step, 0), (region, KEPT), (policy, KEPT)],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_of_200_that_are_made_and_dropped_none_stays_but_what_a_bounded_cache_holds(
    make: Callable[[int], list[Any]], alive: int
) -> None:
    tables_before = len(table_lookup.TABLES)
    seen = []
    for number in range(200):
        seen += [weakref.ref(one) for one in make(number)]
    gc.collect()
    assert sum(one() is not None for one in seen) <= alive
    assert len(table_lookup.TABLES) <= tables_before + KEPT


def test_of_converted_programs_that_are_made_and_dropped_none_stays() -> None:
    seen = []
    for _ in range(20):
        model = nn.Linear(4, 4)
        converted = mezzo.convert(model, (X,), dtype="bfloat16")
        converted(X)
        seen += [weakref.ref(one) for one in (model, converted, *model.parameters())]
    del model, converted
    gc.collect()
    assert not any(one() is not None for one in seen)


def test_a_region_that_left_the_cache_still_carries_out_its_policy() -> None:
    kept = mezzo.autocast(device_type="cpu", dtype="bfloat16", half={"add", "exp"})
    for number in range(KEPT + 5):
        region(number)
    again = mezzo.autocast(device_type="cpu", dtype="bfloat16", half={"add", "exp"})
    del again
    for number in range(KEPT + 5):
        region(number)
    gc.collect()
    with kept:
        assert torch.exp(X).dtype is torch.bfloat16
