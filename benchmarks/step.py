"""Whole training steps: eager torch.amp, torch tuned by hand, and `mezzo.TrainStep`.

Run it with `python benchmarks/step.py`, or in parts with `--only mlp cifar`: stored rows of the
other models are kept.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpt import GPT
from measure import Row, store, take_turns
from torch import nn
from torch.nn import functional as F

import mezzo

Step = Callable[[], object]
AMP, MEZZO = "torch.amp", "mezzo"


@dataclass(frozen=True)
class Case:
    """A model with its data, and the ratios that mezzo must reach."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Any, Any]]
    loss: Callable[..., torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    against_amp: float
    against_hand: float
    calls: int
    options: dict[str, Any]
    """Arguments of `mezzo.TrainStep`."""
    by_hand: tuple[str, ...]
    """Names of set-ups in `BY_HAND`; the fastest of them counts."""
    images: bool = False
    dtype: torch.dtype = torch.float16


def amp(case: Case, **options: Any) -> Step:
    """Set up torch.amp as documented."""
    model, (x, y) = case.model().cuda(), case.data()
    optimizer, scaler = (
        case.optimizer(model.parameters(), **options),
        torch.amp.GradScaler("cuda", enabled=case.dtype is torch.float16),
    )

    def step() -> None:
        with torch.autocast("cuda", case.dtype):
            loss = case.loss(model(*x) if isinstance(x, tuple) else model(x), *y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def by_hand(case: Case, *, compiles: str | None = None, captures: bool = False) -> Step:
    """Set torch up by hand: fused optimizer, channels_last, compiled code, a captured step.

    Each step gets a new batch, as in real training: it is brought to the layout, or copied to the
    static input buffers of the captured step.
    """
    model, (x, y) = case.model().cuda(), case.data()
    layout = torch.channels_last if case.images else torch.preserve_format
    model = model.to(memory_format=layout)
    called: Any = model if compiles is None else torch.compile(model, mode=compiles)
    options = {"fused": True} | (
        {"capturable": True} if captures and case.optimizer is adamw else {}
    )
    optimizer, scaler = (
        case.optimizer(model.parameters(), **options),
        torch.amp.GradScaler("cuda", enabled=case.dtype is torch.float16),
    )

    def step(x: Any, y: Any) -> None:
        with torch.autocast("cuda", case.dtype, cache_enabled=not captures):
            loss = case.loss(called(*x) if isinstance(x, tuple) else called(x), *y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    if captures:
        return _captured(step, x, y, layout)
    return (
        (lambda: step(x.contiguous(memory_format=layout), y)) if case.images else lambda: step(x, y)
    )


def _captured(
    step: Callable[[Any, Any], None], x: Any, y: Any, layout: torch.memory_format
) -> Step:
    batch = [x, *y] if isinstance(x, torch.Tensor) else [*x, *y]
    buffers = [
        tensor.clone(memory_format=layout if tensor.dim() == 4 else torch.preserve_format)
        for tensor in batch
    ]
    inputs = (
        (buffers[0], tuple(buffers[1:]))
        if isinstance(x, torch.Tensor)
        else (tuple(buffers[: len(x)]), tuple(buffers[len(x) :]))
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            step(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*inputs)

    # The default argument keeps the model alive: the graph reads its memory.
    def replay(_keep_alive: Any = step) -> None:
        for buffer, tensor in zip(buffers, batch, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        graph.replay()

    return replay


BY_HAND: dict[str, Callable[[Case], Step]] = {
    "by hand": by_hand,
    "by hand, captured": lambda case: by_hand(case, captures=True),
    "by hand, compiled with reduce-overhead": lambda case: by_hand(
        case, compiles="reduce-overhead"
    ),
    "by hand, compiled and captured": lambda case: by_hand(case, compiles="default", captures=True),
    "bfloat16, fused, no scaler": lambda case: amp(replace(case, dtype=torch.bfloat16), fused=True),
}
"""Set-ups of torch by name."""


def with_mezzo(case: Case) -> tuple[Step, mezzo.TrainStep]:
    """Set up `mezzo.TrainStep`, and capture it."""
    model, (x, y) = case.model().cuda(), case.data()
    optimizer = case.optimizer(model.parameters())
    step = mezzo.TrainStep(
        model, case.loss, optimizer, dtype=str(case.dtype).removeprefix("torch."), **case.options
    )
    for _ in range(6):
        step(x, y)
    print(
        f"  captured: {step.captured}, eager_reason: {step.eager_reason}, channels_last:"
        f" {step.channels_last_reason}",
        flush=True,
    )
    return lambda: step(x, y), step


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **options)


def plain_sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """Return SGD without momentum."""
    return torch.optim.SGD(parameters, lr=1e-4, **options)


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-4, **options)


def mlp() -> nn.Module:
    """Return the network of OneFlow's documentation."""
    return nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def resnet(classes: int) -> nn.Module:
    """Return ResNet-50."""
    import torchvision  # type: ignore[import-not-found, import-untyped] # noqa: PLC0415 - optional

    model: nn.Module = torchvision.models.resnet50(num_classes=classes)
    return model


def wide() -> nn.Module:
    """Return nine layers of 8192 × 8192."""
    return nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(9)))


def _images(size: int, classes: int) -> tuple[Any, Any]:
    return torch.randn(128, 3, size, size, device="cuda"), (
        torch.randint(classes, (128,), device="cuda"),
    )


def _tokens() -> tuple[Any, Any]:
    tokens, targets = torch.randint(50257, (2, 8, 1024), device="cuda")
    return (tokens, targets), ()


def _rows() -> tuple[Any, Any]:
    return torch.randn(128, 256, device="cuda"), (torch.randint(10, (128,), device="cuda"),)


def _wide_rows() -> tuple[Any, Any]:
    x, y = torch.randn(2, 2048, 8192, device="cuda")
    return x, (y,)


def identity(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss of a model that computes it in its forward pass."""
    return loss


CASES = {
    "mlp": Case(
        "MLP 256-128-10, batch 128",
        mlp,
        _rows,
        F.cross_entropy,
        sgd,
        0.05,
        0.8,
        200,
        {"policy": "O2"},
        ("by hand, captured",),
    ),
    "cifar": Case(
        "ResNet-50, CIFAR-10 shapes, batch 128",
        lambda: resnet(10),
        lambda: _images(32, 10),
        F.cross_entropy,
        sgd,
        0.135,
        0.93,
        5,
        {"policy": "O2", "compile": True},
        ("by hand, captured", "by hand, compiled and captured"),
        images=True,
    ),
    "imagenet": Case(
        "ResNet-50, 224², batch 128",
        lambda: resnet(1000),
        lambda: _images(224, 1000),
        F.cross_entropy,
        sgd,
        0.5,
        0.98,
        3,
        {"policy": "O2", "compile": True},
        ("by hand", "by hand, compiled and captured"),
        images=True,
    ),
    "gpt": Case(
        "GPT-2 124M, 8 × 1024, AdamW",
        GPT,
        _tokens,
        identity,
        adamw,
        0.58,
        0.97,
        3,
        {"policy": "O2", "compile": True},
        ("by hand, compiled and captured", "by hand, compiled with reduce-overhead"),
    ),
    "wide": Case(
        "9 × Linear 8192, batch 2048",
        wide,
        _wide_rows,
        F.mse_loss,
        plain_sgd,
        0.84,
        0.93,
        3,
        {"policy": "O2"},
        ("bfloat16, fused, no scaler",),
    ),
}


def rows_of(case: Case, rounds: int) -> list[Row]:
    """Measure one case."""
    print(case.name, flush=True)
    contestants: dict[str, Step] = {AMP: amp(case)} | {
        f"torch {kind}": BY_HAND[kind](case) for kind in case.by_hand
    }
    contestants[MEZZO], _ = with_mezzo(case)
    times = take_turns(contestants, calls=case.calls, rounds=rounds, device="cuda")
    contestants.clear()
    _clear()
    best = min(times[f"torch {kind}"] for kind in case.by_hand)
    rows = [
        Row(
            f"step, {case.name}, against torch.amp",
            times,
            times[MEZZO] / times[AMP],
            "×",
            case.against_amp,
        ),
        Row(
            f"step, {case.name}, against torch by hand",
            times,
            times[MEZZO] / best,
            "×",
            case.against_hand,
        ),
    ]
    print(*rows, sep="\n", flush=True)
    return rows


def host_row() -> Row:
    """Measure the host time of a replayed step.

    Calls are queued while the device is busy, so that the host never has to wait.
    """
    run, step = with_mezzo(CASES["mlp"])
    if not step.captured:
        raise SystemExit(f"The step was not captured: {step.eager_reason}")
    samples = []
    for _ in range(30):
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        begin = time.perf_counter()
        for _ in range(50):
            run()
        samples.append((time.perf_counter() - begin) / 50 * 1e6)
    return Row(
        "host time of a replayed step, MLP", {}, sorted(samples)[len(samples) // 2], "µs", 60.0
    )


def recapture_row() -> Row:
    """Measure the time that a new shape takes on ResNet-50: warm-up and capture."""
    # Not compiled: the time of torch.compile is not part of the capture.
    _, step = with_mezzo(replace(CASES["cifar"], options={"policy": "O2"}))
    x, y = _images(32, 10)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(3):
        step(x[:96], (y[0][:96],))
    torch.cuda.synchronize()
    return Row("a new shape is captured, ResNet-50", {}, time.perf_counter() - begin, "s", 2.0)


def _clear() -> None:
    # Only after all contestants: it would drop compiled code that the others still call.
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _has_torchvision() -> bool:
    try:
        import torchvision  # noqa: F401, PLC0415
    except ImportError:
        return False
    return True


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device.")
        return
    skipped = () if _has_torchvision() else ("cifar", "imagenet")
    rows: list[Row] = []
    for name in options.only:
        if name in skipped:
            print(f"{name} is skipped: torchvision is not installed.")
            continue
        rows += rows_of(CASES[name], options.rounds)
    if "mlp" in options.only:
        rows.append(host_row())
    if "cifar" in options.only and "cifar" not in skipped:
        rows.append(recapture_row())
    print(*rows, sep="\n")
    print(f"stored in {store('step', rows, 'cuda').name}")


if __name__ == "__main__":
    main()
