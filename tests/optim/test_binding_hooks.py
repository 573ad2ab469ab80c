"""Hooks, schedulers and closures of a bound optimizer, and unbinding it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from support.bound_twins import OPTIMIZERS, Make, Twins, every_optimizer
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import mezzo
from mezzo import UnsupportedError
from mezzo.optim.binding import OptimizerBinding
from mezzo.optim.master_weights import MasterWeights

# -- hooks, schedulers, closures -------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_step_hooks_run_once_if_registered_before_or_after_binding(when: str):
    parameter = nn.Parameter(torch.ones(2))
    optimizer, masters, calls = torch.optim.SGD([parameter], lr=0.5), MasterWeights("split"), []

    def register() -> None:
        optimizer.register_step_pre_hook(lambda *_: calls.append(("before", parameter[0].item())))
        optimizer.register_step_post_hook(lambda *_: calls.append(("after", parameter[0].item())))

    if when == "before":
        register()
    masters.adopt(parameter, torch.bfloat16)
    OptimizerBinding(optimizer, masters)
    if when == "after":
        register()
    parameter.grad = torch.ones(2, dtype=torch.bfloat16)
    optimizer.step()
    assert calls == [("before", 1.0), ("after", 0.5)]


def test_global_optimizer_hooks_run_once():
    twins, calls = Twins(OPTIMIZERS["Adam"], "split"), []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(optimizer))
    try:
        twins.set_gradients()
        twins.optimizer.step()
    finally:
        handle.remove()
    assert calls == [twins.optimizer]


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_schedulers_created_before_or_after_binding_advance_without_a_warning(when: str):
    parameter = nn.Parameter(torch.ones(2))
    optimizer, masters, schedulers = (
        torch.optim.SGD([parameter], lr=0.5),
        MasterWeights("split"),
        [],
    )
    if when in {"before", "both"}:
        schedulers.append(StepLR(optimizer, 1, 0.5))
    masters.adopt(parameter, torch.bfloat16)
    OptimizerBinding(optimizer, masters)
    if when in {"after", "both"}:
        schedulers.append(StepLR(optimizer, 1, 0.5))
    values = []
    for _ in range(3):
        parameter.grad = torch.ones(2, dtype=torch.bfloat16)
        optimizer.step()
        values.append(parameter[0].item())
        for scheduler in schedulers:
            scheduler.step()
    assert values == ([0.5, 0.25, 0.125] if when != "both" else [0.5, 0.375, 0.34375])


def test_a_scheduler_that_steps_first_still_gives_a_warning():
    twins = Twins(OPTIMIZERS["SGD"], "split")
    scheduler = StepLR(twins.optimizer, 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "Adagrad", "Lion", "LAMB", "RMSprop", "NAdam"]
)
def test_a_closure_is_evaluated_once_before_the_step(name: str):
    parameter = nn.Parameter(torch.ones(2))
    optimizer, masters, calls = OPTIMIZERS[name]([parameter]), MasterWeights("split"), []
    masters.adopt(parameter, torch.bfloat16)
    OptimizerBinding(optimizer, masters)

    def closure() -> torch.Tensor:
        calls.append((torch.is_grad_enabled(), optimizer.param_groups[0]["params"][0] is parameter))
        optimizer.zero_grad()
        loss = parameter.float().square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert calls == [(True, True)]
    assert bool((masters.read(parameter) < 1.0).all())


def test_a_closure_of_lbfgs_is_refused():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, masters = torch.optim.LBFGS([parameter]), MasterWeights("split")
    masters.adopt(parameter, torch.bfloat16)
    OptimizerBinding(optimizer, masters)
    with pytest.raises(
        UnsupportedError,
        match=(
            r"LBFGS\.step\(closure\) is not supported over 16-bit parameters: .*then call step\(\)"
        ),
    ):
        optimizer.step(lambda: parameter.sum())


# -- unbinding -------------------------------------------------------------------------------------


def unbind(twins: Twins) -> None:
    twins.binding.unbind()
    for parameter in twins.half_weights:
        parameter.grad = None
        twins.masters.release(parameter)


@every_optimizer
def test_an_unbound_optimizer_continues_in_float32_to_the_bit(make: Make):
    twins = Twins(make, "split")
    before = set(make([nn.Parameter(torch.ones(1))]).__dict__)
    for _ in range(2):
        twins.set_gradients()
        twins.step()
    unbind(twins)
    assert set(twins.optimizer.__dict__) - {"_opt_called"} == before
    for _ in range(2):
        twins.set_gradients()
        twins.step()
    assert all(map(torch.equal, twins.half_weights, twins.full_weights)), twins.seed


@pytest.mark.parametrize("when", ["before", "during"])
def test_hooks_and_schedulers_keep_working_after_unbinding(when: str):
    parameter = nn.Parameter(torch.ones(2))
    optimizer, masters, calls = torch.optim.SGD([parameter], lr=0.5), MasterWeights("split"), []
    scheduler = StepLR(optimizer, 1, 0.5) if when == "before" else None
    masters.adopt(parameter, torch.bfloat16)
    binding = OptimizerBinding(optimizer, masters)
    scheduler = scheduler or StepLR(optimizer, 1, 0.5)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    binding.unbind()
    masters.release(parameter)
    parameter.grad = torch.ones(2)
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert (calls, parameter.tolist(), optimizer.param_groups[0]["lr"]) == (
        ["after"],
        [0.5, 0.5],
        0.25,
    )


def test_an_optimizer_can_be_bound_again():
    twins = Twins(OPTIMIZERS["AdamW"], "split")
    for _ in range(2):
        twins.set_gradients()
        twins.step()
        twins.binding.unbind()
        twins.binding = OptimizerBinding(twins.optimizer, twins.masters)
    twins.set_gradients()
    twins.step()
    assert twins.are_equal(), twins.seed


def test_a_deep_copy_of_a_bound_optimizer_is_refused():
    weight = nn.Parameter(torch.ones(2))
    optimizer, masters = torch.optim.SGD([weight], lr=0.1), MasterWeights("split")
    masters.adopt(weight, torch.bfloat16)
    binding = OptimizerBinding(optimizer, masters)
    with pytest.raises(mezzo.UnsupportedError, match=r"Copy optimizer.state_dict\(\)"):
        copy.deepcopy(optimizer)
    assert copy.deepcopy(optimizer.state_dict())["param_groups"]
    binding.unbind()
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
