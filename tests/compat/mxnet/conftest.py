import pytest

from mezzo.compat.mxnet import amp


@pytest.fixture(autouse=True)
def amp_is_switched_off_afterwards():
    yield
    amp.uninit()
