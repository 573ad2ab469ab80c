"""Static programs: `Program`, `Variable`, and how calls are recorded under `program_guard`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch

from mezzo._casting import map_tensors, tensors_of
from mezzo._torch import DisableTorchFunctionSubclass
from mezzo.autocasting.regions import innermost_region
from mezzo.compat.paddle._dtypes import parse_dtype
from mezzo.compat.paddle._places import device_of
from mezzo.compat.paddle._tensor import Tensor, parse_to

UNKNOWN_SIZES = (9973, 9967, 9949, 9941, 9931, 9929, 9923, 9907)
"""Placeholders for sizes that are unknown until the program runs, one per dimension. They are
primes, so that a product with a placeholder is recognised as a multiple of it."""

_get_device = torch.Tensor.device.__get__


@dataclass(frozen=True, eq=False)
class Node:
    """One recorded call of a program."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Variable, ...]
    guarded: bool
    """Whether it was recorded inside `fp16_guard`."""

    @property
    def name(self) -> str:
        """The function's name in torch."""
        return str(getattr(self.function, "__name__", self.function))

    @property
    def writes(self) -> bool:
        """Whether it changes its first argument in place."""
        return self.name == "__setitem__" or (
            self.name.endswith("_") and not self.name.endswith("__")
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor that it reads."""
        return tensors_of((self.args, dict(self.kwargs)))


class Program:
    """`paddle.static.Program`: calls in the order they were recorded, and the variables fed."""

    def __init__(self) -> None:
        self.feeds: dict[str, Variable] = {}
        self.nodes: list[Node] = []
        self.trainer: Any = None
        """The `ProgramTrainer`, once an optimizer minimizes its loss; clones share it."""
        self.for_test = False
        self.origin: Program | None = None
        """The program that this one is a clone of."""
        self.random_seed = 0
        self._variables: dict[str, Variable] = {}
        self._counts: dict[str, itertools.count[int]] = {}

    def clone(self, for_test: bool = False) -> Program:
        """Return a copy that shares the trainer.

        With `for_test=True` running it does not train, and dropout and batch norm evaluate.
        """
        copy = Program()
        copy.feeds, copy.nodes = dict(self.feeds), list(self.nodes)
        copy._variables = dict(self._variables)
        copy.trainer, copy.for_test, copy.origin = self.trainer, for_test, self
        return copy

    def variable(self, key: Any) -> Variable:
        """Return a variable, given itself, its name, or the function that builds it as a loss."""
        if isinstance(key, Variable):
            if key.program is not self and key.program is not self.origin:
                raise ValueError(
                    f"The variable {key.name!r} belongs to another program. Run that one, or fetch"
                    " a variable of this program."
                )
            return key
        name = key if isinstance(key, str) else getattr(key, "__name__", None)
        if name is None:
            raise TypeError(
                "fetch_list should have variables of the program or their names, but received"
                f" {type(key).__name__}. Tensors with values, such as parameters, need no fetch."
            )
        if name not in self._variables:
            raise ValueError(
                f"The program has no variable {name!r}. Its feeds are"
                f" {', '.join(self.feeds) or 'none'}. Fetch variables, or their names."
            )
        return self._variables[name]

    def train_with(self, trainer: Any) -> None:
        """Let every run train, or evaluate as this trainer does."""
        self.trainer = trainer

    def set_name(self, variable: Variable, name: str) -> None:
        """Name a variable of this program."""
        variable.set_name(name)
        self._variables[name] = variable

    def unique_name(self, op: str) -> str:
        """Return a new variable name for the output of an op, in Paddle's style."""
        return f"{op}_{next(self._counts.setdefault(op, itertools.count()))}.tmp_0"

    def needed_for(self, targets: Iterable[Variable]) -> list[Node]:
        """Return the nodes that variables depend on, in order."""
        needed, nodes = {id(target) for target in targets}, []
        for node in reversed(self.nodes):
            reads = node.tensors()
            if any(id(output) in needed for output in node.outputs) or (
                node.writes and id(reads[0]) in needed
            ):
                nodes.append(node)
                needed.update(id(tensor) for tensor in reads if isinstance(tensor, Variable))
        return nodes[::-1]


class Variable(Tensor):
    """`paddle.static.Variable`: a tensor without values, part of a program.

    A torch function called with one is recorded as a node of its program, not executed. It has no
    device: a program runs on the place of its executor.
    """

    program: Program
    sizes: tuple[int, ...]
    """Its shape, read without calling a torch function."""
    # Overrides the property `torch.Tensor.name`.
    name: str = ""

    @classmethod
    def from_meta(cls, meta: torch.Tensor, program: Program, name: str) -> Variable:
        """Return a variable with the shape and dtype of a tensor on the meta device."""
        variable: Variable = meta.detach().as_subclass(cls)
        variable.program, variable.sizes = program, tuple(meta.shape)
        program.set_name(variable, name)
        return variable

    def set_name(self, name: str) -> None:
        """Set the name; `Program.set_name` also enters it among those of the program."""
        self.name = name

    # Reaches `__torch_function__`, which raises with what to call in a static program.
    backward = torch.Tensor.backward

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"var {self.name} : shape{paddle_shape(self)}, dtype"
            f" {str(self.dtype).removeprefix('torch.')}"
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return it in a dtype; a device has no effect."""
        args, kwargs = parse_to(args, kwargs)
        dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        return torch.Tensor.to(self, dtypes[0]) if dtypes else self

    def _to(self, device: Any = None, dtype: Any = None, blocking: bool | None = None) -> Self:
        """Return it; a dtype has no effect in place: use `astype`."""
        return self

    def cpu(self, *args: Any, **kwargs: Any) -> Self:
        """Return it."""
        return self

    def cuda(self, *args: Any, **kwargs: Any) -> Self:
        """Return it."""
        return self

    def numpy(self, *, force: bool = True) -> NoReturn:
        """Raise: it has no value."""
        raise _no_value_error("Variable.numpy()", self)

    def __float__(self) -> NoReturn:
        raise _no_value_error("float(Variable)", self)

    def __int__(self) -> NoReturn:
        raise _no_value_error("int(Variable)", self)

    def __format__(self, spec: str) -> str:
        if spec:
            raise _no_value_error("format(Variable)", self)
        return repr(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call and return variables for its outputs, with shapes from the meta device."""
        kwargs = kwargs or {}
        # `==` and not `is`: each access of `__get__` creates a new wrapper.
        if func == _get_device:
            # Tensors created with `device=x.device` must be on a real device.
            return device_of(None)
        if func in _READS_VALUE:
            raise _no_value_error(_READS_VALUE[func], args[0])
        tensors = tensors_of((args, kwargs))
        _check_constant_sizes(tensors)
        meta_result = _call_on_meta(func, args, kwargs)
        outputs: list[Variable] = []
        program = next(tensor.program for tensor in tensors if isinstance(tensor, Variable))
        op = _op_name(func)

        def wrap(meta: torch.Tensor) -> torch.Tensor:
            outputs.append(cls.from_meta(meta, program, program.unique_name(op)))
            return outputs[-1]

        result = map_tensors(meta_result, wrap)
        if outputs or func is torch.Tensor.__setitem__:
            _check_no_autocast()
            program.nodes.append(Node(func, args, kwargs, tuple(outputs), _fp16_guard.depth > 0))
        return result


def _op_name(function: Any) -> str:
    return str(getattr(function, "__name__", "op")).strip("_")


def _call_on_meta(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function on the meta device, for the shapes and dtypes of its results."""
    try:
        with DisableTorchFunctionSubclass(), torch.no_grad():
            return function(*map_tensors(args, _to_meta), **map_tensors(kwargs, _to_meta))
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{_op_name(function)} cannot be part of a static program: its result depends on"
            f" values, which exist only when the program runs. torch reports: {error}"
        ) from None
    except (RuntimeError, ValueError) as error:
        # torch's message has the placeholders of unknown sizes.
        text = str(error)
        for size in UNKNOWN_SIZES:
            text = text.replace(str(size), "-1")
        raise type(error)(f"{_op_name(function)} in a static program: {text}") from None


_READS_VALUE = {
    torch.Tensor.__bool__: "bool(Variable)",
    torch.Tensor.__complex__: "complex(Variable)",
    torch.Tensor.__index__: "int(Variable)",
    torch.Tensor.__array__: "numpy.array(Variable)",
    torch.Tensor.item: "Variable.item()",
    torch.Tensor.tolist: "Variable.tolist()",
    torch.Tensor.backward: "Variable.backward()",
}
"""Functions that need the value of a variable → how a program calls them."""


def _no_value_error(call: str, variable: Variable) -> TypeError:
    remedy = (
        "Call optimizer.minimize(loss); every run of the program trains then."
        if call == _READS_VALUE[torch.Tensor.backward]
        else f"Run the program: exe.run(program, feed=..., fetch_list=[{variable.name!r}])."
    )
    return TypeError(
        f"{call} is not supported in static graph mode: {variable.name!r} has no value until its"
        f" program runs. {remedy}"
    )


def paddle_shape(variable: Variable) -> list[int]:
    """Return a shape as Paddle shows it: -1 for an unknown size."""
    return [-1 if size in UNKNOWN_SIZES else size for size in variable.sizes]


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.as_subclass(torch.Tensor)
        if isinstance(tensor, Variable)
        else torch.empty_like(tensor, device="meta")
    )


def _check_no_autocast() -> None:
    region = innermost_region()
    if region is not None and region.enabled:
        raise RuntimeError(
            "amp.auto_cast is around a static program that is being recorded. It has no effect on"
            " the run. Remove it and pass the precision to static.amp.decorate(optimizer, ...)."
        )


def _check_constant_sizes(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, Variable) and any(size in UNKNOWN_SIZES for size in tensor.shape):
            raise ValueError(
                f"A tensor of shape {tuple(tensor.shape)} was created from a size that is unknown"
                " until the program runs. Create it from a variable (torch.zeros_like), or declare"
                " the size: static.data(name, [32, ...])."
            )


# -- recording -------------------------------------------------------------------------------------


class _Fp16Guard(threading.local):
    """Nesting depth of `fp16_guard` in this thread."""

    depth = 0


_fp16_guard = _Fp16Guard()


@contextmanager
def fp16_guard() -> Iterator[None]:
    """Mark calls inside as 16-bit: `paddle.static.amp.fp16_guard`.

    With `static.amp.decorate(use_pure_fp16=True, use_fp16_guard=True)` all other calls stay
    float32.

    >>> program = Program()
    >>> x = Variable.from_meta(torch.empty(2, device="meta"), program, "x")
    >>> with fp16_guard():
    ...     y = x + 1
    >>> z = y + 1
    >>> [node.guarded for node in program.nodes]
    [True, False]
    """
    _fp16_guard.depth += 1
    try:
        yield
    finally:
        _fp16_guard.depth -= 1


class _ThreadState(threading.local):
    """The programs that are being recorded in this thread, innermost last."""

    def __init__(self) -> None:
        self.main, self.startup, self.static = [Program()], [Program()], False


_state = _ThreadState()


def default_main_program() -> Program:
    """Return the program that is being recorded.

    >>> program = Program()
    >>> with program_guard(program):
    ...     default_main_program() is program
    True
    """
    return _state.main[-1]


def default_startup_program() -> Program:
    """Return the startup program, which initializes parameters in Paddle.

    torch's layers are initialized when constructed, so running it does nothing.
    """
    return _state.startup[-1]


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Record into another program inside this context.

    >>> main = Program()
    >>> with program_guard(main):
    ...     _ = data("x", [1]) + 1
    >>> [node.name for node in main.nodes]
    ['add']
    """
    for program in (main_program, startup_program):
        if program is not None and not isinstance(program, Program):
            raise TypeError(
                "The type of programs in program_guard must be Program, but received"
                f" {type(program).__name__}."
            )
    _state.main.append(main_program)
    _state.startup.append(startup_program or _state.startup[-1])
    try:
        yield
    finally:
        _state.main.pop()
        _state.startup.pop()


def data(
    name: str, shape: Any, dtype: str | torch.dtype | None = None, lod_level: int = 0
) -> Variable:
    """Declare a variable that is fed. A size of -1 or None is unknown until the program runs.

    >>> with program_guard(Program()):
    ...     data("x", [None, 784], "float32")
    var x : shape[-1, 784], dtype float32
    """
    if not isinstance(name, str):
        raise TypeError(
            f"The type of 'name' in data must be str, but received {type(name).__name__}."
        )
    program = default_main_program()
    sizes = _parse_shape(name, shape)
    meta = torch.empty(sizes, dtype=parse_dtype(dtype or "float32"), device="meta")
    program.feeds[name] = Variable.from_meta(meta, program, name)
    return program.feeds[name]


def _parse_shape(name: str, shape: Any) -> list[int]:
    if not isinstance(shape, list | tuple) or len(shape) > len(UNKNOWN_SIZES):
        raise TypeError(
            f"The type of 'shape' in data must be list or tuple, of at most {len(UNKNOWN_SIZES)}"
            f" sizes, but received {shape!r} for {name!r}. Pass shape=[-1, 784], for example."
        )
    for size in shape:
        if size is not None and (not isinstance(size, int) or size < -1):
            raise TypeError(
                f"The shape of {name!r} is {list(shape)}. Its sizes should be ints, with -1 or None"
                f" for one that is unknown, but received {size!r}."
            )
    return [
        UNKNOWN_SIZES[dimension] if size in (None, -1) else size
        for dimension, size in enumerate(shape)
    ]


def enable_static() -> None:
    """Enter static mode: only `in_dynamic_mode` changes.

    A program is recorded wherever layers are called with `static.data`, in either mode.
    """
    _state.static = True


def disable_static() -> None:
    """Leave static mode."""
    _state.static = False


def in_dynamic_mode() -> bool:
    """Return whether static mode is off.

    >>> in_dynamic_mode()
    True
    """
    return not _state.static
