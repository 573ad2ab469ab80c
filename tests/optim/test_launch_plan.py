"""Tables of addresses: made once for a set of parameters, and made again when anything in them moves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo import _launch
from mezzo.optim.fused_algorithms import ALGORITHMS
from mezzo.optim.fused_tables import LaunchPlan, ParameterSlots, make_launches
from mezzo.optim.master_weights import MasterWeights

CHUNK = 4


class Case:
    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.ones(size)) for size in (5, 1, 9)]
        self.optimizer = torch.optim.AdamW(self.parameters)
        self.masters = MasterWeights("split")
        for parameter in self.parameters[:2]:
            self.masters.adopt(parameter, torch.bfloat16)
        self.gradients = [torch.ones_like(parameter) for parameter in self.parameters]
        slots = ParameterSlots(self.optimizer, self.masters, ALGORITHMS[torch.optim.AdamW]).of(
            self.parameters
        )
        dtypes = [gradient.dtype for gradient in self.gradients]
        self.prepared = LaunchPlan(
            slots,
            make_launches(slots, dtypes, (False,), CHUNK),
            self.optimizer.state,
            self.masters.generation,
            (False,),
            dtypes,
        )

    def fits(
        self,
        parameters: list[torch.Tensor] | None = None,
        gradients: list[torch.Tensor] | None = None,
        variants: tuple[bool, ...] = (False,),
    ) -> bool:
        return self.prepared.fits(
            parameters or self.parameters,
            gradients or self.gradients,
            self.optimizer.state,
            self.masters.generation,
            variants,
        )


@pytest.fixture
def case() -> Case:
    return Case()


def test_parameters_of_one_dtype_share_a_launch(case: Case) -> None:
    half, full = case.prepared.launches
    assert (half.count, half.parameter_dtype, full.count, full.parameter_dtype) == (
        2,
        torch.bfloat16,
        1,
        torch.float32,
    )
    assert half.chosen("abc") == ("a", "b")
    assert full.chosen("abc") == ("c",)


def test_a_table_holds_addresses_sizes_and_first_programs(case: Case) -> None:
    half, _ = case.prepared.launches
    first, second = case.parameters[:2]
    state = case.optimizer.state
    assert half.addresses[:, 0].tolist() == [
        first.data_ptr(),
        case.masters.companion_tensor(first).data_ptr(),
        state[first]["exp_avg"].data_ptr(),
        state[first]["exp_avg_sq"].data_ptr(),
        0,
        5,
        0,
        case.masters.sample(first).data_ptr(),
        0,
    ]
    assert half.addresses[5:7, 1].tolist() == [second.numel(), 2]
    assert half.chunks.tolist() == [[0, 0, 1], [0, 1, 0]]


def test_the_same_parameters_with_gradients_elsewhere_fit(case: Case) -> None:
    assert case.fits()
    assert case.fits(gradients=[gradient.clone() for gradient in case.gradients])


@pytest.mark.parametrize(
    "change",
    [
        lambda case: case.fits(case.parameters[:2], case.gradients[:2]),
        lambda case: case.fits(gradients=[gradient.float() for gradient in case.gradients]),
        lambda case: case.fits(gradients=[*case.gradients[:2], case.gradients[2].to_sparse()]),
        lambda case: case.fits(variants=(True,)),
    ],
    ids=["fewer parameters", "another gradient dtype", "a sparse gradient", "another variant"],
)
def test_another_set_does_not_fit(case: Case, change) -> None:
    assert not change(case)


def _replace_state(case: Case) -> None:
    case.optimizer.state[case.parameters[2]]["exp_avg"] = torch.zeros(9)


def _load(case: Case) -> None:
    case.optimizer.load_state_dict(case.optimizer.state_dict())


def _move(case: Case) -> None:
    case.parameters[2].data = case.parameters[2].data.clone()


def _readopt(case: Case) -> None:
    case.masters.adopt(nn.Parameter(torch.ones(1)), torch.bfloat16)


@pytest.mark.parametrize(
    "change", [_replace_state, _load, _move, _readopt], ids=lambda change: change.__name__
)
def test_what_moved_does_not_fit(case: Case, change) -> None:
    change(case)
    assert not case.fits()


def prepared_for(parameter: nn.Parameter) -> LaunchPlan:
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    slots = ParameterSlots(optimizer, MasterWeights(), ALGORITHMS[torch.optim.SGD]).of([parameter])
    return LaunchPlan(slots, (), optimizer.state, 0, (False,), [torch.float32])


def test_a_gradient_with_other_strides_is_replaced_by_a_copy_that_has_its_parameters() -> None:
    parameter = nn.Parameter(torch.ones(4, 3).T)
    prepared = prepared_for(parameter)
    same, other = torch.arange(12.0).view(4, 3).T, torch.arange(12.0).view(3, 4)
    assert prepared.lay_out([same])[0] is same
    parameter.grad = other
    (moved,) = prepared.lay_out([other])
    assert moved.stride() == parameter.stride()
    assert torch.equal(moved, other)
    assert moved is parameter.grad
    assert prepared.lay_out([moved])[0] is moved


def test_strides_of_dimensions_of_size_one_need_no_copy() -> None:
    # A 1 × 1 convolution in channels_last, and the gradient that cuDNN gives it.
    parameter = nn.Parameter(torch.empty_strided((72, 24, 1, 1), (24, 1, 24, 24)))
    gradient = torch.empty_strided((72, 24, 1, 1), (24, 1, 1, 1))
    assert prepared_for(parameter).lay_out([gradient])[0] is gradient


def test_two_uses_in_one_capture_have_tables_of_their_own(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, moved = torch.device("cpu"), [gradient.clone() for gradient in case.gradients]
    monkeypatch.setattr(_launch, "is_capturing", lambda _: True)
    case.prepared.reserve()
    first, second = (
        case.prepared.gradients_on(device, case.gradients),
        case.prepared.gradients_on(device, moved),
    )
    case.prepared.settle()
    assert [table.tolist() for table in first] == [
        [gradient.data_ptr() for gradient in case.gradients[:2]],
        [case.gradients[2].data_ptr()],
    ]
    assert [table.tolist() for table in second] == [
        [gradient.data_ptr() for gradient in moved[:2]],
        [moved[2].data_ptr()],
    ]


def test_tables_of_gradients_are_kept_while_addresses_repeat(case: Case) -> None:
    device = torch.device("cpu")
    first = case.prepared.gradients_on(device, case.gradients)
    assert [table.tolist() for table in first] == [
        [gradient.data_ptr() for gradient in case.gradients[:2]],
        [case.gradients[2].data_ptr()],
    ]
    moved = [gradient.clone() for gradient in case.gradients]
    assert case.prepared.gradients_on(device, moved)[0] is not first[0]
    assert case.prepared.gradients_on(device, case.gradients)[0] is first[0]
