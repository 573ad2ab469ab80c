"""Numerics: small trainings in float32, torch.amp, and mezzo's O1 and O2, compared by their loss.

A training passes if its final loss differs from that of the same seed in float32 by at most the
range of three float32 seeds plus 1 %. For one that does not pass, `mezzo.trace_overflow` must
name the op, and the policy that it suggests must pass.

Run it with `python benchmarks/numerics.py`, or in parts with `--only vae ctc`: stored rows of the
other trainings are kept. `--short` is the form for a CPU, with fewer steps.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from measure import Row, store
from numerics_cases import CASES, Case
from torch import Tensor, nn

import mezzo

AMP = "torch.amp float16"
MEZZO: dict[str, tuple[str, dict[str, Any]]] = {
    "O1 float16": ("O1", {"dtype": "float16"}),
    "O2 float16": ("O2", {"dtype": "float16"}),
    "O1 bfloat16": ("O1", {"dtype": "bfloat16"}),
    "O2 bfloat16": ("O2", {"dtype": "bfloat16", "master": "split"}),
}
"""Level and policy of each run with mezzo."""
FIRST = 50
"""Updates among which at most one may be skipped."""
LAST = 10
"""Steps over which the final loss is averaged."""
FAR = 1000.0
"""Deviation of a loss that is not finite."""
BATCHES = 40
"""Batches of an epoch."""

Precision = str | mezzo.Policy


@dataclass(frozen=True)
class Run:
    """What a training ended with."""

    loss: float
    skips: int = 0
    """Skipped updates among the first `FIRST`."""


@dataclass(frozen=True)
class Outcome(Row):
    """One training in all precisions; the value is mezzo's largest deviation, the bar 1."""

    float32: tuple[float, ...] = ()
    """Final losses of the three seeds."""
    losses: dict[str, float | None] = field(default_factory=dict)
    """Final loss by precision; None where it is not finite."""
    skips: dict[str, int] = field(default_factory=dict)
    """Skipped updates among the first `FIRST`, by precision."""
    found: dict[str, str] = field(default_factory=dict)
    """What `mezzo.trace_overflow` found in those that do not pass, by precision."""
    entries: dict[str, str] = field(default_factory=dict)
    """What it suggested to add to the policy."""
    cured: dict[str, float | None] = field(default_factory=dict)
    """Final loss with the suggested policy; `skips` belongs to it where there is one."""

    @property
    def passes(self) -> bool:
        """Whether mezzo passes, with the suggested policies where it gave some."""
        return self.value <= self.bar and all(
            skips <= 1 for name, skips in self.skips.items() if name != AMP
        )

    def __str__(self) -> str:
        skips = {name: skips for name, skips in self.skips.items() if skips}
        float32 = ", ".join(f"{loss:.4g}" for loss in self.float32)
        verdict = f"{'ok' if self.passes else 'FAILS':5} {self.name:32} {self.value:5.2f}"
        lines = [
            f"{verdict}   float32 {float32}   {_named(self.losses)}",
            *(f"      {name}: {text}" for name, text in self.found.items()),
            f"      with these policies: {_named(self.cured)}" if self.cured else "",
            f"      skipped: {skips}" if skips else "",
        ]
        return "\n".join(line for line in lines if line)


def _named(losses: dict[str, float | None]) -> str:
    return "  ".join(
        f"{name} {'not finite' if loss is None else f'{loss:.4g}'}" for name, loss in losses.items()
    )


def _stored(loss: float) -> float | None:
    # JSON has no NaN.
    return loss if math.isfinite(loss) else None


class Training:
    """One case on a device with the data of one seed."""

    def __init__(self, case: Case, seed: int, device: str, steps: int) -> None:
        self.case, self.seed, self.device = case, seed, device
        random = torch.Generator().manual_seed(seed)
        drawn = [case.data(random) for _ in range(min(BATCHES, steps))]
        self.batches = [_to(drawn[step % len(drawn)], device) for step in range(steps)]

    def model(self) -> nn.Module:
        """Return the model at the start of the training."""
        torch.manual_seed(self.seed)
        return self.case.model().to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a model."""
        return self.case.optimizer(model.parameters(), lr=self.case.rate)

    def float32(self) -> tuple[Run, nn.Module]:
        """Train in float32."""
        model = self.model()
        optimizer = self.optimizer(model)
        losses = []
        for x, y in self.batches:
            loss = _loss(self.case, model, x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return Run(_final(losses)), model

    def amp(self) -> Run:
        """Train with torch.amp in float16, as documented."""
        model = self.model()
        optimizer, scaler = self.optimizer(model), torch.amp.GradScaler(self.device)
        losses, skips = [], 0
        for step, (x, y) in enumerate(self.batches):
            with torch.autocast(self.device, torch.float16):
                loss = _loss(self.case, model, x, y)
            optimizer.zero_grad()
            before = scaler.get_scale()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            skips += step < FIRST and scaler.get_scale() < before
            losses.append(loss.detach())
        return Run(_final(losses), skips)

    def mezzo(self, policy: Precision, **overrides: Any) -> Run:
        """Train with `mezzo.TrainStep`, captured where that is possible."""
        model = self.model()
        step = mezzo.TrainStep(
            model, self.case.loss, self.optimizer(model), policy, channels_last=False, **overrides
        )
        losses, skips = [], 0
        for number, (x, y) in enumerate(self.batches, 1):
            losses.append(step(x, y))
            if number == min(FIRST, len(self.batches)) and step.scaler is not None:
                skips = step.scaler.state().skipped_steps
        return Run(_final(losses), skips)

    def diagnose(self, trained: nn.Module, policy: Precision, **overrides: Any) -> mezzo.Overflow:
        """Return the op that loses precision at the start, or else in a trained model."""

        def trace(model: nn.Module) -> mezzo.Overflow:
            return mezzo.trace_overflow(model, self.batches[0], self.case.loss, policy, **overrides)

        return trace(self.model()) or trace(trained)


def _loss(case: Case, model: nn.Module, x: Any, y: Any) -> Tensor:
    outputs = model(*x) if isinstance(x, tuple) else model(x)
    return case.loss(outputs, *y) if isinstance(y, tuple) else case.loss(outputs, y)


def _to(batch: Any, device: str) -> Any:
    if isinstance(batch, tuple):
        return tuple(_to(one, device) for one in batch)
    return batch.to(device)


def _final(losses: list[Tensor]) -> float:
    return float(torch.stack([loss.float() for loss in losses[-LAST:]]).mean())


def _attempt(train: Callable[[], Run]) -> Run | None:
    """Train; None if this CPU has no kernel of the LSTM for the dtype."""
    try:
        return train()
    except RuntimeError as error:
        if "could not create a primitive descriptor" in str(error):
            return None
        raise


def outcome_of(name: str, device: str, steps: int | None = None) -> Outcome:
    """Run one case in all precisions."""
    case = CASES[name]
    count = case.steps if steps is None else steps
    training = Training(case, 0, device, count)
    first, trained = training.float32()
    others = [Training(case, seed, device, count).float32()[0].loss for seed in (1, 2)]
    float32 = (first.loss, *others)
    tolerance = max(float32) - min(float32) + 0.01 * abs(first.loss)

    def deviation(run: Run) -> float:
        value = abs(run.loss - first.loss) / tolerance
        return value if math.isfinite(value) else FAR

    runs: dict[str, Run] = {}
    cured: dict[str, Run] = {}
    traced: dict[str, mezzo.Overflow] = {}
    if (amp := _attempt(training.amp)) is not None:
        runs[AMP] = amp
    for label, (level, overrides) in MEZZO.items():
        run = _attempt(partial(training.mezzo, level, **overrides))
        if run is None:
            continue
        runs[label] = run
        if deviation(run) > 1.0:
            found = traced[label] = training.diagnose(trained, level, **overrides)
            if found.verified and found.policy is not None:
                cured[label] = training.mezzo(found.policy)
    final = runs | cured
    return Outcome(
        name,
        {},
        max(deviation(run) for label, run in final.items() if label != AMP),
        "of the tolerance",
        1.0,
        float32,
        {label: _stored(run.loss) for label, run in runs.items()},
        {label: run.skips for label, run in final.items()},
        {label: str(found) for label, found in traced.items()},
        {label: found.cure for label, found in traced.items() if found.verified},
        {label: _stored(run.loss) for label, run in cured.items()},
    )


def main() -> None:
    """Train, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE"
    )
    parser.add_argument("--short", action="store_true", help="25 steps each; nothing is stored")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.short:
        print("This benchmark needs a CUDA device, or --short.")
        return
    # Some trainings are meant to fail, and steps that cannot be captured run eagerly.
    warnings.simplefilter("ignore", UserWarning)
    outcomes = []
    for name in options.only:
        begin = time.perf_counter()
        outcome = outcome_of(name, device, 25 if options.short else None)
        outcomes.append(outcome)
        print(f"{outcome}   ({time.perf_counter() - begin:.1f} s)", flush=True)
    failed = [one.name for one in outcomes if not one.passes]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} pass.", *failed, sep="\n  ")
    if not options.short:
        print(f"stored in {store('numerics', list(outcomes), device).name}")


if __name__ == "__main__":
    main()
