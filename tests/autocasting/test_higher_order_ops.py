"""Higher-order operators: the policy applies in their functions, or they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mezzo
from mezzo.autocasting.dynamo import (
    REFUSED_OPERATORS,
    WRAPPED_OPERATORS,
    higher_order_operators,
    under_mode,
)
from mezzo.autocasting.function_mode import AutocastMode

HALF = torch.bfloat16
X = torch.ones(2, 2)
REMEDY = r"cannot be applied. Put `with torch.autocast"
if torch.__version__ < "2.13":
    # torch before 2.13 reports the type of an error in traced code, and not always its message.
    REMEDY += "|RefusedOpError"
pytestmark = pytest.mark.usefixtures("_fresh_compiler")


def region(**fields: Any) -> mezzo.autocast:
    return mezzo.autocast("cpu", dtype=HALF, **fields)


def conditional(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: (x @ x) * 2, (x,))


def loop(x: Tensor) -> Tensor:
    return torch.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x + x), (torch.tensor(0), x))[
        1
    ]


def compiled(call: Any) -> Any:
    return torch.compile(call, backend="eager", fullgraph=True)


@pytest.mark.parametrize("run", [conditional, compiled(conditional)], ids=["eager", "compiled"])
def test_torch_cond_runs_under_torchs_own_lists(run: Any) -> None:
    with region():
        assert run(X).dtype is HALF


@pytest.mark.parametrize("call", [conditional, loop], ids=["cond", "while_loop"])
@pytest.mark.parametrize("wrap", [lambda call: call, compiled], ids=["eager", "compiled"])
def test_control_flow_raises_under_a_custom_policy_with_the_remedy(call: Any, wrap: Any) -> None:
    with region(half={"add"}), pytest.raises(Exception, match=REMEDY):
        wrap(call)(X)


@pytest.mark.parametrize("wrap", [lambda call: call, compiled], ids=["eager", "compiled"])
def test_the_remedy_works(wrap: Any) -> None:
    def remedied(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return conditional(x)

    with region(half={"add"}):
        assert wrap(remedied)(X).dtype is torch.float32


def test_the_loop_runs_outside_and_under_torchs_own_lists() -> None:
    assert loop(X).tolist() == [[4.0, 4.0], [4.0, 4.0]]
    with region():
        assert loop(X).tolist() == [[4.0, 4.0], [4.0, 4.0]]


def test_every_higher_order_operator_is_either_wrapped_or_refused() -> None:
    assert set(higher_order_operators().values()) <= WRAPPED_OPERATORS | REFUSED_OPERATORS
    assert {"cond", "while_loop"} <= set(higher_order_operators().values())
    assert not WRAPPED_OPERATORS & REFUSED_OPERATORS


def test_under_mode_runs_a_function_under_the_mode() -> None:
    with region(half={"add"}):
        mode = next(
            mode
            for mode in torch.overrides._get_current_function_mode_stack()
            if isinstance(mode, AutocastMode)
        )
    with torch.autocast("cpu", dtype=HALF):
        assert under_mode(mode, torch.add)(X, X).dtype is HALF
        assert (X + X).dtype is torch.float32
