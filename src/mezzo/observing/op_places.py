"""Where an op runs: its module, its line in the user's code, forward or backward."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from mezzo._errors import PolicyError
from mezzo._torch import (
    current_autograd_node,
    dispatch_mode_count,
    function_mode_count,
    line_modules,
    loaded,
    next_sequence_number,
    sequence_number,
)
from mezzo.conversion.converted import Converted
from mezzo.observing.module_hooks import ModuleHook
from mezzo.observing.user_lines import user_line
from mezzo.parallel.ddp import inner_models
from mezzo.policy.registry import registry
from mezzo.step.base import Step
from mezzo.step.eval_step import EvalStep

_MAX_PLACES = 200_000
"""Autograd nodes whose places are kept: those of a few dozen steps of a large model."""


@dataclass(frozen=True, slots=True)
class OpPlace:
    """Where an op runs."""

    module: str = ""
    """The path of the module; empty for the model itself and for code outside of it."""
    source: str = ""
    """The file and line in the user's code, of a backward op those of its forward op."""
    backward: bool = False
    function: str = ""
    """The torch function that ran the op, as policies name it; of a backward op, its forward's."""

    def __str__(self) -> str:
        parts = [self.module, f"({self.source})" if self.module and self.source else self.source]
        return " ".join(filter(None, parts))


class CurrentFunction(TorchFunctionMode):
    """Follows which torch function runs."""

    name = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.name = self.name, registry().name_of(func) or self.name
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.name = before


class PlaceTracker:
    """Follows which module runs, with hooks that are removed by `stop()`.

    Each autograd node has a number, and numbers grow as a forward pass makes nodes. The place of a
    backward op is that of the forward op which ran when the node with its number was new.

    `target` is a model, a list of models, a training or evaluation step, a converted model, or
    None, for which all modules are "". With `sources` places have lines of code; frames below the
    code `caller` do not count.
    """

    def __init__(
        self, target: Any = None, *, sources: bool = False, caller: CodeType | None = None
    ) -> None:
        self._models = models_of(target)
        self._graphs = _graph_lines(target) if isinstance(target, Converted) else {}
        self._sources, self._caller = sources, caller
        self.functions = CurrentFunction()
        """Names the functions in places; to be entered where these are needed."""
        self._handles: list[RemovableHandle] = []
        self._modules: list[tuple[str, bool]] = [("", False)]
        """Paths of the modules that run, and whether they run inside a backward pass."""
        self._forward: dict[int, OpPlace] = {}
        """Places of forward ops, by the number of their autograd node."""
        self._owners: dict[int, str] = {}
        """Paths of the modules that own parameters, by the address of the parameter's object."""

    def start(self) -> None:
        """Register the hooks."""
        for path, module in self._named_modules():
            self._owners |= {id(parameter): path for parameter in module.parameters(recurse=False)}
            self._handles += [
                module.register_forward_pre_hook(
                    ModuleHook(lambda *_, path=path: self._enter(path))
                ),
                module.register_forward_hook(
                    ModuleHook(lambda *_: self._leave()), always_call=True
                ),
            ]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forward.clear()
        self._owners.clear()
        del self._modules[1:]

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for index, model in enumerate(self._models):
            prefix = f"{index}." if len(self._models) > 1 else ""
            for name, module in model.named_modules():
                # The wrapper of torch.compile is not part of the user's model.
                path = f"{prefix}{name}".replace("_orig_mod.", "").removesuffix("_orig_mod")
                yield path.removesuffix("."), module

    def _enter(self, path: str) -> None:
        self._modules.append((path, current_autograd_node() is not None))

    def _leave(self) -> None:
        if len(self._modules) > 1:
            self._modules.pop()

    # -- one op ------------------------------------------------------------------------------------

    def place(self) -> OpPlace:
        """Return the place of the op that runs now. Call this before the op runs."""
        node = current_autograd_node()
        path, is_recomputed = self._modules[-1]
        if node is not None and not is_recomputed:
            return self._backward_place(node)
        found = OpPlace(
            self._graph_path() if self._graphs else path,
            user_line(self._caller) if self._sources else "",
            node is not None,
            self.functions.name,
        )
        # Autograd makes a node just before its op runs. Ops without gradients find an older node,
        # whose place is known.
        self._forward.setdefault(next_sequence_number() - 1, found)
        if len(self._forward) > _MAX_PLACES:
            for number in list(self._forward)[: _MAX_PLACES // 2]:
                del self._forward[number]
        return found

    def _backward_place(self, node: Any) -> OpPlace:
        found = self._forward.get(sequence_number(node))
        if found is not None:
            return replace(found, backward=True)
        # AccumulateGrad, which has no forward op.
        variable = getattr(node, "variable", None)
        return OpPlace(self._owners.get(id(variable), ""), backward=True)

    def _graph_path(self) -> str:
        """Return the module path of the line of a converted graph that runs now."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            lines = self._graphs.get(frame.f_code)
            if lines is not None:
                return lines.get(frame.f_lineno - frame.f_code.co_firstlineno, "")
            frame = frame.f_back
        return ""


def leaves_of(values: Iterable[Any]) -> list[Any]:
    """Return arguments or results of an op, with those in lists one by one.

    >>> leaves_of([1, [2, (3,)], None])
    [1, 2, 3, None]
    """
    # Arguments of ATen ops are nested in lists only, for which pytree takes four times as long.
    found: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            found += leaves_of(value)
        else:
            found.append(value)
    return found


def models_of(target: Any) -> tuple[nn.Module, ...]:
    """Return the models to observe, without wrappers that average gradients."""
    if target is None or isinstance(target, Converted):
        return ()
    if isinstance(target, Step):
        return tuple(target.models)
    models = target.model if isinstance(target, EvalStep) else target
    listed = models if isinstance(models, list | tuple) else [models]
    if not all(isinstance(model, nn.Module) for model in listed):
        raise PolicyError(
            f"Cannot observe {type(target).__name__}. Pass a torch.nn.Module, a list of them, a"
            " TrainStep, an EvalStep or a converted model."
        )
    return inner_models(listed)


class Observation:
    """Modes that see the ops that run, from `start` to `stop`."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._modes: tuple[int, int] | None = None

    def start(self, tracker: PlaceTracker, *modes: AbstractContextManager[Any]) -> None:
        """Enter modes that use a tracker.

        Compiled functions run as they are written: no mode sees the ops of compiled code.
        """
        with ExitStack() as stack:
            tracker.start()
            stack.callback(tracker.stop)
            # Importing dynamo takes seconds, and without it nothing is compiled.
            if loaded("OptimizedModule") is not None:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for mode in modes:
                stack.enter_context(mode)
            self._modes = function_mode_count(), dispatch_mode_count()
            self._stack = stack.pop_all()

    def stop(self) -> None:
        """Leave the modes.

        Raises RuntimeError if other modes were entered since and not left: torch would leave those.
        """
        if self._modes not in (None, (function_mode_count(), dispatch_mode_count())):
            raise RuntimeError(
                "An autocast region or a mode was entered after the observation began, and was not"
                " left. Stop the observation in the block in which it was started."
            )
        self._modes = None
        self._stack.close()


def _graph_lines(converted: Converted) -> Mapping[CodeType, dict[int, str]]:
    """Return the module path of each line of the graphs of a converted model."""
    return {
        type(graph).forward.__code__: line_modules(graph)
        for runner in converted._runners
        for graph in runner.graphs
    }
