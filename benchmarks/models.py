"""Whole training steps of real models: torch.amp, torch tuned by hand, and `mezzo.TrainStep`.

Run it with `python benchmarks/models.py`, or in parts with names of models or groups: `python
benchmarks/models.py bert torchvision`. Each row is stored as soon as it is measured; stored rows
of other models are kept. A row that fails prints its error, and the rest goes on. `--float32` times
float32 and TF32 as well.

Groups: transformers, torchvision, own (networks of `networks.py`), muon, lengths (batches of 40
lengths), further (ten models that were chosen last), compiled (transformers with torch.compile).
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from lengths import length_rows
from measure import Row, take_turns
from training import (
    BATCHES,
    MEZZO,
    Contestant,
    Rows,
    batches_of,
    calls_within,
    float32_set_ups,
    one_line,
    run_rows,
    set_ups,
    skips_of,
    with_mezzo,
)
from zoo import GROUPS, Case

import mezzo


@dataclass(frozen=True)
class ModelRow(Row):
    """One model; the value is the largest ratio in parts of its bar, the bar 1."""

    ratios: dict[str, float] = field(default_factory=dict)
    """Set-up of torch → mezzo's time against it."""
    bars: dict[str, float] = field(default_factory=dict)
    """Set-up of torch → the ratio that must not be exceeded."""
    captured: bool = False
    eager_reason: str | None = None
    skipped: int = 0
    """Updates that mezzo skipped."""
    losses: dict[str, float | None] = field(default_factory=dict)
    """Set-up → mean of the last losses after the same number of steps; None if not finite."""
    errors: dict[str, str] = field(default_factory=dict)
    """Set-ups of torch that failed."""

    def __str__(self) -> str:
        ratios = "  ".join(
            f"{ratio:.3f} of {name} (at most {self.bars[name]:g})"
            for name, ratio in self.ratios.items()
        )
        times = "  ".join(f"{name} {time / 1e3:.2f} ms" for name, time in self.times.items())
        losses = "  ".join(
            f"{name} {'not finite' if loss is None else f'{loss:.4f}'}"
            for name, loss in self.losses.items()
        )
        state = "captured" if self.captured else f"eager: {self.eager_reason}"
        lines = [
            f"{'ok' if self.value <= self.bar else 'FAILS':5} {self.name:44} {ratios}   {times}",
            f"      {state}; {self.skipped} skipped; losses {losses}",
            *(f"      {name} failed: {error}" for name, error in self.errors.items()),
        ]
        return "\n".join(lines)


def model_rows(case: Case, options: argparse.Namespace, device: str) -> list[Row]:
    """Measure one case."""
    torch.manual_seed(0)
    original = case.model(options.tiny).to(device).train()
    batches = batches_of(case, device, BATCHES, tiny=options.tiny)
    contestants: dict[str, Contestant] = {}
    errors: dict[str, str] = {}
    compared = {**(float32_set_ups(device) if options.float32 else {}), **set_ups(case)}
    for name, set_up in compared.items():
        try:
            contestant = Contestant(set_up(case, copy.deepcopy(original), device), batches)
            contestant.warm_up(tiny=options.tiny)
        except Exception as error:  # noqa: BLE001 - the others can still be compared
            errors[name] = one_line(error)
        else:
            contestants[name] = contestant
    train, step = with_mezzo(case, original)
    contestants[MEZZO] = Contestant(train, batches)
    contestants[MEZZO].warm_up(tiny=options.tiny)
    calls = min(calls_within(options.seconds, each, device) for each in contestants.values())
    times = take_turns(contestants, calls=calls, rounds=options.rounds, device=device)
    losses = {name: contestant.last_loss() for name, contestant in contestants.items()}
    return [row_of(case, times, step, losses, errors)]


def row_of(
    case: Case,
    times: dict[str, float],
    step: mezzo.TrainStep,
    losses: dict[str, float | None],
    errors: dict[str, str],
) -> ModelRow:
    """Compare mezzo's time with that of torch.amp and with the fastest by hand."""
    ratios = {}
    for name in case.bars:
        # By hand there may be two: with channels_last and without.
        if measured := [times[other] for other in times if other.startswith(name)]:
            ratios[name] = times[MEZZO] / min(measured)
    if not ratios:
        raise RuntimeError(f"Nothing of torch to compare with: {errors}")
    return ModelRow(
        case.name,
        times,
        max(ratio / case.bars[name] for name, ratio in ratios.items()),
        "of the bar",
        1.0,
        ratios,
        case.bars,
        step.captured,
        step.eager_reason,
        skips_of(step),
        losses,
        errors,
    )


def main(arguments: Sequence[str] | None = None) -> bool:
    """Measure, print and store; return whether every row was measured."""
    groups: dict[str, dict[str, Rows]] = {
        group: {name: partial(model_rows, case) for name, case in cases.items()}
        for group, cases in GROUPS.items()
    }
    groups["lengths"] = {"lengths": length_rows}
    # What takes longest comes last.
    groups["compiled"] = groups.pop("compiled")
    return run_rows("models", __doc__, groups, arguments)


if __name__ == "__main__":
    sys.exit(not main())
