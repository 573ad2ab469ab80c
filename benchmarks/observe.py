"""What `mezzo.observe` costs a captured step: all the time, and with samples.

Run it with `python benchmarks/observe.py`, or in parts with `--only mlp gpt`: stored rows of the
other models are kept.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from measure import Row, store, take_turns
from step import CASES, Case, Step, with_mezzo

import mezzo

PLAIN, ALWAYS, SAMPLED = "not observed", "observed", "sampled every 100 steps"
DEFAULT = "sampled by default"
MODELS = ("mlp", "imagenet", "gpt")
SETTLED = 1100
"""Steps before the time is taken on the MLP: the log has every one of the first 1000."""


def observed(
    case: Case, folder: str, *, numerics: bool, every: int | None = 100
) -> tuple[Step, mezzo.Run]:
    """Set up a captured step that is observed, with a log."""
    run, step = with_mezzo(case)
    path = Path(folder) / f"{'sampled' if numerics else 'always'} {every}.jsonl"
    watch = mezzo.observe(step, log=path, every=every, numerics=numerics)
    for _ in range(12):
        run()
    if not step.captured:
        raise SystemExit(f"The observed step was not captured: {step.eager_reason}")
    return run, watch


def rows_of(name: str, rounds: int) -> list[Row]:
    """Measure one model: not observed, observed, and sampled, in turns."""
    case = CASES[name]
    print(case.name, flush=True)
    with TemporaryDirectory() as folder:
        plain, _ = with_mezzo(case)
        always, first = observed(case, folder, numerics=False)
        sampled, second = observed(case, folder, numerics=True)
        for _ in range(SETTLED if name == "mlp" else 0):
            plain(), always(), sampled()
        # One sample in each turn, as in a run.
        calls = 100 if name == "mlp" else case.calls
        times = take_turns(
            {PLAIN: plain, ALWAYS: always}, calls=calls, rounds=rounds, device="cuda"
        )
        few = max(3, rounds // 8)
        times |= {
            f"{kind}, 100 steps": time
            for kind, time in take_turns(
                {PLAIN: plain, SAMPLED: sampled}, calls=100, rounds=few, device="cuda"
            ).items()
        }
        print(first, second.numerics, sep="\n")
        first.stop()
        second.stop()
        rows = [_always_row(name, case, times), _sampled_row(case, times)]
        if name == "mlp":
            rows.append(_default_row(case, plain, folder))
    print(*rows, sep="\n", flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def _always_row(name: str, case: Case, times: dict[str, float]) -> Row:
    if name == "mlp":
        more = times[ALWAYS] - times[PLAIN]
        return Row(f"observe, {case.name}, more per step", times, more, "µs", 2.0)
    ratio = times[ALWAYS] / times[PLAIN]
    return Row(f"observe, {case.name}, always on", times, ratio, "×", 1.01)


def _sampled_row(case: Case, times: dict[str, float]) -> Row:
    ratio = times[f"{SAMPLED}, 100 steps"] / times[f"{PLAIN}, 100 steps"]
    return Row(f"observe, {case.name}, sampled every 100 steps", times, ratio, "×", 1.02)


def _default_row(case: Case, plain: Step, folder: str) -> Row:
    """Measure many steps at a time, of which a few are sampled."""
    default, watch = observed(case, folder, numerics=True, every=None)
    times = take_turns({PLAIN: plain, DEFAULT: default}, calls=30_000, rounds=5, device="cuda")
    print(f"one step in {watch.every} is sampled")
    watch.stop()
    ratio = times[DEFAULT] / times[PLAIN]
    return Row(f"observe, {case.name}, sampled by default", times, ratio, "×", 1.02)


def main() -> None:
    """Measure the chosen models and store the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=41)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device.")
        return
    rows = [row for name in arguments.only for row in rows_of(name, arguments.rounds)]
    print(f"stored in {store('observe', rows, 'cuda')}")


if __name__ == "__main__":
    main()
