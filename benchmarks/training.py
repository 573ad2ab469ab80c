"""Ways to train a case of the zoo, and how benchmarks run many rows within a limit of time."""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from internals import float32_products
from measure import Row, store
from torch import Tensor, nn
from zoo import AMP, HAND, Batch, Case

import mezzo

MEZZO = "mezzo"
CHANNELS_LAST = f"{HAND}, channels_last"
BATCHES = 4
"""Different batches, which every set-up gets one after the other."""
WARM_UP = 12
"""Steps before a measurement, in which mezzo compiles, measures and captures."""

Train = Callable[[Batch], Tensor]
"""Trains on one batch and returns the loss."""


def loss_of(case: Case, model: Any, batch: Batch) -> Tensor:
    """Run the forward pass and the loss."""
    if case.loss is not None:
        x, y = batch
        return case.loss(model(*x) if isinstance(x, tuple) else model(x), y)
    outputs = model(**batch)
    loss: Tensor = outputs if isinstance(outputs, Tensor) else outputs.loss
    return loss


def batches_of(case: Case, device: str, count: int, *, tiny: bool) -> list[Batch]:
    """Return different batches on a device."""
    torch.manual_seed(1)
    return [_to(case.batch(tiny), device) for _ in range(count)]


def _to(batch: Batch, device: str) -> Batch:
    if isinstance(batch, dict):
        return {name: _to(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_to(value, device) for value in batch)
    return batch.to(device)


# -- set-ups ---------------------------------------------------------------------------------------


def amp(case: Case, model: nn.Module, device: str, **options: Any) -> Train:
    """Set up torch.amp as documented; the options are those of the optimizer."""
    optimizers, scaler = case.optimizers(model, **options), torch.amp.GradScaler(device)
    called = torch.compile(model) if case.compile else model

    def step(batch: Batch) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.float16):
            loss = loss_of(case, called, batch)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def by_hand(case: Case, model: nn.Module, device: str) -> Train:
    """Set up torch.amp with a fused optimizer, and with torch.compile where the case has it."""
    return amp(case, model, device, fused=True)


def channels_last(case: Case, model: nn.Module, device: str) -> Train:
    """Set up torch by hand with the model and each batch in channels_last."""
    step = by_hand(case, model.to(memory_format=torch.channels_last), device)

    def in_channels_last(batch: Batch) -> Tensor:
        x, y = batch
        return step((x.contiguous(memory_format=torch.channels_last), y))

    return in_channels_last


def in_float32(case: Case, model: nn.Module, _device: str, *, tf32: bool = False) -> Train:
    """Set up a plain loop in float32 or TF32, with the optimizer as documented."""
    optimizers = case.optimizers(model)
    called = torch.compile(model) if case.compile else model

    def step(batch: Batch) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        with float32_products(tf32=tf32):
            loss = loss_of(case, called, batch)
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return step


def with_mezzo(
    case: Case, model: nn.Module, level: str = "O2", **options: Any
) -> tuple[Train, mezzo.TrainStep]:
    """Set up `mezzo.TrainStep` in float16."""
    optimizers = case.optimizers(model)
    step = mezzo.TrainStep(
        model,
        case.loss,
        optimizers[0] if len(optimizers) == 1 else optimizers,
        level,
        dtype="float16",
        **{"compile": case.compile} | options,
    )
    return (lambda batch: step(**batch) if isinstance(batch, dict) else step(*batch)), step


SetUp = Callable[[Case, nn.Module, str], Train]


def float32_set_ups(device: str) -> dict[str, SetUp]:
    """Return set-ups that are shown beside the others and have no bar; TF32 is NVIDIA's."""
    tf32: dict[str, SetUp] = {"TF32": partial(in_float32, tf32=True)}
    return {"float32": in_float32, **(tf32 if device == "cuda" else {})}


def set_ups(case: Case) -> dict[str, SetUp]:
    """Return the set-ups of torch that a case is compared with."""
    chosen: dict[str, SetUp] = {}
    if AMP in case.bars:
        chosen[AMP] = amp
    if HAND in case.bars:
        chosen |= {HAND: by_hand} | ({CHANNELS_LAST: channels_last} if case.images else {})
    return chosen


def skips_of(step: mezzo.TrainStep) -> int:
    """Return the number of updates that a step skipped so far."""
    return 0 if step.scaler is None else step.scaler.state().skipped_steps


# -- contestants -----------------------------------------------------------------------------------


@dataclass
class Contestant:
    """A set-up that trains on the next batch at each call."""

    train: Train
    batches: list[Batch]
    losses: deque[Tensor] = field(default_factory=lambda: deque(maxlen=BATCHES))

    def __post_init__(self) -> None:
        self.following = itertools.cycle(self.batches)

    def __call__(self) -> None:
        self.losses.append(self.train(next(self.following)))

    def warm_up(self, *, tiny: bool) -> None:
        """Train the first steps, with the same random numbers as the other contestants."""
        self.steps(2 if tiny else WARM_UP)

    def steps(self, count: int) -> None:
        """Train some steps from a fixed random state."""
        torch.manual_seed(2)
        for _ in range(count):
            self()

    def last_loss(self) -> float | None:
        """Return the mean of the last losses, one for each batch; None if it is not finite."""
        loss = float(torch.stack([loss.float() for loss in self.losses]).mean())
        return loss if math.isfinite(loss) else None


def calls_within(seconds: float, contestant: Contestant, device: str) -> int:
    """Return how often to call in a round that takes about so many seconds."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(2):
        contestant()
    synchronize(device)
    return min(max(round(2 * seconds / (time.perf_counter() - begin)), 2), 30)


# -- rows ------------------------------------------------------------------------------------------


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def clear(device: str) -> None:
    """Free what earlier rows left, and forget their compiled code and their peak of memory."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def one_line(error: Exception) -> str:
    """Return the type and the first line of an error.

    >>> one_line(ValueError("too long" + chr(10) + "by 3"))
    'ValueError: too long'
    """
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


Rows = Callable[[argparse.Namespace, str], Sequence[Row]]
"""Measures some rows with the given options on a device."""


def run_rows(
    benchmark: str,
    description: str | None,
    groups: Mapping[str, Mapping[str, Rows]],
    arguments: Sequence[str] | None,
) -> bool:
    """Measure the rows that the command line names; print and store each; return whether all ran.

    A row that fails prints its error. No row begins after `--minutes`.
    """
    options, makers = _parse(description, groups, arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        print("This benchmark needs a CUDA device, or --tiny.")
        return True
    # Why a step is not captured is part of its row.
    warnings.simplefilter("ignore", UserWarning)
    begin, failed, left = time.perf_counter(), [], []
    for name, make in makers.items():
        since = time.perf_counter()
        if options.minutes is not None and since - begin > options.minutes * 60:
            left.append(name)
            continue
        try:
            rows = list(make(options, device))
            if not options.tiny:
                store(benchmark, rows, device)
            print(*rows, f"      ({time.perf_counter() - since:.0f} s)", sep="\n", flush=True)
        except Exception as error:  # noqa: BLE001 - the other rows can still be measured
            failed.append(name)
            print(f"ERROR {name}: {one_line(error)}", flush=True)
            if not isinstance(error, ImportError):
                traceback.print_exc(limit=-4, file=sys.stdout)
        clear(device)
    for title, names in (("failed", failed), ("no time left for", left)):
        if names:
            print(f"{title}: {' '.join(names)}")
    return not failed and not left


def _parse(
    description: str | None,
    groups: Mapping[str, Mapping[str, Rows]],
    arguments: Sequence[str] | None,
) -> tuple[argparse.Namespace, dict[str, Rows]]:
    """Return the options, and the rows that are named one by one or by their group."""
    every = {name: make for group in groups.values() for name, make in group.items()}
    choices = list(dict.fromkeys([*groups, *every]))
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(choices))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="of a round for each way to train"
    )
    parser.add_argument("--minutes", type=float, help="begin no row after this time")
    parser.add_argument("--tiny", action="store_true", help="small models; nothing is stored")
    parser.add_argument("--float32", action="store_true", help="time float32 and TF32 too (models)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in choices]:
        parser.error(f"unknown: {', '.join(unknown)}. Choose from: {', '.join(choices)}.")
    if not options.names:
        return options, every
    named = [groups.get(name) or {name: every[name]} for name in options.names]
    return options, {name: make for group in named for name, make in group.items()}
