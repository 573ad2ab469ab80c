"""Warnings about the loss scale: it collapses, or a bfloat16 loss does not need it."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mezzo import _events
from mezzo._errors import PolicyError, ScalerError
from mezzo._launch import AsyncCopy
from mezzo.scaling.scale_state import OnCollapse, ScaleRule
from mezzo.scaling.scale_tensors import DeviceLossScale, HostLossScale, LossScale
from mezzo.scaling.step_result import NonfiniteSource

# -- scale collapse --------------------------------------------------------------------------------

CHECK_INTERVAL = 8
"""Updates between two copies of a device's scale: a copy costs 100 µs of host time on an H200, a
whole small step 1500."""
_MAX_COPIES = 8
"""No copy is started while this many are under way."""


@dataclass(frozen=True, slots=True)
class ScaleSnapshot:
    """The scale after an update."""

    step: int
    """Number of steps so far."""
    scale: float
    """The loss scale."""
    consecutive_skips: int
    """Skipped steps in a row."""
    rule: ScaleRule
    """The rule of the scale."""
    source: NonfiniteSource
    """The first parameter with a non-finite gradient in the step."""

    @property
    def is_at_floor(self) -> bool:
        """Whether the scale is at its floor and the step was still skipped."""
        return self.rule.dynamic and self.consecutive_skips > 0 and self.scale <= self.rule.floor


class _CopiedCounters(NamedTuple):
    """Counters of a scale that are being copied to the host, with their step."""

    step: int
    counters: AsyncCopy
    rule: ScaleRule
    source: NonfiniteSource


class CollapseMonitor:
    """Warns, or raises, when a scale collapses; once until a step is successful again.

    The scale has collapsed when it is at its floor and a step is skipped, or when `patience` steps
    in a row were skipped. A scale on a device is copied asynchronously, so that the warning comes
    a few steps late.
    """

    def __init__(self, patience: int = 50, on_collapse: OnCollapse = OnCollapse.WARN) -> None:
        if patience < 1:
            raise PolicyError(
                f"collapse_patience={patience}: it must be a number of skipped steps, 1 or more."
            )
        self._patience = patience
        self._on_collapse = on_collapse
        self._copies: deque[_CopiedCounters] = deque()
        self._pending: tuple[ScaleSnapshot, list[AsyncCopy]] | None = None
        """A collapse whose source is being copied to the host."""
        self._has_warned = False

    def observe(self, scale: LossScale, rule: ScaleRule, source: NonfiniteSource) -> None:
        """Check a scale after an update. Does not synchronize."""
        if isinstance(scale, HostLossScale):
            self._observe_on_host(scale, rule, source)
        elif isinstance(scale, DeviceLossScale):
            is_due = scale.steps % min(CHECK_INTERVAL, self._patience) == 0
            if is_due and len(self._copies) < _MAX_COPIES:
                copied = AsyncCopy(scale.counters)
                self._copies.append(_CopiedCounters(scale.steps, copied, rule, source))
            if self._copies or self._pending is not None:
                self._judge_arrived()

    def judge(self, snapshot: ScaleSnapshot) -> None:
        """Check a scale whose values are on the host already."""
        if snapshot.consecutive_skips or self._has_warned:
            self._judge(snapshot)
            self._warn()

    def _observe_on_host(
        self, scale: HostLossScale, rule: ScaleRule, source: NonfiniteSource
    ) -> None:
        if scale.has_skips or self._has_warned:
            state = scale.latest
            step = state.good_steps + state.skipped_steps
            self._judge(ScaleSnapshot(step, state.scale, state.consecutive_skips, rule, source))
            self._warn()

    def _judge_arrived(self) -> None:
        self._warn()
        while self._copies and self._copies[0].counters.arrived():
            step, copied, rule, source = self._copies.popleft()
            scale, _, consecutive_skips, _ = copied.values()
            self._judge(ScaleSnapshot(step, scale, int(consecutive_skips), rule, source))

    def _judge(self, snapshot: ScaleSnapshot) -> None:
        if not snapshot.is_at_floor and snapshot.consecutive_skips < self._patience:
            # A successful step ends the collapse; the next one warns again.
            self._has_warned = self._has_warned and snapshot.consecutive_skips > 0
        elif not self._has_warned:
            self._has_warned = True
            self._pending = (snapshot, snapshot.source.fetch())

    def _warn(self) -> None:
        if self._pending is None or not all(copy.arrived() for copy in self._pending[1]):
            return
        (snapshot, fetched), self._pending = self._pending, None
        message = _collapse_message(snapshot, snapshot.source.name_from(fetched))
        if _events.listening():
            _events.emit(
                _events.ScaleCollapsed(snapshot.scale, snapshot.consecutive_skips, message)
            )
        if self._on_collapse is OnCollapse.RAISE:
            raise ScalerError(f"{message} Training stops because of on_collapse='raise'.")
        # The stack level of the line that called update().
        warnings.warn(
            f"{message} Training continues, and such steps are skipped.", UserWarning, stacklevel=6
        )


def _collapse_message(snapshot: ScaleSnapshot, name: str | None) -> str:
    what = (
        f"The loss scale is at its floor of {snapshot.scale:g}"
        if snapshot.is_at_floor
        else f"{snapshot.consecutive_skips} steps in a row were skipped"
    )
    where = f", first in the gradient of {name!r}" if name else ""
    return (
        f"{what} (step {snapshot.step}): gradients are not finite{where}. The cause is rarely the"
        " scale: look for a loss that is not finite, a division or logarithm near zero, or a"
        " learning rate that is too high. mezzo.trace_overflow names the op and its line."
        " bfloat16 needs no loss scaling."
    )


# -- loss scaling that is not needed ---------------------------------------------------------------

_MAX_NODES = 512
"""Nodes of a loss's autograd graph that are searched, once per process."""
_REASON = "bfloat16 has the range of float32, so its gradients do not underflow"

_has_warned_bfloat16 = False


def warn_if_not_needed(loss: torch.Tensor) -> None:
    """Warn once per process that a bfloat16 loss does not need loss scaling.

    A loss that was computed partly in float16 does.
    """
    global _has_warned_bfloat16
    if not _has_warned_bfloat16 and half_dtypes(loss) == {torch.bfloat16}:
        _has_warned_bfloat16 = True
        if _events.listening():
            _events.emit(_events.ScalingNotNeeded("bfloat16", _REASON))
        # The stack level of the line that called scale().
        warnings.warn(
            f"This loss was computed in bfloat16, which needs no loss scaling: {_REASON}."
            " Pass enabled=False to GradScaler to save its cost.",
            UserWarning,
            stacklevel=5,
        )


def half_dtypes(loss: torch.Tensor) -> set[torch.dtype]:
    """Return the 16-bit dtypes in the autograd graph of a loss, as far as it is searched.

    >>> half_dtypes(torch.ones(2, requires_grad=True).bfloat16().sum().float())
    {torch.bfloat16}
    """
    dtypes, queue = {loss.dtype}, [loss.grad_fn]
    seen: set[Any] = set()
    while queue and len(seen) < _MAX_NODES:
        node: Any = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        dtypes.update(metadata.dtype for metadata in node._input_metadata)
        queue.extend(earlier for earlier, _ in node.next_functions)
    return dtypes & {torch.float16, torch.bfloat16}
