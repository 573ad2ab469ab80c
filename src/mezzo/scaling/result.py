"""What a step did, told without waiting for the device until somebody asks."""

from __future__ import annotations

from typing import Any

import torch

from mezzo.scaling.culprit import NOBODY, Culprit


class StepResult:
    """The outcome of `scaler.step(optimizer)`.

    `value` is what the optimizer's own step returned; `skipped` says whether the step was skipped, and only reading it may wait for the device.

    >>> StepResult.known(None, skipped=False)
    StepResult(stepped, value=None)
    """

    __slots__ = ("_culprit", "_found", "_skipped", "value")

    def __init__(self, value: Any, found: torch.Tensor | None, culprit: Culprit | None = None) -> None:
        self.value = value
        self._found = found
        self._skipped: bool | None = None
        self._culprit = culprit

    @classmethod
    def known(cls, value: Any, *, skipped: bool, culprit: Culprit | None = None) -> StepResult:
        """A result that the host knows already."""
        result = cls(value, None, culprit)
        result._skipped = skipped
        return result

    @property
    def found(self) -> torch.Tensor | None:
        """The flag on the device, where the host does not know it: 0 after a good step, else 1."""
        return self._found

    @property
    def skipped(self) -> bool:
        """Whether the gradients were not finite and the parameters were left alone."""
        if self._skipped is None:
            self._skipped = self._found is not None and bool(self._found)
        return self._skipped

    @property
    def first_nonfinite(self) -> str | None:
        """The name of the first parameter whose gradient was not finite; None after a good step, and where nobody looked at single parameters."""
        return (self._culprit or NOBODY).name() if self.skipped else None

    def __repr__(self) -> str:
        told = "not read yet" if self._skipped is None else ("skipped" if self._skipped else "stepped")
        return f"StepResult({told}, value={self.value!r})"
