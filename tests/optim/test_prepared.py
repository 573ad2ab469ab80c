"""Tables of addresses: made once for a set of parameters, and made again when anything in them moves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.optim.algorithms import ALGORITHMS
from mezzo.optim.masters import Masters
from mezzo.optim.prepared import Prepared, make_launches
from mezzo.optim.slots import Slots

CHUNK = 4


class Case:
    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.ones(size)) for size in (5, 1, 9)]
        self.optimizer = torch.optim.AdamW(self.parameters)
        self.masters = Masters("split")
        for parameter in self.parameters[:2]:
            self.masters.adopt(parameter, torch.bfloat16)
        self.gradients = [torch.ones_like(parameter) for parameter in self.parameters]
        slots = Slots(self.optimizer, self.masters, ALGORITHMS[torch.optim.AdamW]).of(self.parameters)
        dtypes = [gradient.dtype for gradient in self.gradients]
        self.prepared = Prepared(slots, make_launches(slots, dtypes, (False,), CHUNK), self.optimizer.state, self.masters.generation, (False,), dtypes)

    def fits(self, parameters: list[torch.Tensor] | None = None, gradients: list[torch.Tensor] | None = None, variants: tuple[bool, ...] = (False,)) -> bool:
        return self.prepared.fits(parameters or self.parameters, gradients or self.gradients, self.optimizer.state, self.masters.generation, variants)


@pytest.fixture
def case() -> Case:
    return Case()


def test_parameters_of_one_dtype_share_a_launch(case: Case) -> None:
    half, full = case.prepared.launches
    assert (half.count, half.parameter_dtype, full.count, full.parameter_dtype) == (2, torch.bfloat16, 1, torch.float32)
    assert half.chosen("abc") == ("a", "b")
    assert full.chosen("abc") == ("c",)


def test_a_table_holds_addresses_sizes_and_first_programs(case: Case) -> None:
    half, _ = case.prepared.launches
    first, second = case.parameters[:2]
    state = case.optimizer.state
    assert half.addresses[:, 0].tolist() == [
        first.data_ptr(),
        case.masters.beside(first).data_ptr(),
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


@pytest.mark.parametrize("change", [_replace_state, _load, _move, _readopt], ids=lambda change: change.__name__)
def test_what_moved_does_not_fit(case: Case, change) -> None:
    change(case)
    assert not case.fits()


def test_gradients_are_laid_out_as_their_parameters_and_copied_only_if_they_are_not() -> None:
    parameter = nn.Parameter(torch.ones(4, 3).T)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    slots = Slots(optimizer, Masters(), ALGORITHMS[torch.optim.SGD]).of([parameter])
    prepared = Prepared(slots, (), optimizer.state, 0, (False,), [torch.float32])
    same, other = torch.arange(12.0).view(4, 3).T, torch.arange(12.0).view(3, 4)
    assert prepared.laid_out([same])[0] is same
    (moved,) = prepared.laid_out([other])
    assert moved.stride() == parameter.stride()
    assert torch.equal(moved, other)


def test_tables_of_gradients_are_kept_while_addresses_repeat(case: Case) -> None:
    device = torch.device("cpu")
    first = case.prepared.gradients_on(device, case.gradients)
    assert [table.tolist() for table in first] == [[gradient.data_ptr() for gradient in case.gradients[:2]], [case.gradients[2].data_ptr()]]
    moved = [gradient.clone() for gradient in case.gradients]
    assert case.prepared.gradients_on(device, moved)[0] is not first[0]
    assert case.prepared.gradients_on(device, case.gradients)[0] is first[0]
