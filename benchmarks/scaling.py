"""Cost of gradient scaling in addition to a plain optimizer step, compared with torch's scaler.

On a CPU: 400 parameters with fresh gradients; the overhead is the time with a scaler minus the time
without. On CUDA: a whole step of a small network with a fused optimizer, where torch's scaler does
not synchronize either.

    python benchmarks/scaling.py --device cpu
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from internals import check_and_unscale
from measure import Row, store, take_turns
from torch import nn

import mezzo

PARAMETERS = 400
SHAPES = {"32x32": (32, 32), "16 elements": (16,)}
OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "SGD foreach": lambda parameters: torch.optim.SGD(parameters, lr=1e-6, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, fused=True),
}


class Training:
    """One optimizer over many small parameters.

    Each step gets new gradient tensors, as from a backward pass.
    """

    def __init__(
        self,
        optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer],
        shape: tuple[int, ...],
    ) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(shape)) for _ in range(PARAMETERS)]
        self.source = [torch.randn(shape) for _ in range(PARAMETERS)]
        self.optimizer = optimizer(self.parameters)
        self.loss = torch.ones((), requires_grad=True)

    def make_gradients(self) -> None:
        """Give every parameter a new gradient."""
        for parameter, gradient in zip(
            self.parameters, torch._foreach_mul(self.source, 1.0), strict=True
        ):
            parameter.grad = gradient

    def step(self, scaler: Any) -> None:
        """Take one step, with a scaler or without."""
        if scaler is None:
            self.loss.backward()
            self.optimizer.step()
            return
        scaler.scale(self.loss).backward()
        scaler.step(self.optimizer)
        scaler.update()


def step_times(
    training: Training, scalers: Mapping[str, Any], rounds: int
) -> dict[str, list[float]]:
    """Return the times of a step in microseconds.

    Like `take_turns`, but on the same tensors and without the time to make the gradients, which is
    longer than the difference that is measured.
    """
    samples: dict[str, list[float]] = {name: [] for name in scalers}
    for round_number in range(rounds + 5):
        for name, scaler in scalers.items():
            training.make_gradients()
            begin = time.perf_counter()
            training.step(scaler)
            if round_number >= 5:
                samples[name].append((time.perf_counter() - begin) * 1e6)
    return samples


def overhead(samples: Mapping[str, list[float]], name: str) -> float:
    """Return the median time that a scaler adds to the plain step of the same round."""
    return statistics.median(
        scaled - plain for scaled, plain in zip(samples[name], samples["plain"], strict=True)
    )


def cpu_rows(rounds: int) -> list[Row]:
    """Measure the overhead of scaling on a CPU, relative to torch's."""
    rows = []
    for name, optimizer in OPTIMIZERS.items():
        for size, shape in SHAPES.items():
            samples = step_times(
                Training(optimizer, shape),
                {
                    "plain": None,
                    "torch": torch.amp.GradScaler("cpu"),
                    "mezzo": mezzo.GradScaler("cpu"),
                },
                rounds,
            )
            times = {scaler: statistics.median(values) for scaler, values in samples.items()}
            share = overhead(samples, "mezzo") / overhead(samples, "torch")
            rows.append(
                Row(f"overhead, {PARAMETERS} parameters of {size}, {name}", times, share, "×", 0.5)
            )
    return rows


class Network:
    """A small network in float16 with fused SGD."""

    def __init__(self, scaler: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, fused=True)
        self.inputs, self.targets = (
            torch.randn(128, 256, device="cuda"),
            torch.randint(10, (128,), device="cuda"),
        )
        self.scaler = scaler

    def step(self) -> None:
        """Take one step."""
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.model(self.inputs), self.targets)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def cuda_rows(rounds: int) -> list[Row]:
    """Measure a whole step on a GPU, and the check of many gradients alone."""
    times = take_turns(
        {
            "torch": Network(torch.amp.GradScaler("cuda")).step,
            "mezzo": Network(mezzo.GradScaler("cuda")).step,
        },
        calls=50,
        rounds=rounds,
        device="cuda",
    )
    return [
        Row(
            "step, MLP 256-128-10, float16, SGD fused",
            times,
            times["mezzo"] / times["torch"],
            "×",
            1.0,
        ),
        _check_row(),
    ]


def _check_row() -> Row:
    """Check and unscale half a billion float16 values.

    mezzo's kernel also writes a flag for each tensor. A copy of the same bytes is timed too.
    """
    many = [torch.ones(5_000_000, dtype=torch.float16, device="cuda") for _ in range(100)]
    flat, other = torch.ones(2, 500_000_000, dtype=torch.float16, device="cuda")
    factor, found, flags = (
        torch.ones((), device="cuda"),
        torch.zeros((), device="cuda"),
        torch.zeros(100, dtype=torch.int32, device="cuda"),
    )
    times = take_turns(
        {
            "torch": lambda: torch._amp_foreach_non_finite_check_and_unscale_(many, found, factor),
            "mezzo": lambda: check_and_unscale(many, factor, found, flags),
            "copy": lambda: flat.copy_(other),
        },
        calls=10,
        device="cuda",
    )
    return Row("check and unscale, 500M float16", times, times["mezzo"] / times["torch"], "×", 1.0)


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    parser.add_argument("--rounds", type=int, default=401)
    options = parser.parse_args()
    rows = cpu_rows(options.rounds) if options.device == "cpu" else cuda_rows(options.rounds)
    for row in rows:
        print(row)
    print(f"stored in {store('scaling', rows, options.device).name}")


if __name__ == "__main__":
    main()
