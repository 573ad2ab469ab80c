"""Binding an optimizer: the step that it gets, and parameters that are 16-bit already."""

from __future__ import annotations

import pytest
import torch
from support.wrappers import Lookahead

import mezzo
from mezzo.optim.bind_optimizer import bind_half_parameters, bind_optimizer, has_device_step
from mezzo.optim.binding import OptimizerBinding, optimizer_binding
from mezzo.optim.capturable_step import CAPTURABLE, CapturableBinding
from mezzo.optim.companion import MASTERS
from mezzo.optim.fused_algorithms import ALGORITHMS
from mezzo.optim.fused_step import FusedBinding
from mezzo.optim.master_weights import MasterWeights
from mezzo.optim.muon_step import MuonBinding
from mezzo.policy.types import Master


class Subclass(torch.optim.SGD):
    """A subclass that may override `step`."""


class Renamed(torch.optim.SGD):
    """A subclass that declares that it does not override `step`."""

    steps_as = torch.optim.SGD


class Inherits(Renamed):
    """A subclass of that one, which declares nothing."""


@pytest.mark.parametrize(
    "optimizer_class", [*ALGORITHMS, Renamed], ids=lambda optimizer_class: optimizer_class.__name__
)
def test_known_optimizers_get_the_fused_step(optimizer_class: type[torch.optim.Optimizer]) -> None:
    assert (
        type(
            bind_optimizer(
                optimizer_class([torch.nn.Parameter(torch.ones(2))], lr=0.1), MasterWeights()
            )
        )
        is FusedBinding
    )


@pytest.mark.parametrize(
    "optimizer_class",
    [torch.optim.Adafactor, Subclass, Inherits],
    ids=lambda optimizer_class: optimizer_class.__name__,
)
def test_other_optimizers_and_subclasses_keep_their_own_step(
    optimizer_class: type[torch.optim.Optimizer],
) -> None:
    assert (
        type(
            bind_optimizer(
                optimizer_class([torch.nn.Parameter(torch.ones(2))], lr=0.1), MasterWeights()
            )
        )
        is OptimizerBinding
    )


@pytest.mark.parametrize(
    "optimizer_class", CAPTURABLE, ids=lambda optimizer_class: optimizer_class.__name__
)
def test_optimizers_with_a_capturable_form_get_a_step_on_the_device(
    optimizer_class: type[torch.optim.Optimizer],
) -> None:
    optimizer = optimizer_class([torch.nn.Parameter(torch.ones(2, 2))])
    assert has_device_step(optimizer)
    assert type(bind_optimizer(optimizer, MasterWeights())) is CapturableBinding


def test_muon_gets_a_step_of_its_own() -> None:
    optimizer = torch.optim.Muon([torch.nn.Parameter(torch.ones(2, 2))])
    assert has_device_step(optimizer)
    assert type(bind_optimizer(optimizer, MasterWeights())) is MuonBinding


def test_stochastic_rounding_without_a_kernel_keeps_the_original_step() -> None:
    optimizer = torch.optim.RMSprop([torch.nn.Parameter(torch.ones(2))])
    binding = bind_optimizer(optimizer, MasterWeights(Master.STOCHASTIC))
    assert type(binding) is OptimizerBinding
    assert not binding.captures


# -- 16-bit parameters -----------------------------------------------------------------------------


def bound_adam(master: Master) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.Adam([weight], lr=1e-4)
    bind_half_parameters(optimizer, master)
    return weight, optimizer


@pytest.mark.parametrize("master", [Master.FLOAT32, Master.NONE], ids=lambda master: master.value)
def test_a_gradient_whose_square_underflows_in_float16_updates_the_parameter(
    master: Master,
) -> None:
    weight, optimizer = bound_adam(master)
    for _ in range(10):
        weight.grad = torch.full((2,), 1e-5, dtype=torch.float16)
        optimizer.step()
    assert optimizer.state[weight]["exp_avg"].dtype is torch.float32
    # Updates of 1e-4 are too small for a float16 of 1 unless a master adds them up.
    assert weight[0].item() == (pytest.approx(0.999, abs=5e-4) if master is Master.FLOAT32 else 1.0)


def test_parameter_groups_added_later_are_updated() -> None:
    _, optimizer = bound_adam(Master.NONE)
    other = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [other], "lr": 0.5})
    other.grad = torch.ones(1, dtype=torch.bfloat16)
    optimizer.step()
    assert (other.item(), optimizer.state[other]["exp_avg"].dtype) == (0.5, torch.float32)


def test_masters_are_saved_with_the_optimizer() -> None:
    assert bound_adam(Master.FLOAT32)[1].state_dict()[MASTERS].keys() == {0}
    assert MASTERS not in bound_adam(Master.NONE)[1].state_dict()


def test_optimizer_state_created_in_init_is_cast_to_float32() -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.Adagrad([weight], lr=0.1)
    assert optimizer.state[weight]["sum"].dtype is torch.float16
    bind_half_parameters(optimizer)
    assert optimizer.state[weight]["sum"].dtype is torch.float32


def test_a_wrapped_optimizer_is_refused_before_anything_changes() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = Lookahead(torch.optim.SGD([weight], lr=0.1))
    with pytest.raises(
        mezzo.UnsupportedError, match=r"Lookahead steps another optimizer, \.optimizer \(SGD\)"
    ):
        bind_half_parameters(optimizer)
    assert optimizer_binding(optimizer) is None
    assert "step" not in vars(optimizer)
