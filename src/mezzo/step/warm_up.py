"""Count the calls that warm up a step, and decide whether it can be captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

from mezzo.scaling import captured_scaler
from mezzo.step.executor import StepExecutor
from mezzo.step.options import AccumulationPhase

_CALLS = 3
"""Real calls before the first capture, which create optimizer states, tables and compiled kernels.
At least one of them has the inputs that are captured: inputs seen only once are not captured."""
_WRAPPED_CALLS = 11
"""The same for DistributedDataParallel, which arranges its buckets and times ten calls first."""


class NumberedModes(NamedTuple):
    """Modes of modules and parameters, with a small number that is fast to hash."""

    modes: Hashable
    number: int


class WarmUp:
    """The calls so far by modes and phase, of all kinds of inputs."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self.modes = NumberedModes(None, 0)
        """Modes of the current call."""
        self._numbers: dict[Hashable, int] = {}
        self._needed = _WRAPPED_CALLS if executor.components.ddp else _CALLS
        self._calls: Counter[tuple[int, AccumulationPhase]] = Counter()

    def select(self, modes: Hashable) -> bool:
        """Use the modes of the next call; return whether they have changed, as they rarely do."""
        if modes == self.modes.modes:
            return False
        self.modes = NumberedModes(modes, self._numbers.setdefault(modes, len(self._numbers)))
        return True

    def count_call(self, phase: AccumulationPhase) -> None:
        """Count a call, unless it has yet to find the buffers that the models write."""
        if self._executor.buffers.knows(self.modes.modes):
            self._calls[self.modes.number, phase] += 1

    def is_ready(self, phase: AccumulationPhase) -> bool:
        """Return whether a capture has what it needs.

        That is warm-up calls, known buffers, a loss scale past its warm-up and, if calls
        accumulate, gradients at fixed addresses, which this allocates.
        """
        executor, scaler = self._executor, self._executor.components.scaler
        if (
            self._calls[self.modes.number, phase] < self._needed
            or not executor.buffers.knows(self.modes.modes)
            or (scaler is not None and not captured_scaler.is_warmed_up(scaler))
        ):
            return False
        if executor.options.accumulate > 1 and not executor.static_gradients.exist:
            return phase.first and executor.static_gradients.allocate()
        return True

    def clear(self) -> None:
        """Start anew: what the calls have created may be gone."""
        self._calls.clear()
