"""`paddle.static.Executor`: run a program on fed arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from mezzo._casting import map_tensors
from mezzo.compat.paddle._places import device_of
from mezzo.compat.paddle.static._program import (
    UNKNOWN_SIZES,
    Node,
    Program,
    Variable,
    default_main_program,
    shown_shape,
)

Around = Callable[[Node, tuple[Any, Any]], Any]
"""Carries one call out, given what it is called with."""


def plainly(node: Node, given: tuple[Any, Any]) -> Any:
    """A call as it is."""
    args, kwargs = given
    return node.function(*args, **kwargs)


def evaluating(node: Node, given: tuple[Any, Any]) -> Any:
    """A call as in evaluation: dropout keeps everything, a batch norm uses its statistics."""
    args, kwargs = given
    place = _place_of_training(node.function)
    if place is None:
        return node.function(*args, **kwargs)
    if place < len(args):
        args = (*args[:place], False, *args[place + 1 :])
    else:
        kwargs = {**kwargs, "training": False}
    return node.function(*args, **kwargs)


def replay(
    nodes: Sequence[Node],
    feeds: Mapping[Variable, torch.Tensor],
    wanted: Iterable[Variable],
    around: Around = plainly,
) -> list[torch.Tensor]:
    """The values of variables."""
    values = {id(variable): value for variable, value in feeds.items()}
    sizes = {
        size: found
        for variable, value in feeds.items()
        for size, found in zip(variable.sizes, value.shape, strict=True)
        if size in UNKNOWN_SIZES
    }

    def value_of(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, Variable):
            return tensor
        if id(tensor) not in values:
            raise ValueError(
                f"The program needs {tensor.name!r}, which was not fed. Pass"
                f" feed={{{tensor.name!r}: ...}}."
            )
        return values[id(tensor)]

    for node in nodes:
        said = (node.args, dict(node.kwargs))
        result = around(node, map_tensors(_with_sizes(said, sizes) if sizes else said, value_of))
        outputs = iter(node.outputs)

        def keep(tensor: torch.Tensor, outputs: Any = outputs) -> torch.Tensor:
            values[id(next(outputs))] = tensor
            return tensor

        map_tensors(result, keep)
    return [value_of(variable) for variable in wanted]


def _with_sizes(value: Any, sizes: Mapping[int, int]) -> Any:
    """Arguments with the sizes of the feed in the place of what stands for them, and of multiples of it."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)([_with_sizes(item, sizes) for item in value])
    if isinstance(value, dict):
        return {name: _with_sizes(item, sizes) for name, item in value.items()}
    if type(value) is int and value > 0:
        for size in [size for size in sizes if value % size == 0]:
            value = value // size * sizes[size]
    return value


@cache
def _place_of_training(function: Any) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        # A function of torch's that is written in C has no such argument.
        return None
    return names.index("training") if "training" in names else None


class Scope:
    """Where Paddle keeps the values of variables. torch's layers keep theirs: ask the model."""


_GLOBAL = Scope()


def global_scope() -> Scope:
    """The scope that programs run in."""
    return _GLOBAL


class Executor:
    """Runs programs on a place; parameters are brought there at the first run.

    >>> from torch import nn
    >>> from mezzo.compat import paddle
    >>> program = paddle.static.Program()
    >>> with paddle.static.program_guard(program):
    ...     x = paddle.static.data("x", [-1, 2], "float32")
    ...     double = x * 2
    >>> Executor(paddle.CPUPlace()).run(program, feed={"x": torch.ones(1, 2)}, fetch_list=[double])
    [array([[2., 2.]], dtype=float32)]
    """

    def __init__(self, place: Any = None) -> None:
        self.place = place
        self._device = device_of(place)

    def run(
        self,
        program: Program | None = None,
        feed: Mapping[str, Any] | None = None,
        fetch_list: Sequence[Any] | None = None,
        feed_var_name: str = "feed",
        fetch_var_name: str = "fetch",
        scope: Scope | None = None,
        return_numpy: bool = True,
        use_program_cache: bool = False,
        # Only what is asked for is computed.
        use_prune: bool = False,
    ) -> list[Any]:
        """Run a program on a feed, and give what was asked for: as arrays, of the dtype it was computed in (bfloat16 as uint16, as in Paddle).

        A program that `minimize` has closed trains at every run. With `use_program_cache=True` the
        whole step is captured on CUDA, and replayed.
        """
        program = default_main_program() if program is None else program
        if not isinstance(program, Program):
            raise TypeError(
                "Executor requires Program as its Parameter. But you passed in"
                f" {type(program).__name__}."
            )
        wanted = [program.variable(word) for word in fetch_list or ()]
        closing = _closing(program)
        if closing is None and not wanted:
            return []
        feeds = self._fed(program, feed or {})
        if closing is None:
            values = self._compute(program, feeds, wanted)
        else:
            closing.move(self._device)
            values = (
                closing.evaluate(program, feeds, wanted)
                if program.for_test
                else closing.train(feeds, wanted, capture=use_program_cache)
            )
        return [_array(value) for value in values] if return_numpy else values

    def close(self) -> None:
        """Nothing is held."""

    def _compute(
        self, program: Program, feeds: dict[str, torch.Tensor], wanted: list[Variable]
    ) -> list[torch.Tensor]:
        given = {program.feeds[name]: value for name, value in feeds.items()}
        with torch.no_grad():
            return replay(
                program.needed_for(wanted),
                given,
                wanted,
                evaluating if program.for_test else plainly,
            )

    def _fed(self, program: Program, feed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        if strange := [name for name in feed if name not in program.feeds]:
            raise ValueError(
                f"The feed has {', '.join(map(repr, strange))}, and the program has no static.data"
                f" of that name: {', '.join(program.feeds)}."
            )
        return {
            name: _fitting(name, torch.as_tensor(value), program.feeds[name]).to(self._device)
            for name, value in feed.items()
        }


def _closing(program: Program) -> Any:
    """How a program is trained: a clone that was made before it was closed is run like the program it is of."""
    return (
        program.origin.closing
        if program.closing is None and program.for_test and program.origin is not None
        else program.closing
    )


def _fitting(name: str, value: torch.Tensor, wanted: Variable) -> torch.Tensor:
    sizes = wanted.sizes
    if value.dim() != len(sizes) or any(
        size != got and size not in UNKNOWN_SIZES
        for size, got in zip(sizes, value.shape, strict=True)
    ):
        shown = f"dimensions = {len(sizes)}, shape = {shown_shape(wanted)}"
        raise ValueError(
            f"The fed Variable {name!r} should have {shown}, but received fed shape"
            f" {list(value.shape)}."
        )
    if value.is_floating_point() is not wanted.dtype.is_floating_point:
        raise ValueError(
            f"The data type of fed Variable {name!r} must be {wanted.dtype}, but received"
            f" {value.dtype}."
        )
    # A 16-bit feed stays what it is, as Paddle's guide has it for pure 16-bit programs; everything
    # else becomes what was declared.
    return (
        value
        if value.is_floating_point() and value.dtype.itemsize < wanted.dtype.itemsize
        else value.to(wanted.dtype)
    )


def _array(value: torch.Tensor) -> Any:
    held = value.detach().cpu()
    return held.view(torch.uint16).numpy() if held.dtype is torch.bfloat16 else held.numpy()
