"""An optimizer's own step over exact weights: what it does in float32, it does to 16-bit parameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.kernel_cases import fresh_seed
from support.patterns import same_bits
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import mezzo
from mezzo import UnsupportedError
from mezzo.optim.binding import OptimizerBinding
from mezzo.optim.master_formats import MASTER_FORMATS
from mezzo.optim.master_weights import MasterWeights, without_companion
from mezzo.optim.optimizers import LAMB, Lion
from mezzo.policy.types import Master

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "SGD nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, maximize=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1
    ),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Lion": lambda p: Lion(p, lr=0.01, weight_decay=0.1),
    "LAMB": lambda p: LAMB(p, lr=0.01),
}
SHAPES = [(4, 5), (7,), (), (0,), (2, 3, 2, 2)]

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
exact_masters = pytest.mark.parametrize(
    ("master", "half"),
    [("float32", torch.bfloat16), ("float32", torch.float16), ("split", torch.bfloat16)],
)
every_master = pytest.mark.parametrize(
    "master", ["float32", "split", "kahan", "stochastic", "none"]
)


class Twins:
    """The same weights twice: 16-bit ones whose optimizer is bound, and float32 ones whose optimizer is plain."""

    def __init__(
        self, make: Make, master: str, half: torch.dtype = torch.bfloat16, **settings: Any
    ) -> None:
        self.seed, self.half = fresh_seed(), half
        self.generator = torch.Generator().manual_seed(self.seed)
        values = [torch.randn(shape, generator=self.generator) for shape in SHAPES]
        values[-1] = values[-1].to(memory_format=torch.channels_last)
        self.halves, self.wholes = (
            [nn.Parameter(value.clone()) for value in values] for _ in range(2)
        )
        self.optimizer, self.plain = make(self.halves), make(self.wholes)
        self.masters = MasterWeights(master, seed=3)
        for parameter in self.halves:
            self.masters.adopt(parameter, half)
        self.bound = OptimizerBinding(self.optimizer, self.masters, **settings)

    def give(self, *, without: int | None = None) -> None:
        """Both the same fresh gradients, each in its dtype."""
        for place, (half, whole) in enumerate(zip(self.halves, self.wholes, strict=True)):
            gradient = torch.randn(half.shape, generator=self.generator).to(self.half)
            half.grad = None if place == without else gradient.to(half.dtype, copy=True)
            whole.grad = None if place == without else gradient.float()

    def step(self) -> None:
        for optimizer in (self.optimizer, self.plain):
            optimizer.step()

    def are_equal(self) -> bool:
        return all(
            same_bits(self.masters.read(half), whole.detach())
            for half, whole in zip(self.halves, self.wholes, strict=True)
        )


def snapshot(optimizer: torch.optim.Optimizer, masters: MasterWeights) -> Any:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    beside = [
        masters.companion_tensor(parameter) if parameter in masters else None
        for parameter in parameters
    ]
    return copy.deepcopy((parameters, beside, optimizer.state_dict()))


def equal(first: Any, second: Any) -> bool:
    """Equal all the way down, tensors by their bits."""
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


def told(optimizer: torch.optim.Optimizer, scale: float | None, *, bad: bool = False) -> None:
    """As a scaler does."""
    optimizer.grad_scale = None if scale is None else torch.tensor(scale)
    optimizer.found_inf = torch.tensor(float(bad))


# -- exactness -------------------------------------------------------------------------------------


@every_optimizer
@exact_masters
def test_weights_are_those_of_the_same_optimizer_in_float32(
    make: Make, master: str, half: torch.dtype
):
    twins = Twins(make, master, half)
    for _ in range(5):
        twins.give()
        twins.step()
        assert twins.are_equal(), twins.seed


@every_optimizer
def test_with_a_compensation_a_value_is_within_half_a_step_of_its_parameter(make: Make):
    """Rounded to 16 bits itself, a compensation can come to lie on the tie."""
    twins = Twins(make, "kahan")
    for _ in range(3):
        twins.give()
        twins.step()
        for parameter in twins.halves:
            size = parameter.detach().abs()
            step = torch.nextafter(size, torch.full_like(size, torch.inf)).float() - size.float()
            assert bool(
                ((twins.masters.read(parameter) - parameter.float()).abs() <= step / 2).all()
            ), twins.seed


@every_optimizer
@pytest.mark.parametrize("master", ["float32", "split", "stochastic", "none"])
def test_after_a_step_a_parameter_is_the_rounding_of_its_value(make: Make, master: str):
    twins = Twins(make, master)
    kind = MASTER_FORMATS[Master(master)]
    for _ in range(3):
        twins.give()
        twins.step()
        for parameter in twins.halves:
            assert parameter.dtype is torch.bfloat16
            rounded, _ = kind.split(twins.masters.read(parameter), torch.bfloat16)
            assert torch.equal(rounded, parameter), twins.seed


@every_optimizer
def test_the_state_is_float32_and_keyed_by_the_parameters(make: Make):
    twins = Twins(make, "split")
    twins.give()
    twins.step()
    assert set(twins.optimizer.state) <= set(twins.halves)
    state = twins.optimizer.state_dict()
    # What mezzo adds to it is not torch's.
    state["state"] = {
        number: own for number, held in state["state"].items() if (own := without_companion(held))
    }
    assert equal(state, twins.plain.state_dict()), twins.seed


@every_master
def test_updates_too_small_for_16_bits_are_kept_where_there_is_a_master(master: str):
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


def test_draws_repeat_with_the_seed_and_differ_from_step_to_step_and_place_to_place():
    def drawn(seed: int) -> list[torch.Tensor]:
        parameters = [nn.Parameter(torch.ones(500)) for _ in range(2)]
        optimizer, masters = (
            torch.optim.SGD(parameters, lr=2.0**-10),
            MasterWeights("stochastic", seed=seed),
        )
        for parameter in parameters:
            masters.adopt(parameter, torch.bfloat16)
        OptimizerBinding(optimizer, masters)
        seen = []
        for _ in range(2):
            for parameter in parameters:
                parameter.data.fill_(1.0)
                parameter.grad = torch.ones(500, dtype=torch.bfloat16)
            optimizer.step()
            seen += [parameter.detach().clone() for parameter in parameters]
        return seen

    first, second = drawn(5), drawn(5)
    assert all(map(torch.equal, first, second))
    streams = [*first, drawn(6)[0]]
    assert not any(
        torch.equal(one, other) for place, one in enumerate(streams) for other in streams[:place]
    )


def test_strangers_writes_between_steps_are_followed():
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


def test_groups_have_their_own_values():
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
        twins.give()
        twins.step()
    assert twins.are_equal(), twins.seed


# Torch's raises where a gradient comes later than others.
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "SGD fused"])
def test_parameters_without_gradients_are_left_alone(name: str):
    twins = Twins(OPTIMIZERS[name], "split")
    before, versions = (
        snapshot(twins.optimizer, twins.masters),
        [parameter._version for parameter in twins.halves],
    )
    for _ in range(2):
        twins.give(without=1)
        twins.step()
    assert twins.are_equal(), twins.seed
    assert torch.equal(before[0][1], twins.halves[1])
    assert twins.halves[1]._version == versions[1]
    twins.give()
    twins.step()
    assert twins.are_equal(), twins.seed


def test_a_step_without_any_gradient_does_nothing():
    twins = Twins(OPTIMIZERS["AdamW"], "split")
    before = snapshot(twins.optimizer, twins.masters)
    twins.optimizer.step()
    assert equal(snapshot(twins.optimizer, twins.masters), before)


@every_optimizer
def test_float32_parameters_beside_16_bit_ones_are_stepped_as_ever(make: Make):
    torch.manual_seed(seed := fresh_seed())
    values = [torch.randn(4) for _ in range(3)]
    halves, wholes = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizer, plain, masters = make(halves), make(wholes), MasterWeights("split")
    masters.adopt(halves[1], torch.bfloat16)
    OptimizerBinding(optimizer, masters)
    for _ in range(3):
        for half, whole in zip(halves, wholes, strict=True):
            gradient = torch.randn(4).bfloat16()
            half.grad, whole.grad = gradient.to(half.dtype), gradient.float()
        optimizer.step()
        plain.step()
    assert [half.dtype for half in halves] == [torch.float32, torch.bfloat16, torch.float32]
    for half, whole in zip(halves, wholes, strict=True):
        assert same_bits(
            masters.read(half) if half in masters else half.detach(), whole.detach()
        ), seed


def test_gradients_may_be_float32():
    twins = Twins(OPTIMIZERS["Adam"], "split")
    twins.give()
    for half, whole in zip(twins.halves, twins.wholes, strict=True):
        half.grad_dtype = None
        half.grad = whole.grad = torch.randn(half.shape, generator=twins.generator)
    twins.step()
    assert twins.are_equal(), twins.seed


def test_sparse_gradients_reach_an_optimizer_that_takes_them():
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
    told(optimizer, 2.0)
    optimizer.step()
    plain.step()
    assert same_bits(masters.read(embedding.weight), whole.weight.detach())


def test_a_group_that_is_added_later_is_stepped():
    twins = Twins(OPTIMIZERS["AdamW"], "split")
    for optimizer, parameters in ((twins.optimizer, twins.halves), (twins.plain, twins.wholes)):
        parameters.append(nn.Parameter(torch.full((3,), 1.0001)))
        optimizer.add_param_group({"params": parameters[-1:], "lr": 0.5})
    twins.masters.adopt(twins.halves[-1], torch.bfloat16)
    twins.give()
    twins.step()
    assert twins.are_equal(), twins.seed


def test_gradients_are_left_as_they_were():
    for clip_norm in (None, 0.1):
        twins = Twins(OPTIMIZERS["SGD nesterov"], "split", clip_norm=clip_norm)
        twins.give()
        before = [parameter.grad.clone() for parameter in twins.halves]
        twins.optimizer.step()
        assert all(map(torch.equal, before, [parameter.grad for parameter in twins.halves]))


# -- scale and skip --------------------------------------------------------------------------------


@every_optimizer
@every_master
def test_a_skipped_step_changes_nothing(make: Make, master: str):
    twins, calls = Twins(make, master), []
    twins.give()
    twins.optimizer.step()
    twins.give()
    before, held = snapshot(twins.optimizer, twins.masters), dict(twins.optimizer.state)
    versions = [parameter._version for parameter in twins.halves]
    twins.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    told(twins.optimizer, 4.0, bad=True)
    twins.optimizer.step()
    assert equal(snapshot(twins.optimizer, twins.masters), before), twins.seed
    assert all(twins.optimizer.state[parameter] is state for parameter, state in held.items())
    assert [parameter._version for parameter in twins.halves] == versions
    assert calls == ["after"]


@pytest.mark.parametrize("master", ["split", "stochastic"])
def test_after_a_skip_training_goes_on_as_if_nothing_had_happened(master: str):
    with_skip, without = Twins(OPTIMIZERS["Adam"], master), Twins(OPTIMIZERS["Adam"], master)
    for one, other in zip(with_skip.halves, without.halves, strict=True):
        without.masters.write(other, value := with_skip.masters.read(one))
        with_skip.masters.write(one, value)
    for step in range(4):
        with_skip.give()
        for one, other in zip(with_skip.halves, without.halves, strict=True):
            other.grad = one.grad.clone()
        told(with_skip.optimizer, None, bad=step == 2)
        with_skip.optimizer.step()
        if step != 2:
            without.optimizer.step()
    assert equal(
        snapshot(with_skip.optimizer, with_skip.masters),
        snapshot(without.optimizer, without.masters),
    ), with_skip.seed


@every_optimizer
@pytest.mark.parametrize("scale", [65536.0, 3.0])
def test_gradients_are_divided_by_the_scale_once(make: Make, scale: float):
    twins = Twins(make, "split")
    for _ in range(2):
        twins.give()
        for whole in twins.wholes:
            whole.grad *= torch.tensor(1.0 / scale)
        told(twins.optimizer, scale)
        twins.step()
    assert twins.are_equal(), twins.seed
    assert twins.optimizer.grad_scale.item() == scale


def test_what_the_optimizer_is_told_stays_when_its_step_raises():
    twins = Twins(OPTIMIZERS["Adam"], "split")
    twins.give()
    told(twins.optimizer, 8.0)
    before = snapshot(twins.optimizer, twins.masters)
    twins.optimizer.param_groups[0]["betas"] = "no numbers"
    with pytest.raises(ValueError):
        twins.optimizer.step()
    twins.optimizer.param_groups[0]["betas"] = before[2]["param_groups"][0]["betas"]
    assert all(
        one is other
        for one, other in zip(twins.optimizer.param_groups[0]["params"], twins.halves, strict=True)
    )
    assert (twins.optimizer.grad_scale.item(), twins.optimizer.found_inf.item()) == (8.0, 0.0)
    assert equal(snapshot(twins.optimizer, twins.masters), before)


@every_optimizer
@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_carries_gradients_that_float16_alone_would_lose(make: Make, unscale: bool):
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


def test_only_16_bit_gradients_are_widened_to_be_unscaled():
    twins = Twins(OPTIMIZERS["SGD"], "float32", torch.float16)
    twins.give(without=1)
    wide = torch.randn(SHAPES[0])
    twins.halves[0].grad_dtype = None
    twins.halves[0].grad = wide.clone()
    scaler = mezzo.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(twins.optimizer)
    assert torch.equal(twins.halves[0].grad, wide / 4)
    assert twins.halves[1].grad is None
    assert {parameter.grad.dtype for parameter in twins.halves if parameter.grad is not None} == {
        torch.float32
    }


@every_optimizer
def test_a_scaler_skips_a_step_and_backs_off(make: Make):
    twins = Twins(make, "float32", torch.float16)
    scaler = mezzo.GradScaler("cpu", init_scale=2.0**15)
    scaler.scale(torch.ones(()))
    twins.give()
    twins.halves[0].grad[1, 2] = torch.inf
    before = snapshot(twins.optimizer, twins.masters)
    assert scaler.step(twins.optimizer).skipped
    scaler.update()
    assert equal(snapshot(twins.optimizer, twins.masters), before), twins.seed
    assert scaler.get_scale() == 2.0**14


@every_optimizer
def test_a_schedule_that_the_scaler_steps_waits_on_a_skip(make: Make):
    twins = Twins(make, "split")
    scaler = mezzo.GradScaler("cpu", init_scale=4.0)
    schedulers = [StepLR(optimizer, 1, 0.5) for optimizer in (twins.optimizer, twins.plain)]
    for step in range(4):
        scaler.scale(torch.ones(()))
        twins.give()
        for whole in twins.wholes:
            whole.grad /= scaler.get_scale()
        if bad := step == 2:
            twins.halves[0].grad[0, 0] = torch.nan
        assert scaler.step(twins.optimizer, scheduler=schedulers[0]).skipped is bad
        scaler.update()
        if not bad:
            twins.plain.step()
            schedulers[1].step()
    assert twins.are_equal(), twins.seed
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()


def test_torchs_scaler_is_understood_too():
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
def test_clipping_is_clip_grad_norm(clip_norm: float, scale: float | None):
    twins = Twins(OPTIMIZERS["AdamW"], "split", clip_norm=clip_norm)
    for _ in range(3):
        twins.give()
        for whole in twins.wholes:
            whole.grad /= scale or 1.0
        norm = nn.utils.clip_grad_norm_(twins.wholes, clip_norm)
        told(twins.optimizer, scale)
        twins.step()
        assert torch.equal(twins.bound.grad_norm, norm), twins.seed
        assert twins.are_equal(), twins.seed


def test_without_clipping_no_norm_is_computed():
    twins = Twins(OPTIMIZERS["SGD"], "split")
    twins.give()
    twins.step()
    assert twins.bound.grad_norm is None


def test_clipping_beside_float32_parameters_leaves_their_gradients_as_they_were():
    half, whole = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer, masters = torch.optim.SGD([half, whole], lr=1.0), MasterWeights("split")
    masters.adopt(half, torch.bfloat16)
    bound = OptimizerBinding(optimizer, masters, clip_norm=1.0)
    half.grad, whole.grad = torch.full((2,), 3.0, dtype=torch.bfloat16), torch.full((2,), 4.0)
    optimizer.step()
    assert bound.grad_norm.item() == pytest.approx(50**0.5)
    assert (half.grad.tolist(), whole.grad.tolist()) == ([3.0, 3.0], [4.0, 4.0])
    assert whole.tolist() == pytest.approx([1.0 - 4.0 / 50**0.5] * 2, rel=1e-5)


# -- hooks, schedulers, closures -------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_step_hooks_run_once_whenever_they_were_registered(when: str):
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


def test_hooks_of_every_optimizer_run_once():
    twins, calls = Twins(OPTIMIZERS["Adam"], "split"), []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(optimizer))
    try:
        twins.give()
        twins.optimizer.step()
    finally:
        handle.remove()
    assert calls == [twins.optimizer]


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_schedulers_advance_without_a_warning_whenever_they_were_made(when: str):
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
    seen = []
    for _ in range(3):
        parameter.grad = torch.ones(2, dtype=torch.bfloat16)
        optimizer.step()
        seen.append(parameter[0].item())
        for scheduler in schedulers:
            scheduler.step()
    assert seen == ([0.5, 0.25, 0.125] if when != "both" else [0.5, 0.375, 0.34375])


def test_a_scheduler_that_goes_first_is_still_warned_about():
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


def test_a_closure_that_would_be_evaluated_in_between_is_refused_with_the_reason():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, masters = torch.optim.LBFGS([parameter]), MasterWeights("split")
    masters.adopt(parameter, torch.bfloat16)
    OptimizerBinding(optimizer, masters)
    with pytest.raises(
        UnsupportedError,
        match=(
            r"LBFGS\.step\(closure\) over 16-bit parameters would evaluate the closure while .*then"
            r" call step\(\)"
        ),
    ):
        optimizer.step(lambda: parameter.sum())


# -- unbinding -------------------------------------------------------------------------------------


def taken_back(twins: Twins) -> None:
    twins.bound.unbind()
    for parameter in twins.halves:
        parameter.grad = None
        twins.masters.release(parameter)


@every_optimizer
def test_an_unbound_optimizer_goes_on_in_float32_bit_for_bit(make: Make):
    twins = Twins(make, "split")
    before = set(make([nn.Parameter(torch.ones(1))]).__dict__)
    for _ in range(2):
        twins.give()
        twins.step()
    taken_back(twins)
    assert set(twins.optimizer.__dict__) - {"_opt_called"} == before
    for _ in range(2):
        twins.give()
        twins.step()
    assert all(map(torch.equal, twins.halves, twins.wholes)), twins.seed


@pytest.mark.parametrize("when", ["before", "during"])
def test_hooks_and_schedulers_survive_unbinding(when: str):
    parameter = nn.Parameter(torch.ones(2))
    optimizer, masters, calls = torch.optim.SGD([parameter], lr=0.5), MasterWeights("split"), []
    scheduler = StepLR(optimizer, 1, 0.5) if when == "before" else None
    masters.adopt(parameter, torch.bfloat16)
    bound = OptimizerBinding(optimizer, masters)
    scheduler = scheduler or StepLR(optimizer, 1, 0.5)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    bound.unbind()
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
        twins.give()
        twins.step()
        twins.bound.unbind()
        twins.bound = OptimizerBinding(twins.optimizer, twins.masters)
    twins.give()
    twins.step()
    assert twins.are_equal(), twins.seed


def test_a_deep_copy_that_would_train_without_exact_weights_is_refused():
    weight = nn.Parameter(torch.ones(2))
    optimizer, masters = torch.optim.SGD([weight], lr=0.1), MasterWeights("split")
    masters.adopt(weight, torch.bfloat16)
    bound = OptimizerBinding(optimizer, masters)
    with pytest.raises(mezzo.UnsupportedError, match=r"Copy optimizer.state_dict\(\)"):
        copy.deepcopy(optimizer)
    assert copy.deepcopy(optimizer.state_dict())["param_groups"]
    bound.unbind()
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
