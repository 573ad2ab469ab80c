"""Which program is being written, and what it is fed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mezzo.compat.paddle.static._program import UNKNOWN_SIZES, Program, Variable


class _State(threading.local):
    """The programs that are being written in this thread."""

    def __init__(self) -> None:
        self.main, self.startup, self.static = [Program()], [Program()], False


_state = _State()


def default_main_program() -> Program:
    """The program that is being written.

    >>> program = Program()
    >>> with program_guard(program):
    ...     default_main_program() is program
    True
    """
    return _state.main[-1]


def default_startup_program() -> Program:
    """The program that makes parameters ready. torch's layers are ready when they are made: running it does nothing."""
    return _state.startup[-1]


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Write another program for a while.

    >>> main = Program()
    >>> with program_guard(main):
    ...     _ = data("x", [1]) + 1
    >>> [node.name for node in main.nodes]
    ['add']
    """
    for one in (main_program, startup_program):
        if one is not None and not isinstance(one, Program):
            raise TypeError(f"The type of programs in program_guard must be Program, but received {type(one).__name__}.")
    _state.main.append(main_program)
    _state.startup.append(startup_program or _state.startup[-1])
    try:
        yield
    finally:
        _state.main.pop()
        _state.startup.pop()


def data(name: str, shape: Any, dtype: str | torch.dtype | None = None, lod_level: int = 0) -> Variable:  # noqa: ARG001 - Paddle's call shape
    """A variable that is fed. A size of -1 or None is known when the program runs.

    >>> with program_guard(Program()):
    ...     data("x", [None, 784], "float32")
    var x : shape[-1, 784], dtype float32
    """
    if not isinstance(name, str):
        raise TypeError(f"The type of 'name' in data must be str, but received {type(name).__name__}.")
    chosen = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype or "float32", None)
    if not isinstance(chosen, torch.dtype):
        raise TypeError(f"The data type of {name!r} is {dtype!r}. Use one such as 'float32', 'float16', 'int64' or 'bool'.")
    program = default_main_program()
    sizes = [UNKNOWN_SIZES[place] if size in (None, -1) else int(size) for place, size in enumerate(shape)]
    made = Variable.of(torch.empty(sizes, dtype=chosen, device="meta"), program, name)
    program.feeds[name] = made
    return made


def enable_static() -> None:
    """Say that programs are written from now on. A program is written by calling layers with `static.data`, with or without this."""
    _state.static = True


def disable_static() -> None:
    """Say that no programs are written any more."""
    _state.static = False


def in_dynamic_mode() -> bool:
    """Whether `enable_static` was not called.

    >>> in_dynamic_mode()
    True
    """
    return not _state.static
