"""Fixtures for the tests of conversion."""

from functools import cache

import pytest
import torch


@pytest.fixture(scope="session")
def one_registry():
    """Cache torch's table of ONNX translations, which takes two seconds to build per export."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    original = ONNXRegistry.from_torchlib.__func__
    cached = cache(lambda opset_version: original(ONNXRegistry, opset_version))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cached))
        yield


@pytest.fixture(autouse=True)
def _seeded():
    """Give each test the same weights, independent of the tests before it."""
    torch.manual_seed(0)
