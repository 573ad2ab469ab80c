"""Gradients of every kind are checked and unscaled in place."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mezzo import ScalerError
from mezzo.scaling import check_unscale
from mezzo.scaling.gradients import (
    CpuGradientChecker,
    check_sorted,
    first_nonfinite,
    parameters,
    unscale_tensors,
)
from mezzo.scaling.step_result import FlaggedSource, ParameterNames

# Torch says once that such layouts are in beta, and are not validated.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

QUARTER = torch.tensor(0.25)
REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def with_gradients(*gradients: torch.Tensor | None) -> torch.optim.Optimizer:
    held = []
    for gradient in gradients:
        parameter = nn.Parameter(
            torch.zeros(2)
            if gradient is None
            else torch.zeros(gradient.shape, dtype=gradient.dtype)
        )
        parameter.grad = gradient
        held.append(parameter)
    return torch.optim.SGD(held, lr=0.1)


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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [*REALS, torch.complex64])
def test_one_bad_value_raises_the_flag(dtype: torch.dtype, bad: float, way: str):
    gradient = torch.ones(5, 7, dtype=dtype)
    gradient[4, 6] = bad
    assert run(with_gradients(torch.ones(3), gradient), way) == 1


def test_a_bad_imaginary_part_raises_the_flag(way: str):
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
def test_views_and_gaps_are_unscaled_and_what_lies_between_is_left_alone(view, way: str):
    base = torch.full((6, 6), 4.0)
    parameter = nn.Parameter(torch.zeros_like(view(base)))
    parameter.grad = view(base)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert run(optimizer, way) == 0
    wanted = torch.full((6, 6), 4.0)
    view(wanted).fill_(1.0)
    assert torch.equal(base, wanted)


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


def test_sparse_values_that_overflow_only_together_are_seen(way: str):
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([60000.0, 60000.0], dtype=torch.float16), (3,)
    )
    assert gradient._values().isfinite().all()
    assert run(with_gradients(gradient), way) == 1


def test_a_perfect_storm_of_kinds_in_one_optimizer_is_unscaled_once_each(way: str):
    kinds = [torch.full((3,), 4.0, dtype=dtype) for dtype in (*REALS, torch.complex64)]
    kinds += [
        torch.full((4, 4), 4.0).t(),
        torch.full((3,), 4.0).to_sparse(),
        torch.zeros(0),
        torch.tensor(4.0),
    ]
    optimizer = with_gradients(*kinds, None)
    assert run(optimizer, way) == 0
    for parameter in parameters(optimizer)[:-1]:
        dense = parameter.grad.to_dense()
        assert torch.equal(dense, torch.ones_like(dense))


def test_a_bad_gradient_anywhere_in_the_storm_is_found(way: str):
    for place in range(4):
        kinds = [
            torch.ones(3),
            torch.ones(3, dtype=torch.float16),
            torch.ones(3).to_sparse(),
            torch.ones(3, dtype=torch.complex64),
        ]
        kinds[place] = kinds[place] * math.inf
        assert run(with_gradients(*kinds), way) == 1


def test_a_flag_that_is_up_stays_up():
    checker, flags = CpuGradientChecker(), {torch.device("cpu"): torch.tensor(1.0)}
    checker.check(with_gradients(torch.ones(2)), QUARTER, flags)
    assert flags[torch.device("cpu")].item() == 1


def test_no_gradients_raise_no_flag_and_leave_none():
    flags: dict[torch.device, torch.Tensor] = {}
    CpuGradientChecker().check(with_gradients(None), QUARTER, flags)
    check_sorted(with_gradients(None), QUARTER, flags)
    assert flags == {}


def test_kinds_that_appear_later_are_noticed():
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
def test_only_checked_gradients_keep_their_values_and_name_their_owner(
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
    culprit, flags = FlaggedSource(ParameterNames(), optimizer), {}
    check_sorted(optimizer, None, flags, culprit)
    held = [parameter.grad for parameter in parameters(optimizer)]
    optimizer.zero_grad()
    assert flags[torch.device("cpu")].item() == 1
    assert torch.equal(held[0], torch.tensor([1.0, 2.0**-149]))
    assert culprit.name() == culprit.name_from(culprit.fetch()) == "parameter 2"


def test_a_pass_that_unscales_raises_a_flag_for_each_gradient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mezzo._launch.has_triton", lambda _: True)
    monkeypatch.setattr("mezzo.scaling.check_unscale._run", check_unscale._run_in_torch)
    optimizer = with_gradients(
        torch.full((2,), 4.0),
        torch.tensor([math.nan, 4.0]),
        torch.full((2,), 4.0, dtype=torch.float64),
    )
    culprit, flags = FlaggedSource(ParameterNames(), optimizer), {}
    check_sorted(optimizer, QUARTER, flags, culprit)
    assert flags[torch.device("cpu")].item() == 1
    assert flags[torch.device("cpu")].dtype is torch.float32
    assert parameters(optimizer)[0].grad.tolist() == [1.0, 1.0]
    parameters(optimizer)[0].grad.fill_(math.nan)
    assert culprit.name() == "parameter 1"


def test_checking_without_a_factor_writes_nothing():
    gradient = torch.tensor([1.0, math.inf])
    flags: dict[torch.device, torch.Tensor] = {}
    version = gradient._version
    check_sorted(with_gradients(gradient), None, flags)
    assert flags[torch.device("cpu")].item() == 1
    assert gradient._version == version


def test_a_dtype_that_cannot_be_unscaled_is_refused_with_the_remedy():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn))
    parameter.grad = torch.ones(2).to(torch.float8_e4m3fn)
    with pytest.raises(ScalerError, match=r"float8_e4m3fn.*parameter\.grad\.float\(\)"):
        CpuGradientChecker().check(torch.optim.SGD([parameter], lr=0.1), QUARTER, {})


def test_the_first_nonfinite_parameter_is_found_in_any_layout():
    optimizer = with_gradients(
        None, torch.ones(2), torch.tensor([1.0, math.nan]).to_sparse(), torch.tensor([math.inf])
    )
    assert first_nonfinite(parameters(optimizer)) is parameters(optimizer)[2]
    assert first_nonfinite(parameters(optimizer)[:2]) is None


def test_a_checker_tells_what_its_flag_says():
    checker = CpuGradientChecker()
    assert checker.check(with_gradients(torch.ones(2)), QUARTER, {}) is False
    assert checker.check(with_gradients(torch.tensor([math.inf])), QUARTER, {}) is True
    assert checker.check(with_gradients(None), QUARTER, {}) is None


def test_a_flag_serves_again_only_when_it_is_down_and_was_taken_back():
    checker = CpuGradientChecker()

    def flag_after(gradient: torch.Tensor) -> torch.Tensor:
        flags: dict[torch.device, torch.Tensor] = {}
        checker.check(with_gradients(gradient), QUARTER, flags)
        return flags[torch.device("cpu")]

    first, second = flag_after(torch.ones(2)), flag_after(torch.ones(2))
    assert first is not second
    checker.unscale()
    again = [flag_after(torch.ones(2)), flag_after(torch.tensor([math.nan]))]
    assert {id(flag) for flag in again} == {id(first), id(second)}
    checker.unscale()
    assert flag_after(torch.ones(2)).item() == 0.0


def test_a_flag_raised_by_a_later_check_of_the_same_loss_never_serves_again():
    checker, flags = CpuGradientChecker(), {}
    for gradient in (torch.ones(2), torch.tensor([math.inf])):
        checker.check(with_gradients(gradient), QUARTER, flags)
    checker.unscale()
    after: dict[torch.device, torch.Tensor] = {}
    assert checker.check(with_gradients(torch.ones(2)), QUARTER, after) is False


def test_a_flag_raised_by_a_gradient_of_another_kind_never_serves_again():
    checker, flags = CpuGradientChecker(), {}
    checker.check(with_gradients(torch.ones(2)), QUARTER, flags)
    checker.check(with_gradients(torch.tensor([complex(math.nan, 0.0)])), QUARTER, flags)
    assert flags[torch.device("cpu")].item() == 1.0
    checker.unscale()
    assert checker.check(with_gradients(torch.ones(2)), QUARTER, {}) is False


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "nonfinite"])
def test_tensors_of_several_kinds_are_unscaled_without_an_optimizer(bad):
    tensors = [torch.ones(2, dtype=dtype, requires_grad=True) for dtype in REALS]
    for tensor in tensors:
        tensor.grad = torch.full_like(tensor, 16.0)
    if bad:
        tensors[1].grad[0] = math.nan

    assert unscale_tensors([*tensors, torch.ones(1, requires_grad=True)], 4.0) is bad
    assert all(tensor.grad[1].item() == 4.0 for tensor in tensors)


def test_no_gradient_at_all_is_a_good_one():
    assert unscale_tensors([torch.ones(1, requires_grad=True)], 3.0) is False
