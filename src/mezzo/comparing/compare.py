"""`compare`: train a workload in several modes, and compare time, memory, loss and casts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import mezzo
from mezzo._dtypes import dtype_name, parse_dtype
from mezzo._errors import PolicyError
from mezzo._hardware import Hardware, hardware
from mezzo.advising.setting_run import free_memory
from mezzo.comparing.comparison import Comparison, ModeResult
from mezzo.comparing.measure import (
    Advance,
    Batches,
    Inference,
    Timed,
    convert_trained,
    time_rounds,
    timed,
    timed_training,
    train,
)
from mezzo.comparing.modes import Mode, Setting, make_training, why_not
from mezzo.comparing.workload import Workload
from mezzo.prepare.rng_state import capture_rng_state, restore_rng_state

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how much of it of how much."""

_FORWARD = "float32 forward pass"


def compare(
    workload: Workload,
    *,
    modes: Sequence[str] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    steps: int | None = None,
    rounds: int = 7,
    progress: Progress | None = None,
) -> Comparison:
    """Train a workload in several modes, and compare time, memory, loss and casts.

    Every mode starts from the same weights and random numbers and gets the same batches. First the
    modes train one after the other, for losses, accuracy, memory and casts; then all are timed in
    turn. A mode that fails gets a note, and the others are measured. Ctrl-C returns what was
    measured so far, with `complete=False`. Random generators are not changed.

    Args:
        workload: What to train.
        modes: Names of `Mode`; None for all. float32 is always among them.
        dtype: The 16-bit dtype; None for the one that the device prefers. Apex's is float16.
        device: The device; None for the accelerator, or else the CPU.
        steps: Steps to train for the losses; None for those of the workload.
        rounds: Rounds of timing; the median counts.
        progress: Called after each step.

    >>> from mezzo.comparing.own_workload import own_workload
    >>> workload = own_workload("mine", torch.nn.Linear(4, 2), torch.ones(8, 4))
    >>> result = compare(workload, modes=["O1"], dtype="bfloat16", device="cpu", steps=2, rounds=1)
    >>> [(one.mode, one.dtype, one.skipped) for one in result.modes]
    [('float32', None, None), ('O1', 'bfloat16', None)]
    """
    facts = hardware(device)
    setting = _setting(workload, facts, dtype, device)
    count = workload.steps if steps is None else steps
    for name, value in (("steps", count), ("rounds", rounds)):
        if value < 1:
            raise PolicyError(f"{name}={value} is too few. Pass 1 or more.")
    run = _Run(setting, _chosen(modes), count, rounds, progress)
    random, complete = capture_rng_state(), False
    with warnings.catch_warnings():
        # Each mode would warn again, about what its note has.
        warnings.simplefilter("ignore")
        try:
            run.train_all()
            run.time_all()
            complete = True
        except KeyboardInterrupt:
            # What was measured so far is the result.
            pass
        finally:
            restore_rng_state(random)
    return run.result(facts, complete=complete)


def _setting(
    workload: Workload,
    facts: Hardware,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
) -> Setting:
    if facts.preferred is None:
        raise PolicyError(
            f"device={str(device)!r} computes no 16-bit dtype: {facts.bfloat16.reason}. Pass"
            " device='cpu', or leave it out."
        )
    half = facts.preferred.dtype if dtype is None else parse_dtype(dtype)
    if not facts.support(half).supported:
        raise PolicyError(
            f"{facts.name} does not compute {dtype_name(half)}: {facts.support(half).reason}. Use"
            f" dtype={dtype_name(facts.preferred.dtype)!r}."
        )
    return Setting(workload, torch.device(facts.device if device is None else device), half)


def _chosen(modes: Sequence[str] | None) -> tuple[Mode, ...]:
    """Return the modes in their order, float32 first."""
    if modes is None:
        return tuple(Mode)
    named = {Mode.parse(mode) for mode in ([modes] if isinstance(modes, str) else modes)}
    return tuple(mode for mode in Mode if mode in named or mode is Mode.FLOAT32)


class _Run:
    """One comparison: what was measured so far, which Ctrl-C leaves valid."""

    def __init__(
        self,
        setting: Setting,
        modes: tuple[Mode, ...],
        steps: int,
        rounds: int,
        progress: Progress | None,
    ) -> None:
        self._setting, self._modes = setting, modes
        self._steps, self._rounds = steps, rounds
        self._progress = progress
        self._batches = Batches(setting)
        self._results: dict[Mode, ModeResult] = {}
        self._timed: dict[str, Timed] = {}
        self._weights: dict[str, Any] = {}
        """The weights that were trained in float32, on the host."""
        self._inference: Inference | None = None

    # -- measure -----------------------------------------------------------------------------------

    def train_all(self) -> None:
        """Train in each mode, one model on the device at a time."""
        for mode in self._modes:
            if note := why_not(mode, self._setting.device):
                self._results[mode] = ModeResult(mode.value, note=note)
                continue
            try:
                self._results[mode] = self._trained(mode)
            except Exception as error:
                # In float32 it is an error of the workload.
                if mode is Mode.FLOAT32 and not isinstance(error, torch.OutOfMemoryError):
                    raise
                self._results[mode] = ModeResult(mode.value, note=f"failed: {one_line(error)}")
            free_memory(self._setting.device)

    def _trained(self, mode: Mode) -> ModeResult:
        if mode is Mode.CONVERTED:
            result, self._inference = convert_trained(
                self._setting, self._batches[0], self._weights
            )
            return result
        advance = self._advance(f"train {self._steps} steps in {mode}", self._steps)
        result, training = train(mode, self._setting, self._batches, self._steps, advance)
        if mode is Mode.FLOAT32 and Mode.CONVERTED in self._modes:
            self._weights = {
                name: weight.cpu() for name, weight in training.model.state_dict().items()
            }
        return result

    def time_all(self) -> None:
        """Build all modes again, which are now on the device together, and time them in turn."""
        device = self._setting.device
        trained = [mode for mode in self._modes if mode in self._results and self._runs(mode)]
        advance = self._advance("warm up", len(trained))
        for mode in trained:
            try:
                self._prepare(mode)
            except Exception as error:  # noqa: BLE001 - the other modes can still be timed
                self._timed[mode.value] = Timed(mode.value, lambda: None, error=error)
                free_memory(device)
            advance()
        runs = list(self._timed.values())
        advance = self._advance(f"time {self._rounds} rounds", self._rounds * len(runs))
        time_rounds(runs, device, self._rounds, advance)

    def _prepare(self, mode: Mode) -> None:
        device = self._setting.device
        if mode is not Mode.CONVERTED:
            training = make_training(mode, self._setting)
            self._timed[mode.value] = timed_training(training, mode.value, self._batches, device)
        elif self._inference is not None:
            self._timed[_FORWARD] = timed(_FORWARD, self._inference.run_float32, device)
            self._timed[mode.value] = timed(mode.value, self._inference.run_converted, device)

    def _runs(self, mode: Mode) -> bool:
        """Return whether a mode was measured, and did not fail."""
        result = self._results[mode]
        return result.loss is not None or result.casts is not None

    def _advance(self, text: str, total: int) -> Advance:
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            if self._progress is not None:
                self._progress(text, done, total)

        if self._progress is not None:
            self._progress(text, 0, total)
        return advance

    # -- result ------------------------------------------------------------------------------------

    def result(self, facts: Hardware, *, complete: bool) -> Comparison:
        """Return what was measured so far."""
        workload, support = self._setting.workload, facts.support(self._setting.dtype)
        return Comparison(
            workload.name,
            workload.title,
            str(workload.preset),
            workload.data,
            facts.name,
            torch.__version__,
            mezzo.__version__,
            self._steps,
            self._rounds,
            tuple(self._finished(mode) for mode in self._modes),
            documented=workload.documented,
            complete=complete,
            emulated=None if support.native else support.reason,
        )

    def _finished(self, mode: Mode) -> ModeResult:
        """Return the result of a mode with its time."""
        result = self._results.get(mode, ModeResult(mode.value, note="not run: interrupted"))
        run = self._timed.get(mode.value)
        if run is None:
            return result
        notes = [result.note] if result.note else []
        base = self._timed.get(_FORWARD)
        if mode is Mode.CONVERTED and base is not None and base.milliseconds:
            notes.append(f"float32 takes {base.milliseconds:.3g} ms")
        if run.error is not None:
            notes.append(f"not timed: {one_line(run.error)}")
        notes += [run.unsteady] if run.unsteady else []
        if not run.milliseconds:
            return replace(result, note="; ".join(notes) or None)
        return replace(
            result,
            milliseconds=run.milliseconds,
            samples_per_second=1000 * self._setting.workload.samples / run.milliseconds,
            note="; ".join(notes) or None,
        )


def one_line(error: Exception) -> str:
    """Return what a note has about an error: its type unless it is one of mezzo's, and its text.

    >>> one_line(ValueError("too long" + chr(10) + "by 3")), one_line(PolicyError("Pass O1."))
    ('ValueError: too long', 'Pass O1.')
    """
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = (str(error).strip().splitlines() or [""])[0]
    return (
        text if isinstance(error, mezzo.MezzoError) and text else f"{type(error).__name__}: {text}"
    )
