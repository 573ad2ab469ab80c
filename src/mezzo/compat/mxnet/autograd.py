"""`mxnet.autograd`: `record`, `pause`, training mode, and `backward` of one or several outputs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mezzo._errors import ScalerError
from mezzo.autocasting.autocast import autocast_all_devices
from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS

__all__ = [
    "backward",
    "grad",
    "is_recording",
    "is_training",
    "pause",
    "predict_mode",
    "record",
    "train_mode",
]

Heads = torch.Tensor | Sequence[torch.Tensor]


class _Modes(threading.local):
    recording = False
    training = False


_modes = _Modes()


@contextmanager
def record(train_mode: bool = True) -> Iterator[None]:
    """Enable gradients inside, and training mode unless `train_mode` is False.

    Differs from MXNet: operations outside are recorded too, as usual in torch.

    >>> with record():
    ...     is_recording(), (torch.ones(1, requires_grad=True) * 2).requires_grad
    (True, True)
    """
    with _scope(recording=True, training=train_mode):
        yield


@contextmanager
def pause(train_mode: bool = False) -> Iterator[None]:
    """Disable gradients inside, and training mode unless `train_mode` is True.

    >>> with pause():
    ...     is_recording(), (torch.ones(1, requires_grad=True) * 2).requires_grad
    (False, False)
    """
    with _scope(recording=False, training=train_mode):
        yield


@contextmanager
def train_mode() -> Iterator[None]:
    """Set training mode inside; recording is unchanged.

    >>> with train_mode():
    ...     is_training()
    True
    """
    with _scope(recording=None, training=True):
        yield


@contextmanager
def predict_mode() -> Iterator[None]:
    """Set inference mode inside; recording is unchanged.

    >>> with record(), predict_mode():
    ...     is_training(), is_recording()
    (False, True)
    """
    with _scope(recording=None, training=False):
        yield


def is_recording() -> bool:
    """Return whether this thread is inside `record`."""
    return _modes.recording


def is_training() -> bool:
    """Return whether this thread is in training mode.

    torch modules do not read it: use `module.train()` and `module.eval()`.
    """
    return _modes.training


@contextmanager
def _scope(*, recording: bool | None, training: bool) -> Iterator[None]:
    previous = _modes.recording, _modes.training
    enabled = torch.is_grad_enabled() if recording is None else recording
    _modes.recording = previous[0] if recording is None else recording
    _modes.training = training
    try:
        with torch.set_grad_enabled(enabled):
            yield
    finally:
        _modes.recording, _modes.training = previous


def backward(
    heads: Heads,
    head_grads: Any = None,
    retain_graph: bool = False,
    train_mode: bool = True,
) -> None:
    """Compute the gradients of one or several outputs; `head_grads` default to 1.

    Earlier gradients of the variables are replaced, as in MXNet. A variable with
    `grad_req = "add"` adds the new ones, and `Tensor.backward()` always does.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> for _ in range(2):
    ...     backward([weight * 2, weight.sum()])
    >>> weight.grad
    tensor([3., 3.])
    """
    outputs, gradients = _parse_heads(heads, head_grads)
    replaced = [
        (variable, variable.grad)
        for variable in _variables_of(outputs)
        if variable.grad is not None and getattr(variable, "grad_req", "write") != "add"
    ]
    for variable, _ in replaced:
        variable.grad = None
    try:
        # Backward runs in the dtypes of the forward pass, without casts of its own.
        with autocast_all_devices(enabled=False):
            torch.autograd.backward(outputs, gradients, retain_graph=retain_graph)
    except RuntimeError as error:
        for variable, gradient in replaced:
            variable.grad = gradient
        _raise_if_freed(error)
        raise


def grad(
    heads: Heads,
    variables: Heads,
    head_grads: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    train_mode: bool = True,
) -> torch.Tensor | list[torch.Tensor]:
    """Return the gradients of outputs with respect to variables, without storing them.

    >>> x = torch.ones(1, requires_grad=True)
    >>> grad(x * 3, [x])
    [tensor([3.])]
    """
    outputs, gradients = _parse_heads(heads, head_grads)
    inputs = [variables] if isinstance(variables, torch.Tensor) else list(variables)
    try:
        with autocast_all_devices(enabled=False):
            found = torch.autograd.grad(
                outputs, inputs, gradients, retain_graph=retain_graph, create_graph=create_graph
            )
    except RuntimeError as error:
        _raise_if_freed(error)
        raise
    return found[0] if isinstance(variables, torch.Tensor) else list(found)


def check_recorded(heads: Sequence[Any], name: str) -> None:
    """Raise if an output is no tensor or has no graph; `name` is that of the argument.

    >>> check_recorded([torch.ones(1)], "heads")
    Traceback (most recent call last):
    ...
    mezzo._errors.ScalerError: Cannot differentiate heads, because it is not in a computational \
graph. Compute it inside `with autograd.record():`, from parameters that require gradients.
    """
    if not heads:
        raise ValueError(f"{name} is an empty list. Pass at least one array.")
    for index, head in enumerate(heads):
        which = name if len(heads) == 1 else f"{name}[{index}]"
        if not isinstance(head, torch.Tensor):
            raise TypeError(
                f"{which} should be an NDArray, here a tensor, got {type(head).__name__}. Pass one"
                " array or a list of arrays."
            )
        if not head.requires_grad:
            raise ScalerError(
                f"Cannot differentiate {which}, because it is not in a computational graph."
                " Compute it inside `with autograd.record():`, from parameters that require"
                " gradients."
            )


def _parse_heads(heads: Any, head_grads: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    outputs = list(heads) if isinstance(heads, list | tuple) else [heads]
    check_recorded(outputs, "heads")
    if head_grads is None:
        gradients = [None] * len(outputs)
    else:
        gradients = list(head_grads) if isinstance(head_grads, list | tuple) else [head_grads]
    if len(outputs) != len(gradients):
        raise AssertionError(
            "heads and head_grads must be lists of the same length:"
            f" {len(outputs)} vs. {len(gradients)}."
        )
    pairs = list(zip(outputs, gradients, strict=True))
    for index, (output, gradient) in enumerate(pairs):
        if gradient is not None and gradient.shape != output.shape:
            raise ValueError(
                f"head_grads[{index}] has shape {tuple(gradient.shape)}, but heads[{index}] has"
                f" {tuple(output.shape)}. Pass a gradient of the same shape, or None for ones."
            )
    return outputs, [
        torch.ones_like(output) if gradient is None else gradient for output, gradient in pairs
    ]


def _variables_of(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaf tensors of the graph, whose gradients backward computes."""
    variables = [output for output in outputs if output.is_leaf]
    pending: list[Any] = [output.grad_fn for output in outputs]
    visited: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is None:
            pending.extend(next_node for next_node, _ in node.next_functions)
        else:
            variables.append(variable)
    return variables


def _raise_if_freed(error: RuntimeError) -> None:
    if "second time" in str(error):
        raise RuntimeError(
            "The computational graph was used by an earlier backward and is freed. If you want to"
            " differentiate the same graph twice, you need to pass retain_graph=True to the first"
            " backward."
        ) from error


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
