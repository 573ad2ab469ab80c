"""The closed sets of a step."""

from __future__ import annotations

from mezzo.policy.types import Word


class Capture(Word):
    """Whether a step becomes one program that the device replays."""

    AUTO = "auto"
    """Where it can be; else it runs eagerly, and says why."""
    ON = True
    """It must be: what cannot be captured is an error."""
    OFF = False
    """It runs eagerly."""


class Layout(Word):
    """Whether a convolutional model is converted to channels_last."""

    AUTO = "auto"
    """Where that is faster, measured once on the real model."""
    ON = True
    OFF = False

    @classmethod
    def _said(cls) -> str:
        return "channels_last"


class Reduction(Word):
    """What becomes of the gradients of several calls."""

    MEAN = "mean"
    """They are averaged."""
    SUM = "sum"
    """They are added up."""

    @classmethod
    def _said(cls) -> str:
        return "accumulate_reduction"
