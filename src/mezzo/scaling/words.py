"""The closed sets of gradient scaling."""

from __future__ import annotations

from mezzo.policy.types import Word


class OnCollapse(Word):
    """What to do when the scale is at its floor or too many steps in a row were skipped."""

    WARN = "warn"
    RAISE = "raise"


class Stage(Word):
    """Where an optimizer stands between two updates."""

    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"
