"""Reset amp's state around each test, and check that no cast stays active."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mezzo.compat.apex.amp import _amp_state
from mezzo.compat.apex.amp._casts import deactivate_casts, registered_rules


@pytest.fixture(autouse=True)
def fresh_amp_state() -> Iterator[None]:
    _reset_amp_state()
    yield
    deactivate_casts()
    assert not torch.is_autocast_enabled("cpu")
    _reset_amp_state()


def _reset_amp_state() -> None:
    _amp_state.__dict__.pop("opt_properties", None)
    _amp_state.__init__()
    registered_rules.clear()
