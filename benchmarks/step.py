"""Whole training steps: eager torch.amp, the best that torch can be set up to by hand, and `mezzo.TrainStep`.

Run it with `python benchmarks/step.py`, or in parts with `--only mlp cifar`: what was stored of the
others stays.
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
    """One model with its data, and how far it should come."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Any, Any]]
    loss: Callable[..., torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    against_amp: float
    against_hand: float
    calls: int
    words: dict[str, Any]
    """What mezzo is told."""
    by_hand: tuple[str, ...]
    """The ways in which torch is set up, of `HANDS`; the fastest of them counts."""
    images: bool = False
    dtype: torch.dtype = torch.float16


def amp(case: Case, **words: Any) -> Step:
    """torch.amp as its documentation has it."""
    model, (x, y) = case.model().cuda(), case.data()
    optimizer, scaler = (
        case.optimizer(model.parameters(), **words),
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
    """The fastest that torch can be set up to: a fused optimizer, channels_last, compiled code, a whole captured step.

    A batch arrives at every step, as it does for everybody: it gets its layout, or is copied to
    where a captured step reads it.
    """
    model, (x, y) = case.model().cuda(), case.data()
    layout = torch.channels_last if case.images else torch.preserve_format
    model = model.to(memory_format=layout)
    called: Any = model if compiles is None else torch.compile(model, mode=compiles)
    words = {"fused": True} | ({"capturable": True} if captures and case.optimizer is adamw else {})
    optimizer, scaler = (
        case.optimizer(model.parameters(), **words),
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
    held = [
        tensor.clone(memory_format=layout if tensor.dim() == 4 else torch.preserve_format)
        for tensor in batch
    ]
    inputs = (
        (held[0], tuple(held[1:]))
        if isinstance(x, torch.Tensor)
        else (tuple(held[: len(x)]), tuple(held[len(x) :]))
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

    # Whoever holds the graph holds the model too, whose memory it reads.
    def replay(_model: Any = step) -> None:
        for buffer, tensor in zip(held, batch, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        graph.replay()

    return replay


HANDS: dict[str, Callable[[Case], Step]] = {
    "by hand": by_hand,
    "by hand, captured": lambda case: by_hand(case, captures=True),
    "by hand, compiled with reduce-overhead": lambda case: by_hand(
        case, compiles="reduce-overhead"
    ),
    "by hand, compiled and captured": lambda case: by_hand(case, compiles="default", captures=True),
    "bfloat16, fused, no scaler": lambda case: amp(replace(case, dtype=torch.bfloat16), fused=True),
}
"""Ways to set torch up."""


def ours(case: Case) -> tuple[Step, mezzo.TrainStep]:
    """One call, with the inputs copied at each."""
    model, (x, y) = case.model().cuda(), case.data()
    optimizer = case.optimizer(model.parameters())
    step = mezzo.TrainStep(
        model, case.loss, optimizer, dtype=str(case.dtype).removeprefix("torch."), **case.words
    )
    for _ in range(6):
        step(x, y)
    print(
        f"  captured: {step.captured}, reason: {step.eager_reason}, channels_last:"
        f" {step.channels_last_reason}",
        flush=True,
    )
    return lambda: step(x, y), step


def sgd(parameters: Any, **words: Any) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **words)


def plain_sgd(parameters: Any, **words: Any) -> torch.optim.Optimizer:
    """SGD without."""
    return torch.optim.SGD(parameters, lr=1e-4, **words)


def adamw(parameters: Any, **words: Any) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-4, **words)


def mlp() -> nn.Module:
    """The network of the OneFlow document."""
    return nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def resnet(classes: int) -> nn.Module:
    """ResNet-50."""
    import torchvision  # type: ignore[import-not-found, import-untyped] # noqa: PLC0415 - optional

    made: nn.Module = torchvision.models.resnet50(num_classes=classes)
    return made


def wide() -> nn.Module:
    """Nine layers of 8192 × 8192."""
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


def itself(loss: torch.Tensor) -> torch.Tensor:
    """For models that compute their loss."""
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
        itself,
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
    """One case, everybody in turns."""
    print(case.name, flush=True)
    contestants: dict[str, Step] = {AMP: amp(case)} | {
        f"torch {kind}": HANDS[kind](case) for kind in case.by_hand
    }
    contestants[MEZZO], _ = ours(case)
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
    """Microseconds that the host needs for a replayed step: calls are queued while the device is busy with something else."""
    run, step = ours(CASES["mlp"])
    assert step.captured, step.eager_reason  # noqa: S101 - a benchmark of something else would be stored
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
    """Seconds that a new shape costs on ResNet-50: its warm-up and its capture."""
    # Not compiled: what torch.compile takes for a new shape is not the capture's.
    _, step = ours(replace(CASES["cifar"], words={"policy": "O2"}))
    x, y = _images(32, 10)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(3):
        step(x[:96], (y[0][:96],))
    torch.cuda.synchronize()
    return Row("a new shape is captured, ResNet-50", {}, time.perf_counter() - begin, "s", 2.0)


def _clear() -> None:
    # Not between contestants: it would take the graphs of those that dynamo still calls.
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
        print("Whole steps are captured and measured on a GPU, and there is none.")
        return
    skipped = () if _has_torchvision() else ("cifar", "imagenet")
    rows: list[Row] = []
    for name in options.only:
        if name in skipped:
            print(f"{name} left out: torchvision is not installed")
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
