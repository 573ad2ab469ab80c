"""Where the torch function of an op was called, also of ops in custom backward functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mezzo._torch import current_autograd_node, pytree
from mezzo.observing.user_lines import user_line
from mezzo.policy.registry import registry

_METADATA = "mezzo_place"
_BACKWARD = "Backward"


@dataclass(frozen=True)
class Place:
    """Where an op was called."""

    op: str
    """The name that policies use, or ATen's name, or the name of a `torch.autograd.Function`."""
    module: str = ""
    """The path of the module; empty for the model itself and for the loss function."""
    source: str = ""
    """The file and line of the user's code; empty if only torch's code was involved."""


class Pausable:
    """Base of modes that observe ops: a block can be excluded."""

    is_paused = False
    """Whether ops are not observed now."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not observe the ops of a block."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


class FunctionPlaces(TorchFunctionMode):
    """Keeps the torch function and the module that run now.

    Autograd nodes get the place of the function that made them. Those of a
    `torch.autograd.Function`, which function modes do not see, are marked when their results leave
    the module or reach the next function.
    """

    def __init__(self, modules: Mapping[str, nn.Module], caller: CodeType) -> None:
        super().__init__()
        self._function: str | None = None
        self._modules = [""]
        self._caller = caller
        """Frames below the one of this code are not the user's."""
        self._owners = {
            parameter: name
            for name, module in modules.items()
            for parameter in module.parameters(recurse=False)
        }
        for name, module in modules.items():
            if name:
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: self._enter(name, (args, kwargs)),
                    with_kwargs=True,
                    prepend=True,
                )
                module.register_forward_hook(
                    lambda _module, _args, result: self._leave(result), always_call=True
                )

    def _enter(self, name: str, inputs: Any) -> None:
        self._mark_custom(inputs)
        self._modules.append(name)

    def _leave(self, result: Any) -> None:
        self._mark_custom(result)
        self._modules.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        before, self._function = self._function, function_name(func)
        try:
            inputs = _nodes((args, kwargs))
            self._mark_custom((args, kwargs))
            result = func(*args, **kwargs)
            self._mark(_nodes(result), inputs, self._function, self.source)
        finally:
            self._function = before
        return result

    def place_of(self, overload: Any) -> Place:
        """Return the place of an op that runs now; in backward, the place of its forward op."""
        node = current_autograd_node()
        aten = registry().name_of(overload) or overload.overloadpacket.__name__
        if node is None:
            return Place(self._function or aten, self._modules[-1], self.source())
        place: Place | None = node.metadata.get(_METADATA)
        if place is None:
            source, variable = self.source(), getattr(node, "variable", None)
            if source and variable is not None:
                # A hook of a parameter changes its gradient.
                return Place(aten, self._owners.get(variable, ""), source)
            return Place(_name(node) or aten, "", source)
        # The backward of a torch.autograd.Function is the user's code too.
        return place if place.source else Place(place.op, place.module, self.source())

    @property
    def module(self) -> str:
        """The path of the module that runs now."""
        return self._modules[-1]

    def source(self) -> str:
        """Return the file and line of the user's code that runs now; empty if there is none."""
        return user_line(self._caller)

    def _mark_custom(self, values: Any) -> None:
        """Mark nodes that no torch function has made; their line is found in backward."""
        self._mark(_nodes(values), (), None, str)

    def _mark(
        self,
        nodes: list[Any],
        inputs: Collection[Any],
        op: str | None,
        read_source: Callable[[], str],
    ) -> None:
        """Store a place on these nodes and on those before them, up to the nodes of the inputs."""
        source: str | None = None
        while nodes:
            node = nodes.pop()
            if node in inputs or _METADATA in node.metadata or not node.next_functions:
                continue
            source = read_source() if source is None else source
            node.metadata[_METADATA] = Place(op or _name(node), self._modules[-1], source)
            nodes += [parent for parent, _ in node.next_functions if parent is not None]


def function_name(func: Callable[..., Any]) -> str | None:
    """Return the name of a torch function for policies, or its own; None for properties."""
    name: str | None = registry().name_of(func)
    own = getattr(func, "__name__", "")
    return name or (None if own.startswith("_") or not own else own)


def _nodes(values: Any) -> list[Any]:
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def _name(node: Any) -> str:
    """Return the name of the forward op of an autograd node, as far as the node's name shows it."""
    name: str = node.name().rpartition("::")[2]
    return name.rpartition(_BACKWARD)[0] or name
