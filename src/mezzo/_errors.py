"""Every exception that mezzo raises, and how its messages are made.

    MezzoError
    ├── PolicyError (ValueError)         the words of a policy: an unknown op, level or dtype, lists that overlap
    ├── RefusedOpError (RuntimeError)    an op that the policy bans was called
    └── UnsupportedError (RuntimeError)  what was asked for cannot be done here: hardware, torch or a mechanism lacks it

A message says what was passed, what is allowed and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class MezzoError(Exception):
    """The root of everything mezzo raises on purpose."""


class PolicyError(MezzoError, ValueError):
    """The words of a policy make no sense: raised when a policy is made or bound, never in the middle of training."""


class RefusedOpError(MezzoError, RuntimeError):
    """An op was called that the policy bans; the message says what to call instead."""


class UnsupportedError(MezzoError, RuntimeError):
    """What was asked for cannot be done on this hardware, by this torch or by this mechanism."""


def choices(allowed: Iterable[str]) -> str:
    """Spell out a closed set.

    >>> choices(["O0", "O1"])
    'Choose one of: O0, O1.'
    """
    return f"Choose one of: {', '.join(allowed)}."


def nearest(word: str, known: Iterable[str]) -> str:
    """Name the close matches of a misspelt word, or nothing when none is close.

    >>> nearest("sofmax", ["softmax", "add"])
    " Did you mean 'softmax'?"
    """
    matches = get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


def unknown(what: str, word: object, known: Iterable[str]) -> str:
    """Say that a word is not known, which are, and which are close.

    >>> unknown("preset", "padle", ["torch", "paddle"])
    "Unknown preset 'padle'. Choose one of: torch, paddle. Did you mean 'paddle'?"
    """
    listed = list(known)
    return f"Unknown {what} {word!r}. {choices(listed)}{nearest(str(word), listed)}"
