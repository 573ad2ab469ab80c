"""`TrainStep`: a whole training step as one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mezzo import _events
from mezzo._errors import PolicyError
from mezzo.autocasting.regions import enter_regions
from mezzo.prepare.arguments import (
    Models,
    Optimizer,
    Optimizers,
    optimizers_of,
    unwrapped,
    without_fabric,
)
from mezzo.prepare.decorate import undecorate
from mezzo.prepare.plan import PolicyArg
from mezzo.scaling.gradients import parameters
from mezzo.step import memory_format
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
from mezzo.step.inputs import Call, ModelArguments, call_model, closure_values, move_inputs
from mezzo.step.options import (
    Capture,
    Layout,
    Reduction,
    StepOptions,
    check_accumulate,
    check_mean_over,
)
from mezzo.step.outputs import KeptOutputs, loss_of_output, split_loss
from mezzo.step.padding import InputPadding, Padding

_INPUTS_AND_TARGET = 2
"""Positional arguments of a step with a loss function."""


class TrainStep(Step):
    """A training step as one call: forward, loss, backward, check, clip, update, new loss scale.

    `step(x, y)` computes `loss_fn(model(x), y)` in the policy's precision, trains on it and returns
    the loss. Without `loss_fn` all arguments go to the model, which computes the loss itself, as
    those of transformers do. On CUDA the call is captured as a CUDA graph after a few warm-up
    calls, then replayed.

    `step(**batch)` passes keywords to the model. A mapping or dataclass `x`, or a named tuple with
    names of the model's parameters, is unpacked into keywords, another tuple into positional
    arguments, unless the model can only take it whole; a tuple `y` is unpacked into the loss
    function. Without `y`, it gets the model's output only.

    A loss function may return `(loss, aux)`, where `aux` is any nest of tensors and plain values:
    `step.outputs` are copies of the last `aux`, `step.outputs_on_host()` copies them to the host
    asynchronously, and with `mean_over=` `step.means` are the means of its scalars.

    Calls do not synchronize. Reading `optimizer.param_groups`, a state dict or `get_last_lr()`
    does, once after a call. A group kept from an earlier read (`group = optimizer.param_groups[0]`)
    shows an old learning rate: read `optimizer.param_groups` again.

    A captured step follows changes of inputs, shapes, train and eval modes, learning rates and
    other numbers of the optimizer's groups, and numbers and tensors that the loss function closes
    over. Other attributes of modules, such as a dropout's `p`, and Python values that a model reads
    keep the values they had at the capture.

    With several processes, pass the model in DistributedDataParallel, or one that `fully_shard` has
    sharded. At O1 the order is free; at O2 and O3, which cast parameters, first decorate, then
    wrap, but shard first. All ranks skip an update together. With NCCL the step is captured, with
    DistributedDataParallel after eleven warm-up calls: before each call the ranks agree whether it
    runs eagerly, is captured or replayed. Give all ranks batches of equal shapes (pad them, or drop
    the last one), since each new combination of shapes is a graph of its own. The step runs the
    wrapper on a stream of its own, and gives it a new reducer for that.

        model, optimizer = mezzo.decorate(model, optimizer, "O2")
        ddp = DistributedDataParallel(model)
        step = mezzo.TrainStep(ddp, loss_fn, optimizer)

    Args:
        model: The model, or DistributedDataParallel of it. A plain model and its optimizer are
            decorated as by `mezzo.decorate`; if both are decorated, leave out `policy` and
            `overrides`.
        loss_fn: A function of the model's output and the target that returns the loss, a tensor
            with one element, or `(loss, aux)`. A module whose parameters are in the optimizer, such
            as a loss with a proxy of each class, is decorated and saved with the model. None takes
            the loss from the model's output: `output.loss`, `output["loss"]`, or the only tensor
            with one element.
        optimizer: The optimizer of the model, or a list of them, such as Muon for matrices and
            AdamW for the other parameters.
        policy: A level such as `"O1"` (the default) or `"O2"`, a `mezzo.Policy`, or the path of a
            TOML file.
        scaler: A `mezzo.GradScaler`. None creates one if the dtype is float16; False uses none.
        clip_norm: Clip the unscaled gradients to this norm.
        grad_norm: Whether to compute the norm of the gradients for `metrics` without `clip_norm`
            too. On CUDA that is one more pass over the gradients, unless a scaler checks them.
        accumulate: Number of calls for each update; `flush()` updates from fewer. Gradients are
            averaged over processes in the last of these calls only.
        accumulate_reduction: `"mean"` averages the gradients of these calls, `"sum"` adds them.
        scheduler: A learning rate scheduler of the optimizer. It advances after each update that
            is not skipped. It must be one of torch's whose future values can be computed; step
            others, such as `ReduceLROnPlateau`, yourself.
        capture: `"auto"` captures if that is possible and not slower, and warns if not; True raises
            `UnsupportedError` if it is not possible; False always runs eagerly.
        reduce_dtype: Dtype in which DistributedDataParallel averages gradients over processes:
            `"float32"` rounds 16-bit gradients once. None leaves it to the wrapper, which uses the
            dtype of the gradients.
        compile: Whether to run the model through `torch.compile`.
        channels_last: `"auto"` converts a convolutional model on CUDA if the first batch shows that
            this is faster, True converts it, False does not. `channels_last_reason` is the reason.
        max_graphs: Kinds of inputs, such as sequence lengths, that CUDA graphs are kept for. Their
            graphs share one memory pool. Others run eagerly.
        same_shapes: A promise that in every call all processes get inputs of equal shapes, dtypes
            and plain values, and that the loss function closes over the same tensors. A captured
            step then does not compare them before each call, which is a small all-gather between
            the hosts.
        keep_outputs: Whether `step.outputs` is the model's output if the loss function returns the
            loss alone. A captured step then holds the memory of that output for each shape.
        mean_over: Number of calls over which `step.means` are taken; None for no means.
        pad_to: Pad the sequences of batches with `input_ids` or `attention_mask` to a multiple of
            this length, so that few shapes are captured; see `mezzo.pad_batch`. The loss must
            ignore padding, as cross-entropy ignores the label -100. Or a function of the batch
            that returns it padded.
        **overrides: Fields of the policy to change, such as `dtype=`, `master=` or `keep_full=`.

    >>> import mezzo
    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = mezzo.TrainStep(model, nn.functional.mse_loss, optimizer, "O2", dtype="bfloat16")
    >>> losses = [float(step(torch.ones(8, 4), torch.zeros(8, 2))) for _ in range(20)]
    >>> losses[-1] < losses[0], step.skipped
    (True, False)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: Optimizers | None = None,
        policy: PolicyArg | None = None,
        *,
        scaler: ScalerArg = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        accumulate_reduction: str | Reduction = Reduction.MEAN,
        scheduler: SchedulersArg = None,
        capture: str | bool | Capture = Capture.AUTO,
        grad_norm: bool = False,
        reduce_dtype: str | torch.dtype | None = None,
        compile: bool = False,  # noqa: A002 - torch's name
        channels_last: str | bool | Layout = Layout.AUTO,
        max_graphs: int = MAX_GRAPHS,
        same_shapes: bool = False,
        keep_outputs: bool = False,
        mean_over: int | None = None,
        pad_to: Padding = None,
        **overrides: Any,
    ) -> None:
        _check_loss_fn(loss_fn)
        check_mean_over(mean_over)
        calls, reduction = check_accumulate(accumulate), Reduction.parse(accumulate_reduction)
        layout = Layout.parse(channels_last)
        capture = Capture.parse(capture)
        model = without_fabric(model)
        self.model, self.loss_fn = model, loss_fn
        self.optimizer: Any = () if optimizer is None else optimizer
        self._needs_target = loss_fn is not None and _needs_target(loss_fn)
        inner = unwrapped(model)
        self._arguments, self._keep_outputs = ModelArguments(inner), keep_outputs
        self._padding = InputPadding.parse(pad_to, inner)
        self._takes_pairs = loss_fn is not None and self._padding is None
        self._precision = PrecisionArgs(policy, clip_norm, overrides, grad_norm, reduce_dtype)
        self._scheduler = scheduler
        self._layout = memory_format.decide(model, layout)
        self._forward: Any = _compile(model) if compile else model
        options = StepOptions(
            calls,
            reduction,
            closure_values=closure_values(loss_fn),
            casts_first_input=True,
            channels_last=bool(self._layout.channels_last),
            max_graphs=check_max_graphs(max_graphs),
            same_shapes=same_shapes,
        )
        self._models = _trained_models(model, loss_fn, self.optimizer)
        with restored_on_error(self._models, self.optimizer):
            if layout is Layout.ON and inner is model:
                memory_format.channels_last(model)
            components = prepare_components(
                self._models, self.optimizer, self._precision, scaler, scheduler
            )
            super().__init__(components, self._compute_loss, options, capture, mean_over)
        if self._layout.channels_last is not None:
            self._emit_layout()

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on one batch and return a copy of its loss. Does not synchronize."""
        call = self._arrange(args, kwargs)
        if self._layout.channels_last is None:
            self._measure_layout(call.args)
        returned = self._call(call)
        loss: torch.Tensor
        loss, self._outputs = returned if isinstance(returned, tuple) else (returned, None)
        if self._means is not None:
            self._means.add(loss, None if self._outputs is None else self._outputs.value)
        return loss

    def _arrange(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return a call of the body: the inputs of the model, and the target if there is one."""
        if (
            len(args) == _INPUTS_AND_TARGET
            and isinstance(args[0], torch.Tensor)
            and not kwargs
            and self._takes_pairs
        ):
            # The most common call: what follows costs 2 µs.
            return Call(args, kwargs)
        if not args and not kwargs:
            raise PolicyError("The step was called without inputs. Call step(x, y) or step(batch).")
        if self._padding is not None:
            args, kwargs = self._padding.change(Call(args, kwargs), self._components.device)
        if self.loss_fn is None:
            if not self._updates:
                self._check_arguments(Call(args, kwargs))
            return Call((self._arguments.arrange(args, kwargs),), {})
        if len(args) > _INPUTS_AND_TARGET:
            raise PolicyError(
                f"A step with a loss function takes the inputs and the target, got {len(args)}"
                " positional arguments. Pass several inputs as a tuple: step((a, b), y)."
            )
        if self._needs_target and len(args) < _INPUTS_AND_TARGET:
            raise PolicyError(
                f"The loss function {_name(self.loss_fn)} needs a target, and the step got inputs"
                " only. Pass it second: step(x, y) or step(batch, y). For a model that computes"
                " its loss itself leave out loss_fn."
            )
        return Call((self._arguments.arrange(args[:1], kwargs), *args[1:]), {})

    def _check_arguments(self, call: Call) -> None:
        """Raise for arguments among which there is a target, but no loss function for it."""
        if len(call.args) > 1 and not self._arguments.accepts(call):
            raise PolicyError(
                f"{type(self.model).__name__}.forward cannot take {len(call.args)} positional"
                " arguments. Without loss_fn all arguments go to the model: pass"
                " TrainStep(model, loss_fn, optimizer) to use the second as the target."
            )

    def _compute_loss(self, x: Any, *target: Any, model: nn.Module | None = None) -> Any:
        """Run the forward pass and the loss function: the body of the step."""
        # The first update may run backward several times, which compiled code does not support.
        compiled = self.model if self._executor.finds_scale else self._forward
        outputs = call_model(compiled if model is None else model, x)
        if self.loss_fn is None:
            loss, aux = loss_of_output(outputs), None
        else:
            y = target[0] if target and isinstance(target[0], tuple) else target
            loss, aux = self._split(self.loss_fn(outputs, *y))
        if aux is None and self._keep_outputs:
            aux = outputs
        return loss if aux is None else (loss, KeptOutputs(aux))

    def _split(self, returned: Any) -> tuple[torch.Tensor, Any]:
        loss, aux = split_loss(returned)
        if loss is None:
            raise PolicyError(
                f"The loss function returned {type(returned).__name__}, not a tensor. Return the"
                " loss itself, without .item(), or (loss, aux)."
            )
        return loss, aux

    @property
    def outputs(self) -> Any:
        """What the last call returned besides its loss, as detached copies.

        That is the `aux` of a loss function that returned `(loss, aux)`, or with `keep_outputs` the
        model's output; None if the loss function returned the loss alone. No later call overwrites
        the copies. If the step is captured, plain values among them keep the values they had at the
        capture. Does not synchronize.
        """
        if self.loss_fn is None and not self._keep_outputs:
            raise PolicyError(
                "The model's output is not kept, since that costs memory. Pass keep_outputs=True,"
                " or a loss_fn that returns (loss, aux)."
            )
        return super().outputs

    # -- memory format -----------------------------------------------------------------------------

    @property
    def channels_last_reason(self) -> str:
        """Why the model is or is not converted to channels_last."""
        return self._layout.reason

    def _measure_layout(self, args: tuple[Any, ...]) -> None:
        """Choose the memory format by timing the first batch, before the first update."""
        region, device = self._components.region, self._components.device
        inputs = [move_inputs(args, device, channels_last=last) for last in (False, True)]

        def run(model: nn.Module, last: bool) -> torch.Tensor:  # noqa: FBT001
            with enter_regions(region):
                returned = self._compute_loss(*inputs[last], model=model)
            loss: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
            return loss

        captured = self._capture is not Capture.OFF and self._runner.eager_reason is None
        self._layout = memory_format.measure(self.model, run, captured=captured)
        if self._layout.channels_last:
            self._build(self._convert_model(), replace(self._executor.options, channels_last=True))
        self._emit_layout()

    def _convert_model(self) -> StepComponents:
        """Convert the model to channels_last and decorate it again.

        Master weights and optimizer states take the memory format of the parameters.
        """
        scaler = self._components.scaler
        undecorate(self._models)
        memory_format.channels_last(self.model)
        return prepare_components(
            self._models, self.optimizer, self._precision, scaler or False, self._scheduler
        )

    def _emit_layout(self) -> None:
        if _events.listening():
            _events.emit(
                _events.LayoutChosen(bool(self._layout.channels_last), self._layout.reason)
            )


def _check_loss_fn(loss_fn: Any) -> None:
    """Raise `PolicyError` for a loss function that cannot be called, such as an optimizer."""
    if loss_fn is None or callable(loss_fn):
        return
    name = type(loss_fn).__name__ if isinstance(loss_fn, Optimizer) else repr(loss_fn)
    raise PolicyError(
        f"loss_fn={name} cannot be called. Pass a function of the model's output and the target,"
        " such as nn.CrossEntropyLoss(), or None if the model computes its loss:"
        " TrainStep(model, optimizer=optimizer)."
    )


def _trained_models(
    model: nn.Module, loss_fn: Callable[..., Any] | None, optimizer: Optimizers
) -> Models:
    """Return the model, with the loss function if that is a module whose parameters are trained."""
    if not isinstance(loss_fn, nn.Module):
        return model
    trained = {id(parameter) for each in optimizers_of(optimizer) for parameter in parameters(each)}
    trained -= set(map(id, model.parameters()))
    return [model, loss_fn] if trained & set(map(id, loss_fn.parameters())) else model


def _needs_target(loss_fn: Callable[..., Any]) -> bool:
    """Return whether a loss function cannot be called with the model's output alone."""
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # A builtin without a signature.
        return False
    try:
        signature.bind(None)
    except TypeError:
        return True
    return False


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _compile(model: nn.Module) -> Any:
    # Imported here: Inductor is slow to import.
    from mezzo.step.inductor_pass import compiled  # noqa: PLC0415

    return compiled(model)
