"""A pytest plugin that makes Triton's interpreter faster, with the same results.

Triton 3.6 replaces the functions of `triton.language` by interpreted ones at each call of a device
function, although the launch has done so already: 45 % of the time of a fused AdamW step. Here a
device function only replaces what its launch did not.

Half of the rest goes into describing shapes and dtypes of intermediate results, which are the same
few: here each is described once. And integers are checked for overflow, which those of the small
tensors in tests cannot reach, only by `make test-all`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

try:
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction, InterpreterError, _patch_lang
except ImportError:
    interpreter = None


def pytest_configure() -> None:
    if interpreter is not None:
        InterpretedFunction.__call__ = _call_device_function
        interpreter.tl.tensor.__init__ = _describe_tensor
        interpreter.tl.block_type.with_element_ty = _with_element_type
        interpreter.tl.block_type.to_ir = _itself
        interpreter._get_np_dtype = _cached_by_name(interpreter._get_np_dtype)
        builder = interpreter.interpreter_builder
        checks_overflow = bool(os.environ.get("MEZZO_EXHAUSTIVE"))
        builder.options = replace(builder.options, sanitize_overflow=checks_overflow)


_core_is_patched = False


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    _patch_core(self.fn)
    function = self.rewrite()
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


def _patch_core(function: Any) -> None:
    """Patch `triton.language.core` once: functions of Triton's own library use it directly.

    Triton does not restore it after the call either.
    """
    global _core_is_patched
    core = interpreter.tl.core
    if not _core_is_patched and any(value is core for value in function.__globals__.values()):
        _patch_lang(function)
        _core_is_patched = True


def _describe_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - Triton's name
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _dimensions(tuple(type.shape) if type.is_block() else ())


@cache
def _dimensions(shape: tuple[int, ...]) -> tuple[Any, Any]:
    constant = interpreter.tl.constexpr
    return constant(math.prod(shape)), interpreter.tl.tuple([constant(size) for size in shape])


def _with_element_type(self: Any, scalar: Any) -> Any:
    # Pointers are not hashable.
    make = _block_type.__wrapped__ if scalar.is_ptr() else _block_type
    return make(tuple(self.shape), scalar)


@cache
def _block_type(shape: tuple[int, ...], scalar: Any) -> Any:
    return interpreter.tl.block_type(scalar, list(shape))


def _itself(self: Any, builder: Any) -> Any:
    """Return the type: the interpreter has no representation of its own, and would make a copy."""
    return self


def _cached_by_name(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found: dict[str, Any] = {}

    def cached(type: Any) -> Any:  # noqa: A002 - Triton's name
        if type.name not in found:
            found[type.name] = numpy_dtype(type)
        return found[type.name]

    return cached
