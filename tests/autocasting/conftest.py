"""Check that every test restores torch's autocast state; fixtures for the tests of regions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.autocasting import arguments
from mezzo.policy import missing_kernels
from mezzo.policy.registry import registry


def state() -> tuple[object, ...]:
    """Return the state that a region changes."""
    devices = ("cpu", "cuda")
    return (
        tuple(torch.is_autocast_enabled(device) for device in devices),
        tuple(torch.get_autocast_dtype(device) for device in devices),
        torch.is_autocast_cache_enabled(),
        torch._C._len_torch_function_stack(),
    )


@pytest.fixture(autouse=True)
def _state_is_restored() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def _own_missing_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_kernels, "_recorded", set())


@pytest.fixture
def _own_registered_ops() -> Iterator[None]:
    before = {op.name for op in registry()}
    yield
    for name in {op.name for op in registry()} - before:
        registry().unregister(name)


class OneDtype(TorchDispatchMode):
    """A device whose norms need input and parameters of one dtype, like CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtypes = {value.dtype for value in args if isinstance(value, torch.Tensor)}
        if (
            func
            in (
                torch.ops.aten.native_layer_norm.default,
                torch.ops.aten.native_group_norm.default,
            )
            and len(dtypes) > 1
        ):
            raise RuntimeError("expected scalar type Half but found Float")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def one_dtype(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneDtype]:
    """Treat the CPU as a device whose norms need one dtype; in the returned mode they do."""
    caches = (arguments._table, arguments._resolved)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(missing_kernels, "_MIXED", {})
    yield OneDtype()
    for cache in caches:
        cache.cache_clear()
