"""torch's own modules with the inputs of its own tests: under O2 they compile whole where they do without, and give what eager gives."""

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
    pytest.mark.filterwarnings("ignore"),  # what torch's modules say of their own inputs
]
_INPUTS = 2
"""Of each module, which has up to a hundred."""


def _cases(info: ModuleInfo) -> Any:
    """Modules with arguments that torch compiles whole."""
    for one in info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
    ):
        made, given = one.constructor_input, one.forward_input
        if given is None:
            continue
        module = info.module_cls(*made.args, **made.kwargs)
        try:
            _called(module, given, compiles=True)
        except Exception:  # noqa: BLE001 - whatever torch says of it
            continue
        yield module, given


def _called(module: nn.Module, given: Any, *, compiles: bool, region: Any = None) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    call = torch.compile(module, backend="eager", fullgraph=True) if compiles else module
    with region or nullcontext():
        result = call(*given.args, **given.kwargs)
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_a_module_compiles_whole_under_o2(info: ModuleInfo) -> None:
    cases = list(islice(_cases(info), _INPUTS))
    if not cases:
        pytest.skip("torch does not compile it whole")
    for module, given in cases:
        region = mezzo.autocast("cpu", policy="O2", dtype=torch.bfloat16)
        expected, found = (
            _called(module, given, compiles=compiles, region=region) for compiles in (False, True)
        )
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, equal_nan=True)
