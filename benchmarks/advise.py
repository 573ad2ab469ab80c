"""What `mezzo.advise` says about three models, against a separate timing of the same settings.

Run it with `python benchmarks/advise.py`. The value of a row is the advised gain over float32
against the gain that CUDA events give, whichever is larger over the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from measure import Row, store
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo

CALLS, ROUNDS = 20, 9


def wide() -> tuple[nn.Module, Tensor]:
    """Return four wide linear layers, bound by their products."""
    return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))), torch.randn(2048, 4096)


def convolutional() -> tuple[nn.Module, Tensor]:
    """Return three convolutions with batch norms."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((8, 64), (64, 256), (256, 256)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return model, torch.randn(64, 8, 56, 56)


def small() -> tuple[nn.Module, Tensor]:
    """Return a model that is bound by the launches of its kernels."""
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), torch.randn(16, 32)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "4 × Linear(4096), batch 2048": wide,
    "3 convolutions, 56², batch 64": convolutional,
    "MLP 32-32-32, batch 16": small,
}


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Compute float32 products in TF32, if that is the precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "TF32" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def time_setting(make: Callable[[], tuple[nn.Module, Tensor]], batch: Any, setting: Any) -> float:
    """Return the median microseconds of a training step, by events of CUDA."""
    model = make()[0].cuda()
    dtype = {} if setting.level == "O0" else {"dtype": setting.precision.value}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)
    with products_in(setting.precision.value):
        step = mezzo.TrainStep(
            model, F.mse_loss, optimizer, setting.level, capture=setting.captured, **dtype
        )
        for _ in range(CALLS):
            step(*batch)
        times = []
        for _ in range(ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                step(*batch)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return median(times)


def row_of(name: str) -> Row:
    """Compare the advice on a model with a separate timing."""
    make = MODELS[name]
    model, x = make()
    model, x = model.cuda(), x.cuda()
    with torch.no_grad():
        batch = x, torch.zeros_like(model(x))
    advice = mezzo.advise(model, batch, F.mse_loss, rounds=21)
    print(name, advice, sep="\n", flush=True)
    slow = time_setting(make, batch, advice.times[0].setting)
    fast = time_setting(make, batch, advice.chosen.setting)
    advised = advice.chosen.gain or 1.0
    ratio = advised * fast / slow
    return Row(
        f"{name}: {advice.chosen.setting}, {advised:.2f} × as fast",
        {"float32": slow, str(advice.chosen.setting): fast},
        max(ratio, 1 / ratio),
        "×",
        1.15,
    )


def main() -> None:
    """Measure all models and store the rows."""
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device.")
        return
    rows = [row_of(name) for name in MODELS]
    print(*rows, sep="\n")
    print(f"stored in {store('advise', rows, 'cuda')}")


if __name__ == "__main__":
    main()
