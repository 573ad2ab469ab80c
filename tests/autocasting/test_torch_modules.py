"""torch's modules with the inputs of its tests: at O2 compiled results equal eager ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils._pytree import tree_leaves

import mezzo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("_fresh_compiler"),
    pytest.mark.filterwarnings("ignore"),  # of torch's modules about their inputs
]


def _cases(info: ModuleInfo) -> Iterator[tuple[nn.Module, Any]]:
    """Yield modules with their inputs; torch has up to a hundred for a module."""
    for case in info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
    ):
        constructor, inputs = case.constructor_input, case.forward_input
        if inputs is not None:
            yield info.module_cls(*constructor.args, **constructor.kwargs), inputs


def _compiles_without_mezzo(module: nn.Module, inputs: Any) -> bool:
    try:
        _called(module, inputs, compiles=True)
    except Exception:  # noqa: BLE001 - torch raises errors of many types
        return False
    return True


def _called(module: nn.Module, inputs: Any, *, compiles: bool, region: Any = None) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    call = torch.compile(module, backend="eager", fullgraph=True) if compiles else module
    with region or nullcontext():
        result = call(*inputs.args, **inputs.kwargs)
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_a_module_compiles_without_graph_breaks_at_o2(info: ModuleInfo, count: int) -> None:
    checked = 0
    for module, inputs in _cases(info):
        region = mezzo.autocast("cpu", policy="O2", dtype=torch.bfloat16)
        try:
            found = _called(module, inputs, compiles=True, region=region)
        except Exception:
            if _compiles_without_mezzo(module, inputs):
                raise
            continue
        expected = _called(module, inputs, compiles=False, region=region)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, equal_nan=True)
        checked += 1
        if checked == count:
            return
    if not checked:
        pytest.skip("torch does not compile it without graph breaks")
