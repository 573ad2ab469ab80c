"""What several tests of graphs need."""

from functools import cache

import pytest
import torch


@pytest.fixture(scope="session")
def one_registry():
    """torch makes its table of ONNX translations anew for each file, which takes two seconds."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    original = ONNXRegistry.from_torchlib.__func__
    made = cache(lambda opset_version: original(ONNXRegistry, opset_version))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(made))
        yield


@pytest.fixture(autouse=True)
def _seeded():
    """The same weights whichever tests run before."""
    torch.manual_seed(0)
