"""torch's exception types, with mezzo's words after torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mezzo._errors import PolicyError, ScalerError


class TorchScalerError(ScalerError, AssertionError):
    """What torch's scaler asserts."""


class TorchValueError(PolicyError, AssertionError):
    """What torch's scaler asserts of its arguments."""


@contextmanager
def in_torchs_words(torchs: str) -> Iterator[None]:
    """Let what is refused inside be refused as torch does, an assertion that says what torch says and what to do."""
    try:
        yield
    except ScalerError as error:
        raise TorchScalerError(f"{torchs} {error}") from None
