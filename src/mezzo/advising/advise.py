"""`mezzo.advise`: time a model at each level and dtype on this machine, and say which to use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo._errors import MezzoError, PolicyError, UnsupportedError
from mezzo._hardware import hardware
from mezzo.advising.advice import (
    Advice,
    OpTime,
    Precision,
    Setting,
    SettingTime,
    best_half,
    choose,
    format_time,
)
from mezzo.advising.gpus import find_gpu
from mezzo.advising.roofline import estimate_times
from mezzo.advising.setting_run import Peak, SettingRun, Workload, free_memory
from mezzo.advising.timing import interleaved_times, time_ops, unsteady
from mezzo.prepare.arguments import Optimizers, unwrapped
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.rng_state import capture_rng_state, restore_rng_state
from mezzo.prepare.sharding import is_sharded_model

_TOP = 10
_SHOWN = 60
"""Characters of an error in the table."""
_FLOAT32 = Setting("O0", Precision.FLOAT32)
_LEVELS = ("O1", "O2")


def advise(
    model: nn.Module,
    sample: Any,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Optimizers | None = None,
    *,
    levels: Sequence[str] = _LEVELS,
    gpu: str | None = None,
    rounds: int = 7,
    budget: float = 10.0,
    **overrides: Any,
) -> Advice:
    """Time a model at each level and dtype on this machine, and say which to use.

    With a loss function or an optimizer, whole training steps are timed, otherwise forward passes.
    On CUDA each setting is timed eagerly and captured as a CUDA graph, and TF32 too. Each runs on a
    copy of the model, in turn with float32. The model, the optimizer and the random generators are
    not changed. A setting that does not fit into memory is reported, and the others are timed.

    Args:
        model: The model, not decorated, on the device to time.
        sample: Inputs of the model, as `TrainStep` takes them; with `loss_fn` `(inputs, target)`.
        loss_fn: A function of the model's output and the target. None if the model computes its
            loss itself, and for inference.
        optimizer: The optimizer of the model, or a list of them. None trains with AdamW if there is
            a `loss_fn`.
        levels: The levels to time, besides float32.
        gpu: Name of a GPU, such as `"H100"`: times are computed from its data sheet and the sizes
            of the model's tensors, not measured.
        rounds: Timed calls of each setting; the median counts.
        budget: Seconds for each setting: there are fewer rounds if they would take longer. A level
            is left out if a lower one in the same dtype takes longer and is slower than float32.
        **overrides: Fields of the policies to change, such as `keep_full=`.

    >>> import mezzo
    >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> advice = mezzo.advise(model, torch.ones(8, 16), gpu="H100")
    >>> advice.switch_off, advice.line
    (True, 'model = mezzo.EvalStep(model.eval(), "O0")')
    """
    workload = _read(model, sample, loss_fn, optimizer, overrides)
    chosen_levels = _checked_levels(levels)
    if gpu is not None:
        return _estimated(workload, chosen_levels, gpu)
    random = capture_rng_state()
    with warnings.catch_warnings():
        # Each setting would warn again, about what the table shows.
        warnings.simplefilter("ignore")
        try:
            settings = list(_settings(workload.device, chosen_levels))
            timer = _Timer(workload, rounds, budget)
            times = timer.time(settings)
            best = choose(times)
            compared = _compared(times, best)
            slow = any((timed.seconds or 0.0) * _TOP > budget for timed in times)
            ops = _time_ops(workload, compared, runs=1 if slow else 3)
        finally:
            restore_rng_state(random)
    name = hardware(workload.device).name
    line = _line(workload, best.setting)
    return Advice(name, workload.training, times, best, line, ops, compared, unsteady=timer.caveat)


def _settings(device: torch.device, levels: Sequence[str]) -> Iterator[Setting]:
    """Yield the settings to time, eager float32 first."""
    support = hardware(device)
    dtypes = [dtype for dtype in reversed(HALF_DTYPES) if support.support(dtype).supported]
    precisions = [Precision(dtype_name(dtype)) for dtype in dtypes]
    yield _FLOAT32
    is_cuda = device.type == "cuda"
    captures = (False, True) if is_cuda else (False,)
    if is_cuda:
        yield Setting("O0", Precision.FLOAT32, captured=True)
        # Otherwise float32 computes its products in TF32 already.
        if torch.get_float32_matmul_precision() == "highest":
            yield from (Setting("O0", Precision.TF32, captured=captured) for captured in captures)
    for level in levels:
        for precision in precisions:
            yield from (Setting(level, precision, captured=captured) for captured in captures)


class _Timer:
    """Times settings one by one, each in turn with float32, of which it keeps a copy."""

    def __init__(self, workload: Workload, rounds: int, budget: float) -> None:
        self._workload, self._rounds, self._budget = workload, rounds, budget
        self._baseline: SettingRun | None = None
        self.caveat = ""
        """What to say of the times if rounds of one setting differ a lot."""

    def time(self, settings: Sequence[Setting]) -> tuple[SettingTime, ...]:
        """Return the time of each setting; the first is eager float32."""
        self._baseline, first = _build(self._workload, settings[0])
        if self._baseline is not None:
            (seconds,) = self._medians([self._baseline])
            first = SettingTime(settings[0], seconds, 1.0, first.memory)
        times = [first]
        for setting in settings[1:]:
            problem = self._too_slow(times, setting)
            times.append(
                SettingTime(setting, problem=problem) if problem else self._timed(setting, first)
            )
            free_memory(self._workload.device)
        return tuple(times)

    def _timed(self, setting: Setting, first: SettingTime) -> SettingTime:
        run, built = _build(self._workload, setting)
        if run is None and built.problem == _OUT_OF_MEMORY and self._baseline is not None:
            # It may fit alone.
            self._baseline = None
            free_memory(self._workload.device)
            run, built = _build(self._workload, setting)
        if run is None:
            return built
        if self._baseline is None:
            (seconds,) = self._medians([run])
            before = first.seconds
        else:
            before, seconds = self._medians([self._baseline, run])
        gain = None if before is None else before / seconds
        # Relative to the float32 calls beside it: the load of the machine may have changed since.
        shown = seconds if gain is None or first.seconds is None else first.seconds / gain
        return SettingTime(setting, shown, gain, built.memory)

    def _medians(self, runs: Sequence[SettingRun]) -> list[float]:
        times = interleaved_times(runs, self._workload.device, self._rounds, self._budget)
        for run, seconds in zip(runs, times, strict=True):
            if found := unsteady(seconds):
                low, high = map(format_time, found)
                self.caveat = (
                    f"Times are unsteady: rounds of {run.setting} took from {low} to {high}."
                    " Something else uses this machine; advise again when it is idle."
                )
        return [median(seconds) for seconds in times]

    def _too_slow(self, times: Sequence[SettingTime], setting: Setting) -> str:
        """Return why a setting is not worth the time to measure it; empty if it is."""
        for timed in times:
            is_alike = timed.setting.precision is setting.precision and timed.setting.level != "O0"
            if is_alike and (timed.gain or 1.0) < 1.0 and (timed.seconds or 0.0) > self._budget:
                return f"not timed: {timed.setting} is {timed.gain:.2f}× as fast as float32"
        return ""


_OUT_OF_MEMORY = "out of memory"


def _build(workload: Workload, setting: Setting) -> tuple[SettingRun | None, SettingTime]:
    """Return a run of a setting, and its memory; or None, and the problem."""
    peak = Peak(workload.device)
    try:
        run = SettingRun(workload, setting)
    except torch.OutOfMemoryError:
        return None, SettingTime(setting, problem=_OUT_OF_MEMORY)
    except (MezzoError, RuntimeError) as error:
        # In float32 it is the user's error; another setting may lack a kernel, or a capture fail.
        if setting == _FLOAT32:
            raise
        return None, SettingTime(setting, problem=_first_sentence(error))
    return run, SettingTime(setting, memory=peak.read(run.state_bytes))


def _first_sentence(error: Exception) -> str:
    text = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0]
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _compared(times: Sequence[SettingTime], best: SettingTime) -> Setting:
    """Return the setting whose ops are shown: if the best is float32, why 16 bits are not."""
    half = best_half(times) if best.setting.precision is Precision.FLOAT32 else None
    return best.setting if half is None else half.setting


def _time_ops(workload: Workload, best: Setting, runs: int) -> tuple[OpTime, ...]:
    """Return the times of the ops that take most of the time, eagerly, in float32 and the best."""
    tables: list[dict[str, float]] = []
    for setting in (_FLOAT32, Setting(best.level, best.precision)):
        run, _ = _build(workload, setting)
        tables.append({} if run is None else time_ops(run, workload.device, runs))
        del run
        free_memory(workload.device)
    before, after = tables
    largest = sorted(
        {*before, *after}, key=lambda op: -max(before.get(op, 0.0), after.get(op, 0.0))
    )
    return tuple(OpTime(op, before.get(op, 0.0), after.get(op, 0.0)) for op in largest[:_TOP])


def _estimated(workload: Workload, levels: Sequence[str], name: str) -> Advice:
    gpu = find_gpu(name)
    times, tables, note = estimate_times(workload, levels, gpu)
    best = choose(times)
    compared = _compared(times, best)
    before, after = tables[times[0].setting], tables[compared]
    largest = sorted(before, key=lambda op: -before[op])[:_TOP]
    ops = tuple(OpTime(op, before[op], after.get(op, 0.0)) for op in largest)
    line = _line(workload, best.setting)
    return Advice(gpu.name, workload.training, times, best, line, ops, compared, note)


# -- arguments and the line to paste ---------------------------------------------------------------


def _read(
    model: nn.Module,
    sample: Any,
    loss_fn: Callable[..., Any] | None,
    optimizer: Optimizers | None,
    overrides: dict[str, Any],
) -> Workload:
    if not isinstance(model, nn.Module):
        raise PolicyError(f"advise takes a model first, got {type(model).__name__}.")
    if is_sharded_model((unwrapped(model),)):
        raise UnsupportedError(
            "The model is sharded by FSDP2 or tensor parallelism, and copies of it are compared."
            " Advise before fully_shard; mezzo.estimate(model, ranks=...) tells the memory of"
            " shards."
        )
    if any(decoration_of(module) is not None for module in unwrapped(model).modules()):
        raise PolicyError(
            "The model is decorated, and each level is applied to a copy of the plain model. Call"
            " mezzo.undecorate(model) first, or advise before decorate."
        )
    if next(model.parameters(), None) is None:
        raise PolicyError(f"{type(model).__name__} has no parameters: there is nothing to compare.")
    half = next(
        (parameter.dtype for parameter in model.parameters() if parameter.dtype in HALF_DTYPES),
        None,
    )
    if half is not None:
        raise PolicyError(
            f"The model has {dtype_name(half)} parameters, and each level is compared with float32."
            " Pass a float32 model: mezzo.advise(model.float(), ...)."
        )
    is_pair = isinstance(sample, tuple | list) and len(sample) == 2
    if loss_fn is not None and not is_pair:
        raise PolicyError(
            f"With loss_fn the sample is (inputs, target), got {type(sample).__name__}. Pass"
            " sample=(x, y), or leave out loss_fn."
        )
    training = loss_fn is not None or optimizer is not None
    return Workload(unwrapped(model), sample, loss_fn, optimizer, training, overrides)


def _checked_levels(levels: Sequence[str]) -> tuple[str, ...]:
    chosen = (levels,) if isinstance(levels, str) else tuple(levels)
    unknown = [level for level in chosen if level not in _LEVELS]
    if unknown:
        raise PolicyError(f"levels={unknown[0]!r}: choose from {', '.join(map(repr, _LEVELS))}.")
    return chosen


def _line(workload: Workload, setting: Setting) -> str:
    """Return the line of code that uses a setting."""
    if setting.precision is Precision.TF32 and not setting.captured:
        return 'torch.set_float32_matmul_precision("high")'
    dtype = f', dtype="{setting.precision.value}"' if setting.level != "O0" else ""
    is_eager = workload.device.type == "cuda" and not setting.captured
    ending = f'"{setting.level}"{dtype}{", capture=False" if is_eager else ""})'
    if workload.training:
        loss = "None" if workload.loss_fn is None else "loss_fn"
        line = f"step = mezzo.TrainStep(model, {loss}, optimizer, {ending}"
    else:
        line = f"model = mezzo.EvalStep(model.eval(), {ending}"
    if setting.precision is Precision.TF32:
        line = f'torch.set_float32_matmul_precision("high")\n{line}'
    return line
