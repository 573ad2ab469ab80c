"""What `mezzo.advise` says about three models, against a separate timing of the same settings.

Run it with `python benchmarks/advise.py`. The value of a row is the advised gain over float32
against the gain that a training loop of one's own gives, whichever is larger over the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from measure import Row, results_path, store, take_turns
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo

CALLS, ROUNDS = 20, 21


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


def trained_at(
    make: Callable[[], tuple[nn.Module, Tensor]], batch: Any, setting: Any
) -> Callable[[], object]:
    """Set up a training step as a user would write it, and run it until it is captured."""
    model = make()[0].cuda()
    dtype = {} if setting.level == "O0" else {"dtype": setting.precision.value}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)
    step = mezzo.TrainStep(
        model, F.mse_loss, optimizer, setting.level, capture=setting.captured, **dtype
    )

    def train() -> object:
        with products_in(setting.precision.value):
            return step(*batch)

    for _ in range(CALLS):
        train()
    # A captured step keeps the precision of its products.
    return (lambda: step(*batch)) if step.captured else train


def row_of(name: str) -> Row:
    """Compare the advice on a model with a separate timing."""
    make = MODELS[name]
    model, x = make()
    model, x = model.cuda(), x.cuda()
    with torch.no_grad():
        batch = x, torch.zeros_like(model(x))
    advice = mezzo.advise(model, batch, F.mse_loss, rounds=21)
    print(name, advice, sep="\n", flush=True)
    settings = {
        "float32": advice.times[0].setting,
        str(advice.chosen.setting): advice.chosen.setting,
    }
    steps = {what: trained_at(make, batch, setting) for what, setting in settings.items()}
    times = take_turns(steps, calls=CALLS, rounds=ROUNDS, device="cuda")
    advised = advice.chosen.gain or 1.0
    ratio = advised * times[str(advice.chosen.setting)] / times["float32"]
    return Row(
        f"{name}: {advice.chosen.setting}, {advised:.2f} × as fast",
        times,
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
    # A row's name has the gain: rows of earlier runs would be kept beside it.
    results_path("advise", "cuda").unlink(missing_ok=True)
    print(f"stored in {store('advise', rows, 'cuda')}")


if __name__ == "__main__":
    main()
