"""A small network, a counter of host reads, and a CPU that counts as another device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo import _launch
from mezzo.scaling import diagnostics

READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.item.default,
}


class HostReads(TorchDispatchMode):
    """Counts reads that would synchronize with a device: tensors read as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))


@pytest.fixture
def host_reads() -> Callable[[], HostReads]:
    return HostReads


@pytest.fixture
def far_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a device that synchronizes: scales are tensors, fused optimizers skip."""
    monkeypatch.setattr(_launch, "needs_sync", lambda _: True)


@pytest.fixture(autouse=True)
def no_warning_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "_has_warned_bfloat16", False)


class Net(nn.Module):
    """Two layers; an infinite input gives non-finite gradients."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def make_net() -> type[Net]:
    return Net
