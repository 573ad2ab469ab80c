"""What each rank does with 16-bit shards: the same training with and without shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mezzo

FORMATS = [
    ("bfloat16", "split"),
    ("bfloat16", "kahan"),
    ("float16", "kahan"),
    ("bfloat16", "stochastic"),
]
Pair = tuple[nn.Sequential, torch.optim.Optimizer]


def make_pair(
    dtype: str, master: str, *, sharded: bool, freeze: bool = False, **options: Any
) -> Pair:
    """Return a decorated model and its optimizer. The norm has a group of its own."""
    torch.manual_seed(0)
    # Five rows shard unevenly.
    model = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 5))
    model[3].requires_grad_(not freeze)
    if sharded:
        for layer in (model[0], model[1], model):
            fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return mezzo.decorate(model, optimizer, "O2", dtype=dtype, master=master, **options)


def update(pair: Pair, start: int, stop: int, scaler: Any = None, *, unscale: bool = False) -> None:
    """Update from batches that are the same on all ranks, so that their mean is that of one."""
    model, optimizer = pair
    for index in range(start, stop):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, 8, generator=generator)
        y = torch.randn(4, 5, generator=generator)
        loss = nn.functional.mse_loss(model(x).float(), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


def masters(model: nn.Module) -> list[torch.Tensor]:
    """Return whole float32 weights."""
    return [
        (one.full_tensor() if isinstance(one, DTensor) else one).clone()
        for one in mezzo.master_params(model).values()
    ]


def train(dtype: str, master: str, *, sharded: bool) -> list[torch.Tensor]:
    pair = make_pair(dtype, master, sharded=sharded)
    scaler = mezzo.GradScaler("cpu", init_scale=64.0) if dtype == "float16" else None
    update(pair, 0, 4, scaler)
    return masters(pair[0])


def unscale_first(*, sharded: bool) -> list[torch.Tensor]:
    pair = make_pair("float16", "kahan", sharded=sharded)
    update(pair, 0, 3, mezzo.GradScaler("cpu", init_scale=64.0), unscale=True)
    return masters(pair[0])


def unfreeze(*, sharded: bool) -> list[torch.Tensor]:
    pair = make_pair("bfloat16", "split", sharded=sharded, freeze=True)
    update(pair, 0, 2)
    pair[0].requires_grad_(True)
    update(pair, 2, 4)
    return masters(pair[0])


def clamp(*, sharded: bool) -> list[torch.Tensor]:
    pair = make_pair("bfloat16", "split", sharded=sharded)
    update(pair, 0, 2)
    with torch.no_grad():
        pair[0][0].weight.clamp_(-0.1, 0.1)
    update(pair, 2, 4)
    return masters(pair[0])


def average(*, sharded: bool) -> list[torch.Tensor]:
    pair = make_pair("bfloat16", "split", sharded=sharded)
    averaged = mezzo.EMA(pair[0], decay=0.5)
    update(pair, 0, 2)
    averaged.update()
    with averaged.applied():
        return masters(pair[0])


def load_exact(*, sharded: bool) -> list[torch.Tensor]:
    first, second = (
        make_pair("bfloat16", "split", sharded=sharded, save_dtype="float32") for _ in range(2)
    )
    update(first, 0, 2)
    second[0].load_state_dict(first[0].state_dict())
    return masters(second[0])


def undecorate(*, sharded: bool) -> list[torch.Tensor]:
    pair = make_pair("bfloat16", "split", sharded=sharded)
    model, _ = mezzo.undecorate(*pair)
    model(torch.ones(1, 8)).sum().backward()
    return [*masters(model), *(_whole(one.grad) for one in model.parameters())]


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


CASES: dict[str, Callable[..., list[torch.Tensor]]] = {
    one.__name__: one for one in (unscale_first, unfreeze, clamp, average, load_exact, undecorate)
}
"""Functions that return the same tensors with and without shards."""


def describe() -> dict[str, Any]:
    """Return the dtypes of shards, gradients and masters, and what a plan prints."""
    model, optimizer = make_pair("bfloat16", "split", sharded=True)
    model(torch.ones(2, 8)).float().sum().backward()
    gradients = [(one.grad.dtype, one.grad.to_local().dtype) for one in model.parameters()]
    optimizer.step()
    state = optimizer.state[model[0].weight]
    torch.manual_seed(0)
    together = fully_shard(nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12)))
    plan = mezzo.plan(
        together, torch.optim.AdamW(together.parameters()), dtype="bfloat16", master="stochastic"
    )
    return {
        "shards": [(one.dtype, one.to_local().dtype) for one in model.parameters()],
        "gradients": gradients,
        "master": (type(state["mezzo_master"]).__name__, tuple(state["mezzo_master"].shape)),
        "plan": str(plan),
        "saved": plan.shard_bytes_saved,
    }


def run() -> dict[str, Any]:
    """Run every scenario of two ranks."""
    return {
        **{f"{dtype} {master}": train(dtype, master, sharded=True) for dtype, master in FORMATS},
        **{name: case(sharded=True) for name, case in CASES.items()},
        "describe": describe(),
    }
