"""`mxnet.gluon.Trainer` with torch optimizers, and the loss scaling of `amp.init_trainer`."""

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

__all__ = ["Trainer"]

Parameters = list[torch.nn.Parameter]
TrainerParams = Mapping[str, torch.nn.Parameter] | Iterable[torch.nn.Parameter]


class Trainer:
    """`mxnet.gluon.Trainer`: step an optimizer over a dict or list of parameters.

    `step` sets the gradients to None, since in MXNet the next backward overwrites them. Differs
    from MXNet: momentum is torch's, which a changed learning rate multiplies as a whole.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> trainer = Trainer({"weight": weight}, "sgd", {"learning_rate": 0.5})
    >>> weight.sum().backward()
    >>> trainer.step(2)
    >>> weight.item()
    0.75
    """

    def __init__(
        self,
        params: TrainerParams,
        optimizer: str | torch.optim.Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: Any = "device",
        compression_params: Any = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        self._names = _named_parameters(params)
        arguments = dict(optimizer_params or {})
        if isinstance(optimizer, torch.optim.Optimizer):
            if arguments:
                raise AssertionError(
                    "optimizer_params must be None if optimizer is an instance of Optimizer instead"
                    " of str."
                )
            self._optimizer = optimizer
        else:
            self._optimizer = make_optimizer(optimizer, list(self._names.values()), arguments)
        self._rescale_grad = float(arguments.get("rescale_grad", 1.0))
        self._clip_gradient: float | None = arguments.get("clip_gradient")
        self._update_on_kvstore = bool(update_on_kvstore)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group."""
        rate: float = self._optimizer.param_groups[0]["lr"]
        return rate

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all parameter groups."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    @property
    def amp_loss_scale(self) -> float:
        """The loss scale; 1 before `amp.init_trainer`. Reading it synchronizes."""
        attached = scaled_optimizer_of(self._optimizer)
        return 1.0 if attached is None else attached.scaler.get_scale()

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Divide gradients by `batch_size`, step, and set them to None."""
        if not ignore_stale_grad:
            self._check_stale_gradients()
        self._prepare(batch_size)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def allreduce_grads(self) -> None:
        """Do nothing. For several processes wrap the network in DistributedDataParallel."""
        self._check_kvstore("allreduce_grads()")

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Call `step`, after `allreduce_grads`."""
        self._check_kvstore("update()")
        self.step(batch_size, ignore_stale_grad)

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Save the state of the optimizer and the loss scale."""
        attached = scaled_optimizer_of(self._optimizer)
        torch.save(
            {
                "optimizer": self._optimizer.state_dict(),
                "scaler": None if attached is None else attached.scaler.state_dict(),
            },
            fname,
        )

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Load a file of `save_states`."""
        saved = torch.load(fname, weights_only=True)
        self._optimizer.load_state_dict(saved["optimizer"])
        attached = scaled_optimizer_of(self._optimizer)
        if attached is not None and saved["scaler"] is not None:
            attached.scaler.load_state_dict(saved["scaler"])

    @torch.no_grad()
    def _prepare(self, batch_size: int) -> None:
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        attached = scaled_optimizer_of(self._optimizer)
        if self._clip_gradient is not None and attached is not None:
            # clip_gradient bounds the unscaled gradients.
            attached.unscale()
        if not gradients:
            return
        if self._rescale_grad != batch_size:
            foreach_mul_(gradients, self._rescale_grad / batch_size)
        if self._clip_gradient is not None:
            foreach_clamp_min_(gradients, -self._clip_gradient)
            foreach_clamp_max_(gradients, self._clip_gradient)

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (p for group in self._optimizer.param_groups for p in group["params"])

    def _check_stale_gradients(self) -> None:
        for name, parameter in self._names.items():
            if parameter.requires_grad and parameter.grad is None:
                raise UserWarning(
                    f"Gradient of Parameter `{name}` has not been updated by backward since last"
                    " `step`. This could mean a bug in your model that made it only use a subset"
                    " of the Parameters (Blocks) for this iteration. If you are intentionally only"
                    " using a subset, call step with ignore_stale_grad=True to suppress this"
                    " warning and skip updating of Parameters with stale gradient."
                )

    def _check_kvstore(self, call: str) -> None:
        if self._update_on_kvstore:
            raise AssertionError(
                f"{call} when parameters are updated on kvstore is not supported. Try setting"
                " `update_on_kvstore` to False when creating trainer."
            )


def _named_parameters(params: Any) -> dict[str, torch.nn.Parameter]:
    """Return parameters by name, shared ones once; dicts sorted by name, as in MXNet."""
    if isinstance(params, Mapping):
        pairs = [(str(name), params[name]) for name in sorted(params)]
    elif isinstance(params, Iterable) and not isinstance(
        params, str | torch.Tensor | torch.nn.Module
    ):
        pairs = [(f"parameter {index}", value) for index, value in enumerate(params)]
    else:
        raise ValueError(
            f"First argument must be a list or dict of Parameters, got {type(params)}. Pass"
            " dict(net.named_parameters())."
        )
    for _, value in pairs:
        if not isinstance(value, torch.Tensor):
            # MXNet raises ValueError.
            raise ValueError(
                f"First argument must be a list or dict of Parameters, got list of {type(value)}."
            )
    first_names: dict[int, str] = {}
    for name, value in pairs:
        first_names.setdefault(id(value), name)
    return {name: value for name, value in pairs if first_names[id(value)] == name}


Optimizer = torch.optim.Optimizer

_ATTRIBUTE = "_mezzo_attached"


class ScaledOptimizer:
    """Replace an optimizer's step by `GradScaler.step` and `update` after a scaled loss.

    Steps without a scaled loss run the original step.

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
        self.last_result: StepResult | None = None
        """Result of the last step of the scaler."""
        self._scaled = self._unscaled = self._stepping = False
        self._original_step = optimizer.step

        def step(_optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(args, kwargs)

        # torch's step hooks run once, in the original step.
        self._restore = replace_step(optimizer, step)
        optimizer.__dict__[_ATTRIBUTE] = self

    def scale(self, losses: Any) -> Any:
        """Return the losses times the loss scale; the next step uses the scaler."""
        self._scaled = True
        return self.scaler.scale(losses)

    def unscale(self) -> None:
        """Unscale and check the gradients in place before the step. A second call does nothing."""
        if self._scaled and not self._unscaled:
            self.scaler.unscale_(self.optimizer)
            self._unscaled = True

    def detach(self) -> None:
        """Restore the original step. A wrapper added later, as by a scheduler, stays in place."""
        self._scaled = False
        if self.optimizer.__dict__.get(_ATTRIBUTE) is self:
            del self.optimizer.__dict__[_ATTRIBUTE]
        self._restore()

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stepping or not self._scaled:
            return self._original_step(*args, **kwargs)
        self._stepping = True
        try:
            self.last_result = self.scaler.step(self.optimizer, *args, **kwargs)
        finally:
            self._stepping = False
        self._scaled = self._unscaled = False
        self.scaler.update()
        return self.last_result.value


def scaled_optimizer_of(optimizer: Optimizer) -> ScaledOptimizer | None:
    """Return the `ScaledOptimizer` of an optimizer, or None."""
    scaled_optimizer: ScaledOptimizer | None = optimizer.__dict__.get(_ATTRIBUTE)
    return scaled_optimizer


_COMMON_ARGUMENTS = {"learning_rate": "lr", "wd": "weight_decay"}
_ADAM_ARGUMENTS = _COMMON_ARGUMENTS | {"epsilon": "eps", "beta1": "beta1", "beta2": "beta2"}


@dataclass(frozen=True)
class _OptimizerSpec:
    """The torch counterpart of an MXNet optimizer."""

    factory: Callable[..., torch.optim.Optimizer]
    argument_names: Mapping[str, str]
    """MXNet's argument names → torch's."""
    defaults: Mapping[str, Any]
    """MXNet's defaults, by torch's argument names."""


_OPTIMIZERS = {
    "sgd": _OptimizerSpec(
        torch.optim.SGD, _COMMON_ARGUMENTS | {"momentum": "momentum"}, {"lr": 0.01}
    ),
    "nag": _OptimizerSpec(
        partial(torch.optim.SGD, nesterov=True),
        _COMMON_ARGUMENTS | {"momentum": "momentum"},
        {"lr": 0.1, "momentum": 0.9},
    ),
    "adam": _OptimizerSpec(torch.optim.Adam, _ADAM_ARGUMENTS, {"lr": 0.001}),
    "adamw": _OptimizerSpec(torch.optim.AdamW, _ADAM_ARGUMENTS, {"lr": 0.001, "weight_decay": 0.0}),
    "adamax": _OptimizerSpec(torch.optim.Adamax, _ADAM_ARGUMENTS, {"lr": 0.002}),
    "nadam": _OptimizerSpec(
        torch.optim.NAdam, _ADAM_ARGUMENTS | {"schedule_decay": "momentum_decay"}, {"lr": 0.001}
    ),
    "adagrad": _OptimizerSpec(
        torch.optim.Adagrad,
        _COMMON_ARGUMENTS | {"epsilon": "eps", "eps": "eps"},
        {"lr": 0.01, "eps": 1e-6},
    ),
    "adadelta": _OptimizerSpec(
        torch.optim.Adadelta,
        _COMMON_ARGUMENTS | {"rho": "rho", "epsilon": "eps"},
        {"lr": 1.0, "eps": 1e-5},
    ),
    "rmsprop": _OptimizerSpec(
        torch.optim.RMSprop,
        _COMMON_ARGUMENTS
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
    "lamb": _OptimizerSpec(LAMB, _ADAM_ARGUMENTS, {"lr": 0.001, "weight_decay": 0.0}),
}


_IGNORED_ARGUMENTS = (
    "multi_precision",
    "lazy_update",
    "use_fused_step",
    "aggregate_num",
    "begin_num_update",
)
"""Arguments about MXNet's kernels and 16-bit weights, without effect: weights are float32."""


_TRAINER_ARGUMENTS = ("rescale_grad", "clip_gradient")
"""Arguments that `Trainer` applies itself."""


def make_optimizer(
    name: str, parameters: Parameters, arguments: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Create a torch optimizer from MXNet's name and arguments.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = make_optimizer("sgd", [weight], {"learning_rate": 0.1, "wd": 0.01})
    >>> optimizer.param_groups[0]["weight_decay"]
    0.01
    """
    spec = _OPTIMIZERS.get(name.lower())
    if spec is None:
        raise ValueError(
            f"Cannot find optimizer {name}. There are: {', '.join(_OPTIMIZERS)}; or pass one of"
            f" torch.optim.{nearest(name, _OPTIMIZERS)}"
        )
    return spec.factory(parameters, **_translate_arguments(name, spec, arguments))


def _translate_arguments(
    name: str, spec: _OptimizerSpec, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    kwargs = dict(spec.defaults)
    for argument, value in arguments.items():
        if argument in (*_IGNORED_ARGUMENTS, *_TRAINER_ARGUMENTS):
            continue
        if argument not in spec.argument_names:
            allowed = ", ".join([*spec.argument_names, *_TRAINER_ARGUMENTS])
            raise TypeError(
                f"The optimizer {name!r} got an unexpected keyword argument {argument!r}. It takes:"
                f" {allowed}.{nearest(argument, spec.argument_names)}"
            )
        kwargs[spec.argument_names[argument]] = value
    if {"beta1", "beta2"} & kwargs.keys():
        kwargs["betas"] = (kwargs.pop("beta1", 0.9), kwargs.pop("beta2", 0.999))
    return kwargs
