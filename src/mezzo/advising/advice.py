"""The result of `mezzo.advise`: times of each level and dtype, which to use, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mezzo.prepare.plan_rows import format_bytes

_USEFUL = 1.05
"""Gain in time from which a setting is worth a change."""
_EQUAL = 0.97
"""Part of the best gain from which two settings count as equally fast."""
_SAVES = 0.8
"""Part of the memory below which a setting is worth a remark for its memory alone."""


class Precision(StrEnum):
    """A precision that is timed."""

    FLOAT32 = "float32"
    TF32 = "TF32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True)
class Setting:
    """A level with a precision, eager or captured as a CUDA graph."""

    level: str
    """`O0`, `O1` or `O2`."""
    precision: Precision
    captured: bool = False

    def __str__(self) -> str:
        name = self.precision.value
        text = name if self.level == "O0" else f"{self.level} {name}"
        return f"{text}, captured" if self.captured else text


@dataclass(frozen=True)
class SettingTime:
    """Time and memory of one call of a setting."""

    setting: Setting
    seconds: float | None = None
    """Median time of a call; None if it did not run."""
    gain: float | None = None
    """Time of the eager float32 call, divided by this one; None if one of them did not run."""
    memory: int | None = None
    """Bytes: the peak on a GPU, parameters, gradients and optimizer states elsewhere."""
    problem: str = ""
    """Why it did not run, such as `out of memory`; empty if it did."""


@dataclass(frozen=True)
class OpTime:
    """Time of one op in a call, in float32 and in the setting that is advised."""

    op: str
    """ATen's name."""
    before: float
    """Seconds in float32."""
    after: float
    """Seconds in the other setting."""


@dataclass(frozen=True)
class Advice:
    """Which level and dtype to use for a model on a device, with the times; print it."""

    device: str
    """The name of the device."""
    training: bool
    """Whether a call is a training step; otherwise a forward pass."""
    times: tuple[SettingTime, ...]
    """All settings, float32 first."""
    chosen: SettingTime
    """The setting that is advised."""
    line: str
    """The line to paste."""
    ops: tuple[OpTime, ...] = ()
    """The ten ops that take most of the time in float32, or in the setting compared with it."""
    compared: Setting | None = None
    """The setting of the ops: the advised one, or the best in 16 bits if that is float32."""
    computed: str = ""
    """How times were computed; empty if they were measured."""
    unsteady: str = ""
    """Which times differ a lot between rounds, so that they may mislead; empty if none do."""

    @property
    def baseline(self) -> SettingTime:
        """The eager float32 call, which gains are relative to."""
        return self.times[0]

    @property
    def switch_off(self) -> bool:
        """Whether the advice is to use no mixed precision."""
        return self.chosen.setting.precision is Precision.FLOAT32

    @property
    def verdict(self) -> str:
        """The advice in a sentence."""
        what = "a training step" if self.training else "a forward pass"
        how = " (computed, not measured)" if self.computed else ""
        if self.chosen.seconds is None:
            return f"No setting runs on {self.device}: {self.chosen.problem}. Use smaller batches."
        if self.switch_off:
            best = best_half(self.times)
            seen = "" if best is None else f": {best.setting} is {_times(best.gain)} float32"
            capture = f" Use {self.chosen.setting}." if self.chosen.setting.captured else ""
            return (
                f"Switch it off: no 16-bit setting makes {what} faster on"
                f" {self.device}{seen}{how}.{capture}{_memory_remark(self)}"
            )
        gain = "the only kind that runs" if self.chosen.gain is None else _times(self.chosen.gain)
        return (
            f"Use {self.chosen.setting}: {what} on {self.device} is {gain}"
            f"{' float32' if self.chosen.gain else ''}{_saved(self)}{how}."
        )

    def __str__(self) -> str:
        parts = [self.verdict, f"    {self.line}".replace("\n", "\n    "), self._table()]
        if self.ops:
            parts.append(self._op_table())
        return "\n\n".join([*parts, *filter(None, (self.unsteady, self.computed))])

    def _table(self) -> str:
        rows = [("setting", "time", "gain", "memory")]
        for timed in self.times:
            mark = "→ " if timed is self.chosen else "  "
            rows.append(
                (
                    f"{mark}{timed.setting}",
                    timed.problem or format_time(timed.seconds),
                    "" if timed.gain is None else f"{timed.gain:.2f}×",
                    "" if timed.memory is None else format_bytes(timed.memory),
                )
            )
        return _aligned([(f"  {rows[0][0]}", *rows[0][1:]), *rows[1:]])

    def _op_table(self) -> str:
        rows = [("  op", "float32", str(self.compared), "gain")]
        for op in self.ops:
            gain = f"{op.before / op.after:.2f}×" if op.before and op.after else ""
            rows.append((f"  {op.op}", format_time(op.before), format_time(op.after), gain))
        return _aligned(rows)


def choose(times: Sequence[SettingTime]) -> SettingTime:
    """Return the setting to use: the fastest by a margin, and float32 if none is.

    >>> def timed(level, precision, gain):
    ...     return SettingTime(Setting(level, precision), 1 / gain, gain)
    >>> times = [timed("O0", Precision.FLOAT32, 1.0), timed("O1", Precision.BFLOAT16, 1.9)]
    >>> str(choose(times).setting), str(choose([times[0]]).setting)
    ('O1 bfloat16', 'float32')
    """
    ran = [timed for timed in times if timed.seconds is not None]
    if times[0].seconds is None:
        return min(ran, key=lambda timed: timed.seconds or 0.0, default=times[0])
    fastest = _fastest(ran)
    # 16 bits lose digits: they must be faster than what float32 and TF32 can do.
    full = _fastest([timed for timed in ran if not _is_half(timed)])
    best = fastest if _gain(fastest) >= _USEFUL * _gain(full) else full
    return best if _gain(best) >= _USEFUL else times[0]


def _fastest(times: Sequence[SettingTime]) -> SettingTime:
    """Return the fastest setting; of those that are as fast within noise, the preferred one."""
    most = max(map(_gain, times))
    return min((timed for timed in times if _gain(timed) >= _EQUAL * most), key=_preference)


def _gain(time: SettingTime) -> float:
    return time.gain or 0.0


def _is_half(time: SettingTime) -> bool:
    return time.setting.precision in (Precision.BFLOAT16, Precision.FLOAT16)


def best_half(times: Sequence[SettingTime]) -> SettingTime | None:
    """Return the fastest 16-bit setting; None if none ran."""
    ran = [timed for timed in times if timed.gain and _is_half(timed)]
    return max(ran, key=lambda timed: timed.gain or 0.0, default=None)


def _preference(timed: SettingTime) -> tuple[int, float, bool]:
    """Order equally fast settings: bfloat16 needs no scaler, then less memory, then eager."""
    order = [Precision.FLOAT32, Precision.TF32, Precision.BFLOAT16, Precision.FLOAT16]
    return order.index(timed.setting.precision), timed.memory or 0, timed.setting.captured


def _times(gain: float | None) -> str:
    ratio = gain or 1.0
    return f"{ratio:.2f}× as fast as"


def _saved(advice: Advice) -> str:
    before, after = advice.baseline.memory, advice.chosen.memory
    if not before or not after or f"{after / before:.2f}" == "1.00":
        return ""
    return f", with {after / before:.2f} of the memory"


def _memory_remark(advice: Advice) -> str:
    before = advice.baseline.memory
    smaller = [timed for timed in advice.times if timed.memory and before and _is_half(timed)]
    least = min(smaller, key=lambda timed: timed.memory or 0, default=None)
    if least is None or not before or (least.memory or 0) > _SAVES * before:
        return ""
    return (
        f" {least.setting} needs {(least.memory or 0) / before:.2f} of the memory, if that is what"
        " you need."
    )


def format_time(seconds: float | None) -> str:
    """Return a time for a table.

    >>> format_time(0.01234), format_time(0.0000123)
    ('12.34 ms', '12.3 µs')
    """
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
