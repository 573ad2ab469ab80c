"""Restore models, optimizers, scalers, schedulers and random generators after a run or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from functools import partial
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
    """Restore all of these to the bit, and the random generators, if the body raises.

    Weights, buffers and master weights are copied to host memory first, because a load writes them
    in place. The state of an optimizer is only kept alive, because torch replaces it when it loads.
    Others, such as scalers and schedulers, are restored with their own `load_state_dict`.
    """
    with ExitStack() as undo:
        _push_restorers(undo, tuple(models), tuple(optimizers), others)
        yield
        undo.pop_all()


@contextmanager
def rolled_back(
    models: Iterable[nn.Module], optimizers: Iterable[Optimizer], others: Iterable[Any]
) -> Iterator[None]:
    """Restore all of these to the bit afterwards, also what a training step writes in place.

    That is the state of `rolled_back_on_error`, the tensors of the optimizers' states, the
    gradients, and what a forward pass assigns to its modules.
    """
    models, optimizers = tuple(models), tuple(optimizers)
    with ExitStack() as undo:
        for model in models:
            undo.callback(attributes_restorer(model))
        for tensor in _written_by_steps(models, optimizers):
            undo.callback(_tensor_restorer(tensor))
        for model in models:
            for parameter in model.parameters():
                undo.callback(setattr, parameter, "grad", parameter.grad)
        _push_restorers(undo, models, optimizers, others)
        yield


def _written_by_steps(
    models: tuple[nn.Module, ...], optimizers: tuple[Optimizer, ...]
) -> Iterator[torch.Tensor]:
    trained = [
        *(parameter for model in models for parameter in model.parameters()),
        *(parameter for optimizer in optimizers for parameter in parameters(optimizer)),
    ]
    yield from (
        parameter.grad for parameter in dict.fromkeys(trained) if parameter.grad is not None
    )
    for optimizer in optimizers:
        for state in optimizer.state.values():
            if isinstance(state, dict):
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _push_restorers(
    undo: ExitStack,
    models: tuple[nn.Module, ...],
    optimizers: tuple[Optimizer, ...],
    others: Iterable[Any],
) -> None:
    undo.callback(rng_state.restore_rng_state, rng_state.capture_rng_state())
    for other in others:
        undo.callback(_restorer(other))
    # Runs after the parameters are restored: it records the versions that companions are for.
    for masters in dict.fromkeys(_masters_of(models, optimizers)):
        undo.callback(masters.snapshot())
    for optimizer in optimizers:
        for stepped in (optimizer, *inner_optimizers(optimizer).values()):
            undo.callback(_optimizer_restorer(stepped))
    for model in models:
        undo.callback(_model_restorer(model))


def _masters_of(
    models: tuple[nn.Module, ...], optimizers: tuple[Optimizer, ...]
) -> Iterator[MasterWeights]:
    decorations = [
        *(decoration for model in models for decoration in decorations_of(model)),
        *filter(None, map(decoration_of, optimizers)),
    ]
    for decoration in dict.fromkeys(decorations):
        yield from decoration.weights.all_masters()
    for optimizer in optimizers:
        if (binding := optimizer_binding(optimizer)) is not None:
            yield binding.masters


def _model_restorer(model: nn.Module) -> Callable[[], None]:
    dicts: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (tensors, dict(tensors))
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
    ]
    tensors = dict.fromkeys(
        tensor
        for _, before in dicts
        for tensor in before.values()
        if tensor is not None and not tensor.is_meta
    )
    restores = [_tensor_restorer(tensor) for tensor in tensors]
    extra_states = [
        (module, deepcopy(module.get_extra_state()))
        for module in model.modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]

    def restore() -> None:
        _restore_dicts(dicts)
        for restore_part in restores:
            restore_part()
        for module, state in extra_states:
            with suppress(Exception):
                module.set_extra_state(state)

    return restore


def attributes_restorer(model: nn.Module) -> Callable[[], None]:
    """Return a function that gives all modules the attributes and buffers that they have now."""
    dicts = [
        (attributes, dict(attributes))
        for module in model.modules()
        for attributes in (vars(module), module._buffers)
    ]
    return partial(_restore_dicts, dicts)


def _restore_dicts(dicts: Iterable[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    """Restore the content of dictionaries in place, because other objects refer to them."""
    for container, before in dicts:
        container.clear()
        container.update(before)


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
    attributes = dict(vars(optimizer))
    gradients = [(parameter, parameter.grad) for parameter in parameters(optimizer)]
    state, groups = attributes.get("state", {}), attributes.get("param_groups", [])
    dicts = [
        (container, dict(container))
        for container in (
            *(container for container in state.values() if isinstance(container, dict)),
            *groups,
            state,
        )
    ]
    old_groups = list(groups)
    # torch creates a new state and does not write to tensors of the old one. A class with its own
    # load_state_dict may write to them.
    writes_in_place = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    restores = [
        _tensor_restorer(value)
        for container, _ in dicts
        for value in container.values()
        if writes_in_place and isinstance(value, torch.Tensor)
    ]

    def restore() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        groups[:] = old_groups
        _restore_dicts(dicts)
        for restore_state in restores:
            restore_state()
        for parameter, gradient in gradients:
            parameter.grad = gradient

    return restore


def _restorer(target: Any) -> Callable[[], None]:
    state, attributes = deepcopy(target.state_dict()), dict(getattr(target, "__dict__", {}))
    contents = list(_contents(attributes))

    def restore() -> None:
        if attributes:
            vars(target).clear()
            vars(target).update(attributes)
        # torch's scaler keeps the stage of each optimizer in nested dictionaries.
        for container, before in contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(before)
        # Also load the state, because objects that the attributes refer to may have changed.
        with suppress(Exception):
            target.load_state_dict(state)

    return restore


def _contents(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the dictionaries and lists inside of one, each with a copy of its content."""
    for value in container.values() if isinstance(container, dict) else container:
        if isinstance(value, dict | list):
            yield value, dict(value) if isinstance(value, dict) else list(value)
            yield from _contents(value)
