"""`mezzo.register_op`: functions and custom operators with a name and a rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo

HALF = torch.bfloat16
pytestmark = pytest.mark.usefixtures("_own_registered_ops")


def region(**fields: Any) -> mezzo.autocast:
    return mezzo.autocast("cpu", dtype=HALF, **fields)


def seen(x: Tensor, *rest: Any, **named: Any) -> torch.dtype:
    return x.dtype


def test_a_registered_function_runs_under_its_rule_in_every_region() -> None:
    mine = mezzo.register_op(seen, "my_seen", "half")
    assert mine(torch.ones(1)) is torch.float32
    for fields in ({}, {"half": {"add"}}):
        with region(**fields):
            assert mine(torch.ones(1)) is HALF


def test_the_name_is_an_argument_or_that_of_the_function() -> None:
    @mezzo.register_op("first_of_mine", rule="half")
    def one(x: Tensor) -> torch.dtype:
        """One."""
        return x.dtype

    @mezzo.register_op(rule="full")
    def second_of_mine(x: Tensor) -> torch.dtype:
        return x.dtype

    @mezzo.register_op
    def third_of_mine(x: Tensor) -> torch.dtype:
        return x.dtype

    assert one.__doc__ == "One."
    assert {"first_of_mine", "second_of_mine", "third_of_mine"} <= {op.name for op in mezzo.ops()}
    with region():
        assert (
            one(torch.ones(1)),
            second_of_mine(torch.ones(1, dtype=HALF)),
            third_of_mine(torch.ones(1)),
        ) == (HALF, torch.float32, torch.float32)


def test_the_body_runs_without_further_casts() -> None:
    mine = mezzo.register_op(lambda x: (x @ x).dtype, "my_product", "full")
    for fields in ({}, {"half": {"add"}}):
        with region(**fields):
            assert mine(torch.ones(2, 2)) is torch.float32
            assert torch.is_autocast_enabled("cpu")


def test_a_policy_overrides_the_rule() -> None:
    mine = mezzo.register_op(seen, "my_seen", "half")
    with region(full={"my_seen"}):
        assert mine(torch.ones(1, dtype=HALF)) is torch.float32
    with region(keep={"my_seen"}):
        assert mine(torch.ones(1)) is torch.float32
    with region(refuse={"my_seen"}), pytest.raises(mezzo.RefusedOpError, match="my_seen"):
        mine(torch.ones(1))


def test_it_is_not_cast_in_a_disabled_region_or_on_another_device() -> None:
    mine = mezzo.register_op(seen, "my_seen", "half")
    with region(), torch.autocast("cpu", enabled=False):
        assert mine(torch.ones(1)) is torch.float32
    with region():
        assert mine(torch.ones(1, device="meta")) is torch.float32


def test_a_call_without_tensors_passes_through() -> None:
    mine = mezzo.register_op(lambda number: number + 1, "my_number", "half")
    with region():
        assert mine(1) == 2


def test_tensors_in_containers_and_keywords_are_cast() -> None:
    mine = mezzo.register_op(
        lambda pair, named=None: (pair[0].dtype, named.dtype), "my_pair", "half"
    )
    with region():
        assert mine([torch.ones(1)], named=torch.ones(1)) == (HALF, HALF)


def test_promote_uses_the_widest_input() -> None:
    mine = mezzo.register_op(lambda x, y: (x.dtype, y.dtype), "my_widest", "promote")
    with region():
        assert mine(torch.ones(1, dtype=HALF), torch.ones(1)) == (torch.float32, torch.float32)


def test_the_name_of_a_torch_op_and_a_function_without_a_name_raise() -> None:
    with pytest.raises(mezzo.PolicyError, match="is an op of torch"):
        mezzo.register_op(seen, "softmax", "half")
    with pytest.raises(mezzo.PolicyError, match="register_op takes"):
        mezzo.register_op(3)
    with pytest.raises(mezzo.PolicyError, match="rule"):
        mezzo.register_op(seen, "my_seen", "halff")


def test_an_unknown_name_in_a_policy_raises_with_how_to_register_it() -> None:
    with pytest.raises(mezzo.PolicyError, match="register_op"):
        region(half={"my_unregistered_thing"})


def test_registering_again_replaces_the_rule_in_later_regions() -> None:
    first = mezzo.register_op(seen, "my_seen", "half")
    with region():
        assert first(torch.ones(1)) is HALF
    second = mezzo.register_op(seen, "my_seen", "full")
    with region():
        assert second(torch.ones(1, dtype=HALF)) is torch.float32


def test_gradients_flow_through_a_registered_function() -> None:
    mine = mezzo.register_op(lambda x, w: x @ w, "my_product", "half")
    weight = nn.Parameter(torch.ones(2, 2))
    with region():
        result = mine(torch.ones(2, 2), weight)
    result.float().sum().backward()
    assert result.dtype is HALF
    assert weight.grad is not None


@pytest.fixture(scope="module")
def operator() -> Any:
    @torch.library.custom_op("mezzo_tests::scaled", mutates_args=())
    def scaled(x: Tensor, by: float) -> Tensor:
        return x * by

    scaled.register_fake(lambda x, by: torch.empty_like(x))
    scaled.register_autograd(lambda ctx, gradient: (gradient, None))
    return scaled


def test_a_custom_operator_runs_under_its_rule_in_every_spelling(operator: Any) -> None:
    assert mezzo.register_op(operator, "my_scaled", "half") is operator
    for fields in ({}, {"half": {"add"}}):
        with region(**fields):
            for call in (
                operator,
                torch.ops.mezzo_tests.scaled,
                torch.ops.mezzo_tests.scaled.default,
            ):
                assert call(torch.ones(1), 2.0).dtype is HALF
    assert operator(torch.ones(1), 2.0).dtype is torch.float32


def test_a_policy_overrides_a_custom_operators_rule(operator: Any) -> None:
    mezzo.register_op(operator, "my_scaled", "half")
    with region(full={"my_scaled"}):
        assert operator(torch.ones(1, dtype=HALF), 2.0).dtype is torch.float32


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("fields", [{}, {"half": {"add"}}, {"full": {"my_product"}}], ids=str)
def test_a_registered_function_compiles_without_graph_breaks(fields: dict[str, Any]) -> None:
    mine = mezzo.register_op(lambda x: x * 2, "my_product", "half")
    x = torch.ones(2, 2)
    compiled = torch.compile(lambda x: mine(x) - 1, backend="eager", fullgraph=True)
    assert compiled(x).dtype is torch.float32
    with region(**fields):
        expected = mine(x) - 1
        assert compiled(x).dtype is expected.dtype


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_registered_custom_operator_compiles_without_graph_breaks(operator: Any) -> None:
    mezzo.register_op(operator, "my_scaled", "half")
    compiled = torch.compile(lambda x: operator(x, 2.0), backend="aot_eager", fullgraph=True)
    with region():
        assert compiled(torch.ones(2)).dtype is HALF
