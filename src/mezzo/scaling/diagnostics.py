"""Warnings about the loss scale: it collapses, or bfloat16 does not need it."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from mezzo import _events
from mezzo._errors import PolicyError, ScalerError
from mezzo._launch import AsyncCopy
from mezzo.scaling.scale_state import OnCollapse, ScaleRule
from mezzo.scaling.scale_tensors import DeviceLossScale, HostLossScale, LossScale
from mezzo.scaling.step_result import NonfiniteSource

EVERY = 8
"""So many updates apart a device is looked at: a copy costs 100 µs of the host's time beside an
H200, a whole small step 1500."""
_IN_FLIGHT = 8
"""More copies are not started while so many are under way."""


@dataclass(frozen=True, slots=True)
class ScaleSnapshot:
    """What a copy saw after an update."""

    step: int
    """How many steps were counted then."""
    scale: float
    """The scale."""
    consecutive_skips: int
    """How many steps in a row were skipped."""
    rule: ScaleRule
    """The rule that held."""
    source: NonfiniteSource
    """Who can name the first bad parameter of the step."""

    @property
    def is_at_floor(self) -> bool:
        """Whether a bad step found the scale at its floor."""
        return self.rule.dynamic and self.consecutive_skips > 0 and self.scale <= self.rule.floor


class CollapseMonitor:
    """Looks at a scale after every update, and speaks up once an episode when it collapses."""

    def __init__(self, patience: int = 50, on_collapse: OnCollapse = OnCollapse.WARN) -> None:
        if patience < 1:
            raise PolicyError(
                f"collapse_patience={patience}: it must be a number of skipped steps, 1 or more."
            )
        self._patience = patience
        self._on_collapse = on_collapse
        self._flying: deque[tuple[int, AsyncCopy, ScaleRule, NonfiniteSource]] = deque()
        self._pending: tuple[ScaleSnapshot, list[AsyncCopy]] | None = None
        self._warned = False

    def observe(self, scale: LossScale, rule: ScaleRule, culprit: NonfiniteSource) -> None:
        """Note the state after an update, and judge what has arrived."""
        if isinstance(scale, HostLossScale):
            self._look_near(scale, rule, culprit)
        elif isinstance(scale, DeviceLossScale):
            if scale.steps % min(EVERY, self._patience) == 0 and len(self._flying) < _IN_FLIGHT:
                self._flying.append((scale.steps, AsyncCopy(scale.shown), rule, culprit))
            if self._flying or self._pending is not None:
                self._judge_what_arrived()

    def judge(self, glance: ScaleSnapshot) -> None:
        """Judge what somebody else has copied."""
        if glance.consecutive_skips or self._warned:
            self._judge(glance)
            self._warn()

    def _look_near(self, scale: HostLossScale, rule: ScaleRule, culprit: NonfiniteSource) -> None:
        if scale.has_skips or self._warned:
            state = scale.latest
            self._judge(
                ScaleSnapshot(
                    state.good_steps + state.skipped_steps,
                    state.scale,
                    state.consecutive_skips,
                    rule,
                    culprit,
                )
            )
            self._warn()

    def _judge_what_arrived(self) -> None:
        self._warn()
        while self._flying and self._flying[0][1].arrived():
            step, copy, rule, culprit = self._flying.popleft()
            scale, _, in_a_row, _ = copy.values()
            self._judge(ScaleSnapshot(step, scale, int(in_a_row), rule, culprit))

    def _judge(self, glance: ScaleSnapshot) -> None:
        if not glance.is_at_floor and glance.consecutive_skips < self._patience:
            # The episode lasts until a step is good again.
            self._warned = self._warned and glance.consecutive_skips > 0
        elif not self._warned:
            self._warned = True
            self._pending = (glance, glance.source.fetch())

    def _warn(self) -> None:
        if self._pending is None or not all(copy.arrived() for copy in self._pending[1]):
            return
        (glance, fetched), self._pending = self._pending, None
        message = self._message(glance, glance.source.name_from(fetched))
        if _events.listening():
            _events.emit(_events.ScaleCollapsed(glance.scale, glance.consecutive_skips, message))
        if self._on_collapse is OnCollapse.RAISE:
            raise ScalerError(f"{message} It was stopped here because of on_collapse='raise'.")
        # Seen from the line that called update().
        warnings.warn(f"{message} Training goes on, skipping.", UserWarning, stacklevel=6)

    def _message(self, glance: ScaleSnapshot, name: str | None) -> str:
        what = (
            f"The loss scale is at its floor of {glance.scale:g}"
            if glance.is_at_floor
            else f"{glance.consecutive_skips} steps in a row were skipped"
        )
        where = f", first in the gradient of {name!r}" if name else ""
        return (
            f"{what} (step {glance.step}): gradients keep coming out not finite{where}. The cause"
            " is rarely the scale: look for a loss that is not finite, a division or logarithm"
            " near zero, or a learning rate that is too high; bfloat16 needs no scale."
        )


_NODES = 512
"""How much of a loss's history is looked at, once."""
_REASON = "bfloat16 has the range of float32, so its gradients do not underflow"

_said = False


def warn_if_not_needed(loss: torch.Tensor) -> None:
    """Say once a process that a loss computed in bfloat16 needs no scaling. float16 anywhere in it makes scaling worth its while."""
    global _said
    if not _said and half_dtypes(loss) == {torch.bfloat16}:
        _said = True
        if _events.listening():
            _events.emit(_events.ScalingNotNeeded("bfloat16", _REASON))
        # Seen from the line that called scale().
        warnings.warn(
            f"This loss was computed in bfloat16, which needs no gradient scaling: {_REASON}."
            " GradScaler(enabled=False) saves its cost.",
            UserWarning,
            stacklevel=5,
        )


def half_dtypes(loss: torch.Tensor) -> set[torch.dtype]:
    """The 16-bit dtypes that a loss was computed in, as far as its graph tells.

    >>> half_dtypes(torch.ones(2, requires_grad=True).bfloat16().sum().float())
    {torch.bfloat16}
    """
    found, waiting = {loss.dtype}, [loss.grad_fn]
    seen: set[Any] = set()
    while waiting and len(seen) < _NODES:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.update(made.dtype for made in node._input_metadata)
        waiting.extend(earlier for earlier, _ in node.next_functions)
    return found & {torch.float16, torch.bfloat16}
