"""What `Model` shows while it works, as Paddle shows it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

_WIDTH = 30
_UNITS = {"s": 1.0, "ms": 1e-3}
_BAR, _LINES = 1, 2
"""`verbose`: one line that is written over, or a line every few steps."""


class Progress:
    """One pass over data, on standard output."""

    def __init__(self, verbose: int, log_freq: int, steps: int | None) -> None:
        self._verbose, self._log_freq, self._steps = verbose, log_freq, steps
        self._begun = time.perf_counter()

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._verbose:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def show(self, step: int, logs: Mapping[str, Any]) -> None:
        """How far the pass is, counted from 1; the last step always shows."""
        last = step == self._steps
        if self._verbose == _BAR:
            sys.stdout.write(f"\r{self._line(step, logs)}" + ("\n" if last else ""))
            sys.stdout.flush()
        elif self._verbose == _LINES and (last or step % self._log_freq == 0):
            self.say(self._line(step, logs))

    def _line(self, step: int, logs: Mapping[str, Any]) -> str:
        total = "" if self._steps is None else f"/{self._steps}"
        bar = f" [{self._bar(step, self._steps)}]" if self._verbose == _BAR and self._steps else ""
        spent = (time.perf_counter() - self._begun) / step
        unit, size = next(((unit, size) for unit, size in _UNITS.items() if spent >= size), ("us", 1e-6))
        return " - ".join(
            [
                f"step {step:>{len(str(self._steps or 0))}}{total}{bar}",
                *(f"{name}: {_shown(value)}" for name, value in logs.items()),
                f"{spent / size:.0f}{unit}/step",
            ]
        )

    @staticmethod
    def _bar(step: int, steps: int) -> str:
        done = _WIDTH * step // steps
        return ("=" * done + ">" * (done < _WIDTH)).ljust(_WIDTH, ".")


def _shown(value: Any) -> str:
    return " ".join(f"{one:.4f}" for one in (value if isinstance(value, list | tuple) else [value]))
