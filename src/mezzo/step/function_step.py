"""`@train_step`: a training step whose body is a user's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch

from mezzo._errors import PolicyError
from mezzo.parallel.ddp import find_ddp_wrappers
from mezzo.prepare.arguments import Models, Optimizers, without_fabric
from mezzo.prepare.plan import PolicyArg
from mezzo.step.base import Step
from mezzo.step.components import (
    PrecisionArgs,
    ScalerArg,
    SchedulersArg,
    StepComponents,
    prepare_components,
    restored_on_error,
)
from mezzo.step.input_kinds import MAX_GRAPHS, check_max_graphs
from mezzo.step.inputs import Call, closure_values
from mezzo.step.options import Capture, Reduction, StepOptions, check_accumulate, check_mean_over
from mezzo.step.outputs import split_loss


class FunctionStep(Step):
    """A training step whose body is a user's function; it is called like the function."""

    def __init__(
        self,
        body: Callable[..., Any],
        components: StepComponents,
        options: StepOptions,
        capture: Capture,
        mean_over: int | None = None,
    ) -> None:
        super().__init__(components, body, options, capture, mean_over)
        update_wrapper(self, body)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train on one batch and return detached copies of what the function returned."""
        returned = self._call(Call(args, kwargs))
        loss, self._outputs = split_loss(returned)
        if self._means is not None:
            self._means.add(loss, self._outputs)
        return returned

    def _title(self) -> str:
        return f"@train_step {getattr(self, '__name__', 'function')}"


def train_step(
    *,
    models: Models,
    optimizers: Optimizers,
    policy: PolicyArg | None = None,
    scaler: ScalerArg = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    accumulate_reduction: str | Reduction = Reduction.MEAN,
    scheduler: SchedulersArg = None,
    capture: str | bool | Capture = Capture.AUTO,
    grad_norm: bool = False,
    reduce_dtype: str | torch.dtype | None = None,
    max_graphs: int = MAX_GRAPHS,
    same_shapes: bool = False,
    mean_over: int | None = None,
    **overrides: Any,
) -> Callable[[Callable[..., Any]], FunctionStep]:
    """Make a training step from a function that computes a loss; use as a decorator.

    The function returns the loss or `(loss, aux)`, and backward, update and scaling follow. Or it
    calls `loss.backward()` itself, any number of times, and returns anything. Then every optimizer
    whose parameters have gradients is stepped. A call of the step returns detached copies of what
    the function returned; `step.outputs` is the `aux` of the last call.

    To step an optimizer in the middle of the function, as GANs do, take `update` as the first
    parameter: `update(loss, optimizer)` computes gradients for the parameters of this optimizer
    only, and steps it.

        @mezzo.train_step(models=[generator, critic], optimizers=[of_generator, of_critic])
        def step(update, real, noise):
            fake = generator(noise)
            loss_critic = critic_loss(critic(real), critic(fake.detach()))
            update(loss_critic, of_critic)
            loss = generator_loss(critic(fake))
            update(loss, of_generator)
            return loss, loss_critic

    Args:
        models: The model, or a list of models, or DistributedDataParallel of them, which the
            function then calls. Plain models and optimizers are decorated; decorated
            ones must have been decorated together.
        optimizers: The optimizer, or a list of optimizers.
        policy: As for `TrainStep`, like all arguments below.
        scaler: A `mezzo.GradScaler`. None creates one if the dtype is float16; False uses none.
        clip_norm: Clip the unscaled gradients of each optimizer to this norm.
        grad_norm: Whether to compute the norm of all gradients without `clip_norm` too.
        reduce_dtype: Dtype in which DistributedDataParallel averages gradients over processes.
        accumulate: Number of calls for each update.
        accumulate_reduction: `"mean"` or `"sum"` of the gradients of these calls.
        scheduler: A learning rate scheduler, or a list with at most one for each optimizer.
        capture: Whether to capture the function as a CUDA graph: `"auto"`, True or False.
        max_graphs: Kinds of inputs that CUDA graphs are kept for.
        same_shapes: A promise that all processes get inputs of equal shapes in every call.
        mean_over: Number of calls over which `step.means` are taken; None for no means.
        **overrides: Fields of the policy to change, such as `dtype=`.

    Returns:
        A decorator. The step it returns is called like the function.

    >>> import mezzo, torch
    >>> from torch import nn
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> @mezzo.train_step(models=model, optimizers=optimizer, policy="O1", dtype="bfloat16")
    ... def step(x):
    ...     return model(x).square().mean()
    >>> bool(step(torch.ones(8, 4)) > step(torch.ones(8, 4)))
    True
    """
    models = without_fabric(models)
    calls, reduction = check_accumulate(accumulate), Reduction.parse(accumulate_reduction)
    check_mean_over(mean_over)
    check_max_graphs(max_graphs)
    parsed_capture = Capture.parse(capture)
    precision = PrecisionArgs(policy, clip_norm, overrides, grad_norm, reduce_dtype)

    def make(body: Callable[..., Any]) -> FunctionStep:
        takes_update = _takes_update(body)
        if takes_update and calls > 1:
            raise PolicyError(
                f"The function takes {_UPDATE!r}, which steps at once and cannot accumulate, got"
                f" accumulate={accumulate}. Use accumulate=1, or return the loss instead."
            )
        if takes_update and find_ddp_wrappers(models):
            raise PolicyError(
                f"The function takes {_UPDATE!r}, which computes the gradients of a part of the"
                " parameters, and DistributedDataParallel waits for those of all. Return the loss,"
                " or call loss.backward() in the function."
            )
        options = StepOptions(
            calls,
            reduction,
            custom_body=True,
            takes_update=takes_update,
            closure_values=closure_values(body),
            max_graphs=max_graphs,
            same_shapes=same_shapes,
        )
        with restored_on_error(models, optimizers):
            components = prepare_components(models, optimizers, precision, scaler, scheduler)
            return FunctionStep(body, components, options, parsed_capture, mean_over)

    return make


_UPDATE = "update"
"""Name of a first parameter that receives the function which steps single optimizers."""


def _takes_update(body: Any) -> bool:
    """Check the body of a step; return whether its first parameter is `update`."""
    if not callable(body):
        raise PolicyError(
            f"train_step(...) decorates a function, got {body!r}. Write"
            " @mezzo.train_step(models=..., optimizers=...) above one."
        )
    if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body):
        raise PolicyError(
            f"{body.__name__} is a generator or a coroutine function, which does not run when it is"
            " called. Pass a plain function."
        )
    names = list(inspect.signature(body).parameters)
    return bool(names) and names[0] == _UPDATE
