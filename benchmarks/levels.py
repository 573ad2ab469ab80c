"""O2 against O1 in float16: time, memory of activations, and updates skipped at the start.

Run it with `python benchmarks/levels.py`, or in parts with names of rows or groups: `python
benchmarks/levels.py captured skips`. Each row is stored as soon as it is measured; other stored
rows are kept. A row that fails prints its error, and the rest goes on.

Groups: captured and eager (time of a step), memory (peak of a forward and backward pass), skips
(among the first 30 updates from random weights).
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from measure import Row, take_turns
from torch import nn
from training import (
    BATCHES,
    Contestant,
    batches_of,
    calls_within,
    clear,
    loss_of,
    run_rows,
    skips_of,
    with_mezzo,
)
from zoo import (
    MLP,
    MNASNET,
    POST_NORM,
    POST_NORM_WITHOUT_DROPOUT,
    SWIN_V2,
    TORCHVISION,
    TRANSFORMERS,
    WAV2VEC2,
    Batch,
    Case,
)

import mezzo

LEVELS = ("O1", "O2")
UPDATES = 30
"""Updates among which skips are counted."""


@dataclass(frozen=True)
class SkipRow(Row):
    """Updates skipped at O2, with those at O1 as the bar."""

    losses: dict[str, float | None] = field(default_factory=dict)
    """Level → mean of the last losses; None if it is not finite."""

    def __str__(self) -> str:
        losses = ", ".join(
            f"{level} {'not finite' if loss is None else f'{loss:.4f}'}"
            for level, loss in self.losses.items()
        )
        return f"{super().__str__()}losses {losses}"


def _start(case: Case, device: str, *, tiny: bool) -> tuple[nn.Module, list[Batch]]:
    """Return the model before training, and its batches."""
    torch.manual_seed(0)
    model = case.model(tiny).to(device).train()
    return model, batches_of(case, device, BATCHES, tiny=tiny)


def time_rows(
    case: Case,
    bar: float,
    capture: str | bool,  # noqa: FBT001 - as TrainStep has it
    options: argparse.Namespace,
    device: str,
) -> list[Row]:
    """Measure the step of a case at both levels."""
    model, batches = _start(case, device, tiny=options.tiny)
    contestants = {}
    for level in LEVELS:
        train, step = with_mezzo(case, copy.deepcopy(model), level, capture=capture)
        contestants[level] = Contestant(train, batches)
        contestants[level].warm_up(tiny=options.tiny)
        if capture and not step.captured:
            print(f"      {level} is eager: {step.eager_reason}")
    calls = min(calls_within(options.seconds, each, device) for each in contestants.values())
    times = take_turns(contestants, calls=calls, rounds=options.rounds, device=device)
    kind = "captured" if capture else "eager"
    name = f"{case.name}, {kind}: O2 against O1"
    return [Row(name, times, times["O2"] / times["O1"], "×", bar)]


def memory_rows(case: Case, bar: float, options: argparse.Namespace, device: str) -> list[Row]:
    """Measure the peak of the activations of a case at both levels, eagerly.

    Gradients exist before, so that they are no part of it.
    """
    peaks = {level: _peak(case, level, device, tiny=options.tiny) for level in LEVELS}
    sizes = ", ".join(f"{level} {peak / 1e6:.0f} MB" for level, peak in peaks.items())
    print(f"      peak of activations: {sizes}")
    # On a CPU there is nothing to measure.
    value = peaks["O2"] / peaks["O1"] if peaks["O1"] else 0.0
    return [Row(f"{case.name}, activations: O2 against O1", {}, value, "×", bar)]


def _peak(case: Case, level: str, device: str, *, tiny: bool) -> int:
    model, batches = _start(case, device, tiny=tiny)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    mezzo.decorate(model, optimizer, level, dtype="float16")

    def forward_and_backward() -> None:
        loss_of(case, model, batches[0]).backward()

    for _ in range(2):
        forward_and_backward()
        optimizer.zero_grad(set_to_none=False)
    if device != "cuda":
        return 0
    clear(device)
    before = torch.cuda.memory_allocated()
    forward_and_backward()
    return torch.cuda.max_memory_allocated() - before


def skip_rows(case: Case, options: argparse.Namespace, device: str) -> list[Row]:
    """Count the updates that are skipped at the start at both levels."""
    model, batches = _start(case, device, tiny=options.tiny)
    updates = 6 if options.tiny else UPDATES
    skips, losses = {}, {}
    for level in LEVELS:
        train, step = with_mezzo(case, copy.deepcopy(model), level)
        contestant = Contestant(train, batches)
        contestant.steps(updates)
        skips[level], losses[level] = skips_of(step), contestant.last_loss()
    name = f"{case.name}: skips of {updates} at O2, at O1"
    return [SkipRow(name, {}, float(skips["O2"]), "", float(skips["O1"]), losses)]


GROUPS = {
    "captured": {
        "bert": partial(time_rows, TRANSFORMERS["bert"], 0.92, "auto"),
        "convnext": partial(time_rows, TORCHVISION["convnext"], 1.0, "auto"),
        "vit": partial(time_rows, TORCHVISION["vit"], 1.0, "auto"),
        "swin": partial(time_rows, TORCHVISION["swin"], 1.0, "auto"),
    },
    "eager": {
        "llama-eager": partial(time_rows, TRANSFORMERS["llama"], 1.02, False),
        "mlp-eager": partial(time_rows, MLP, 1.02, False),
    },
    "memory": {
        "bert-memory": partial(memory_rows, TRANSFORMERS["bert"], 0.8),
        "post-norm-memory": partial(memory_rows, POST_NORM, 0.8),
        "post-norm-no-dropout-memory": partial(memory_rows, POST_NORM_WITHOUT_DROPOUT, 0.8),
    },
    "skips": {
        "mnasnet-skips": partial(skip_rows, MNASNET),
        "swin-v2-skips": partial(skip_rows, SWIN_V2),
        "t5-skips": partial(skip_rows, TRANSFORMERS["t5"]),
        "llama-skips": partial(skip_rows, TRANSFORMERS["llama"]),
        "wav2vec2-skips": partial(skip_rows, WAV2VEC2),
    },
}


def main(arguments: Sequence[str] | None = None) -> bool:
    """Measure, print and store; return whether every row was measured."""
    return run_rows("levels", __doc__, GROUPS, arguments)


if __name__ == "__main__":
    sys.exit(not main())
