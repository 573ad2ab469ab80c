"""A bound optimizer updates 16-bit parameters exactly as it would update float32 ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.bound_twins import OPTIMIZERS, SHAPES, Make, Twins, every_optimizer
from support.kernel_cases import fresh_seed
from support.patterns import same_bits
from torch import nn
from torch.optim.lr_scheduler import StepLR

import mezzo
from mezzo.optim.binding import OptimizerBinding
from mezzo.optim.companion import without_companion
from mezzo.optim.master_formats import MASTER_FORMATS
from mezzo.optim.master_weights import MasterWeights
from mezzo.policy.types import Master
from mezzo.scaling import mesh

exact_masters = pytest.mark.parametrize(
    ("master", "half"),
    [("float32", torch.bfloat16), ("float32", torch.float16), ("split", torch.bfloat16)],
)
every_master = pytest.mark.parametrize(
    "master", ["float32", "split", "kahan", "stochastic", "none"]
)


def snapshot(optimizer: torch.optim.Optimizer, masters: MasterWeights) -> Any:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    companions = [
        masters.companion_tensor(parameter) if parameter in masters else None
        for parameter in parameters
    ]
    return copy.deepcopy((parameters, companions, optimizer.state_dict()))


def equal(first: Any, second: Any) -> bool:
    """Return whether nested values are equal, tensors in dtype and values."""
    if isinstance(first, torch.Tensor):
        return (
            isinstance(second, torch.Tensor)
            and first.dtype is second.dtype
            and torch.equal(first.detach(), second.detach())
        )
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            equal(first[name], second[name]) for name in first
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def set_scaling(
    optimizer: torch.optim.Optimizer, scale: float | None, *, found_inf: bool = False
) -> None:
    """Set the attributes that a scaler sets before a step."""
    optimizer.grad_scale = None if scale is None else torch.tensor(scale)
    optimizer.found_inf = torch.tensor(float(found_inf))


# -- exactness -------------------------------------------------------------------------------------


@every_optimizer
@exact_masters
def test_weights_equal_those_of_the_same_optimizer_in_float32(
    make: Make, master: str, half: torch.dtype
):
    twins = Twins(make, master, half)
    for _ in range(5):
        twins.set_gradients()
        twins.step()
        assert twins.are_equal(), twins.seed


@every_optimizer
def test_a_kahan_value_is_within_half_a_step_of_its_parameter(make: Make):
    # Not below half a step: a compensation that is rounded to 16 bits can lie on the tie.
    twins = Twins(make, "kahan")
    for _ in range(3):
        twins.set_gradients()
        twins.step()
        for parameter in twins.half_weights:
            size = parameter.detach().abs()
            step = torch.nextafter(size, torch.full_like(size, torch.inf)).float() - size.float()
            assert bool(
                ((twins.masters.read(parameter) - parameter.float()).abs() <= step / 2).all()
            ), twins.seed


@every_optimizer
@pytest.mark.parametrize("master", ["float32", "split", "stochastic", "none"])
def test_after_a_step_a_parameter_is_its_rounded_value(make: Make, master: str):
    twins = Twins(make, master)
    master_format = MASTER_FORMATS[Master(master)]
    for _ in range(3):
        twins.set_gradients()
        twins.step()
        for parameter in twins.half_weights:
            assert parameter.dtype is torch.bfloat16
            rounded, _ = master_format.split(twins.masters.read(parameter), torch.bfloat16)
            assert torch.equal(rounded, parameter), twins.seed


@every_optimizer
def test_the_state_equals_that_of_a_float32_run_and_is_keyed_by_the_parameters(make: Make):
    twins = Twins(make, "split")
    twins.set_gradients()
    twins.step()
    assert set(twins.optimizer.state) <= set(twins.half_weights)
    state = twins.optimizer.state_dict()
    state["state"] = {
        key: own for key, entries in state["state"].items() if (own := without_companion(entries))
    }
    assert equal(state, twins.plain.state_dict()), twins.seed


@every_master
def test_updates_too_small_for_16_bits_add_up_in_masters(master: str):
    parameter = nn.Parameter(torch.ones(2000))
    optimizer, masters = (
        torch.optim.SGD([parameter], lr=2.0**-12),
        MasterWeights(master, seed=fresh_seed()),
    )
    masters.adopt(parameter, torch.bfloat16)
    OptimizerBinding(optimizer, masters)
    for _ in range(256):
        parameter.grad = torch.ones(2000, dtype=torch.bfloat16)
        optimizer.step()
    mean = masters.read(parameter).double().mean().item()
    if master == "none":
        assert mean == 1.0
    else:
        assert mean == pytest.approx(1.0 - 256 * 2.0**-12, rel=1e-3), masters.seed


def test_random_draws_repeat_with_the_seed_and_differ_between_steps_and_parameters():
    def drawn(seed: int) -> list[torch.Tensor]:
        parameters = [nn.Parameter(torch.ones(500)) for _ in range(2)]
        optimizer, masters = (
            torch.optim.SGD(parameters, lr=2.0**-10),
            MasterWeights("stochastic", seed=seed),
        )
        for parameter in parameters:
            masters.adopt(parameter, torch.bfloat16)
        OptimizerBinding(optimizer, masters)
        results = []
        for _ in range(2):
            for parameter in parameters:
                parameter.data.fill_(1.0)
                parameter.grad = torch.ones(500, dtype=torch.bfloat16)
            optimizer.step()
            results += [parameter.detach().clone() for parameter in parameters]
        return results

    first, second = drawn(5), drawn(5)
    assert all(map(torch.equal, first, second))
    streams = [*first, drawn(6)[0]]
    assert not any(
        torch.equal(one, other) for index, one in enumerate(streams) for other in streams[:index]
    )


def test_writes_by_other_code_between_steps_count():
    for master in ("float32", "split", "kahan"):
        parameter = nn.Parameter(torch.full((3,), 1.001))
        optimizer, masters = torch.optim.SGD([parameter], lr=2.0**-10), MasterWeights(master)
        masters.adopt(parameter, torch.bfloat16)
        OptimizerBinding(optimizer, masters)
        with torch.no_grad():
            parameter.fill_(0.5)
        parameter.grad = torch.ones(3, dtype=torch.bfloat16)
        optimizer.step()
        assert masters.read(parameter).tolist() == [0.5 - 2.0**-10] * 3


# -- groups and gradients --------------------------------------------------------------------------


def test_groups_use_their_own_options():
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": parameters[:2], "lr": 0.1, "weight_decay": 0.0},
                {"params": parameters[2:], "betas": (0.5, 0.6)},
            ],
            lr=0.01,
            weight_decay=0.2,
        )

    twins = Twins(make, "split")
    for _ in range(3):
        twins.set_gradients()
        twins.step()
    assert twins.are_equal(), twins.seed


# torch's fused SGD raises an error if a gradient appears later than others.
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "SGD fused"])
def test_parameters_without_gradients_are_not_changed(name: str):
    twins = Twins(OPTIMIZERS[name], "split")
    before, versions = (
        snapshot(twins.optimizer, twins.masters),
        [parameter._version for parameter in twins.half_weights],
    )
    for _ in range(2):
        twins.set_gradients(without=1)
        twins.step()
    assert twins.are_equal(), twins.seed
    assert torch.equal(before[0][1], twins.half_weights[1])
    assert twins.half_weights[1]._version == versions[1]
    twins.set_gradients()
    twins.step()
    assert twins.are_equal(), twins.seed


def test_a_step_without_any_gradient_does_nothing():
    twins = Twins(OPTIMIZERS["AdamW"], "split")
    before = snapshot(twins.optimizer, twins.masters)
    twins.optimizer.step()
    assert equal(snapshot(twins.optimizer, twins.masters), before)


@every_optimizer
def test_float32_parameters_of_the_same_optimizer_are_updated_as_before(make: Make):
    torch.manual_seed(seed := fresh_seed())
    values = [torch.randn(4) for _ in range(3)]
    half_weights, full_weights = (
        [nn.Parameter(value.clone()) for value in values] for _ in range(2)
    )
    optimizer, plain, masters = make(half_weights), make(full_weights), MasterWeights("split")
    masters.adopt(half_weights[1], torch.bfloat16)
    OptimizerBinding(optimizer, masters)
    for _ in range(3):
        for half, whole in zip(half_weights, full_weights, strict=True):
            gradient = torch.randn(4).bfloat16()
            half.grad, whole.grad = gradient.to(half.dtype), gradient.float()
        optimizer.step()
        plain.step()
    assert [half.dtype for half in half_weights] == [torch.float32, torch.bfloat16, torch.float32]
    for half, whole in zip(half_weights, full_weights, strict=True):
        assert same_bits(
            masters.read(half) if half in masters else half.detach(), whole.detach()
        ), seed


def test_gradients_of_16_bit_parameters_may_be_float32():
    twins = Twins(OPTIMIZERS["Adam"], "split")
    twins.set_gradients()
    for half, whole in zip(twins.half_weights, twins.full_weights, strict=True):
        half.grad_dtype = None
        half.grad = whole.grad = torch.randn(half.shape, generator=twins.generator)
    twins.step()
    assert twins.are_equal(), twins.seed


def test_sparse_gradients_are_passed_to_the_optimizer():
    embedding, whole = nn.Embedding(5, 3, sparse=True), nn.Embedding(5, 3, sparse=True)
    whole.load_state_dict(embedding.state_dict())
    (optimizer, plain), masters = (
        (torch.optim.SGD(each.parameters(), lr=0.1) for each in (embedding, whole)),
        MasterWeights("split"),
    )
    masters.adopt(embedding.weight, torch.bfloat16)
    OptimizerBinding(optimizer, masters)
    for each, factor in ((embedding, 2.0), (whole, 1.0)):
        (each(torch.tensor([1, 1, 2])).float() * 0.5 * factor).sum().backward()
    set_scaling(optimizer, 2.0)
    optimizer.step()
    plain.step()
    assert same_bits(masters.read(embedding.weight), whole.weight.detach())


def test_a_group_added_later_is_updated():
    twins = Twins(OPTIMIZERS["AdamW"], "split")
    for optimizer, parameters in (
        (twins.optimizer, twins.half_weights),
        (twins.plain, twins.full_weights),
    ):
        parameters.append(nn.Parameter(torch.full((3,), 1.0001)))
        optimizer.add_param_group({"params": parameters[-1:], "lr": 0.5})
    twins.masters.adopt(twins.half_weights[-1], torch.bfloat16)
    twins.set_gradients()
    twins.step()
    assert twins.are_equal(), twins.seed


def test_an_unbound_optimizer_adds_no_masters():
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    binding = OptimizerBinding(optimizer, MasterWeights(Master.FLOAT32))
    missing: list[list[torch.Tensor]] = []
    binding.add_masters_with(missing.append)
    parameter.grad = torch.ones_like(parameter)
    binding.widen_gradients()
    binding.unbind()
    binding.widen_gradients()
    assert len(missing) == 1


def test_a_step_does_not_change_gradients():
    for clip_norm in (None, 0.1):
        twins = Twins(OPTIMIZERS["SGD nesterov"], "split", clip_norm=clip_norm)
        twins.set_gradients()
        before = [parameter.grad.clone() for parameter in twins.half_weights]
        twins.optimizer.step()
        assert all(map(torch.equal, before, [parameter.grad for parameter in twins.half_weights]))


# -- loss scale and skipped steps ------------------------------------------------------------------


@every_optimizer
@every_master
def test_a_skipped_step_changes_nothing(make: Make, master: str):
    twins, calls = Twins(make, master), []
    twins.set_gradients()
    twins.optimizer.step()
    twins.set_gradients()
    before, held = snapshot(twins.optimizer, twins.masters), dict(twins.optimizer.state)
    versions = [parameter._version for parameter in twins.half_weights]
    twins.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    set_scaling(twins.optimizer, 4.0, found_inf=True)
    twins.optimizer.step()
    assert equal(snapshot(twins.optimizer, twins.masters), before), twins.seed
    assert all(twins.optimizer.state[parameter] is state for parameter, state in held.items())
    assert [parameter._version for parameter in twins.half_weights] == versions
    assert calls == ["after"]


@pytest.mark.parametrize("master", ["split", "stochastic"])
def test_training_continues_after_a_skip_as_without_it(master: str):
    with_skip, without = Twins(OPTIMIZERS["Adam"], master), Twins(OPTIMIZERS["Adam"], master)
    for one, other in zip(with_skip.half_weights, without.half_weights, strict=True):
        without.masters.write(other, value := with_skip.masters.read(one))
        with_skip.masters.write(one, value)
    for step in range(4):
        with_skip.set_gradients()
        for one, other in zip(with_skip.half_weights, without.half_weights, strict=True):
            other.grad = one.grad.clone()
        set_scaling(with_skip.optimizer, None, found_inf=step == 2)
        with_skip.optimizer.step()
        if step != 2:
            without.optimizer.step()
    assert equal(
        snapshot(with_skip.optimizer, with_skip.masters),
        snapshot(without.optimizer, without.masters),
    ), with_skip.seed


@every_optimizer
@pytest.mark.parametrize("scale", [65536.0, 3.0])
def test_gradients_are_unscaled_once(make: Make, scale: float):
    twins = Twins(make, "split")
    for _ in range(2):
        twins.set_gradients()
        for whole in twins.full_weights:
            whole.grad *= torch.tensor(1.0 / scale)
        set_scaling(twins.optimizer, scale)
        twins.step()
    assert twins.are_equal(), twins.seed
    assert twins.optimizer.grad_scale.item() == scale


def test_parameters_and_scaling_attributes_are_restored_when_the_step_raises():
    twins = Twins(OPTIMIZERS["Adam"], "split")
    twins.set_gradients()
    set_scaling(twins.optimizer, 8.0)
    before = snapshot(twins.optimizer, twins.masters)
    twins.optimizer.param_groups[0]["betas"] = "no numbers"
    with pytest.raises(ValueError):
        twins.optimizer.step()
    twins.optimizer.param_groups[0]["betas"] = before[2]["param_groups"][0]["betas"]
    assert all(
        one is other
        for one, other in zip(
            twins.optimizer.param_groups[0]["params"], twins.half_weights, strict=True
        )
    )
    assert (twins.optimizer.grad_scale.item(), twins.optimizer.found_inf.item()) == (8.0, 0.0)
    assert equal(snapshot(twins.optimizer, twins.masters), before)


@every_optimizer
@pytest.mark.parametrize("unscale", [False, True])
def test_gradients_that_underflow_in_float16_are_unscaled_in_float32(make: Make, unscale: bool):
    slope = torch.tensor([2.0**-26, -(2.0**-28), 3 * 2.0**-27])
    parameter, whole = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, plain, masters = make([parameter]), make([whole]), MasterWeights("float32")
    masters.adopt(parameter, torch.float16)
    OptimizerBinding(optimizer, masters)
    scaler = mezzo.GradScaler("cpu", init_scale=2.0**16)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale((parameter.float() * slope).sum()).backward()
        assert parameter.grad.dtype is torch.float16
        assert (parameter.grad * 2.0**-16 == 0.0).all()
        if unscale:
            scaler.unscale_(optimizer)
            assert parameter.grad.tolist() == slope.tolist()
        assert not scaler.step(optimizer).skipped
        scaler.update()
        whole.grad = slope.clone()
        plain.step()
    assert same_bits(masters.read(parameter), whole.detach())


def test_unscaling_casts_16_bit_gradients_to_float32():
    twins = Twins(OPTIMIZERS["SGD"], "float32", torch.float16)
    twins.set_gradients(without=1)
    wide = torch.randn(SHAPES[0])
    twins.half_weights[0].grad_dtype = None
    twins.half_weights[0].grad = wide.clone()
    scaler = mezzo.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(twins.optimizer)
    assert torch.equal(twins.half_weights[0].grad, wide / 4)
    assert twins.half_weights[1].grad is None
    assert {
        parameter.grad.dtype for parameter in twins.half_weights if parameter.grad is not None
    } == {torch.float32}


@every_optimizer
def test_a_scaler_skips_a_step_and_backs_off(make: Make):
    twins = Twins(make, "float32", torch.float16)
    scaler = mezzo.GradScaler("cpu", init_scale=2.0**15)
    scaler.scale(torch.ones(()))
    twins.set_gradients()
    twins.half_weights[0].grad[1, 2] = torch.inf
    before = snapshot(twins.optimizer, twins.masters)
    assert scaler.step(twins.optimizer).skipped
    scaler.update()
    assert equal(snapshot(twins.optimizer, twins.masters), before), twins.seed
    assert scaler.get_scale() == 2.0**14


@every_optimizer
def test_a_scheduler_passed_to_the_scaler_does_not_advance_on_a_skip(make: Make):
    twins = Twins(make, "split")
    scaler = mezzo.GradScaler("cpu", init_scale=4.0)
    schedulers = [StepLR(optimizer, 1, 0.5) for optimizer in (twins.optimizer, twins.plain)]
    for step in range(4):
        scaler.scale(torch.ones(()))
        twins.set_gradients()
        for whole in twins.full_weights:
            whole.grad /= scaler.get_scale()
        if found_inf := step == 2:
            twins.half_weights[0].grad[0, 0] = torch.nan
        assert scaler.step(twins.optimizer, scheduler=schedulers[0]).skipped is found_inf
        scaler.update()
        if not found_inf:
            twins.plain.step()
            schedulers[1].step()
    assert twins.are_equal(), twins.seed
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()


def test_torchs_scaler_unscales_and_skips():
    parameter = nn.Parameter(torch.zeros(3))
    optimizer, masters = torch.optim.SGD([parameter], lr=1.0), MasterWeights("float32")
    masters.adopt(parameter, torch.float16)
    OptimizerBinding(optimizer, masters)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale((parameter.float() * 2.0**-30).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert masters.read(parameter).tolist() == [-(2.0**-30)] * 3
    optimizer.zero_grad()
    scaler.scale((parameter.float() * torch.inf).sum()).backward()
    scaler.step(optimizer)
    assert masters.read(parameter).tolist() == [-(2.0**-30)] * 3


# -- clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [0.5, 1e6])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_clipping_equals_clip_grad_norm(clip_norm: float, scale: float | None):
    twins = Twins(OPTIMIZERS["AdamW"], "split", clip_norm=clip_norm)
    for _ in range(3):
        twins.set_gradients()
        for whole in twins.full_weights:
            whole.grad /= scale or 1.0
        norm = nn.utils.clip_grad_norm_(twins.full_weights, clip_norm)
        set_scaling(twins.optimizer, scale)
        twins.step()
        assert torch.equal(twins.binding.grad_norm, norm), twins.seed
        assert twins.are_equal(), twins.seed


def test_the_norm_of_what_is_no_optimizer_is_refused():
    model = nn.Linear(2, 1)
    for other in (model, model.parameters()):
        with pytest.raises(mezzo.PolicyError, match="grad_norm takes an optimizer, got"):
            mezzo.grad_norm(other)


def test_without_clipping_no_norm_is_computed():
    twins = Twins(OPTIMIZERS["SGD"], "split")
    twins.set_gradients()
    twins.step()
    assert twins.binding.grad_norm is None


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_a_norm_can_be_computed_without_clipping(scale: float | None):
    twins = Twins(OPTIMIZERS["AdamW"], "split")
    twins.binding.track_norm()
    twins.set_gradients()
    for whole in twins.full_weights:
        whole.grad /= scale or 1.0
    norm = nn.utils.get_total_norm([whole.grad for whole in twins.full_weights])
    set_scaling(twins.optimizer, scale)
    twins.step()
    assert torch.equal(twins.binding.grad_norm, norm)
    assert twins.binding.square_sum.item() == pytest.approx(norm.item() ** 2)
    assert twins.are_equal()


def test_clipping_does_not_change_gradients_of_float32_parameters():
    half, whole = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer, masters = torch.optim.SGD([half, whole], lr=1.0), MasterWeights("split")
    masters.adopt(half, torch.bfloat16)
    binding = OptimizerBinding(optimizer, masters, clip_norm=1.0)
    half.grad, whole.grad = torch.full((2,), 3.0, dtype=torch.bfloat16), torch.full((2,), 4.0)
    optimizer.step()
    assert binding.grad_norm.item() == pytest.approx(50**0.5)
    assert (half.grad.tolist(), whole.grad.tolist()) == ([3.0, 3.0], [4.0, 4.0])
    assert whole.tolist() == pytest.approx([1.0 - 4.0 / 50**0.5] * 2, rel=1e-5)


class ScheduleFree(torch.optim.Optimizer):
    """SGD that evaluates at an average of its steps, as the optimizers of schedulefree do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "trains": True})

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state["z"] = parameter.clone()
                state["z"].sub_(parameter.grad, alpha=0.1)
                parameter.lerp_(state["z"], 0.5).sub_(parameter.grad, alpha=0.05)

    def train(self) -> None:
        self._switch(trains=True, weight=0.1)

    def eval(self) -> None:
        self._switch(trains=False, weight=1 - 1 / 0.9)

    @torch.no_grad()
    def _switch(self, *, trains: bool, weight: float) -> None:
        (group,) = self.param_groups
        for parameter in group["params"]:
            if group["trains"] is not trains and "z" in self.state[parameter]:
                parameter.lerp_(self.state[parameter]["z"], weight)
        group["trains"] = trains


@exact_masters
def test_an_optimizer_that_evaluates_other_weights_exchanges_masters(
    master: str, half: torch.dtype
):
    twins = Twins(ScheduleFree, master, half)
    for count in range(4):
        for mode in ("eval", "train"):
            for optimizer in (twins.optimizer, twins.plain):
                getattr(optimizer, mode)()
            assert twins.are_equal(), twins.seed
        # One parameter is never updated, and has no state.
        twins.set_gradients(without=0)
        twins.step()
        assert twins.are_equal(), (count, twins.seed)
    assert twins.half_weights[1].dtype is half
    twins.binding.unbind()
    assert twins.optimizer.eval.__func__ is ScheduleFree.eval


@pytest.mark.parametrize("master", ["kahan", "stochastic", "none"])
def test_an_exchange_of_weights_keeps_inexact_masters(master: str):
    twins = Twins(ScheduleFree, master)
    twins.set_gradients()
    twins.step()
    before = [twins.masters.read(parameter) for parameter in twins.half_weights]
    twins.optimizer.eval()
    twins.optimizer.train()
    after = [twins.masters.read(parameter) for parameter in twins.half_weights]
    torch.testing.assert_close(before, after, rtol=0.02, atol=0.02)


def test_a_step_keeps_the_state_dictionary():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    mezzo.decorate(model, optimizer, "O2", dtype="bfloat16")
    state = optimizer.state
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.state is state
    assert set(state) == set(model.parameters())


# -- shards ----------------------------------------------------------------------------------------


def test_a_warm_step_of_plain_parameters_does_not_search_for_shards(monkeypatch):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    mezzo.decorate(model, optimizer, dtype="float16", clip_norm=1.0)
    scaler = mezzo.GradScaler("cpu")

    def step() -> None:
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    def fail(_: Any) -> bool:
        raise AssertionError("searched for shards")

    step()
    monkeypatch.setattr(mesh, "any_sharded", fail)
    step()


def test_the_mesh_of_a_bound_optimizer_is_found_again_when_parameters_are_added(monkeypatch):
    first, added = (nn.Parameter(torch.ones(2)) for _ in range(2))
    binding = OptimizerBinding(torch.optim.SGD([first]), MasterWeights("none"))
    calls: list[list[torch.Tensor]] = []
    monkeypatch.setattr("mezzo.optim.binding.mesh_of", calls.append)
    for _ in range(2):
        assert binding.mesh is None
    assert len(calls) == 1
    binding.optimizer.add_param_group({"params": [added]})
    assert binding.mesh is None
    assert [len(parameters) for parameters in calls] == [1, 2]
