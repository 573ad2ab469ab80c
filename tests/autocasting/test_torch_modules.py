"""torch's modules with the inputs of its tests: at O2 compiled results equal eager ones."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
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
_INPUTS = 2
"""Number of inputs tested per module, of up to a hundred."""


def _cases(info: ModuleInfo) -> Any:
    """Yield modules with arguments that torch compiles without graph breaks."""
    for one in info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
    ):
        constructor, inputs = one.constructor_input, one.forward_input
        if inputs is None:
            continue
        module = info.module_cls(*constructor.args, **constructor.kwargs)
        try:
            _called(module, inputs, compiles=True)
        except Exception:  # noqa: BLE001 - any error of torch
            continue
        yield module, inputs


def _called(module: nn.Module, inputs: Any, *, compiles: bool, region: Any = None) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    call = torch.compile(module, backend="eager", fullgraph=True) if compiles else module
    with region or nullcontext():
        result = call(*inputs.args, **inputs.kwargs)
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_a_module_compiles_without_graph_breaks_at_o2(info: ModuleInfo) -> None:
    cases = list(islice(_cases(info), _INPUTS))
    if not cases:
        pytest.skip("torch does not compile it whole")
    for module, inputs in cases:
        region = mezzo.autocast("cpu", policy="O2", dtype=torch.bfloat16)
        expected, found = (
            _called(module, inputs, compiles=compiles, region=region) for compiles in (False, True)
        )
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, equal_nan=True)
