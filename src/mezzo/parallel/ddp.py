"""DistributedDataParallel: what a training step needs of the wrappers around its models.

The wrapper averages gradients over the ranks during backward. After that they are the same on all
ranks, non-finite ones included, so that all ranks skip an update together, and clip by the same
norm, without a collective of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from mezzo._dtypes import dtype_name
from mezzo._errors import PolicyError, UnsupportedError
from mezzo._torch import communication_hooks, reducer_refusal, renew_reducer
from mezzo.prepare.arguments import Optimizer, is_inside_ddp, models_of, uncompiled
from mezzo.scaling.gradients import parameters

REDUCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which gradients can be averaged over the ranks."""
_UNFIT_HOOKS = {
    "PowerSGDState": "keeps its error for the next update, and one overflow for ever",
    "PostLocalSGDState": "averages over a part of the ranks, so that ranks skip different updates",
}
"""Class of a communication hook's state → why it does not go with a loss scale."""


@dataclass(frozen=True, eq=False)
class DDPWrappers:
    """The DistributedDataParallel wrappers of a step's models; false if there are none."""

    wrappers: tuple[DistributedDataParallel, ...] = ()
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are averaged; None for their own."""

    def __bool__(self) -> bool:
        return bool(self.wrappers)

    @property
    def group(self) -> distributed.ProcessGroup:
        """The ranks that gradients are averaged over."""
        group: distributed.ProcessGroup = self.wrappers[0].process_group
        return group

    # -- checks ------------------------------------------------------------------------------------

    def check(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], *, scales_loss: bool
    ) -> None:
        """Raise unless the gradients of all trained parameters are averaged over the ranks."""
        if not self.wrappers and is_inside_ddp(models):
            raise UnsupportedError(
                "The model is wrapped by DistributedDataParallel, but the step was given the model"
                " itself: it would train without averaging gradients over the ranks. Pass the"
                " wrapper, TrainStep(ddp, ...), not ddp.module. Wrap the model before the step is"
                " created, and delete a wrapper that is not used any more."
            )
        for wrapper in self.wrappers:
            if wrapper.mixed_precision is not None:
                raise UnsupportedError(
                    "DistributedDataParallel(mixed_precision=...) casts parameters itself, and so"
                    " does the policy. Leave mixed_precision out."
                )
            self._check_hooks(wrapper, scales_loss=scales_loss)
        if self.wrappers:
            self._refuse_unreduced(models, optimizers)

    def _check_hooks(self, wrapper: DistributedDataParallel, *, scales_loss: bool) -> None:
        for hook, state in communication_hooks(wrapper):
            reason = next(
                (why for cls in type(state).__mro__ if (why := _UNFIT_HOOKS.get(cls.__name__))),
                None,
            )
            if scales_loss and reason is not None:
                raise UnsupportedError(
                    f"The communication hook {hook.__name__} {reason}: it does not go with a loss"
                    " scale. Use dtype='bfloat16' or scaler=False, or another hook."
                )
            if self.reduce_dtype is not None and state != self._hook_state(wrapper):
                raise PolicyError(
                    f"reduce_dtype={dtype_name(self.reduce_dtype)!r} registers a communication"
                    f" hook, and the wrapper has {hook.__qualname__!r} already. Leave one of them"
                    " out."
                )

    def _refuse_unreduced(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        reduced = {
            parameter for wrapper in self.wrappers for parameter in _reduced_parameters(wrapper)
        }
        names: dict[torch.Tensor, str] = {
            parameter: name for model in models for name, parameter in model.named_parameters()
        }
        for optimizer in optimizers:
            for parameter in parameters(optimizer):
                if parameter.requires_grad and parameter not in reduced:
                    raise UnsupportedError(
                        f"The gradient of {names.get(parameter, 'a parameter')!r} is not averaged"
                        " over the ranks, as those of other parameters are: ranks would skip"
                        " different updates. Wrap every trained model in DistributedDataParallel,"
                        " and let it ignore no parameter of the optimizers."
                    )

    # -- capture -----------------------------------------------------------------------------------

    def capture_refusal(self, *, accumulates: bool) -> str | None:
        """Return why steps over these wrappers cannot be captured, or None if they can."""
        if len({id(wrapper.process_group) for wrapper in self.wrappers}) > 1:
            return "the models are wrapped with different process groups"
        if self.wrappers and not distributed.is_gloo_available():
            return "torch has no gloo, by which ranks agree what to capture"
        reasons = (_capture_refusal(wrapper, accumulates=accumulates) for wrapper in self.wrappers)
        return next((reason for reason in reasons if reason is not None), None)

    def renew_reducers(self) -> None:
        """Give the wrappers new reducers, which accumulate gradients on the current stream.

        All ranks have to do this together.
        """
        for wrapper in self.wrappers:
            renew_reducer(wrapper)

    # -- reduction of gradients --------------------------------------------------------------------

    def register_hooks(self) -> None:
        """Let the wrappers average gradients in `reduce_dtype`. Call it before the first call."""
        if self.reduce_dtype is None:
            return
        for wrapper in self.wrappers:
            if not communication_hooks(wrapper):
                wrapper.register_comm_hook(self._hook_state(wrapper), reduce_in_dtype)

    def _hook_state(self, wrapper: DistributedDataParallel) -> _HookState | None:
        group = wrapper.process_group
        return None if self.reduce_dtype is None else _HookState(self.reduce_dtype, group)

    @contextmanager
    def unreduced(self) -> Iterator[None]:
        """Accumulate gradients without averaging them, in forward and backward passes inside.

        The first pass of a static graph is averaged all the same, since torch needs it to record
        the graph. That changes no sum: to average what is equal on all ranks changes nothing.
        """
        with ExitStack() as stack:
            for wrapper in self.wrappers:
                if not wrapper.static_graph or wrapper._static_graph_delay_allreduce_enqueued:
                    stack.enter_context(wrapper.no_sync())
            yield

    @contextmanager
    def refusing_bypass(self) -> Iterator[None]:
        """Raise at the end if a wrapped model has gradients, but its wrapper was not called."""
        called: set[nn.Module] = set()

        def note(wrapper: nn.Module, *_: Any) -> None:
            called.add(wrapper)

        with ExitStack() as stack:
            for wrapper in self.wrappers:
                stack.callback(wrapper.register_forward_hook(note).remove)
            yield
        for wrapper in self.wrappers:
            if wrapper not in called and _has_gradients(wrapper):
                raise UnsupportedError(
                    f"The body of the step used {type(wrapper.module).__name__} without its"
                    " DistributedDataParallel wrapper: the gradients are not averaged over the"
                    " ranks. Call the wrapper in the body: ddp(x), not model(x)."
                )

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Average gradients that were accumulated without it. Synchronizes.

        A parameter that has a gradient on some ranks only gets one on all of them, as in backward.
        """
        for wrapper in self.wrappers:
            own = list(_reduced_parameters(wrapper))
            has_gradient = [parameter.grad is not None for parameter in own]
            used = torch.tensor(has_gradient, dtype=torch.int32, device=own[0].device)
            distributed.all_reduce(used, distributed.ReduceOp.MAX, group=wrapper.process_group)
            for parameter, is_used in zip(own, used.tolist(), strict=True):
                if is_used:
                    self._reduce_gradient(parameter, wrapper.process_group)

    def _reduce_gradient(
        self, parameter: torch.Tensor, group: distributed.ProcessGroup | None
    ) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        # Divided before the sum, which could overflow in 16 bits. Contiguous, as gloo needs it.
        shared = gradient.to(self.reduce_dtype or gradient.dtype).contiguous()
        shared = shared / distributed.get_world_size(group)
        distributed.all_reduce(shared, group=group)
        gradient.copy_(shared)

    def check_positions(self, position: int) -> None:
        """Raise on all ranks unless all had the same number of calls since the last update."""
        device = next(self.wrappers[0].parameters()).device
        # The maximum of the negative is the minimum.
        ends = torch.tensor([position, -position], device=device)
        distributed.all_reduce(ends, distributed.ReduceOp.MAX, group=self.group)
        most, least = ends[0].item(), -ends[1].item()
        if most != least:
            raise UnsupportedError(
                f"flush() was called after {position} calls since the last update on this rank, and"
                f" after {least} to {most} on all. Give every rank the same number of batches, for"
                " instance with DistributedSampler(..., drop_last=True)."
            )


def find_ddp_wrappers(models: Any, reduce_dtype: str | torch.dtype | None = None) -> DDPWrappers:
    """Return the wrappers among models that were passed to a step."""
    wrappers = tuple(
        model for model in models_of(models) if isinstance(model, DistributedDataParallel)
    )
    if reduce_dtype is None:
        return DDPWrappers(wrappers)
    by_name = {dtype_name(dtype): dtype for dtype in REDUCE_DTYPES}
    dtype = by_name.get(reduce_dtype) if isinstance(reduce_dtype, str) else reduce_dtype
    if dtype not in REDUCE_DTYPES:
        raise PolicyError(
            f"reduce_dtype={reduce_dtype!r} is not a dtype for averages of gradients. Choose one"
            f" of: {', '.join(by_name)}, or None for the dtype of the gradients."
        )
    if not wrappers:
        raise PolicyError(
            f"reduce_dtype={reduce_dtype!r} is for gradients that DistributedDataParallel averages,"
            " and the model is not wrapped by it. Pass the wrapper, or leave reduce_dtype out."
        )
    return DDPWrappers(wrappers, dtype)


def inner_models(models: Any) -> tuple[nn.Module, ...]:
    """Return the models that were passed to a step, without their wrappers and uncompiled."""
    return tuple(
        uncompiled(model.module) if isinstance(model, DistributedDataParallel) else model
        for model in models_of(models)
    )


def _reduced_parameters(wrapper: DistributedDataParallel) -> Iterable[nn.Parameter]:
    """Return the trained parameters whose gradients a wrapper averages."""
    ignored = wrapper.parameters_to_ignore
    return (
        parameter
        for name, parameter in wrapper.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    )


def _has_gradients(wrapper: DistributedDataParallel) -> bool:
    return any(parameter.grad is not None for parameter in _reduced_parameters(wrapper))


def _capture_refusal(wrapper: DistributedDataParallel, *, accumulates: bool) -> str | None:
    backends = distributed.get_backend_config(wrapper.process_group)
    if "cuda:nccl" not in backends:
        return (
            f"DistributedDataParallel averages gradients by {backends}, and only NCCL is captured"
        )
    if wrapper.find_unused_parameters and not wrapper.static_graph:
        return (
            "DistributedDataParallel(find_unused_parameters=True) looks for them on the host. Leave"
            " it out, or add static_graph=True if they are always the same"
        )
    if wrapper.gradient_as_bucket_view and accumulates:
        return (
            "calls accumulate gradients, and those of"
            " DistributedDataParallel(gradient_as_bucket_view=True) change their addresses"
        )
    for hook, _ in communication_hooks(wrapper):
        if not is_capturable(hook):
            return (
                f"the communication hook {hook.__qualname__!r} may keep state on the host, which a"
                " captured graph would not change"
            )
    return reducer_refusal(wrapper)


# -- communication hook ----------------------------------------------------------------------------


class _HookState(NamedTuple):
    """What the communication hook needs. Not the wrapper, which holds this and would live on."""

    dtype: torch.dtype
    group: distributed.ProcessGroup


def reduce_in_dtype(state: _HookState, bucket: Any) -> Any:
    """Average a bucket of gradients in the dtype of the state; return a future of it."""
    buffer = bucket.buffer()
    shared = buffer.to(state.dtype).div_(distributed.get_world_size(state.group))
    work = distributed.all_reduce(shared, group=state.group, async_op=True)
    return work.get_future().then(partial(_copy_back, buffer))


def _copy_back(buffer: torch.Tensor, future: Any) -> torch.Tensor:
    return buffer.copy_(future.value()[0])


# torch compares the annotations of a hook with types, and ours are strings.
reduce_in_dtype.__annotations__.clear()


def is_capturable(hook: Any) -> bool:
    """Return whether a communication hook does the same at each call, on the device.

    >>> is_capturable(reduce_in_dtype), is_capturable(print)
    (True, False)
    """
    return hook in (reduce_in_dtype, allreduce_hook, fp16_compress_hook, bf16_compress_hook)
