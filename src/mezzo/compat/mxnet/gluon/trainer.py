"""`gluon.Trainer`: an optimizer by name, and a step that divides by the batch size."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mezzo._torch import foreach_clamp_max_, foreach_clamp_min_, foreach_mul_
from mezzo.compat.mxnet.gluon import optimizers
from mezzo.compat.mxnet.gluon.attached import attached_to

Given = Mapping[str, torch.nn.Parameter] | Iterable[torch.nn.Parameter]


class Trainer:
    """Steps an optimizer over parameters, with MXNet's words: a dict of parameters, as `dict(net.named_parameters())`, or a list of them.

    Gradients are forgotten by a step, for there the next backward overwrites them. Momentum is torch's: a rate that changes takes effect at once there and
    here, but torch multiplies the whole momentum by it.

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
        kvstore: Any = "device",  # noqa: ARG002 - one process has nothing to store elsewhere
        compression_params: Any = None,  # noqa: ARG002
        update_on_kvstore: bool | None = None,  # noqa: FBT001 - MXNet's call shape
    ) -> None:
        self._names = _named(params)
        words = dict(optimizer_params or {})
        if isinstance(optimizer, torch.optim.Optimizer):
            if words:
                raise AssertionError("optimizer_params must be None if optimizer is an instance of Optimizer instead of str.")
            self._optimizer = optimizer
        else:
            self._optimizer = optimizers.make(optimizer, list(self._names.values()), words)
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
        attached = attached_to(self._optimizer)
        return 1.0 if attached is None else attached.scaler.get_scale()

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:  # noqa: FBT001, FBT002 - MXNet's call shape
        """Update from gradients divided by the batch size, and forget them."""
        if not ignore_stale_grad:
            self._refuse_stale()
        self._prepare(batch_size)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def allreduce_grads(self) -> None:
        """One process has nothing to reduce: wrap the network in DistributedDataParallel for several."""
        self._refuse_kvstore("allreduce_grads()")

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:  # noqa: FBT001, FBT002 - MXNet's call shape
        """`step`, after `allreduce_grads`."""
        self._refuse_kvstore("update()")
        self.step(batch_size, ignore_stale_grad)

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Write the optimizer's state and the loss scale to a file."""
        attached = attached_to(self._optimizer)
        torch.save({"optimizer": self._optimizer.state_dict(), "scaler": None if attached is None else attached.scaler.state_dict()}, fname)

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Take over what `save_states` wrote."""
        saved = torch.load(fname, weights_only=True)
        self._optimizer.load_state_dict(saved["optimizer"])
        attached = attached_to(self._optimizer)
        if attached is not None and saved["scaler"] is not None:
            attached.scaler.load_state_dict(saved["scaler"])

    @torch.no_grad()
    def _prepare(self, batch_size: int) -> None:
        gradients = [one.grad for one in self._parameters() if one.grad is not None]
        attached = attached_to(self._optimizer)
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
                    f"Gradient of Parameter `{name}` has not been updated by backward since last `step`. This could mean a bug in your model that made it only use "
                    "a subset of the Parameters (Blocks) for this iteration. If you are intentionally only using a subset, call step with ignore_stale_grad=True to "
                    "suppress this warning and skip updating of Parameters with stale gradient."
                )

    def _refuse_kvstore(self, call: str) -> None:
        if self._on_kvstore:
            raise AssertionError(
                f"{call} when parameters are updated on kvstore is not supported. Try setting `update_on_kvstore` to False when creating trainer."
            )


def _named(params: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters by name, shared ones once; dicts in the order of their names, as there."""
    if isinstance(params, Mapping):
        pairs = [(str(name), params[name]) for name in sorted(params)]
    elif isinstance(params, Iterable) and not isinstance(params, str | torch.Tensor | torch.nn.Module):
        pairs = [(f"parameter {place}", one) for place, one in enumerate(params)]
    else:
        raise ValueError(f"First argument must be a list or dict of Parameters, got {type(params)}. Pass dict(net.named_parameters()).")  # noqa: TRY004
    for _, one in pairs:
        if not isinstance(one, torch.Tensor):
            raise ValueError(f"First argument must be a list or dict of Parameters, got list of {type(one)}.")  # noqa: TRY004 - MXNet's type
    seen: set[int] = set()
    return {name: one for name, one in pairs if not (id(one) in seen or seen.add(id(one)))}  # type: ignore[func-returns-value]
