"""Put models, optimizers, scalers, schedulers and random generators back as they were if a load fails halfway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from mezzo.optim.binding import optimizer_binding
from mezzo.optim.master_weights import MasterWeights
from mezzo.prepare import rng_state
from mezzo.prepare.arguments import Optimizer
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.model_state_dict import decorations_of
from mezzo.scaling.gradients import parameters
from mezzo.scaling.optimizer_step import inner_optimizers


@contextmanager
def rolled_back_on_error(
    models: Iterable[nn.Module], optimizers: Iterable[Optimizer], others: Iterable[Any]
) -> Iterator[None]:
    """Restore these to the bit, and the random generators, if the body raises.

    Weights, buffers and master weights are written in place, and are copied beforehand, to host
    memory if they are on a device. torch's optimizers replace their state when they load, and the
    old one is only kept. Others, such as scalers and schedulers, are restored by their own
    `load_state_dict`.
    """
    models, optimizers = tuple(models), tuple(optimizers)
    with ExitStack() as undo:
        undo.callback(rng_state.restore_rng_state, rng_state.capture_rng_state())
        for one in others:
            undo.callback(_restorer(one))
        # After the parameters: a version of each tells whether its companion belongs to it.
        for masters in dict.fromkeys(_masters_of(models, optimizers)):
            undo.callback(masters.snapshot())
        for optimizer in optimizers:
            for one in (optimizer, *inner_optimizers(optimizer).values()):
                undo.callback(_optimizer_restorer(one))
        for model in models:
            undo.callback(_model_restorer(model))
        yield
        undo.pop_all()


def _masters_of(
    models: tuple[nn.Module, ...], optimizers: tuple[Optimizer, ...]
) -> Iterator[MasterWeights]:
    decorations = [
        *(one for model in models for one in decorations_of(model)),
        *filter(None, map(decoration_of, optimizers)),
    ]
    for decoration in dict.fromkeys(decorations):
        yield from decoration.weights.all_masters()
    for optimizer in optimizers:
        if (bound := optimizer_binding(optimizer)) is not None:
            yield bound.masters


def _model_restorer(model: nn.Module) -> Callable[[], None]:
    held: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (own, dict(own))
        for module in model.modules()
        for own in (module._parameters, module._buffers)
    ]
    tensors = dict.fromkeys(
        tensor
        for _, before in held
        for tensor in before.values()
        if tensor is not None and not tensor.is_meta
    )
    restores = [_tensor_restorer(tensor) for tensor in tensors]
    extra = [
        (module, deepcopy(module.get_extra_state()))
        for module in model.modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]

    def restore() -> None:
        _restore_dicts(held)
        for one in restores:
            one()
        for module, state in extra:
            with suppress(Exception):
                module.set_extra_state(state)

    return restore


def _restore_dicts(held: Iterable[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    """Give each dictionary the content that it had: other objects refer to it, so that it cannot be replaced."""
    for one, before in held:
        one.clear()
        one.update(before)


def _tensor_restorer(tensor: torch.Tensor) -> Callable[[], None]:
    data, value = tensor.data, tensor.detach()
    # A sharded tensor cannot be moved by itself.
    value = value.to("cpu", copy=True) if type(value) is torch.Tensor else value.clone()

    def restore() -> None:
        if tensor.data_ptr() != data.data_ptr():
            tensor.data = data
        with torch.no_grad():
            tensor.copy_(value)

    return restore


def _optimizer_restorer(optimizer: Optimizer) -> Callable[[], None]:
    attributes, gradients = (
        dict(vars(optimizer)),
        [(parameter, parameter.grad) for parameter in parameters(optimizer)],
    )
    state, groups = attributes.get("state", {}), attributes.get("param_groups", [])
    held = [
        (one, dict(one))
        for one in (*(one for one in state.values() if isinstance(one, dict)), *groups, state)
    ]
    listed = list(groups)
    # torch makes a new state, and leaves the tensors of the old one alone. A class that loads in
    # its own way may write to them.
    own = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    values = [
        _tensor_restorer(value)
        for one, _ in held
        for value in one.values()
        if own and isinstance(value, torch.Tensor)
    ]

    def restore() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        groups[:] = listed
        _restore_dicts(held)
        for one in values:
            one()
        for parameter, gradient in gradients:
            parameter.grad = gradient

    return restore


def _restorer(one: Any) -> Callable[[], None]:
    state, attributes = deepcopy(one.state_dict()), dict(getattr(one, "__dict__", {}))

    def restore() -> None:
        if attributes:
            vars(one).clear()
            vars(one).update(attributes)
        # Its attributes are back in any case; what they refer to may have been changed.
        with suppress(Exception):
            one.load_state_dict(state)

    return restore
