"""States that the fused step completes: float32, laid out as their parameter, with counters on the device."""

from __future__ import annotations

import torch
from torch import nn

from mezzo.optim.fused_algorithms import ALGORITHMS
from mezzo.optim.fused_tables import ParameterSlots
from mezzo.optim.master_weights import MasterWeights


def slots_of(optimizer: torch.optim.Optimizer, masters: MasterWeights) -> ParameterSlots:
    return ParameterSlots(optimizer, masters, ALGORITHMS[type(optimizer)])


def adopted(kind: str, *parameters: nn.Parameter) -> MasterWeights:
    masters = MasterWeights(kind)
    for parameter in parameters:
        masters.adopt(parameter, torch.bfloat16)
    return masters


def test_states_are_made_as_the_optimizers_own_step_makes_them_but_in_float32() -> None:
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


def test_states_that_are_there_are_taken_over_by_value_and_by_object_where_they_fit() -> None:
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


def test_counters_are_views_that_the_kernel_moves() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights)
    slots = slots_of(optimizer, adopted("stochastic", *weights))
    slots.of(weights[1:])
    slots.counters[0, 1] = 7
    slots.counters[1, 2] = 5
    assert optimizer.state[weights[1]]["step"].item() == 7
    assert optimizer.state[weights[2]]["draws"].item() == 5
    assert "step" not in optimizer.state[weights[0]]


def test_a_momentum_that_is_there_has_begun_and_one_that_is_made_has_not() -> None:
    begun, fresh = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([begun, fresh], lr=0.1, momentum=0.9)
    optimizer.state[begun]["momentum_buffer"] = torch.ones(2)
    slots = slots_of(optimizer, MasterWeights())
    slots.of([begun, fresh])
    assert slots.counters[0].tolist() == [1.0, 0.0]
    assert "step" not in optimizer.state[begun]


def test_parameters_that_join_later_find_room_and_the_others_keep_their_counts() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([first])
    slots = slots_of(optimizer, MasterWeights())
    slots.of([first])
    slots.counters[0, 0] = 9
    optimizer.add_param_group({"params": [second]})
    found = slots.of([first, second])
    assert [optimizer.state[one]["step"].item() for one in (first, second)] == [9.0, 0.0]
    assert [(slot.group, slot.index) for slot in found] == [(0, 0), (1, 1)]
