"""Static programs: variables, nodes, and what is recorded under `program_guard`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mezzo._casting import map_tensors
from mezzo._torch import DisableTorchFunctionSubclass
from mezzo.autocasting.regions import innermost_region

UNKNOWN_SIZES = (9973, 9967, 9949, 9941, 9931)
"""Stand for sizes that are not known before the program runs, one for each dimension: primes, so
that a size made of one is recognised."""

_device = torch.Tensor.device.__get__


@dataclass(frozen=True, eq=False)
class Node:
    """One call that a program makes."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Variable, ...]
    guarded: bool
    """Whether it was made inside `fp16_guard`."""

    @property
    def name(self) -> str:
        """What torch calls the function."""
        return str(getattr(self.function, "__name__", self.function))

    @property
    def writes(self) -> bool:
        """Whether it changes its first argument."""
        return self.name == "__setitem__" or (
            self.name.endswith("_") and not self.name.endswith("__")
        )

    def tensors(self) -> list[torch.Tensor]:
        """Everything that it reads."""
        return _tensors((self.args, dict(self.kwargs)))


class Program:
    """What a model computes from what is fed, in the order it was said."""

    def __init__(self) -> None:
        self.feeds: dict[str, Variable] = {}
        self.nodes: list[Node] = []
        self.closing: Any = None
        """How it is trained, once an optimizer has minimized its loss; shared by its clones."""
        self.for_test = False
        self.random_seed = 0
        self._named: dict[str, Variable] = {}
        self._counts: dict[str, itertools.count[int]] = {}

    # Paddle's call shape.
    def clone(self, for_test: bool = False) -> Program:
        """The same program; for a test it is run without training, and layers such as dropout and batch norm evaluate."""
        other = Program()
        other.feeds, other.nodes, other._named = (
            dict(self.feeds),
            list(self.nodes),
            dict(self._named),
        )
        other.closing, other.for_test = self.closing, for_test
        other.origin = self
        return other

    origin: Program | None = None
    """What it was cloned from."""

    def variable(self, word: Any) -> Variable:
        """A variable by itself, by its name, or by the function that built it."""
        if isinstance(word, Variable):
            return word
        name = word if isinstance(word, str) else getattr(word, "__name__", repr(word))
        if name not in self._named:
            raise ValueError(
                f"The program has no variable {name!r}. It was fed"
                f" {', '.join(self.feeds) or 'nothing'}; fetch variables, or their names."
            )
        return self._named[name]

    def name(self, variable: Variable, name: str) -> None:
        """Let a variable be known by a name."""
        variable.name = name
        self._named[name] = variable

    def fresh_name(self, kind: str) -> str:
        """A name that no variable has, as Paddle makes them."""
        return f"{kind}_{next(self._counts.setdefault(kind, itertools.count()))}.tmp_0"

    def needed_for(self, wanted: Iterable[Variable]) -> list[Node]:
        """The calls that variables depend on, in order."""
        needed, chosen = {id(one) for one in wanted}, []
        for node in reversed(self.nodes):
            reads = node.tensors()
            if any(id(one) in needed for one in node.outputs) or (
                node.writes and id(reads[0]) in needed
            ):
                chosen.append(node)
                needed.update(id(one) for one in reads if isinstance(one, Variable))
        return chosen[::-1]


class Variable(torch.Tensor):
    """A tensor without values: part of a program."""

    program: Program
    sizes: tuple[int, ...]
    """Its shape, without a question to torch."""
    # torch has a property of this name, which nobody uses.
    name: str = ""

    @classmethod
    def of(cls, meta: torch.Tensor, program: Program, name: str) -> Variable:
        """Make one that looks like a tensor of the meta device."""
        made: Variable = meta.detach().as_subclass(cls)
        made.program, made.sizes = program, tuple(meta.shape)
        program.name(made, name)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"var {self.name} : shape{shown_shape(self)}, dtype"
            f" {str(self.dtype).removeprefix('torch.')}"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a call, and say what its result looks like."""
        kwargs = kwargs or {}
        # Not `is`: torch makes the wrapper anew at every look.
        if func == _device:
            # Whoever makes a tensor beside this one makes it where the program will run.
            return torch.get_default_device()
        given = _tensors((args, kwargs))
        _refuse_unknown_constants(given)
        with DisableTorchFunctionSubclass(), torch.no_grad():
            shown = func(*map_tensors(args, _seen), **map_tensors(kwargs, _seen))
        outputs: list[Variable] = []
        program = next(one.program for one in given if isinstance(one, Variable))

        def wrap(meta: torch.Tensor) -> torch.Tensor:
            outputs.append(
                cls.of(
                    meta,
                    program,
                    program.fresh_name(str(getattr(func, "__name__", "op")).strip("_")),
                )
            )
            return outputs[-1]

        result = map_tensors(shown, wrap)
        if outputs or func is torch.Tensor.__setitem__:
            _refuse_regions()
            program.nodes.append(Node(func, args, kwargs, tuple(outputs), _guards.depth > 0))
        return result


def _seen(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.as_subclass(torch.Tensor)
        if isinstance(tensor, Variable)
        else torch.empty_like(tensor, device="meta")
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def shown_shape(variable: Variable) -> list[int]:
    """A shape as Paddle shows it: -1 for a size that is not known."""
    return [-1 if size in UNKNOWN_SIZES else size for size in variable.sizes]


def _refuse_regions() -> None:
    region = innermost_region()
    if region is not None and region.enabled:
        raise RuntimeError(
            "amp.auto_cast is around a static program that is being written, and would not be there"
            " when it runs. Take it away: static.amp.decorate(optimizer, ...) says in which"
            " precision a program runs."
        )


def _refuse_unknown_constants(given: Iterable[torch.Tensor]) -> None:
    for one in given:
        if not isinstance(one, Variable) and any(size in UNKNOWN_SIZES for size in one.shape):
            raise ValueError(
                f"A tensor of shape {tuple(one.shape)} was made from a size that is not known"
                " before the program runs. Make it from a variable (torch.zeros_like), or declare"
                " the size: static.data(name, [32, ...])."
            )


class _Guards(threading.local):
    """How many guards this thread is inside of."""

    depth = 0


_guards = _Guards()


@contextmanager
def fp16_guard() -> Iterator[None]:
    """Mark what is said inside as 16-bit, for `static.amp.decorate(use_pure_fp16=True, use_fp16_guard=True)`: all else stays float32.

    >>> program = Program()
    >>> x = Variable.of(torch.empty(2, device="meta"), program, "x")
    >>> with fp16_guard():
    ...     y = x + 1
    >>> z = y + 1
    >>> [node.guarded for node in program.nodes]
    [True, False]
    """
    _guards.depth += 1
    try:
        yield
    finally:
        _guards.depth -= 1


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
            raise TypeError(
                "The type of programs in program_guard must be Program, but received"
                f" {type(one).__name__}."
            )
    _state.main.append(main_program)
    _state.startup.append(startup_program or _state.startup[-1])
    try:
        yield
    finally:
        _state.main.pop()
        _state.startup.pop()


# Paddle's call shape.
def data(
    name: str, shape: Any, dtype: str | torch.dtype | None = None, lod_level: int = 0
) -> Variable:
    """A variable that is fed. A size of -1 or None is known when the program runs.

    >>> with program_guard(Program()):
    ...     data("x", [None, 784], "float32")
    var x : shape[-1, 784], dtype float32
    """
    if not isinstance(name, str):
        raise TypeError(
            f"The type of 'name' in data must be str, but received {type(name).__name__}."
        )
    chosen = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype or "float32", None)
    if not isinstance(chosen, torch.dtype):
        raise TypeError(
            f"The data type of {name!r} is {dtype!r}. Use one such as 'float32', 'float16', 'int64'"
            " or 'bool'."
        )
    program = default_main_program()
    sizes = [
        UNKNOWN_SIZES[place] if size in (None, -1) else int(size)
        for place, size in enumerate(shape)
    ]
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
