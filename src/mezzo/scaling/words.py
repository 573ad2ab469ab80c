"""The closed sets of gradient scaling."""

from __future__ import annotations

from mezzo.policy.rule import Word


class Skip(Word):
    """How a bad step of an optimizer that cannot skip by itself is skipped."""

    HOST = "host"
    """Read one flag a step and do not call the optimizer."""
    MASKED = "masked"
    """Call it, and keep the old values on the device: nothing is read, but every parameter and state is copied for the step."""


class OnCollapse(Word):
    """What to do when the scale is at its floor or too many steps in a row were skipped."""

    WARN = "warn"
    RAISE = "raise"


class Stage(Word):
    """Where an optimizer stands between two updates."""

    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"
