"""A program that uses every feature of mezzo that changes something in torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mezzo

X = torch.linspace(-1, 1, 16).reshape(4, 4)


def use(*, compiler: bool) -> None:
    """Enter regions, take steps, decorate and average; optionally compile, export and convert."""
    for half in ("bfloat16", "float16"):
        for options in ({}, {"half": {"add"}}, {"policy": "O2"}, {"policy": "O3"}):
            with mezzo.autocast(device_type="cpu", dtype=half, **options):
                torch.linalg.det(X.to(getattr(torch, half)))
                checkpoint(
                    lambda x: torch.mm(x, x) + x, X.clone().requires_grad_(), use_reentrant=False
                ).float().sum().backward()
                torch.jit.script(_scripted)(X)
    model, optimizer = _pair()
    step = mezzo.TrainStep(model, nn.functional.mse_loss, optimizer, policy="O2", dtype="bfloat16")
    step(X, X[:, :1])
    free_model, free_optimizer = _pair()

    @mezzo.train_step(models=free_model, optimizers=free_optimizer, policy="O1", dtype="float16")
    def free(x: torch.Tensor) -> None:
        free_model(x).square().mean().backward()

    free(X)
    average = mezzo.EMA(free_model, decay=0.9)
    average.update()
    with average.applied():
        free_model(X)
    if compiler:
        with mezzo.autocast(device_type="cpu", dtype="bfloat16", half={"add"}):
            torch.compile(lambda x: torch.linalg.det(x) + x.sum(), backend="aot_eager")(X)
            torch.export.export(nn.Linear(4, 4), (X,))
        mezzo.convert(nn.Linear(4, 4), (X,), dtype="bfloat16")


def _pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x) + x
