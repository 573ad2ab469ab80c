"""Tables of the fused step: state per parameter, and addresses that are valid until one moves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo import _launch
from mezzo.optim.fused_algorithms import ALGORITHMS
from mezzo.optim.fused_tables import LaunchPlan, ParameterSlots, make_launches
from mezzo.optim.master_weights import MasterWeights
from mezzo.scaling import check_unscale

CHUNK = 4


def slots_of(optimizer: torch.optim.Optimizer, masters: MasterWeights) -> ParameterSlots:
    return ParameterSlots(optimizer, masters, ALGORITHMS[type(optimizer)])


def adopted(master: str, *parameters: nn.Parameter) -> MasterWeights:
    masters = MasterWeights(master)
    for parameter in parameters:
        masters.adopt(parameter, torch.bfloat16)
    return masters


def test_missing_states_are_created_in_float32_with_the_parameters_strides() -> None:
    weight = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    optimizer = torch.optim.Adam([weight], amsgrad=True)
    (slot,) = slots_of(optimizer, adopted("split", weight)).of([weight])
    assert [name for name, _ in slot.states] == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert all(
        state.dtype is torch.float32 and state.stride() == weight.stride() and not state.any()
        for _, state in slot.states
    )
    assert optimizer.state[weight]["step"].item() == 0.0
    assert slot.companion.dtype is torch.int16


def test_existing_states_are_reused_and_copied_only_if_their_dtype_differs() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    mean, square = optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"].clone()
    optimizer.state[weight]["exp_avg_sq"] = optimizer.state[weight]["exp_avg_sq"].double()
    (slot,) = slots_of(optimizer, MasterWeights()).of([weight])
    assert dict(slot.states)["exp_avg"] is mean
    assert torch.equal(dict(slot.states)["exp_avg_sq"], square)
    assert dict(slot.states)["exp_avg_sq"].dtype is torch.float32
    assert optimizer.state[weight]["step"].item() == 1.0


def test_counters_in_the_state_are_views_of_the_table() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights)
    slots = slots_of(optimizer, adopted("stochastic", *weights))
    slots.of(weights[1:])
    slots.counters[0, 1] = 7
    slots.counters[1, 2] = 5
    assert optimizer.state[weights[1]]["step"].item() == 7
    assert optimizer.state[weights[2]]["draws"].item() == 5
    assert "step" not in optimizer.state[weights[0]]


def test_a_new_momentum_buffer_counts_as_a_first_step_and_an_existing_one_does_not() -> None:
    existing, new = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([existing, new], lr=0.1, momentum=0.9)
    optimizer.state[existing]["momentum_buffer"] = torch.ones(2)
    slots = slots_of(optimizer, MasterWeights())
    slots.of([existing, new])
    assert slots.counters[0].tolist() == [1.0, 0.0]
    assert "step" not in optimizer.state[existing]


def test_counters_grow_for_parameters_added_later_and_keep_their_values() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([first])
    slots = slots_of(optimizer, MasterWeights())
    slots.of([first])
    slots.counters[0, 0] = 9
    optimizer.add_param_group({"params": [second]})
    made = slots.of([first, second])
    assert [optimizer.state[one]["step"].item() for one in (first, second)] == [9.0, 0.0]
    assert [(slot.group, slot.index) for slot in made] == [(0, 0), (1, 1)]


# -- launch plans ----------------------------------------------------------------------------------


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
        self.plan = LaunchPlan(
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
        return self.plan.fits(
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
    half, full = case.plan.launches
    assert (half.count, half.parameter_dtype, full.count, full.parameter_dtype) == (
        2,
        torch.bfloat16,
        1,
        torch.float32,
    )
    assert half.select("abc") == ("a", "b")
    assert full.select("abc") == ("c",)


def test_a_table_holds_addresses_sizes_and_first_programs(case: Case) -> None:
    half, _ = case.plan.launches
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
        0,
    ]
    assert half.addresses[5:7, 1].tolist() == [second.numel(), 2]
    assert half.chunks.tolist() == [[0, 0, 1], [0, 1, 0]]


def test_a_plan_fits_gradients_at_other_addresses(case: Case) -> None:
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
def test_a_plan_does_not_fit_other_parameters_or_gradients(case: Case, change) -> None:
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
def test_a_plan_does_not_fit_after_a_tensor_was_replaced(case: Case, change) -> None:
    change(case)
    assert not case.fits()


def plan_for(parameter: nn.Parameter) -> LaunchPlan:
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    slots = ParameterSlots(optimizer, MasterWeights(), ALGORITHMS[torch.optim.SGD]).of([parameter])
    return LaunchPlan(slots, (), optimizer.state, 0, (False,), [torch.float32])


def test_a_gradient_with_other_strides_is_replaced_by_a_copy_with_the_parameters() -> None:
    parameter = nn.Parameter(torch.ones(4, 3).T)
    plan = plan_for(parameter)
    same, other = torch.arange(12.0).view(4, 3).T, torch.arange(12.0).view(3, 4)
    assert plan.lay_out([same])[0] is same
    parameter.grad = other
    (copied,) = plan.lay_out([other])
    assert copied.stride() == parameter.stride()
    assert torch.equal(copied, other)
    assert copied is parameter.grad
    assert plan.lay_out([copied])[0] is copied


def test_strides_of_dimensions_of_size_one_need_no_copy() -> None:
    # A 1 × 1 convolution in channels_last, and the gradient that cuDNN gives it.
    parameter = nn.Parameter(torch.empty_strided((72, 24, 1, 1), (24, 1, 24, 24)))
    gradient = torch.empty_strided((72, 24, 1, 1), (24, 1, 1, 1))
    assert plan_for(parameter).lay_out([gradient])[0] is gradient


def test_two_uses_in_one_capture_get_separate_tables(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, moved = torch.device("cpu"), [gradient.clone() for gradient in case.gradients]
    monkeypatch.setattr(_launch, "is_capturing", lambda _: True)
    case.plan.reserve()
    first, second = (
        case.plan.gradients_on(device, case.gradients),
        case.plan.gradients_on(device, moved),
    )
    case.plan.fill_captured()
    assert [table.tolist() for table in first] == [
        [gradient.data_ptr() for gradient in case.gradients[:2]],
        [case.gradients[2].data_ptr()],
    ]
    assert [table.tolist() for table in second] == [
        [gradient.data_ptr() for gradient in moved[:2]],
        [moved[2].data_ptr()],
    ]


def test_a_plan_made_in_a_capture_keeps_its_sources_with_the_graph_and_fits_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_launch, "is_capturing", lambda _: True)
    with check_unscale.captured_tables() as kept:
        case = Case()
    # On a CPU a table is its own source.
    tables = [
        table
        for launch in case.plan.launches
        for table in (launch.addresses, launch.chunks, launch.indices)
    ]
    assert [id(one) for one in kept] == [id(one) for one in tables]
    monkeypatch.setattr(_launch, "is_capturing", lambda _: False)
    assert not case.fits()
    assert Case().fits()


def test_a_capture_without_reserved_tables_keeps_the_sources_of_its_copies_with_the_graph(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launch, "is_capturing", lambda _: True)
    with check_unscale.captured_tables() as kept:
        tables = case.plan.gradients_on(torch.device("cpu"), case.gradients)
    # On a CPU a table is its own source. The plan may be replaced before the graph is replayed.
    assert [id(one) for one in kept] == [id(one) for one in tables]


def test_tables_of_gradient_addresses_are_cached(case: Case) -> None:
    device = torch.device("cpu")
    first = case.plan.gradients_on(device, case.gradients)
    assert [table.tolist() for table in first] == [
        [gradient.data_ptr() for gradient in case.gradients[:2]],
        [case.gradients[2].data_ptr()],
    ]
    moved = [gradient.clone() for gradient in case.gradients]
    assert case.plan.gradients_on(device, moved)[0] is not first[0]
    assert case.plan.gradients_on(device, case.gradients)[0] is first[0]
