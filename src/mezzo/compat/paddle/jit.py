"""`paddle.jit`: `to_static` compiles a layer or a function with `torch.compile`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from mezzo._casting import map_tensors
from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle._tensor import Tensor, plain_tensor

__all__ = ["enable_to_static", "ignore_module", "load", "not_to_static", "save", "to_static"]

F = TypeVar("F", bound=Callable[..., Any])

_NOT_STATIC = "_mezzo_not_to_static"
"""Attribute of functions that stay as they are."""


class _Switch:
    """Whether functions of `to_static` run compiled."""

    enabled = True


def to_static(
    function: Any = None,
    input_spec: Any = None,
    build_strategy: Any = None,
    backend: Any = None,
    **kwargs: Any,
) -> Any:
    """Compile a layer or a function with `torch.compile`; also as a decorator.

    A layer is returned itself, with its forward compiled. Where the compiler fails, one warning
    names the reason and the original runs. `input_spec` and `build_strategy` have no effect:
    shapes are taken from the calls. `backend` is one of torch.compile's; None and Paddle's "CINN"
    are the default one.

    >>> @to_static
    ... def double(x):
    ...     return x * 2
    >>> double.__name__
    'double'
    """
    if function is None:
        return lambda decorated: to_static(decorated, input_spec, build_strategy, backend, **kwargs)
    if getattr(function, _NOT_STATIC, False):
        return function
    if isinstance(function, nn.Module):
        if not getattr(function.forward, _NOT_STATIC, False):
            # In the instance: `state_dict` and `parameters` stay as they are.
            function.forward = _compile(function.forward, backend)
        return function
    if not callable(function):
        raise TypeError(
            f"to_static takes a Layer or a function, but got {type(function).__name__}."
        )
    return _compile(function, backend)


def not_to_static(func: Any = None) -> Any:
    """Mark a function that `to_static` leaves as it is, and does not trace into."""
    if func is None:
        return not_to_static
    marked = torch.compiler.disable(func)
    setattr(marked, _NOT_STATIC, True)
    return marked


def enable_to_static(enable_to_static_bool: bool) -> None:
    """Run functions of `to_static` compiled, or as they were written, for debugging."""
    _Switch.enabled = bool(enable_to_static_bool)


def ignore_module(modules: Any) -> None:
    """Do nothing: torch's compiler runs by itself what it cannot trace."""


def _compile(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """Return a function that runs compiled, and as it was written once the compiler has failed."""

    def body(args: Any, kwargs: Any) -> Any:
        return function(*_wrap(args), **_wrap(kwargs))

    options = {} if backend in (None, "CINN") else {"backend": backend}
    compiled: Callable[..., Any] | None = None
    is_usable = True

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled, is_usable
        if not (is_usable and _Switch.enabled) or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if compiled is None:
            # At the first call: this loads the compiler.
            compiled = torch.compile(body, **options)
        try:
            # Compiled code takes plain tensors; they become Paddle's inside.
            return compiled(map_tensors(args, plain_tensor), map_tensors(kwargs, plain_tensor))
        except Exception as error:
            if not _is_of_compiler(error):
                raise
            is_usable = False
            name = getattr(function, "__qualname__", repr(function))
            warnings.warn(
                f"to_static runs {name} as it was written, because torch.compile failed:"
                f" {type(error).__name__}: {' '.join(str(error).split())[:300]}",
                UserWarning,
                stacklevel=2,
            )
            return function(*args, **kwargs)

    return call


def _wrap(value: Any) -> Any:
    """Make every tensor of nested containers a Paddle tensor, in code that dynamo traces."""
    if isinstance(value, torch.Tensor):
        return value.as_subclass(Tensor)
    if isinstance(value, dict):
        return {name: _wrap(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_wrap(item) for item in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple([_wrap(item) for item in value])
    return value


def _is_of_compiler(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, comes from torch's compiler."""
    while error is not None:
        # Errors of torch's ops are of built-in types, those of its compiler of private modules.
        package, *modules = type(error).__module__.split(".")
        if package == "torch" and any(module.startswith("_") for module in modules):
            return True
        error = error.__cause__
    return False


def save(layer: Any, path: Any, input_spec: Any = None, **configs: Any) -> NoReturn:
    """Raise: programs for inference are written by `torch.export`."""
    raise NotImplementedError(
        "paddle.jit.save writes a program for Paddle Inference, which is not supported. Save the"
        " parameters with paddle.save(layer.state_dict(), path), or a program with"
        " torch.export.save(torch.export.export(layer, inputs), path)."
    )


def load(path: Any, **configs: Any) -> NoReturn:
    """Raise: programs for inference are read by `torch.export`."""
    raise NotImplementedError(
        "paddle.jit.load reads a program for Paddle Inference, which is not supported. Build the"
        " layer and use layer.set_state_dict(paddle.load(path)), or torch.export.load(path)."
    )


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
