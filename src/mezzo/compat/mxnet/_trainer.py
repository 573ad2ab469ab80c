"""`gluon.Trainer` with torch optimizers, and the loss scaling of `amp.init_trainer`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mezzo._errors import CheckpointError, ScalerError, UnsupportedError
from mezzo._torch import foreach_clamp_max_, foreach_clamp_min_, foreach_mul_
from mezzo.compat.mxnet._optimizers import check_arguments, check_number, make_optimizer
from mezzo.compat.mxnet._parameter import Parameter
from mezzo.optim.binding import replace_step
from mezzo.scaling.scaler import GradScaler
from mezzo.scaling.step_result import StepResult

__all__ = ["Trainer"]

AnyParameter = torch.nn.Parameter | Parameter
TrainerParams = Mapping[str, AnyParameter] | Iterable[AnyParameter]


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
        arguments = check_arguments(optimizer_params)
        _check_one_process(kvstore, compression_params)
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
        self._clip_gradient: float | None = None
        if arguments.get("clip_gradient") is not None:
            self._clip_gradient = check_number("clip_gradient", arguments["clip_gradient"])
        self._update_on_kvstore = bool(update_on_kvstore)
        self._num_update = 0
        self._scheduler = scheduler = arguments.get("lr_scheduler")
        if scheduler is not None and hasattr(scheduler, "base_lr"):
            # As in MXNet: an explicit learning rate replaces that of the scheduler.
            scheduler.base_lr = arguments.get("learning_rate", scheduler.base_lr)
        self._apply_multipliers()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate: that of the scheduler, or of the first parameter group."""
        if self._scheduler is not None:
            return float(self._scheduler(self._num_update))
        group = self._optimizer.param_groups[0]
        return float(group["lr"] / group.get("lr_mult", 1.0))

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of a trainer without a scheduler."""
        if self._scheduler is not None:
            raise UserWarning(
                "LRScheduler of the optimizer has already been defined. Note that set_learning_rate"
                " can mutate the value of the learning rate of the optimizer only when the"
                " LRScheduler of the optimizer is undefined."
            )
        self._set_rate(check_number("lr", lr))

    @property
    def amp_loss_scale(self) -> float:
        """The loss scale; 1 before `amp.init_trainer`. Reading it synchronizes."""
        attached = scaled_optimizer_of(self._optimizer)
        return 1.0 if attached is None else attached.scaler.get_scale()

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Divide gradients by `batch_size`, step, and set them to None."""
        check_number("batch_size", batch_size, positive=True)
        if not ignore_stale_grad:
            self._check_stale_gradients()
        self._apply_multipliers()
        if self._scheduler is not None:
            self._set_rate(self._scheduler(self._num_update + 1))
        self._prepare(batch_size)
        self._optimizer.step()
        self._count_update()
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
                "num_update": self._num_update,
            },
            fname,
        )

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Load a file of `save_states`."""
        saved = _load_states(fname)
        self._optimizer.load_state_dict(saved["optimizer"])
        self._num_update = saved.get("num_update", 0)
        attached = scaled_optimizer_of(self._optimizer)
        if attached is not None and saved["scaler"] is not None:
            attached.scaler.load_state_dict(saved["scaler"])

    def _set_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)

    def _count_update(self) -> None:
        """Count an update that was not skipped, for the scheduler."""
        if self._scheduler is not None:
            attached = scaled_optimizer_of(self._optimizer)
            result = None if attached is None else attached.last_result
            self._num_update += result is None or not result.skipped

    def _apply_multipliers(self) -> None:
        """Give parameters with their own `lr_mult` or `wd_mult` groups of their own."""
        groups, changed = self._optimizer.param_groups, False
        regrouped: list[dict[str, Any]] = []
        for group in groups:
            current = group.get("lr_mult", 1.0), group.get("wd_mult", 1.0)
            split: dict[tuple[float, float], list[Any]] = {}
            for parameter in group["params"]:
                key = getattr(parameter, "lr_mult", 1.0), getattr(parameter, "wd_mult", 1.0)
                split.setdefault(key, []).append(parameter)
            changed = changed or list(split) != [current]
            for (lr_mult, wd_mult), parameters in split.items():
                base_wd = group.get("base_wd", group["weight_decay"])
                own = {"lr_mult": lr_mult, "wd_mult": wd_mult, "base_wd": base_wd}
                rate = group["lr"] / current[0] * lr_mult
                options = {"params": parameters, "lr": rate, "weight_decay": base_wd * wd_mult}
                regrouped.append({**group, **own, **options})
        if changed:
            groups[:] = regrouped

    @torch.no_grad()
    def _prepare(self, batch_size: int) -> None:
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        attached = scaled_optimizer_of(self._optimizer)
        if self._clip_gradient is not None and attached is not None:
            # clip_gradient bounds the unscaled gradients.
            attached.unscale_pending()
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
        pairs = [(str(name), params[name]) for name in sorted(params, key=str)]
    elif isinstance(params, Iterable) and not isinstance(
        params, str | torch.Tensor | torch.nn.Module
    ):
        pairs = [(f"parameter {index}", value) for index, value in enumerate(params)]
    else:
        raise ValueError(
            f"First argument must be a list or dict of Parameters, got {type(params)}. Pass"
            " net.collect_params(), or dict(net.named_parameters()) of a torch module."
        )
    pairs = [
        (name, value.tensor if isinstance(value, Parameter) else value)
        for name, value in pairs
        if not isinstance(value, Parameter) or value.grad_req != "null"
    ]
    for _, value in pairs:
        if not isinstance(value, torch.Tensor):
            # MXNet raises ValueError.
            raise ValueError(
                f"First argument must be a list or dict of Parameters, got list of {type(value)}."
            )
        if not value.is_leaf:
            raise ValueError(
                "First argument must be a list or dict of Parameters, got a list with the result of"
                " an operation. Pass net.collect_params()."
            )
    first_names: dict[int, str] = {}
    for name, value in pairs:
        first_names.setdefault(id(value), name)
    return {name: value for name, value in pairs if first_names[id(value)] == name}


def _check_one_process(kvstore: Any, compression_params: Any) -> None:
    """Raise for a kvstore that would train in several processes or compress gradients."""
    name = kvstore if isinstance(kvstore, str) else getattr(kvstore, "type", "")
    if name.startswith(("dist", "p3", "horovod", "byteps")):
        raise UnsupportedError(
            f"kvstore={name!r} is not supported: a Trainer does not exchange gradients between"
            " processes. Wrap the network in torch.nn.parallel.DistributedDataParallel, and pass"
            " kvstore='device'."
        )
    if compression_params:
        raise UnsupportedError(
            f"compression_params={compression_params!r} is not supported: gradients are not"
            " compressed. Leave it out."
        )


def _load_states(fname: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        saved = torch.load(fname, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        # torch's unpickler raises any of many errors for bytes of another format.
        raise CheckpointError(f"{os.fspath(fname)!r} is no file of Trainer.save_states.") from error
    if not isinstance(saved, dict) or not {"optimizer", "scaler"} <= saved.keys():
        raise CheckpointError(f"{os.fspath(fname)!r} is no file of Trainer.save_states.")
    return saved


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
        self.detached = False
        """Whether `detach` was called; the step of pending gradients still uses the scaler."""
        self._scaled = self._unscaled = self._stepping = False
        self._original_step = optimizer.step

        def step(_optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(args, kwargs)

        # torch's step hooks run once, in the original step.
        self._restore = replace_step(optimizer, step)
        optimizer.__dict__[_ATTRIBUTE] = self

    def is_pending(self) -> bool:
        """Return whether gradients of a scaled loss have not been used by a step."""
        return self._scaled and self._has_gradients()

    def scale(self, losses: Any) -> Any:
        """Return the losses times the loss scale; the next step uses the scaler."""
        self.check_not_unscaled()
        if self._unscaled:
            self._forget_dropped()
        self._scaled = True
        return self.scaler.scale(losses)

    def check_not_unscaled(self) -> None:
        """Raise if a loss would be scaled while unscaled gradients have not been used."""
        if self._unscaled and self._has_gradients():
            raise ScalerError(
                "amp.scale_loss was called after amp.unscale and before the step of this trainer:"
                " scaled gradients would be added to unscaled ones. Call trainer.step(batch_size)"
                " first, or net.zero_grad() to drop the gradients."
            )

    def unscale(self) -> None:
        """Unscale and check the gradients in place, once, after backward and before the step."""
        if not self._scaled:
            raise ScalerError(
                "amp.unscale was called, but no loss of this trainer was scaled since its last"
                " step. Call it after backward of the loss that amp.scale_loss returned, and before"
                " trainer.step."
            )
        if self._unscaled:
            raise ScalerError(
                "amp.unscale was called twice before the step of this trainer. Its gradients are"
                " unscaled already: call it once for each trainer.step."
            )
        if not self._has_gradients():
            raise ScalerError(
                "amp.unscale found no gradients: no parameter of this trainer has one. Call"
                " autograd.backward(scaled_loss) first, with a loss that reaches them."
            )
        self.unscale_pending()

    def unscale_pending(self) -> None:
        """Unscale and check the gradients if they are scaled; otherwise do nothing."""
        if self._scaled and not self._unscaled and self._has_gradients():
            self.scaler.unscale_(self.optimizer)
            self._unscaled = True

    def detach(self) -> None:
        """Restore the original step. A wrapper added later, as by a scheduler, stays in place.

        Gradients that are still scaled are unscaled by their step; only then is it restored.
        """
        self.detached = True
        if self.is_pending():
            return
        self._scaled = False
        if self.optimizer.__dict__.get(_ATTRIBUTE) is self:
            del self.optimizer.__dict__[_ATTRIBUTE]
        self._restore()

    def _has_gradients(self) -> bool:
        groups = self.optimizer.param_groups
        return any(p.grad is not None for group in groups for p in group["params"])

    def _forget_dropped(self) -> None:
        """Forget a scaled loss whose gradients were dropped instead of used by a step."""
        if self._unscaled:
            # They were checked: if they were not finite, the scale is backed off nevertheless.
            self.scaler.update()
        self._scaled = self._unscaled = False

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stepping:
            return self._original_step(*args, **kwargs)
        if not self.is_pending():
            self._forget_dropped()
            return self._original_step(*args, **kwargs)
        self._stepping = True
        try:
            self.last_result = self.scaler.step(self.optimizer, *args, **kwargs)
        finally:
            self._stepping = False
        self._scaled = self._unscaled = False
        self.scaler.update()
        if self.detached:
            self.detach()
        return self.last_result.value


def scaled_optimizer_of(optimizer: Optimizer) -> ScaledOptimizer | None:
    """Return the `ScaledOptimizer` of an optimizer, or None."""
    scaled_optimizer: ScaledOptimizer | None = optimizer.__dict__.get(_ATTRIBUTE)
    return scaled_optimizer
