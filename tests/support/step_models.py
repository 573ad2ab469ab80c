"""Small models and a training loop written by hand, for the tests of steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mezzo

INF = float("inf")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.out = nn.Dropout(0.25), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(F.relu(self.norm(self.conv(x))).mean((2, 3))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.norm, self.qkv, self.mix, self.out = (
            nn.LayerNorm(16),
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            nn.Linear(16, 4),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        query, key, value = (
            part.unflatten(-1, (2, 8)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = (
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        return self.out((x + self.mix(mixed)).mean(1))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": Mlp, "cnn": Cnn, "transformer": Transformer}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def boosted(outputs: torch.Tensor, target: torch.Tensor, boost: torch.Tensor) -> torch.Tensor:
    """Return a loss that overflows where `boost` is infinite."""
    return F.cross_entropy(outputs, target) * boost


def batches(
    name: str, count: int, overflows: Sequence[int] = (), device: str = "cpu", size: int = 8
) -> Iterator[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(5)
    for place in range(count):
        shape = {"mlp": (size, 8), "cnn": (size, 3, 6, 6)}.get(name)
        x = (
            torch.randint(16, (size, 5), generator=generator)
            if shape is None
            else torch.randn(shape, generator=generator)
        )
        target, boost = (
            torch.randint(4, (size,), generator=generator),
            torch.tensor(INF if place in overflows else 1.0),
        )
        yield x.to(device), (target.to(device), boost.to(device))


@dataclass
class Made:
    """A model with its optimizer, always from the same seed."""

    name: str
    optimizer_name: str = "SGD"
    device: str = "cpu"
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = MODELS[self.name]().to(self.device)
        self.optimizer = OPTIMIZERS[self.optimizer_name](self.model.parameters())


def by_hand(
    made: Made,
    data: Iterator[tuple[Any, Any]],
    level: str,
    dtype: str,
    *,
    accumulate: int = 1,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip_norm: float | None = None,
) -> list[float]:
    """Return the losses of the loop that `TrainStep` replaces."""
    model, optimizer = mezzo.decorate(
        made.model, made.optimizer, level, dtype=dtype, clip_norm=clip_norm
    )
    scaler = mezzo.GradScaler(made.device, enabled=dtype == "float16")
    scheduler = None if schedule is None else schedule(optimizer)
    region = mezzo.autocast(level, device_type=made.device, dtype=dtype)
    losses, before = [], None
    torch.manual_seed(1)
    for place, (x, (target, boost)) in enumerate(data):
        if place % accumulate == 0:
            before = [buffer.clone() for buffer in model.buffers()]
        with region:
            loss = boosted(model(x), target, boost)
        scaler.scale(loss / accumulate).backward()
        losses.append(loss.item())
        if (place + 1) % accumulate == 0:
            result = scaler.step(optimizer, scheduler=scheduler)
            scaler.update()
            optimizer.zero_grad()
            if result.skipped:
                for buffer, old in zip(model.buffers(), before or (), strict=True):
                    buffer.copy_(old)
    return losses


def in_steps(
    made: Made,
    data: Iterator[tuple[Any, Any]],
    level: str,
    dtype: str,
    *,
    schedule: Any = None,
    **options: Any,
) -> tuple[list[float], mezzo.TrainStep]:
    """Return the losses of the same training with `TrainStep`, and the step."""
    scheduler = None if schedule is None else schedule(made.optimizer)
    options = {"channels_last": False, **options}
    step = mezzo.TrainStep(
        made.model, boosted, made.optimizer, level, dtype=dtype, scheduler=scheduler, **options
    )
    torch.manual_seed(1)
    losses = [step(x, y) for x, y in data]
    return [float(loss) for loss in losses], step


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def same(one: Any, other: Any) -> bool:
    """Return whether two nested states are bit-equal."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype is other.dtype
            and torch.equal(one.cpu(), other.cpu())
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def copied(state: Any) -> Any:
    return copy.deepcopy(state)
