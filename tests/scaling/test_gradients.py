"""Check and unscale gradients of every layout and dtype; separate backward passes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mezzo import ScalerError
from mezzo.scaling import check_unscale
from mezzo.scaling.gradients import (
    CpuGradientChecker,
    backward_isolated,
    check_sorted,
    first_nonfinite,
    isolated_gradients,
    parameters,
    unscale_tensors,
)
from mezzo.scaling.step_result import FlaggedSource, ParameterNames

# torch warns once that sparse layouts are in beta.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

QUARTER = torch.tensor(0.25)
REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def with_gradients(*gradients: torch.Tensor | None) -> torch.optim.Optimizer:
    owners = []
    for gradient in gradients:
        parameter = nn.Parameter(
            torch.zeros(2)
            if gradient is None
            else torch.zeros(gradient.shape, dtype=gradient.dtype)
        )
        parameter.grad = gradient
        owners.append(parameter)
    return torch.optim.SGD(owners, lr=0.1)


def run(optimizer: torch.optim.Optimizer, way: str, factor: torch.Tensor = QUARTER) -> float:
    flags: dict[torch.device, torch.Tensor] = {}
    if way == "checker":
        CpuGradientChecker().check(optimizer, factor, flags)
    else:
        check_sorted(optimizer, factor, flags)
    return flags[torch.device("cpu")].item()


@pytest.fixture(params=["checker", "sorted"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", [*REALS, torch.complex64, torch.complex128])
def test_every_dtype_is_unscaled_in_place(dtype: torch.dtype, way: str):
    gradient = torch.full((2, 3), 4.0, dtype=dtype)
    assert run(with_gradients(gradient), way) == 0
    assert torch.equal(gradient, torch.ones(2, 3, dtype=dtype))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [*REALS, torch.complex64])
def test_one_nonfinite_value_sets_the_flag(dtype: torch.dtype, value: float, way: str):
    gradient = torch.ones(5, 7, dtype=dtype)
    gradient[4, 6] = value
    assert run(with_gradients(torch.ones(3), gradient), way) == 1


def test_a_nonfinite_imaginary_part_sets_the_flag(way: str):
    assert run(with_gradients(torch.tensor([complex(1.0, math.inf)])), way) == 1


@pytest.mark.parametrize(
    "view",
    [
        lambda g: g.t(),
        lambda g: g[:, :3],
        lambda g: g[::2],
        lambda g: g.to(memory_format=torch.contiguous_format)[1:, 1:],
        lambda g: g[0],
    ],
    ids=["transposed", "columns", "every other row", "corner", "row"],
)
def test_views_are_unscaled_and_the_elements_between_are_not(view, way: str):
    base = torch.full((6, 6), 4.0)
    parameter = nn.Parameter(torch.zeros_like(view(base)))
    parameter.grad = view(base)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert run(optimizer, way) == 0
    expected = torch.full((6, 6), 4.0)
    view(expected).fill_(1.0)
    assert torch.equal(base, expected)


def test_channels_last_gradients_are_unscaled(way: str):
    gradient = torch.full((2, 3, 4, 4), 4.0).to(memory_format=torch.channels_last)
    assert run(with_gradients(gradient), way) == 0
    assert torch.equal(gradient, torch.ones_like(gradient))


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_gradients_are_unscaled_coalesced_or_not(
    dtype: torch.dtype, coalesced: bool, way: str
):
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 2]]), torch.tensor([4.0, 4.0, 8.0], dtype=dtype), (3,)
    )
    optimizer = with_gradients(
        gradient.coalesce() if coalesced else gradient, torch.full((2,), 4.0)
    )
    assert run(optimizer, way) == 0
    sparse, dense = (parameter.grad for parameter in parameters(optimizer))
    assert torch.equal(sparse.to_dense(), torch.tensor([1.0, 0.0, 3.0], dtype=dtype))
    assert torch.equal(dense, torch.ones(2))


def test_sparse_values_that_overflow_only_when_added_are_found(way: str):
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([60000.0, 60000.0], dtype=torch.float16), (3,)
    )
    assert gradient._values().isfinite().all()
    assert run(with_gradients(gradient), way) == 1


def test_gradients_of_many_kinds_in_one_optimizer_are_unscaled_once_each(way: str):
    gradients = [torch.full((3,), 4.0, dtype=dtype) for dtype in (*REALS, torch.complex64)]
    gradients += [
        torch.full((4, 4), 4.0).t(),
        torch.full((3,), 4.0).to_sparse(),
        torch.zeros(0),
        torch.tensor(4.0),
    ]
    optimizer = with_gradients(*gradients, None)
    assert run(optimizer, way) == 0
    for parameter in parameters(optimizer)[:-1]:
        dense = parameter.grad.to_dense()
        assert torch.equal(dense, torch.ones_like(dense))


def test_a_nonfinite_gradient_among_many_kinds_is_found(way: str):
    for index in range(4):
        gradients = [
            torch.ones(3),
            torch.ones(3, dtype=torch.float16),
            torch.ones(3).to_sparse(),
            torch.ones(3, dtype=torch.complex64),
        ]
        gradients[index] = gradients[index] * math.inf
        assert run(with_gradients(*gradients), way) == 1


def test_a_flag_that_is_1_stays_1():
    checker, flags = CpuGradientChecker(), {torch.device("cpu"): torch.tensor(1.0)}
    checker.check(with_gradients(torch.ones(2)), QUARTER, flags)
    assert flags[torch.device("cpu")].item() == 1


def test_no_gradients_create_no_flag():
    flags: dict[torch.device, torch.Tensor] = {}
    CpuGradientChecker().check(with_gradients(None), QUARTER, flags)
    check_sorted(with_gradients(None), QUARTER, flags)
    assert flags == {}


def test_other_kinds_of_gradients_that_appear_later_are_unscaled():
    checker, optimizer = CpuGradientChecker(), with_gradients(torch.full((2,), 4.0), None)
    first, second = parameters(optimizer)
    checker.check(optimizer, QUARTER, {})
    second.grad = torch.full((2,), 4.0).to_sparse()
    first.grad = None
    checker.check(optimizer, QUARTER, {})
    assert torch.equal(second.grad.to_dense(), torch.ones(2))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]})
    parameters(optimizer)[2].grad = torch.full((2,), 4.0, dtype=torch.complex64)
    checker.check(optimizer, QUARTER, {})
    assert torch.equal(parameters(optimizer)[2].grad, torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize("small", [True, False])
def test_gradients_that_are_only_checked_keep_their_values_and_give_their_name(
    small: bool, monkeypatch: pytest.MonkeyPatch
):
    if not small:
        monkeypatch.setattr("mezzo.scaling.gradients._SMALL", 0)
        monkeypatch.setattr("mezzo._launch.has_triton", lambda _: True)
        monkeypatch.setattr("mezzo.scaling.check_unscale._run", check_unscale._run_in_torch)
    optimizer = with_gradients(
        torch.tensor([1.0, 2.0**-149]),
        torch.ones(2, dtype=torch.float16),
        torch.tensor([0.0, math.inf], dtype=torch.float16),
    )
    source, flags = FlaggedSource(ParameterNames(), optimizer), {}
    check_sorted(optimizer, None, flags, source)
    gradients = [parameter.grad for parameter in parameters(optimizer)]
    optimizer.zero_grad()
    assert flags[torch.device("cpu")].item() == 1
    assert torch.equal(gradients[0], torch.tensor([1.0, 2.0**-149]))
    assert source.name() == source.name_from(source.fetch()) == "parameter 2"


def test_a_pass_that_unscales_sets_a_flag_for_each_gradient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mezzo._launch.has_triton", lambda _: True)
    monkeypatch.setattr("mezzo.scaling.check_unscale._run", check_unscale._run_in_torch)
    optimizer = with_gradients(
        torch.full((2,), 4.0),
        torch.tensor([math.nan, 4.0]),
        torch.full((2,), 4.0, dtype=torch.float64),
    )
    source, flags = FlaggedSource(ParameterNames(), optimizer), {}
    check_sorted(optimizer, QUARTER, flags, source)
    assert flags[torch.device("cpu")].item() == 1
    assert flags[torch.device("cpu")].dtype is torch.float32
    assert parameters(optimizer)[0].grad.tolist() == [1.0, 1.0]
    parameters(optimizer)[0].grad.fill_(math.nan)
    assert source.name() == "parameter 1"


def test_a_check_without_a_factor_does_not_write():
    gradient = torch.tensor([1.0, math.inf])
    flags: dict[torch.device, torch.Tensor] = {}
    version = gradient._version
    check_sorted(with_gradients(gradient), None, flags)
    assert flags[torch.device("cpu")].item() == 1
    assert gradient._version == version


def test_a_dtype_that_cannot_be_unscaled_raises_with_the_remedy():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn))
    parameter.grad = torch.ones(2).to(torch.float8_e4m3fn)
    with pytest.raises(ScalerError, match=r"float8_e4m3fn.*parameter\.grad\.float\(\)"):
        CpuGradientChecker().check(torch.optim.SGD([parameter], lr=0.1), QUARTER, {})


def test_the_first_nonfinite_gradient_is_found_in_any_layout():
    optimizer = with_gradients(
        None, torch.ones(2), torch.tensor([1.0, math.nan]).to_sparse(), torch.tensor([math.inf])
    )
    assert first_nonfinite(parameters(optimizer)) is parameters(optimizer)[2]
    assert first_nonfinite(parameters(optimizer)[:2]) is None


def test_a_checker_returns_the_value_of_its_flag():
    checker = CpuGradientChecker()
    assert checker.check(with_gradients(torch.ones(2)), QUARTER, {}) is False
    assert checker.check(with_gradients(torch.tensor([math.inf])), QUARTER, {}) is True
    assert checker.check(with_gradients(None), QUARTER, {}) is None


def test_a_flag_is_reused_only_if_it_is_0_and_was_recycled():
    checker = CpuGradientChecker()

    def flag_after(gradient: torch.Tensor) -> torch.Tensor:
        flags: dict[torch.device, torch.Tensor] = {}
        checker.check(with_gradients(gradient), QUARTER, flags)
        return flags[torch.device("cpu")]

    first, second = flag_after(torch.ones(2)), flag_after(torch.ones(2))
    assert first is not second
    checker.recycle_flags()
    again = [flag_after(torch.ones(2)), flag_after(torch.tensor([math.nan]))]
    assert {id(flag) for flag in again} == {id(first), id(second)}
    checker.recycle_flags()
    assert flag_after(torch.ones(2)).item() == 0.0


def test_a_flag_that_a_later_check_set_is_not_reused():
    checker, flags = CpuGradientChecker(), {}
    for gradient in (torch.ones(2), torch.tensor([math.inf])):
        checker.check(with_gradients(gradient), QUARTER, flags)
    checker.recycle_flags()
    after: dict[torch.device, torch.Tensor] = {}
    assert checker.check(with_gradients(torch.ones(2)), QUARTER, after) is False


def test_a_flag_that_a_gradient_of_another_kind_set_is_not_reused():
    checker, flags = CpuGradientChecker(), {}
    checker.check(with_gradients(torch.ones(2)), QUARTER, flags)
    checker.check(with_gradients(torch.tensor([complex(math.nan, 0.0)])), QUARTER, flags)
    assert flags[torch.device("cpu")].item() == 1.0
    checker.recycle_flags()
    assert checker.check(with_gradients(torch.ones(2)), QUARTER, {}) is False


@pytest.mark.parametrize("is_nonfinite", [False, True], ids=["finite", "nonfinite"])
def test_tensors_of_several_dtypes_are_unscaled_without_an_optimizer(is_nonfinite):
    tensors = [torch.ones(2, dtype=dtype, requires_grad=True) for dtype in REALS]
    for tensor in tensors:
        tensor.grad = torch.full_like(tensor, 16.0)
    if is_nonfinite:
        tensors[1].grad[0] = math.nan

    assert unscale_tensors([*tensors, torch.ones(1, requires_grad=True)], 4.0) is is_nonfinite
    assert all(tensor.grad[1].item() == 4.0 for tensor in tensors)


def test_tensors_without_gradients_are_finite():
    assert unscale_tensors([torch.ones(1, requires_grad=True)], 3.0) is False


# -- separate backward passes ----------------------------------------------------------------------


def sgd(*parameters: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_old_gradients_are_removed_inside_the_block_and_added_in_place_after_it():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = old = torch.full((2,), 10.0)
    with backward_isolated((parameter * 3).sum(), [sgd(parameter)]):
        assert parameter.grad.tolist() == [3.0, 3.0]
        parameter.grad.mul_(2)
    assert parameter.grad is old
    assert old.tolist() == [16.0, 16.0]


def test_a_parameter_that_the_loss_does_not_reach_keeps_its_gradient():
    reached, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    other.grad = old = torch.ones(2)
    with backward_isolated(reached.sum(), [sgd(reached, other)]):
        assert other.grad is None
    assert other.grad is old


def test_tensors_of_no_optimizer_get_no_gradient():
    parameter, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with backward_isolated((parameter * other).sum(), [sgd(parameter)]):
        pass
    assert other.grad is None


def test_old_gradients_are_restored_when_backward_or_the_body_raises():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = old = torch.ones(2)
    with pytest.raises(RuntimeError), backward_isolated(parameter * 2, [sgd(parameter)]):
        pass
    assert parameter.grad is old
    with pytest.raises(OSError), backward_isolated(parameter.sum(), [sgd(parameter)]):
        raise OSError
    assert parameter.grad is old
    assert old.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("sparse_first", [True, False])
def test_sparse_and_dense_gradients_add_up(sparse_first: bool):
    table = nn.Embedding(3, 2, sparse=True)
    dense, sparse = torch.ones(3, 2), table(torch.tensor([1])).sum()
    if sparse_first:
        sparse.backward()
        with backward_isolated((table.weight * 1).sum(), [sgd(table.weight)]):
            pass
    else:
        table.weight.grad = dense
        with backward_isolated(sparse, [sgd(table.weight)]):
            pass
    assert table.weight.grad.to_dense().tolist() == [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]


def test_frozen_parameters_get_no_gradient():
    parameter, frozen = (
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2), requires_grad=False),
    )
    with backward_isolated(parameter.sum(), [sgd(parameter, frozen)]):
        pass
    assert frozen.grad is None


def test_several_backward_passes_may_run_in_one_block():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = old = torch.full((2,), 10.0)
    with isolated_gradients([sgd(parameter)]) as tensors:
        assert [tensor is parameter for tensor in tensors] == [True]
        (parameter * 3).sum().backward()
        (parameter * 3).sum().backward()
    assert parameter.grad is old
    assert old.tolist() == [16.0, 16.0]
