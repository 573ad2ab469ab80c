"""The verdict on a comparison: the fastest mode that trains as well as float32, in sentences."""

from __future__ import annotations

import math

from mezzo.comparing.comparison import BASELINE, Comparison, ModeResult
from mezzo.prepare.plan_rows import format_bytes
from mezzo.reporting.verdict import Status, Verdict

INFERENCE = "converted"
"""The mode whose time is that of a forward pass, not of a training step."""
_FASTER = 1.03
"""Below this the times of two modes are the same."""
_ONE_DIGIT = 1.1
"""Ratios from which on one digit after the point is enough."""
_LOSS = 0.02
"""A mode trains as well as float32 if its loss is higher by at most this share of the first one."""
_ACCURACY = 0.02
"""Nor is its accuracy lower by more than this."""
_SAME = 0.01
"""Memory that differs by less is the same."""
_SHOWN = ("torch.amp", "O1", "O2")
"""Modes whose casts and bytes the verdict names."""


def verdict(comparison: Comparison) -> str:
    """Return which mode is the fastest that trains as well as float32, and by how much.

    >>> result = Comparison("mlp", "MLP", "full", "synthetic", "a GPU", "2.13", "0.1.0", 50, 7, (
    ...     ModeResult("float32", milliseconds=6.0, loss=0.5, loss_curve=(2.0, 0.5)),
    ...     ModeResult("O2", "float16", milliseconds=2.0, loss=0.503)))
    >>> verdict(result)
    'O2 in float16 is the fastest mode that trains as well as float32: 3.0 times as fast (2.00 ms a\
 step instead of 6.00). Its loss after 50 steps is 0.503 (float32: 0.5).'
    """
    judged = judge(comparison)
    return " ".join((judged.sentence, *judged.facts))


def judge(comparison: Comparison) -> Verdict:
    """Return the verdict as a sentence and the facts that it rests on."""
    base = comparison.mode(comparison.baseline)
    if base is None or not base.milliseconds:
        return Verdict(
            Status.EMPTY,
            "float32 was not measured, so there is nothing to compare the other modes with.",
            tuple(_interrupted(comparison)),
        )
    if comparison.baseline != BASELINE:
        return _judge_programs(comparison, base)
    others = [
        mode for mode in comparison.modes if mode.mode not in {comparison.baseline, INFERENCE}
    ]
    timed = sorted((mode for mode in others if mode.milliseconds), key=_time)
    good, best = [mode for mode in timed if trains_as_well(mode, base)], fastest_mode(comparison)
    bad = [mode for mode in others if mode.loss is not None and not trains_as_well(mode, base)]
    tail = (*_differences(bad, base), *_interrupted(comparison))
    if best is not None and best is not base:
        facts = (*_memory(best, base), *_training(best, base, comparison.steps), *tail)
        return Verdict(Status.WATCH if bad else Status.GOOD, _fastest(best, base), facts)
    if not timed:
        return Verdict(Status.EMPTY, "No mode but float32 was measured.", tail)
    why = _why_slow(comparison, timed[0]) if _time(timed[0]) >= _time(base) else []
    facts = (*why, *_carries_over(good, base), *tail)
    return Verdict(Status.WATCH, _slower(timed[0], base, comparison.machine), facts)


def _judge_programs(comparison: Comparison, base: ModeResult) -> Verdict:
    """Return the verdict on programs of a document, which also differ in how they train."""
    best = min(comparison.modes, key=_time)
    if best is base:
        return Verdict(Status.WATCH, f"{base.mode} is the fastest program.", ())
    reported = [document for document in comparison.documented if document.mode == best.mode]
    beside = "".join(f"; {document.source}: {document.speedup:g}" for document in reported[:1])
    return Verdict(
        Status.GOOD,
        f"{_name(best)} is the fastest program: {_time(base) / _time(best):.1f} times as fast as"
        f" {base.mode}{beside}.",
        (
            "Losses differ between programs as in the document, whose numbers are in the notes.",
            *_interrupted(comparison),
        ),
    )


def fastest_mode(comparison: Comparison) -> ModeResult | None:
    """Return the fastest mode that trains as well as float32; float32 if none is faster.

    None if float32 was not measured.
    """
    base = comparison.mode(comparison.baseline)
    if base is None or not base.milliseconds:
        return None
    others = [
        mode
        for mode in comparison.modes
        if mode.milliseconds
        and mode.mode != INFERENCE
        and base.milliseconds / mode.milliseconds >= _FASTER
        # Programs of a document also differ in how they train.
        and (comparison.baseline != BASELINE or trains_as_well(mode, base))
    ]
    return min(others, key=_time, default=base)


def trains_as_well(mode: ModeResult, base: ModeResult) -> bool:
    """Return whether loss and accuracy of a mode are not worse than float32's but for rounding."""
    if mode.loss is None or base.loss is None:
        return mode.loss is None and base.loss is None
    if not math.isfinite(mode.loss):
        return False
    tolerance = _LOSS * max(abs(base.loss), abs(base.loss_curve[0]) if base.loss_curve else 0.0)
    if mode.loss - base.loss > tolerance:
        return False
    if mode.accuracy is None or base.accuracy is None:
        return True
    return mode.accuracy >= base.accuracy - _ACCURACY


def _fastest(mode: ModeResult, base: ModeResult) -> str:
    times = f"{_time(mode):.2f} ms a step instead of {_time(base):.2f}"
    return (
        f"{_name(mode)} is the fastest mode that trains as well as float32:"
        f" {_number(_time(base) / _time(mode))} times as fast ({times})."
    )


def _number(value: float) -> str:
    """Return a ratio with one digit, or with two where one would be 1.0.

    >>> _number(3.02), _number(1.034)
    ('3.0', '1.03')
    """
    return f"{value:.1f}" if value >= _ONE_DIGIT else f"{value:.2f}"


def _slower(mode: ModeResult, base: ModeResult, machine: str) -> str:
    ratio = _time(mode) / _time(base)
    if ratio < 1 / _FASTER:
        return (
            f"float32 is the fastest mode on {machine} that can be recommended: the modes that are"
            " faster do not train as well."
        )
    if ratio <= _FASTER:
        return f"float32 and {_name(mode)} take the same time on {machine}."
    return (
        f"float32 is the fastest mode on {machine}; the next, {_name(mode)}, takes"
        f" {_number(ratio)} times as long."
    )


def _why_slow(comparison: Comparison, fastest: ModeResult) -> list[str]:
    if comparison.emulated:
        dtype = fastest.dtype or "16 bits"
        return [f"This device does not compute {dtype} natively ({comparison.emulated})."]
    if fastest.dtype:
        return [
            (
                "16 bits do not pay for this workload here: calling ops and casting takes longer"
                " than faster products save."
            )
        ]
    return []


def _carries_over(good: list[ModeResult], base: ModeResult) -> list[str]:
    """Return the counts that are the same on every device: casts and bytes for backward."""
    parts = [
        f"{mode.mode} {mode.casts:,} casts and {ratio:.2f} ×"
        for mode in good
        if mode.mode in _SHOWN
        and mode.casts is not None
        and (ratio := _ratio(mode.saved_bytes, base.saved_bytes))
    ]
    if not parts:
        return []
    what = "casts of a step and bytes kept for backward against float32"
    return [f"What carries over to a GPU, {what}: {', '.join(parts)}."]


def _memory(mode: ModeResult, base: ModeResult) -> list[str]:
    ratio = _ratio(mode.peak_bytes, base.peak_bytes)
    if ratio is None or mode.peak_bytes is None or base.peak_bytes is None:
        return []
    if abs(ratio - 1) < _SAME:
        return ["It needs as much memory."]
    sizes = f"{format_bytes(mode.peak_bytes)} instead of {format_bytes(base.peak_bytes)}"
    return [f"It needs {ratio:.2f} times the memory ({sizes})."]


def _training(mode: ModeResult, base: ModeResult, steps: int) -> list[str]:
    found = []
    if mode.loss is not None and base.loss is not None:
        found.append(f"loss after {steps:,} steps is {mode.loss:.4g} (float32: {base.loss:.4g})")
    if mode.accuracy is not None and base.accuracy is not None:
        found.append(f"accuracy is {mode.accuracy:.1%} (float32: {base.accuracy:.1%})")
    sentences = [f"Its {', its '.join(found)}."] if found else []
    if mode.skipped:
        sentences.append(
            f"{mode.skipped} of {steps:,} steps {'was' if mode.skipped == 1 else 'were'} skipped"
            " because of non-finite gradients."
        )
    return sentences


def _differences(bad: list[ModeResult], base: ModeResult) -> list[str]:
    if base.loss is None:
        return []
    return [
        f"{_name(mode)} does not train as well as float32: its loss is {mode.loss:.4g} instead of"
        f" {base.loss:.4g}{_and_accuracy(mode, base)}."
        for mode in bad
    ]


def _and_accuracy(mode: ModeResult, base: ModeResult) -> str:
    if mode.accuracy is None or base.accuracy is None:
        return ""
    return f", its accuracy {mode.accuracy:.1%} instead of {base.accuracy:.1%}"


def _interrupted(comparison: Comparison) -> list[str]:
    if comparison.complete:
        return []
    return ["The run was interrupted: these are the numbers up to there."]


def _name(mode: ModeResult) -> str:
    return f"{mode.mode} in {mode.dtype}" if mode.dtype else mode.mode


def _time(mode: ModeResult) -> float:
    return mode.milliseconds or math.inf


def _ratio(one: int | None, other: int | None) -> float | None:
    return one / other if one and other else None
