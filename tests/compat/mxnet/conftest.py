"""Undo `amp.init` after each test."""

import pytest

from mezzo.compat.mxnet import amp


@pytest.fixture(autouse=True)
def amp_is_uninitialized_afterwards():
    yield
    amp.uninit()
