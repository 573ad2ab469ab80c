"""Every exception that mezzo raises, and how its messages are made.

    MezzoError
    ├── CheckpointError (RuntimeError)        a file is no checkpoint, or not one of this model and optimizer
    ├── ConversionError (RuntimeError)        a model cannot be exported, or a converted one is called with what it was not made for
    ├── PolicyError (ValueError)              the words of a policy: an unknown op, level or dtype, lists that overlap
    ├── RefusedOpError (NotImplementedError)  an op that the policy bans was called
    ├── ScalerError (RuntimeError)            gradient scaling was called out of order, or found nothing to scale
    └── UnsupportedError (RuntimeError)       what was asked for cannot be done here: hardware, torch or a mechanism lacks it

A message says what was passed, what is allowed and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

_SUGGESTED = 3
_ALMOST_THE_SAME = 0.8
_TELLING = 3
"""How many letters a word needs before what contains it is worth naming."""


class MezzoError(Exception):
    """The root of everything mezzo raises on purpose."""


class CheckpointError(MezzoError, RuntimeError):
    """A file is no checkpoint, lacks a part, or belongs to another model: raised before anything is changed."""


class ConversionError(MezzoError, RuntimeError):
    """A model cannot be exported, its example inputs do not fit, or a converted program is called with inputs that it was not made for."""


class PolicyError(MezzoError, ValueError):
    """The words of a policy make no sense: raised when a policy is made or bound, never in the middle of training."""


class RefusedOpError(MezzoError, NotImplementedError):
    """An op was called that the policy bans; the message says what to call instead. Apex's type for it, which is a RuntimeError too, as torch's."""


class ScalerError(MezzoError, RuntimeError):
    """Gradient scaling was called out of order, or found nothing to work on; the message says what to call when."""


class UnsupportedError(MezzoError, RuntimeError):
    """What was asked for cannot be done on this hardware, by this torch or by this mechanism."""


def choices(allowed: Iterable[str]) -> str:
    """Spell out a closed set.

    >>> choices(["O0", "O1"])
    'Choose one of: O0, O1.'
    """
    return f"Choose one of: {', '.join(allowed)}."


def nearest(word: str, known: Iterable[str]) -> str:
    """Name the close matches of a misspelt word, or nothing when none is close: first what reads almost the same, then what contains it.

    >>> nearest("sofmax", ["softmax", "add"])
    " Did you mean 'softmax'?"
    >>> nearest("attention", ["flatten", "scaled_dot_product_attention"])
    " Did you mean 'scaled_dot_product_attention' or 'flatten'?"
    """
    spelled = {one.lower(): one for one in known}
    wanted = word.lower()
    close = get_close_matches(wanted, spelled, n=_SUGGESTED, cutoff=0.6)
    almost = [one for one in close if SequenceMatcher(a=one, b=wanted).ratio() >= _ALMOST_THE_SAME]
    longer = (
        sorted((one for one in spelled if wanted in one), key=len)
        if len(wanted) >= _TELLING
        else []
    )
    matches = [spelled[one] for one in dict.fromkeys((*almost, *longer, *close))][:_SUGGESTED]
    return f" Did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


def unknown(what: str, word: object, known: Iterable[str]) -> str:
    """Say that a word is not known, which are, and which are close.

    >>> unknown("preset", "padle", ["torch", "paddle"])
    "Unknown preset 'padle'. Choose one of: torch, paddle. Did you mean 'paddle'?"
    """
    listed = list(known)
    return f"Unknown {what} {word!r}. {choices(listed)}{nearest(str(word), listed)}"
