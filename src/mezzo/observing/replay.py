"""Run one batch again on a copy of a model or a step, under any policy; nothing else changes.

The objects of the user stand in for the copy meanwhile: code that refers to the model, as the body
of `@train_step` and many loss functions do, runs on the copy too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo._casting import map_tensors
from mezzo._dtypes import HALF_DTYPES
from mezzo._torch import loaded
from mezzo.autocasting.arguments import region_for
from mezzo.autocasting.regions import Region, enter_regions
from mezzo.observing.finding import Finding, Kind, NamedTensor
from mezzo.observing.model_copy import plain_copy, standing_in
from mezzo.observing.numerics import named_models
from mezzo.observing.shadow_run import shadowed
from mezzo.policy.policy import Policy
from mezzo.prepare import rng_state
from mezzo.prepare.decorate import decorate
from mezzo.step.inputs import Call
from mezzo.step.outputs import split_loss
from mezzo.step.user_body import ScaledBackward

_LARGEST_SCALE = 65536.0
_LARGEST_HALF_SCALE = 32768.0
"""The largest scale of a loss in float16."""
Body = Callable[..., Any]


class ObservingMode(Protocol):
    """A mode that the batch runs in, such as `ShadowMode`."""

    finding: Finding | None
    """What ends the run; None if nothing does."""

    def paused(self) -> AbstractContextManager[None]:
        """Do not observe the ops of a block."""

    def cause_of_error(self) -> Finding | None:
        """Return what was wrong before the body raised; None if the error is all there is."""

    def outcome(self, results: Iterable[Tensor]) -> Finding | None:
        """Return what is wrong with the loss and the gradients."""

    def __enter__(self) -> Any:
        """Enter the mode."""

    def __exit__(self, *error: object) -> Any:
        """Leave the mode."""


Observer = Callable[
    [Mapping[str, nn.Module], CodeType, Iterable[NamedTensor]], AbstractContextManager[Any]
]
"""Makes the mode from the modules by name, the code that runs the body, and named tensors."""


@dataclass(frozen=True)
class Trace:
    """What one run of a batch showed."""

    finding: Finding | None
    """The first op that lost precision, or what made the loss or a gradient non-finite."""
    loss: float | None
    """The loss, if there is one."""
    scale: float
    """The loss scale that backward ran with."""


@dataclass(frozen=True)
class Replay:
    """One batch of a step or a model, which can be run under any policy."""

    models: tuple[nn.Module, ...]
    body: Body
    """Computes the loss from the batch; with `takes_update`, after the function that steps."""
    call: Call
    policy: Policy
    """The policy that the batch was run with."""
    scale: float | None
    """The loss scale; None for the largest with finite gradients, as scalers find it."""
    number: int | None = None
    """Calls of the step so far."""
    takes_update: bool = False
    wrappers: tuple[DistributedDataParallel, ...] = ()
    """Wrappers of the models, which would call collectives."""
    output_dtype: torch.dtype | None = None
    """Dtype that the models cast their outputs to."""
    loss_module: nn.Module | None = None
    """The loss function, if it is a module of its own: it may have parameters and buffers."""

    @property
    def device(self) -> torch.device:
        """The device of the models."""
        tensors = [
            tensor for model in self.models for tensor in (*model.parameters(), *model.buffers())
        ]
        return tensors[0].device if tensors else torch.device("cpu")

    def run(
        self,
        policy: Policy | None,
        scale: float | None = None,
        observer: Observer = shadowed,
    ) -> Trace:
        """Run forward and backward under a policy, None for float32; change nothing else."""
        copies = [plain_copy(model, to_float32=policy is None) for model in self.models]
        call = Call(*map_tensors(self.call, partial(_copied, to_float32=policy is None)))
        with ExitStack() as stack:
            # First: it is restored last, after what an error left behind.
            stack.callback(rng_state.restore_rng_state, rng_state.capture_rng_state())
            if loaded("OptimizedModule") is not None:
                # Compiled code is not seen by modes.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.enable_grad())
            # Also in float32: the caller may be in an autocast region.
            region = region_for(policy or Policy("O0"), self.device.type)
            if policy is not None:
                # Without an optimizer there are no updates to lose.
                applied = replace(policy, master="none")
                decorate(copies, None, applied, output_dtype=self.output_dtype)
            losses = [] if self.loss_module is None else [self.loss_module]
            copied = [plain_copy(loss, to_float32=policy is None) for loss in losses]
            # Before the models stand in for their copies, and have their parameters.
            twins = dict(self._twins(copies))
            stack.enter_context(
                standing_in([*self.models, *losses], [*copies, *copied], self.wrappers)
            )
            parameters = [
                parameter
                for copy in copies
                for parameter in copy.parameters()
                if parameter.requires_grad
            ]
            context = _Backward(
                parameters,
                twins,
                self.scale if scale is None else scale,
                region.dtype or torch.float32,
            )
            stack.callback(context.restore_gradients)
            return self._run(copies, call, region, context, observer)

    def _run(
        self,
        copies: list[nn.Module],
        call: Call,
        region: Region,
        context: _Backward,
        observer: Observer,
    ) -> Trace:
        named = self._named(copies, call)
        with ExitStack() as stack:
            # The region first: the mode that tracks functions must see calls before their casts.
            stack.enter_context(enter_regions(region))
            stack.enter_context(ScaledBackward(context.backward))
            mode = stack.enter_context(observer(_module_names(copies), Replay._run.__code__, named))
            context.observe_with(mode)
            args = (context, *call.args) if self.takes_update else call.args
            try:
                loss = split_loss(self.body(*args, **call.kwargs)).loss
            except Exception:
                # Some models check their values and raise: what made these is asked for.
                cause = mode.cause_of_error()
                if cause is None:
                    raise
                return Trace(cause, None, context.scale or 1.0)
        if context.loss is None and loss is not None:
            self._backward(context, loss)
        results = [] if context.loss is None else [context.loss]
        results += [
            parameter.grad for parameter in context.parameters if parameter.grad is not None
        ]
        shown = context.loss if context.loss is not None else loss
        return Trace(
            mode.outcome(results if context.loss is not None else _tensors(loss)),
            None if shown is None or shown.numel() != 1 else float(shown.detach()),
            context.scale or 1.0,
        )

    def _backward(self, context: _Backward, loss: Tensor) -> None:
        if context.mode.finding is None and loss.requires_grad and loss.numel() == 1:
            with context.mode:
                context.backward(loss)

    def _twins(self, copies: list[nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
        for model, copy in zip(self.models, copies, strict=True):
            yield from zip(_parameters(model), _parameters(copy), strict=True)

    def _named(self, copies: list[nn.Module], call: Call) -> list[NamedTensor]:
        named = [
            NamedTensor(Kind.PARAMETERS, prefix + name, tensor)
            for prefix, model in named_models(copies)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        ]
        if self.loss_module is not None:
            tensors = self.loss_module.named_parameters(), self.loss_module.named_buffers()
            named += [
                NamedTensor(Kind.PARAMETERS, f"loss_fn.{name}", tensor)
                for group in tensors
                for name, tensor in group
            ]
        return named + [NamedTensor(Kind.DATA, *pair) for pair in named_tensors(call)]


# -- tensors and their names -----------------------------------------------------------------------


def _copied(tensor: Tensor, *, to_float32: bool) -> Tensor:
    copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copied.float() if to_float32 and copied.dtype in HALF_DTYPES else copied


def _module_names(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    return {
        (prefix + name).rstrip("."): module
        for prefix, model in named_models(models)
        for name, module in model.named_modules()
    }


def named_tensors(call: Call) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among the arguments of a call with their names."""
    for index, value in enumerate(call.args):
        yield from _named_in(f"argument {index}", value)
    for name, value in call.kwargs.items():
        yield from _named_in(f"argument {name!r}", value)


def _named_in(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _named_in(f"{path}[{name!r}]", item)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _named_in(f"{path}[{index}]", item)


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) and value.is_floating_point() else []


# -- backward --------------------------------------------------------------------------------------


class _Backward:
    """Computes scaled gradients of the copy.

    A body that takes `update` gets this object, and `loss.backward()` in a body calls it.
    """

    mode: ObservingMode

    def __init__(
        self,
        parameters: list[nn.Parameter],
        twins: Mapping[Tensor, Tensor],
        scale: float | None,
        dtype: torch.dtype,
    ) -> None:
        self.parameters, self._twins, self._dtype = parameters, twins, dtype
        self.scale = scale
        self._searches = scale is None
        self.loss: Tensor | None = None
        """The last loss whose gradients were computed."""
        self._outside: dict[Tensor, Tensor | None] = {}
        """Gradients that tensors of the user had before, such as the parameters of a teacher."""

    def observe_with(self, mode: ObservingMode) -> None:
        """Pause a mode where gradients are only tried, and stop when it has found something."""
        self.mode = mode

    def __call__(self, loss: Tensor, optimizer: Any, **kwargs: Any) -> None:
        """Compute the gradients of an optimizer's parameters; nothing is stepped."""
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.backward(
            loss, inputs=[parameter for parameter in trained if parameter.requires_grad], **kwargs
        )

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,  # noqa: FBT001 - the signature of Tensor.backward
        create_graph: bool = False,  # noqa: FBT001, FBT002
        inputs: Any = None,
    ) -> None:
        """Compute scaled gradients, with the arguments of `Tensor.backward`."""
        self.loss = loss
        if self.mode.finding is not None:
            return
        self._set_gradients_aside(loss)
        if self._searches:
            self.scale = self._finite_scale(loss, self.scale)
        limit = _LARGEST_HALF_SCALE if loss.dtype is torch.float16 else torch.inf
        seed = self._seed(loss, min(self.scale or 1.0, limit)) if gradient is None else gradient
        if inputs is not None:
            inputs = [self._twins.get(input_, input_) for input_ in inputs]
        torch.autograd.backward(loss, seed, retain_graph, create_graph, inputs=inputs)

    def _seed(self, loss: Tensor, scale: float) -> Tensor:
        with self.mode.paused():
            return torch.full_like(loss, scale)

    def _finite_scale(self, loss: Tensor, limit: float | None) -> float:
        """Return the largest scale with finite gradients, as scalers find it; 1 if none has.

        All losses of a step have one scale: `limit` is that of those before.
        """
        scale = limit or (_LARGEST_SCALE if self._dtype is torch.float16 else 1.0)
        if loss.dtype is torch.float16:
            scale = min(scale, _LARGEST_HALF_SCALE)
        with self.mode.paused():
            while scale > 1.0 and not self._is_finite(loss, scale):
                scale /= 4.0
        return max(scale, 1.0)

    def _is_finite(self, loss: Tensor, scale: float) -> bool:
        # Not torch.autograd.grad, which reentrant checkpoints refuse.
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            torch.autograd.backward(loss, self._seed(loss, scale), retain_graph=True)
            gradients = [
                parameter.grad for parameter in self.parameters if parameter.grad is not None
            ]
        finally:
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
            for leaf in self._outside:
                leaf.grad = None
        values = [
            gradient.coalesce().values() if gradient.is_sparse else gradient
            for gradient in gradients
        ]
        return all(bool(value.isfinite().all()) for value in values)

    def _set_gradients_aside(self, loss: Tensor) -> None:
        """Keep the gradients of the leaves that are not the copy's; backward adds to them."""
        own = set(self.parameters)
        for leaf in _leaves_of_graph(loss):
            if leaf not in own and leaf not in self._outside:
                self._outside[leaf] = leaf.grad
                leaf.grad = None

    def restore_gradients(self) -> None:
        """Give the tensors of the user the gradients that they had."""
        for tensor, gradient in self._outside.items():
            tensor.grad = gradient


def _leaves_of_graph(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that backward computes gradients of."""
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = {loss.grad_fn, None}
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        parents = {parent for parent, _ in getattr(node, "next_functions", ())} - seen
        seen |= parents
        nodes += parents
