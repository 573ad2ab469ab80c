"""What the tests of the converter share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    """The same weights whichever tests run before."""
    torch.manual_seed(0)
