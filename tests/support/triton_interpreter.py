"""A pytest plugin that makes Triton's interpreter faster, with the same results.

Triton 3.6 replaces the functions of `triton.language` by interpreted ones at each call of a device
function, although the launch has done so already: 45 % of the time of a fused AdamW step. Here a
device function only replaces what its launch did not.
"""

from __future__ import annotations

from typing import Any

try:
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction, InterpreterError, _patch_lang
except ImportError:
    interpreter = None


def pytest_configure() -> None:
    if interpreter is not None:
        InterpretedFunction.__call__ = _call_device_function


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
