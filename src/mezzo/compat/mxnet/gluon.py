"""Gluon's `Trainer` over torch optimizers, with the loss scaling of `amp.init_trainer`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mezzo._errors import nearest
from mezzo._torch import foreach_clamp_max_, foreach_clamp_min_, foreach_mul_
from mezzo.optim.binding import replace_step
from mezzo.optim.optimizers import LAMB
from mezzo.scaling.scaler import GradScaler
from mezzo.scaling.step_result import StepResult

Parameters = list[torch.nn.Parameter]

_RATES = {"learning_rate": "lr", "wd": "weight_decay"}
_ADAM = _RATES | {"epsilon": "eps", "beta1": "beta1", "beta2": "beta2"}


@dataclass(frozen=True)
class Known:
    """An optimizer of MXNet's, in torch's words."""

    make: Callable[..., torch.optim.Optimizer]
    words: Mapping[str, str]
    """Its arguments there → here."""
    defaults: Mapping[str, Any]
    """Its defaults, in words of here."""


_OPTIMIZERS = {
    "sgd": Known(torch.optim.SGD, _RATES | {"momentum": "momentum"}, {"lr": 0.01}),
    "nag": Known(
        partial(torch.optim.SGD, nesterov=True),
        _RATES | {"momentum": "momentum"},
        {"lr": 0.1, "momentum": 0.9},
    ),
    "adam": Known(torch.optim.Adam, _ADAM, {"lr": 0.001}),
    "adamw": Known(torch.optim.AdamW, _ADAM, {"lr": 0.001, "weight_decay": 0.0}),
    "adamax": Known(torch.optim.Adamax, _ADAM, {"lr": 0.002}),
    "nadam": Known(torch.optim.NAdam, _ADAM | {"schedule_decay": "momentum_decay"}, {"lr": 0.001}),
    "adagrad": Known(
        torch.optim.Adagrad, _RATES | {"epsilon": "eps", "eps": "eps"}, {"lr": 0.01, "eps": 1e-6}
    ),
    "adadelta": Known(
        torch.optim.Adadelta, _RATES | {"rho": "rho", "epsilon": "eps"}, {"lr": 1.0, "eps": 1e-5}
    ),
    "rmsprop": Known(
        torch.optim.RMSprop,
        _RATES
        | {
            "rho": "alpha",
            "gamma1": "alpha",
            "momentum": "momentum",
            "gamma2": "momentum",
            "epsilon": "eps",
            "centered": "centered",
        },
        {"lr": 0.001, "alpha": 0.9},
    ),
    "lamb": Known(LAMB, _ADAM, {"lr": 0.001, "weight_decay": 0.0}),
}

_HINTS = ("multi_precision", "lazy_update", "use_fused_step", "aggregate_num", "begin_num_update")
"""Words about MXNet's kernels and its 16-bit weights: weights are float32 here."""
OUTSIDE = ("rescale_grad", "clip_gradient")
"""Words that the trainer itself acts on."""


def make(name: str, parameters: Parameters, words: Mapping[str, Any]) -> torch.optim.Optimizer:
    """An optimizer from its name and its arguments there.

    >>> make("sgd", [torch.nn.Parameter(torch.ones(1))], {"learning_rate": 0.1, "wd": 0.01}).param_groups[0]["weight_decay"]
    0.01
    """
    known = _OPTIMIZERS.get(name.lower())
    if known is None:
        raise ValueError(
            f"Cannot find optimizer {name}. There are: {', '.join(_OPTIMIZERS)}; or pass one of"
            f" torch.optim.{nearest(name, _OPTIMIZERS)}"
        )
    return known.make(
        parameters,
        **_translated(
            name,
            known,
            {word: value for word, value in words.items() if word not in (*_HINTS, *OUTSIDE)},
        ),
    )


def _translated(name: str, known: Known, words: Mapping[str, Any]) -> dict[str, Any]:
    for word in words:
        if word not in known.words:
            allowed = ", ".join([*known.words, *OUTSIDE])
            raise TypeError(
                f"The optimizer {name!r} got an unexpected keyword argument {word!r}. It takes:"
                f" {allowed}.{nearest(word, known.words)}"
            )
    said = dict(known.defaults) | {known.words[word]: value for word, value in words.items()}
    if {"beta1", "beta2"} & said.keys():
        said["betas"] = (said.pop("beta1", 0.9), said.pop("beta2", 0.999))
    return said


Optimizer = torch.optim.Optimizer

_MARK = "_mezzo_attached"


class ScaledOptimizer:
    """Steps an optimizer through a scaler once a loss was scaled: unscaled, checked, skipped where bad, and the scale adapted. Other steps are its own.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> attached = ScaledOptimizer(optimizer, GradScaler("cpu", init_scale=8.0))
    >>> attached.scale(weight.sum() * float("inf")).backward()
    >>> optimizer.step()
    >>> weight.item(), attached.scaler.get_scale()
    (1.0, 4.0)
    """

    def __init__(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.last: StepResult | None = None
        """What became of the last step that ran through the scaler."""
        self._scaled = self._unscaled = self._stepping = False
        self._own = optimizer.step

        def step(_optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(args, kwargs)

        # torch's hooks run once, in the optimizer's own step.
        self._restore = replace_step(optimizer, step)
        optimizer.__dict__[_MARK] = self

    def scale(self, losses: Any) -> Any:
        """Scale losses: the next step is the scaler's."""
        self._scaled = True
        return self.scaler.scale(losses)

    def unscale(self) -> None:
        """Unscale the gradients in place and check them, for whoever looks at them before the step; once, however often it is asked."""
        if self._scaled and not self._unscaled:
            self.scaler.unscale_(self.optimizer)
            self._unscaled = True

    def detach(self) -> None:
        """Let the optimizer's own step run again; a wrapper that somebody put around ours meanwhile stays, and reaches it too."""
        self._scaled = False
        if self.optimizer.__dict__.get(_MARK) is self:
            del self.optimizer.__dict__[_MARK]
        self._restore()

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stepping or not self._scaled:
            return self._own(*args, **kwargs)
        self._stepping = True
        try:
            self.last = self.scaler.step(self.optimizer, *args, **kwargs)
        finally:
            self._stepping = False
        self._scaled = self._unscaled = False
        self.scaler.update()
        return self.last.value


def scaled_optimizer_of(optimizer: Optimizer) -> ScaledOptimizer | None:
    """What steps an optimizer through a scaler; None where it steps by itself."""
    found: ScaledOptimizer | None = optimizer.__dict__.get(_MARK)
    return found


Given = Mapping[str, torch.nn.Parameter] | Iterable[torch.nn.Parameter]


class Trainer:
    """Steps an optimizer over parameters, with MXNet's words: a dict of parameters, as `dict(net.named_parameters())`, or a list of them.

    Gradients are forgotten by a step, for there the next backward overwrites them. Momentum is
    torch's: a rate that changes takes effect at once there and here, but torch multiplies the whole
    momentum by it.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> trainer = Trainer({"weight": weight}, "sgd", {"learning_rate": 0.5})
    >>> weight.sum().backward()
    >>> trainer.step(2)
    >>> weight.item()
    0.75
    """

    def __init__(
        self,
        params: Given,
        optimizer: str | torch.optim.Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: Any = "device",
        compression_params: Any = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        self._names = _named(params)
        words = dict(optimizer_params or {})
        if isinstance(optimizer, torch.optim.Optimizer):
            if words:
                raise AssertionError(
                    "optimizer_params must be None if optimizer is an instance of Optimizer instead"
                    " of str."
                )
            self._optimizer = optimizer
        else:
            self._optimizer = make(optimizer, list(self._names.values()), words)
        self._scale = float(words.get("rescale_grad", 1.0))
        self._clip: float | None = words.get("clip_gradient")
        self._on_kvstore = bool(update_on_kvstore)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, one of torch's."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The rate."""
        rate: float = self._optimizer.param_groups[0]["lr"]
        return rate

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    @property
    def amp_loss_scale(self) -> float:
        """The loss scale; 1 before `amp.init_trainer`."""
        attached = scaled_optimizer_of(self._optimizer)
        return 1.0 if attached is None else attached.scaler.get_scale()

    # MXNet's call shape.
    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Update from gradients divided by the batch size, and forget them."""
        if not ignore_stale_grad:
            self._refuse_stale()
        self._prepare(batch_size)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def allreduce_grads(self) -> None:
        """One process has nothing to reduce: wrap the network in DistributedDataParallel for several."""
        self._refuse_kvstore("allreduce_grads()")

    # MXNet's call shape.
    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """`step`, after `allreduce_grads`."""
        self._refuse_kvstore("update()")
        self.step(batch_size, ignore_stale_grad)

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Write the optimizer's state and the loss scale to a file."""
        attached = scaled_optimizer_of(self._optimizer)
        torch.save(
            {
                "optimizer": self._optimizer.state_dict(),
                "scaler": None if attached is None else attached.scaler.state_dict(),
            },
            fname,
        )

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Take over what `save_states` wrote."""
        saved = torch.load(fname, weights_only=True)
        self._optimizer.load_state_dict(saved["optimizer"])
        attached = scaled_optimizer_of(self._optimizer)
        if attached is not None and saved["scaler"] is not None:
            attached.scaler.load_state_dict(saved["scaler"])

    @torch.no_grad()
    def _prepare(self, batch_size: int) -> None:
        gradients = [one.grad for one in self._parameters() if one.grad is not None]
        attached = scaled_optimizer_of(self._optimizer)
        if self._clip is not None and attached is not None:
            # What is bounded must be the true gradient.
            attached.unscale()
        if not gradients:
            return
        if self._scale != batch_size:
            foreach_mul_(gradients, self._scale / batch_size)
        if self._clip is not None:
            foreach_clamp_min_(gradients, -self._clip)
            foreach_clamp_max_(gradients, self._clip)

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (one for group in self._optimizer.param_groups for one in group["params"])

    def _refuse_stale(self) -> None:
        for name, parameter in self._names.items():
            if parameter.requires_grad and parameter.grad is None:
                raise UserWarning(
                    f"Gradient of Parameter `{name}` has not been updated by backward since last"
                    " `step`. This could mean a bug in your model that made it only use a subset"
                    " of the Parameters (Blocks) for this iteration. If you are intentionally only"
                    " using a subset, call step with ignore_stale_grad=True to suppress this"
                    " warning and skip updating of Parameters with stale gradient."
                )

    def _refuse_kvstore(self, call: str) -> None:
        if self._on_kvstore:
            raise AssertionError(
                f"{call} when parameters are updated on kvstore is not supported. Try setting"
                " `update_on_kvstore` to False when creating trainer."
            )


def _named(params: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters by name, shared ones once; dicts in the order of their names, as there."""
    if isinstance(params, Mapping):
        pairs = [(str(name), params[name]) for name in sorted(params)]
    elif isinstance(params, Iterable) and not isinstance(
        params, str | torch.Tensor | torch.nn.Module
    ):
        pairs = [(f"parameter {place}", one) for place, one in enumerate(params)]
    else:
        raise ValueError(
            f"First argument must be a list or dict of Parameters, got {type(params)}. Pass"
            " dict(net.named_parameters())."
        )
    for _, one in pairs:
        if not isinstance(one, torch.Tensor):
            # MXNet's type.
            raise ValueError(
                f"First argument must be a list or dict of Parameters, got list of {type(one)}."
            )
    seen: set[int] = set()
    return {name: one for name, one in pairs if not (id(one) in seen or seen.add(id(one)))}  # type: ignore[func-returns-value]


__all__ = ["Trainer"]
