"""Steps of every fused optimizer, and their expected results computed in float64.

Used in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mezzo.optim.bind_optimizer import bind_optimizer
from mezzo.optim.binding import OptimizerBinding
from mezzo.optim.companion import KEYS, sampled
from mezzo.optim.fused_launch import BLOCK, CHUNK
from mezzo.optim.fused_step import FusedBinding
from mezzo.optim.master_weights import MasterWeights
from mezzo.optim.optimizers import LAMB, Lion

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "SGD momentum": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    ),
    "SGD nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True},
    ),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "Adam amsgrad": (
        torch.optim.Adam,
        {"lr": 0.01, "betas": (0.5, 0.6), "amsgrad": True, "maximize": True},
    ),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2},
    ),
    "Lion": (Lion, {"lr": 0.01, "weight_decay": 0.1}),
    "LAMB": (LAMB, {"lr": 0.01, "weight_decay": 0.1}),
}
KINDS = ["float32", "split", "kahan", "stochastic", "none"]
HALVES = [torch.bfloat16, torch.float16]
SIZES = [(0,), (), (17,), (BLOCK,), (BLOCK + 1,), (CHUNK - 1,), (3, CHUNK // 2 + 3)]
FEW_SIZES = [(17,), (BLOCK + 1,), (3, CHUNK // 2 + 3)]
"""For tests in Triton's interpreter that do not depend on the sizes."""


def fits(kind: str, half: torch.dtype) -> bool:
    """Return whether the master format supports the dtype."""
    return kind != "split" or half is torch.bfloat16


@dataclass
class Training:
    """A bound optimizer with parameters of every size and layout.

    Most parameters are 16-bit. They are in two groups with different hyperparameters.
    """

    optimizer: torch.optim.Optimizer
    masters: MasterWeights
    bound: OptimizerBinding
    generator: torch.Generator
    parameters: list[nn.Parameter] = field(default_factory=list)

    def gradients(self, scale: float = 1.0, *, wide: bool = False) -> None:
        """Set new random gradients, multiplied by `scale`, as backward would.

        In the dtype of the parameter, or with `wide` in float32, as accumulated gradients.
        """
        for parameter in self.parameters:
            drawn = (
                torch.randn(parameter.shape, generator=self.generator)
                * torch.rand((), generator=self.generator).mul(-6).exp2()
                * scale
            )
            parameter.grad_dtype = None
            parameter.grad = drawn.to(parameter.device, torch.float32 if wide else parameter.dtype)

    def exact(self) -> list[torch.Tensor]:
        """Return the master weights, and the parameters that have none."""
        return [
            (
                self.masters.read(parameter)
                if parameter in self.masters
                else parameter.detach().clone()
            )
            for parameter in self.parameters
        ]

    def step(self, scale: float | None = None, *, found: bool | None = None) -> None:
        """Take one step with the attributes that a scaler sets."""
        device = self.parameters[0].device
        if scale is not None:
            self.optimizer.grad_scale = torch.tensor(scale, device=device)
        if found is not None:
            self.optimizer.found_inf = torch.tensor(float(found), device=device)
        self.optimizer.step()
        self.optimizer.__dict__.pop("grad_scale", None)
        self.optimizer.__dict__.pop("found_inf", None)


def training(
    name: str,
    kind: str,
    half: torch.dtype,
    device: str,
    *,
    seed: int,
    clip_norm: float | None = None,
    fused: bool = True,
    sizes: Sequence[tuple[int, ...]] = SIZES,
) -> Training:
    """Return a training whose weights depend on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    cls, options = OPTIMIZERS[name]

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    with_masters = [nn.Parameter(fresh(*size)) for size in sizes]
    with_masters += [
        nn.Parameter(fresh(7, 9).T),
        nn.Parameter(fresh(2, 3, 5, 7).to(memory_format=torch.channels_last)),
        nn.Parameter(fresh(101)[1:]),
    ]
    plain = [nn.Parameter(fresh(33)), nn.Parameter(fresh(CHUNK + 5))]
    optimizer = cls(
        [
            {"params": with_masters[::2] + plain[:1]},
            {"params": with_masters[1::2] + plain[1:], "lr": 0.03, "weight_decay": 0.0},
        ],
        **options,
    )
    masters = MasterWeights(kind, seed=seed)
    for parameter in with_masters:
        masters.adopt(parameter, half)
    bound = (bind_optimizer if fused else OptimizerBinding)(optimizer, masters, clip_norm=clip_norm)
    assert isinstance(bound, FusedBinding) is fused
    return Training(
        optimizer,
        masters,
        bound,
        generator,
        [parameter for group in optimizer.param_groups for parameter in group["params"]],
    )


# -- the reference: one step in float64 ------------------------------------------------------------

State = dict[str, torch.Tensor]


def _sgd(
    value: torch.Tensor, gradient: torch.Tensor, state: State, group: dict[str, Any], step: int
) -> torch.Tensor:
    gradient = gradient + group["weight_decay"] * value
    if group["momentum"]:
        buffer = (
            gradient
            if step == 1
            else group["momentum"] * state["momentum_buffer"] + (1 - group["dampening"]) * gradient
        )
        state["momentum_buffer"] = buffer
        gradient = gradient + group["momentum"] * buffer if group["nesterov"] else buffer
    return value - group["lr"] * gradient


def _moments(
    gradient: torch.Tensor, state: State, group: dict[str, Any], step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = group["betas"]
    state["exp_avg"] = first * state["exp_avg"] + (1 - first) * gradient
    state["exp_avg_sq"] = second * state["exp_avg_sq"] + (1 - second) * gradient**2
    square = state["exp_avg_sq"]
    if group.get("amsgrad"):
        square = state["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], square)
    return state["exp_avg"] / (1 - first**step), (square / (1 - second**step)).sqrt() + group["eps"]


def _adam(
    value: torch.Tensor, gradient: torch.Tensor, state: State, group: dict[str, Any], step: int
) -> torch.Tensor:
    if group["decoupled_weight_decay"]:
        value = value * (1 - group["lr"] * group["weight_decay"])
    else:
        gradient = gradient + group["weight_decay"] * value
    mean, root = _moments(gradient, state, group, step)
    return value - group["lr"] * mean / root


def _adagrad(
    value: torch.Tensor, gradient: torch.Tensor, state: State, group: dict[str, Any], step: int
) -> torch.Tensor:
    gradient = gradient + group["weight_decay"] * value
    state["sum"] = state["sum"] + gradient**2
    return value - group["lr"] / (1 + (step - 1) * group["lr_decay"]) * gradient / (
        state["sum"].sqrt() + group["eps"]
    )


def _lion(
    value: torch.Tensor, gradient: torch.Tensor, state: State, group: dict[str, Any], step: int
) -> torch.Tensor:
    first, second = group["betas"]
    sign = (first * state["exp_avg"] + (1 - first) * gradient).sign()
    state["exp_avg"] = second * state["exp_avg"] + (1 - second) * gradient
    return value * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * sign


def _lamb(
    value: torch.Tensor, gradient: torch.Tensor, state: State, group: dict[str, Any], step: int
) -> torch.Tensor:
    mean, root = _moments(gradient, state, group, step)
    direction = mean / root + group["weight_decay"] * value
    weight, length = value.norm(), direction.norm()
    trust = weight / length if weight > 0 and length > 0 else 1.0
    return value - group["lr"] * trust * direction


REFERENCES: dict[type[torch.optim.Optimizer], Callable[..., torch.Tensor]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.Adagrad: _adagrad,
    Lion: _lion,
    LAMB: _lamb,
}


def wanted(
    trained: Training, steps: int, scale: float, clip_norm: float | None
) -> tuple[list[torch.Tensor], list[State], float]:
    """Return expected weights, states and gradient norm after the next step."""
    gradients = {
        parameter: parameter.grad.double() / scale
        for parameter in trained.parameters
        if parameter.grad is not None
    }
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
    share = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
    values, states = [], []
    for group, parameter, value in zip(
        _groups(trained.optimizer), trained.parameters, trained.exact(), strict=True
    ):
        gradient = gradients[parameter] * share * (-1.0 if group["maximize"] else 1.0)
        state = {
            name: tensor.double()
            for name, tensor in trained.optimizer.state[parameter].items()
            if name not in ("step", "draws", *KEYS)
        }
        initial = group.get("initial_accumulator_value", 0.0)
        for name in ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "sum"):
            state.setdefault(name, torch.full_like(gradient, initial))
        values.append(
            REFERENCES[type(trained.optimizer)](value.double(), gradient, state, group, steps)
        )
        states.append(state)
    return values, states, norm


def _groups(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    for group in optimizer.param_groups:
        for _ in group["params"]:
            yield group


def close(
    got: torch.Tensor, reference: torch.Tensor, tolerance: float = 2e-6, least: float = 0.0
) -> bool:
    """Return whether values are equal to float32 precision, relative to the largest one.

    `least` is an absolute tolerance for what the format cannot represent.
    """
    if got.numel() == 0:
        return True
    return bool(
        (got.double() - reference).abs().max() <= tolerance * (reference.abs().max() + 1e-3) + least
    )


def check_against_reference(
    name: str, kind: str, half: torch.dtype, device: str, seed: int
) -> None:
    """Take a skipped step and two clipped ones; compare weights and states with float64."""
    clip_norm = 2.0
    trained = training(name, kind, half, device, seed=seed, clip_norm=clip_norm)
    done = 0
    for scale, skipped, wide in ((8.0, True, False), (8.0, False, False), (0.5, False, True)):
        trained.gradients(scale, wide=wide)
        before = trained.exact()
        values, states, norm = wanted(trained, done + 1, scale, clip_norm)
        trained.step(scale, found=skipped)
        if skipped:
            assert all(map(torch.equal, trained.exact(), before)), seed
            continue
        done += 1
        assert abs(trained.bound.grad_norm.item() - norm) <= 2e-6 * norm, seed
        lost = {"kahan": 2.0**-16, "stochastic": 2.0**-7, "none": 2.0**-8}.get(kind, 0.0) * (
            1 if half is torch.bfloat16 else 2.0**-3
        )
        # A float16 compensation has no bits below 2^-24.
        least = 2.0**-25 if kind == "kahan" and half is torch.float16 else 0.0
        for parameter, got, value, state in zip(
            trained.parameters, trained.exact(), values, states, strict=True
        ):
            assert close(
                got, value, 2e-6 + (lost if parameter in trained.masters else 0.0), least
            ), (seed, name, kind, parameter.shape)
            for key, tensor in trained.optimizer.state[parameter].items():
                if key not in ("step", "draws", *KEYS):
                    assert close(tensor, state[key]), (seed, name, key, parameter.shape)


def check_that_parameters_are_rounded_masters(
    name: str, kind: str, half: torch.dtype, device: str, seed: int
) -> None:
    """Assert that parameters are their rounded masters, and companion tensors the remainders."""
    trained = training(name, kind, half, device, seed=seed)
    for _ in range(2):
        trained.gradients()
        trained.step()
    for parameter in trained.masters:
        exact = trained.masters.read(parameter)
        rounded, companion = trained.masters.format.split(exact, half)
        if kind == "kahan":
            # A compensation that was rounded up to half a step makes a tie: the parameter may be
            # either of the two nearest values.
            assert torch.equal(
                (rounded.double() - exact).abs(), (parameter.detach().double() - exact).abs()
            ), seed
            continue
        assert torch.equal(rounded, parameter), seed
        if companion is not None:
            assert torch.equal(companion, trained.masters.companion_tensor(parameter)), seed


def check_against_the_optimizers_own_step(
    name: str, kind: str, half: torch.dtype, device: str, seed: int
) -> None:
    """Assert that the fused step agrees with the optimizer's own step on master weights.

    Stochastic rounding draws the same numbers in both.
    """
    both = [training(name, kind, half, device, seed=seed, fused=fused) for fused in (True, False)]
    for scale in (8.0, 2.0, 4.0):
        for trained in both:
            trained.gradients(scale)
            trained.step(scale, found=False)
    for fused, own in zip(both[0].exact(), both[1].exact(), strict=True):
        if fused.numel() and kind in ("stochastic", "none"):
            # Near a tie the last bit of float32 decides the rounding.
            assert (fused != own).float().mean() <= max(0.01, 1.0 / fused.numel()) or close(
                fused, own.double()
            ), seed
        else:
            assert close(
                fused, own.double(), 2e-6 + (2.0**-16 if kind == "kahan" else 0.0), 2.0**-24
            ), (seed, name, kind, fused.shape)


def check_a_write_through_data(
    name: str, kind: str, half: torch.dtype, device: str, seed: int
) -> None:
    """Assert that the next step starts from values that were written through `.data`.

    torch's version counter does not see such writes. A parameter that was not written keeps its
    master weight.
    """
    trained = training(name, kind, half, device, seed=seed)
    trained.gradients()
    trained.step()
    for parameter in trained.masters:
        assert torch.equal(trained.masters.sample(parameter), sampled(parameter)), seed
    for group in trained.optimizer.param_groups:
        group["lr"] = 0.0
    kept = next(parameter for parameter in trained.masters if parameter.numel() > CHUNK)
    before = trained.masters.read(kept)
    written = [
        parameter for parameter in trained.masters if parameter is not kept and parameter.numel()
    ]
    for parameter in written:
        parameter.data.fill_(2.0)
    trained.step()
    assert torch.equal(trained.masters.read(kept), before), seed
    for parameter in written:
        assert not trained.masters.companion_tensor(parameter).any(), seed
        assert torch.equal(
            trained.masters.read(parameter), torch.full_like(parameter, 2.0, dtype=torch.float32)
        ), seed
