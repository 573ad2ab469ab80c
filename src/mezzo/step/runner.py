"""How the calls of a step are run: eagerly, or as captured programs where a device can replay them."""

from __future__ import annotations

import traceback
import warnings
from typing import Any, Protocol

import torch

from mezzo import _events
from mezzo._errors import UnsupportedError
from mezzo.optim.bound import bound_of
from mezzo.optim.fused import FusedBound
from mezzo.scaling import kernels, replay
from mezzo.step.buffers import mode_of
from mezzo.step.engine import Engine, Phase
from mezzo.step.hostreads import users_line
from mezzo.step.inputs import copies, said
from mezzo.step.parts import Parts
from mezzo.step.words import Capture


class Runner(Protocol):
    """Runs the calls of a step."""

    reason: str | None
    """Why calls run eagerly, where they were to be captured."""

    @property
    def captured(self) -> bool:
        """Whether programs are replayed by now."""

    def __call__(self, arguments: tuple[Any, ...], words: dict[str, Any], phase: Phase) -> Any:
        """One call; what comes back is the caller's own."""

    def flush(self, calls: int) -> None:
        """Update from fewer calls than usual."""

    def forget(self) -> None:
        """Everything that programs stand on may have changed."""

    def first_nonfinite(self) -> str | None:
        """Return the name of the parameter with the last non-finite gradient, if it is known. This synchronizes."""


class EagerRunner:
    """Runs everything as it is written."""

    captured = False

    def __init__(self, engine: Engine, reason: str | None = None) -> None:
        self.reason = reason
        self._engine = engine
        self._modules = [module for model in engine.parts.models for module in model.modules()]
        self._parameters = [parameter for model in engine.parts.models for parameter in model.parameters()]

    def __call__(self, arguments: tuple[Any, ...], words: dict[str, Any], phase: Phase) -> Any:
        """One call."""
        mode = None if self._engine.parts.scaler is None else mode_of(self._modules, self._parameters)
        arguments, words = self._engine.place((arguments, words))
        return copies(self._engine.run(arguments, words, phase, mode))

    def flush(self, calls: int) -> None:
        """Update from fewer calls than usual."""
        self._engine.flush(calls)

    def forget(self) -> None:
        """Nothing is kept."""

    def first_nonfinite(self) -> str | None:
        """Return the name of the first parameter with a non-finite gradient in the last update."""
        return first_nonfinite(self._engine)


def first_nonfinite(engine: Engine) -> str | None:
    """Return the name of the first parameter with a non-finite gradient in the last eager update. This synchronizes."""
    names = (result.first_nonfinite for result in engine.results if result is not None)
    return next((name for name in names if name is not None), None)


def refusal(parts: Parts) -> str | None:
    """Why the steps of these parts cannot be captured, as far as can be said before one ran."""
    if parts.device.type != "cuda":
        return f"the model is on {parts.device.type}, which captures nothing"
    if len({parameter.device for model in parts.models for parameter in model.parameters()}) > 1:
        return "the parameters live on several devices"
    if not kernels.has_kernel(parts.device):
        return "Triton is not installed, and the fused steps need it"
    for optimizer in parts.optimizers:
        if not isinstance(bound_of(optimizer), FusedBound):
            return f"{type(optimizer).__name__} has no fused step, and its own decides on the host"
    return None if parts.scaler is None else replay.refusal(parts.scaler)


def runner_for(engine: Engine, capture: Capture) -> Runner:
    """The runner that was asked for, or that is possible."""
    if capture is Capture.OFF:
        return EagerRunner(engine)
    reason = refusal(engine.parts)
    if reason is None:
        from mezzo.step.capture import CapturingRunner  # noqa: PLC0415 - only where there is a CUDA device

        return CapturingRunner(engine, capture)
    say_not_captured(reason, capture, quietly=engine.parts.device.type != "cuda")
    return EagerRunner(engine, reason)


def first_words(error: BaseException) -> str:
    """What went wrong first, and in which line: the end of a capture that failed raises too."""
    while error.__context__ is not None:
        error = error.__context__
    stack = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}" + (f", in {users_line(stack)}" if stack else "")


def say_not_captured(reason: str, capture: Capture, *, quietly: bool = False) -> None:
    """Tell that steps run eagerly; an error where they must not. On a CPU nobody expects otherwise."""
    if capture is Capture.ON:
        raise UnsupportedError(f"capture=True, but the step cannot be captured: {reason}. Change that, or use capture='auto'.")
    if _events.listening():
        _events.emit(_events.StepNotCaptured(reason))
    if not quietly:
        warnings.warn(f"The step runs eagerly, for it cannot be captured: {reason}. capture=False says that this is meant.", UserWarning, stacklevel=5)


def say_full(leaves: list[torch.Tensor], kinds: int) -> bool:
    """Tell that inputs are of one kind too many; true, so that it is told once."""
    warnings.warn(
        f"{kinds} kinds of inputs are captured, and inputs of {said(leaves)} are another: they run eagerly. Pad inputs to fewer shapes.",
        UserWarning,
        stacklevel=6,
    )
    return True
