"""A fresh state of Accelerate for every test."""

import pytest
from support.accelerate_state import reset_accelerate_state


@pytest.fixture(autouse=True)
def fresh_accelerate_state():
    reset_accelerate_state()
    yield
    reset_accelerate_state()
