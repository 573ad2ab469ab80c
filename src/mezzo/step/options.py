"""Options of a training step: its capture, layout and accumulation, and what its body takes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from mezzo._errors import PolicyError
from mezzo.policy.types import ParsedEnum
from mezzo.step.input_kinds import MAX_GRAPHS

Body = Callable[..., Any]


class Capture(ParsedEnum):
    """Whether a step is captured as a CUDA graph."""

    AUTO = "auto"
    """Captured if possible; else it runs eagerly, with a warning."""
    ON = True
    """Captured; `UnsupportedError` if that is not possible."""
    OFF = False
    """Runs eagerly."""


class Layout(ParsedEnum):
    """Whether a convolutional model is converted to channels_last."""

    AUTO = "auto"
    """Converted if that is faster, measured once with the first batch."""
    ON = True
    OFF = False

    @classmethod
    def _argument_name(cls) -> str:
        return "channels_last"


class Reduction(ParsedEnum):
    """How the gradients of several calls are combined."""

    MEAN = "mean"
    """Averaged."""
    SUM = "sum"
    """Added."""

    @classmethod
    def _argument_name(cls) -> str:
        return "accumulate_reduction"


@dataclass(frozen=True)
class StepOptions:
    """What a step does with its inputs, its body and the gradients of several calls."""

    accumulate: int
    """Calls for each update."""
    reduction: Reduction
    """How the gradients of these calls are combined."""
    custom_body: bool = False
    """Whether the body is a user's function, which may call `loss.backward()` itself."""
    takes_update: bool = False
    """Whether the body takes `update`, which steps a single optimizer, as its first argument."""
    closure_values: Callable[[], Hashable] = tuple
    """Returns what the body closes over that a captured graph depends on."""
    casts_first_input: bool = False
    """Whether the first argument goes to the model only, so that it can be cast in advance."""
    channels_last: bool = False
    """Whether images are converted to channels_last, as the model is."""
    max_graphs: int = MAX_GRAPHS
    """Kinds of inputs that graphs are kept for."""
    same_shapes: bool = False
    """Whether all ranks get inputs of equal kinds in every call, as the user has promised."""

    @property
    def loss_factor(self) -> float:
        """What each loss is multiplied by before backward."""
        return 1.0 / self.accumulate if self.reduction is Reduction.MEAN else 1.0


class AccumulationPhase(NamedTuple):
    """Position of a call among those that make up one update."""

    first: bool
    last: bool


def check_mean_over(mean_over: Any) -> None:
    """Raise `PolicyError` unless this is a number of calls, or None."""
    is_number = isinstance(mean_over, int) and not isinstance(mean_over, bool)
    if mean_over is not None and (not is_number or mean_over < 1):
        raise PolicyError(
            f"mean_over={mean_over!r} is not a number of calls. Pass an integer of 1 or more, or"
            " None."
        )


def check_accumulate(accumulate: int) -> int:
    """Return the number of calls for each update; raise `PolicyError` unless it is one."""
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise PolicyError(
            f"accumulate={accumulate!r} is not a number of calls for each update. Pass an integer"
            " of 1 or more."
        )
    return accumulate
