"""Exceptions, and helpers for the messages of errors and warnings.

    MezzoError
    ├── CheckpointError (RuntimeError)        a file is no checkpoint of this model and optimizer
    ├── ConversionError (RuntimeError)        a model cannot be exported, or its inputs do not fit
    ├── NumericsError (FloatingPointError)    an op made a NaN or an infinite value
    ├── PolicyError (ValueError)              an argument is invalid: unknown op, level or dtype
    ├── RefusedOpError (NotImplementedError)  an op was called that the policy refuses
    ├── ScalerError (RuntimeError)            loss scaling was called out of order
    └── UnsupportedError (RuntimeError)       hardware, torch or a mechanism cannot do it

`except mezzo.MezzoError` catches all of them. Messages state what was passed, what is allowed and
what to do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path

import torch

MEZZO_FOLDER, TORCH_FOLDER = (
    f"{Path(module).parent}{os.sep}" for module in (__file__, torch.__file__)
)
"""Where the code is that is not the user's. They end in a separator: the folders of `torchvision`
and `torch_geometric`, whose lines messages name, begin with that of torch."""

_MAX_SUGGESTIONS = 3
_CLOSE_RATIO = 0.8
_MIN_CONTAINED = 3
"""Shorter names are contained in too many others for that to be a useful suggestion."""


class MezzoError(Exception):
    """Base class of every exception that mezzo raises on purpose."""


class CheckpointError(MezzoError, RuntimeError):
    """A file is not a checkpoint, lacks a part, or belongs to another model or optimizer.

    Raised before anything is changed.
    """


class ConversionError(MezzoError, RuntimeError):
    """A model cannot be exported, or inputs do not fit: its examples, or those of a later call."""


class NumericsError(MezzoError, FloatingPointError):
    """An op made a NaN or an infinite value inside `mezzo.check_numerics`.

    `finding` has the op, its module, its line and the ranges of its inputs.
    """

    def __init__(self, message: str, finding: object = None) -> None:
        super().__init__(message)
        self.finding = finding


class PolicyError(MezzoError, ValueError):
    """An argument is invalid: an unknown op, level, dtype or device, or lists that overlap.

    Raised when a policy, scaler or region is made, never in the middle of training.
    """


class RefusedOpError(MezzoError, NotImplementedError):
    """An op with the rule `refuse` was called; the message names the op to call instead.

    Apex raises NotImplementedError here and torch RuntimeError: this is both.
    """


class ScalerError(MezzoError, RuntimeError):
    """Loss scaling was called out of order, or found no gradients.

    The message names the call that is missing.
    """


class UnsupportedError(MezzoError, RuntimeError):
    """The hardware, this version of torch or a mechanism cannot do what was requested."""


def choices(allowed: Iterable[str]) -> str:
    """Format the allowed values of an argument for a message.

    >>> choices(["O0", "O1"])
    'Choose one of: O0, O1.'
    """
    return f"Choose one of: {', '.join(allowed)}."


def nearest(name: str, known: Iterable[str]) -> str:
    """Format the known names that are close to a misspelt one; empty if none is close.

    Names with almost the same spelling come first, then names that contain it.

    >>> nearest("sofmax", ["softmax", "add"])
    " Did you mean 'softmax'?"
    >>> nearest("attention", ["flatten", "scaled_dot_product_attention"])
    " Did you mean 'scaled_dot_product_attention' or 'flatten'?"
    """
    spelling = {name.lower(): name for name in known}
    wanted = name.lower()
    close = get_close_matches(wanted, spelling, n=_MAX_SUGGESTIONS, cutoff=0.6)
    almost = [name for name in close if SequenceMatcher(a=name, b=wanted).ratio() >= _CLOSE_RATIO]
    longer = (
        sorted((name for name in spelling if wanted in name), key=len)
        if len(wanted) >= _MIN_CONTAINED
        else []
    )
    matches = [spelling[name] for name in dict.fromkeys((*almost, *longer, *close))]
    suggested = " or ".join(repr(match) for match in matches[:_MAX_SUGGESTIONS])
    return f" Did you mean {suggested}?" if suggested else ""


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """Format the message for an unknown name: the allowed names, and those that are close.

    >>> unknown("preset", "padle", ["torch", "paddle"])
    "Unknown preset 'padle'. Choose one of: torch, paddle. Did you mean 'paddle'?"
    """
    allowed = list(known)
    return f"Unknown {what} {name!r}. {choices(allowed)}{nearest(str(name), allowed)}"


def user_stack_level() -> int:
    """Return the `stacklevel` of the first caller outside mezzo."""
    package = __name__.partition(".")[0]
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level
