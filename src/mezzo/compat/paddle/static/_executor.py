"""`paddle.static.Executor`: run a program on fed arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from mezzo._casting import map_tensors
from mezzo._dtypes import dtype_name
from mezzo.compat.paddle._places import device_of
from mezzo.compat.paddle._tensor import Tensor, as_tensor, plain_tensor
from mezzo.compat.paddle.static._program import (
    UNKNOWN_SIZES,
    Node,
    Program,
    Variable,
    default_main_program,
    paddle_shape,
)


class Scope:
    """`paddle.static.Scope`, which holds the values of variables in Paddle.

    Empty here: torch's layers hold their own parameters.
    """


_GLOBAL_SCOPE = Scope()


def global_scope() -> Scope:
    """Return the scope that programs run in."""
    return _GLOBAL_SCOPE


class Executor:
    """`paddle.static.Executor`: run programs on a place.

    Parameters are moved to the place at the first run.

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
        use_prune: bool = False,
    ) -> list[Any]:
        """Run a program on a feed and return the fetched values, as arrays by default.

        Arrays have the dtype that was computed; bfloat16 comes as uint16, as in Paddle. After
        `minimize` every run trains. With `use_program_cache=True` the whole step is captured as a
        CUDA graph and replayed. `use_prune` has no effect: only fetched values are computed.
        """
        program = default_main_program() if program is None else program
        if not isinstance(program, Program):
            raise TypeError(
                "Executor requires Program as its Parameter. But you passed in"
                f" {type(program).__name__}."
            )
        fetched = [program.variable(key) for key in _as_list(fetch_list)]
        trainer = _trainer_of(program)
        if trainer is None and not fetched:
            return []
        feeds = self._prepare_feeds(program, feed)
        if trainer is None:
            values = self._compute(program, feeds, fetched)
        else:
            trainer.move(self._device)
            values = (
                trainer.evaluate(program, feeds, fetched)
                if program.for_test
                else trainer.train(feeds, fetched, capture=use_program_cache)
            )
        convert = _to_array if return_numpy else _to_paddle_tensor
        return [convert(value) for value in values]

    def close(self) -> None:
        """Do nothing: an executor holds no resources."""

    def _prepare_feeds(self, program: Program, feed: Any) -> dict[str, torch.Tensor]:
        if feed is not None and not isinstance(feed, Mapping):
            raise TypeError(
                "feed requires dict as its Parameter, {name: array}. But you passed in"
                f" {type(feed).__name__}."
            )
        feed = feed or {}
        if unknown := [name for name in feed if name not in program.feeds]:
            raise ValueError(
                f"The feed has {', '.join(map(repr, unknown))}, and the program has no static.data"
                f" of that name: {', '.join(program.feeds) or 'it has none at all'}."
            )
        return {
            name: _check_feed(name, _to_tensor(name, value), program.feeds[name]).to(self._device)
            for name, value in feed.items()
        }

    def _compute(
        self, program: Program, feeds: dict[str, torch.Tensor], fetched: list[Variable]
    ) -> list[torch.Tensor]:
        """Compute variables of a program that no optimizer trains."""
        by_variable = {program.feeds[name]: value for name, value in feeds.items()}
        nodes = program.needed_for(fetched)
        move_tensors(tensors_read_by(nodes), self._device)
        call = call_in_eval if program.for_test else call_node
        with torch.no_grad():
            return run_nodes(nodes, by_variable, fetched, call)


def tensors_read_by(nodes: Iterable[Node]) -> list[torch.Tensor]:
    """Return the parameters, buffers and constants that nodes read."""
    return [
        tensor for node in nodes for tensor in node.tensors() if not isinstance(tensor, Variable)
    ]


def move_tensors(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move parameters, buffers and constants to a device, in place."""
    for tensor in tensors:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def _trainer_of(program: Program) -> Any:
    """Return the trainer of a program.

    A test clone from before `minimize` uses the trainer of the program it was cloned from.
    """
    if program.trainer is None and program.for_test and program.origin is not None:
        return program.origin.trainer
    return program.trainer


def _as_list(fetch_list: Any) -> list[Any]:
    """Return what to fetch as a list; one variable or name may stand alone, as in Paddle."""
    if fetch_list is None:
        return []
    if isinstance(fetch_list, list | tuple):
        return list(fetch_list)
    return [fetch_list]


def _to_tensor(name: str, value: Any) -> torch.Tensor:
    """Return a fed tensor, array or nested list as a plain tensor of torch."""
    if isinstance(value, Variable):
        raise TypeError(
            f"The feed of {name!r} is the variable {value.name!r}, which has no value. Feed an"
            " array or a tensor."
        )
    if isinstance(value, torch.Tensor):
        return plain_tensor(value.detach())
    if not getattr(getattr(value, "flags", None), "writeable", True):
        # torch warns about sharing the memory of an array that must not be written.
        value = value.copy()
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"The feed of {name!r} should be an array, a tensor or a list of numbers, but received"
            f" {type(value).__name__}: {error}."
        ) from None


def _check_feed(name: str, value: torch.Tensor, variable: Variable) -> torch.Tensor:
    """Check the shape and dtype of a fed tensor, and cast it where Paddle does."""
    sizes = variable.sizes
    if value.dim() != len(sizes) or any(
        size != actual and size not in UNKNOWN_SIZES
        for size, actual in zip(sizes, value.shape, strict=True)
    ):
        expected = f"dimensions = {len(sizes)}, shape = {paddle_shape(variable)}"
        raise ValueError(
            f"The fed Variable {name!r} should have {expected}, but received fed shape"
            f" {list(value.shape)}."
        )
    if value.is_floating_point() is not variable.dtype.is_floating_point:
        raise ValueError(
            f"The data type of fed Variable {name!r} must be {dtype_name(variable.dtype)}, but"
            f" received {dtype_name(value.dtype)}."
        )
    # A 16-bit feed is not widened: Paddle's guide feeds pure 16-bit programs so. Any other feed is
    # cast to the declared dtype.
    is_narrower = value.is_floating_point() and value.dtype.itemsize < variable.dtype.itemsize
    return value if is_narrower else value.to(variable.dtype)


def _to_paddle_tensor(value: torch.Tensor) -> Tensor:
    return as_tensor(value.detach())


def _to_array(value: torch.Tensor) -> Any:
    on_cpu = value.detach().cpu()
    return on_cpu.view(torch.uint16).numpy() if on_cpu.dtype is torch.bfloat16 else on_cpu.numpy()


# -- running recorded nodes ------------------------------------------------------------------------

CallNode = Callable[[Node, tuple[Any, Any]], Any]
"""Calls a node's function with (args, kwargs) of real tensors."""


def call_node(node: Node, arguments: tuple[Any, Any]) -> Any:
    """Call a node's function."""
    args, kwargs = arguments
    return node.function(*args, **kwargs)


def call_in_eval(node: Node, arguments: tuple[Any, Any]) -> Any:
    """Call a node's function with `training=False`, which dropout and batch norm have."""
    args, kwargs = arguments
    index = _training_index(node.function)
    if index is None:
        return node.function(*args, **kwargs)
    if index < len(args):
        args = (*args[:index], False, *args[index + 1 :])
    else:
        kwargs = {**kwargs, "training": False}
    return node.function(*args, **kwargs)


def run_nodes(
    nodes: Sequence[Node],
    feeds: Mapping[Variable, torch.Tensor],
    fetched: Iterable[Variable],
    call: CallNode = call_node,
) -> list[torch.Tensor]:
    """Run nodes on fed tensors and return the values of variables."""
    values = {id(variable): value for variable, value in feeds.items()}
    sizes = {
        placeholder: size
        for variable, value in feeds.items()
        for placeholder, size in zip(variable.sizes, value.shape, strict=True)
        if placeholder in UNKNOWN_SIZES
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
        recorded = (node.args, dict(node.kwargs))
        if sizes:
            recorded = _substitute_sizes(recorded, sizes)
        result = call(node, map_tensors(recorded, value_of))
        outputs = iter(node.outputs)

        def store(tensor: torch.Tensor, outputs: Any = outputs) -> torch.Tensor:
            values[id(next(outputs))] = tensor
            return tensor

        map_tensors(result, store)
    return [value_of(variable) for variable in fetched]


def _substitute_sizes(value: Any, sizes: Mapping[int, int]) -> Any:
    """Replace placeholders of unknown sizes, and multiples of them, by the fed sizes."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)([_substitute_sizes(item, sizes) for item in value])
    if isinstance(value, dict):
        return {name: _substitute_sizes(item, sizes) for name, item in value.items()}
    if type(value) is int and value > 0:
        for placeholder in [placeholder for placeholder in sizes if value % placeholder == 0]:
            value = value // placeholder * sizes[placeholder]
    return value


@cache
def _training_index(function: Any) -> int | None:
    """Return the position of the parameter `training`, or None if there is none."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        # Functions of torch that are written in C have no signature, and no such parameter.
        return None
    return names.index("training") if "training" in names else None
