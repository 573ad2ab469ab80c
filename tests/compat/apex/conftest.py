"""Tests of Apex's dialect: each starts as a fresh process would, and leaves no cast on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mezzo.compat.apex.amp import _amp_state
from mezzo.compat.apex.amp._casts import registered, stop_casting


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    _forget()
    yield
    stop_casting()
    assert not torch.is_autocast_enabled("cpu")
    _forget()


def _forget() -> None:
    _amp_state.__dict__.pop("opt_properties", None)
    _amp_state.__init__()
    registered.clear()
