"""`use`: train with mezzo instead of the mixed precision of an `accelerate.Accelerator`.

from mezzo.integrations.accelerate import use

accelerator = use(Accelerator(), "O2", dtype="float16")
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from mezzo._errors import PolicyError, UnsupportedError
from mezzo.integrations.precision import CASTS, Optimizer, Precision, import_extra, is_trained
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.plan import PolicyArg
from mezzo.scaling.gradients import parameters
from mezzo.scaling.step_result import StepResult
from mezzo.step.components import ScalerArg

_accelerate = import_extra("accelerate", "accelerate")
_optimizer = import_extra("accelerate.optimizer", "accelerate")

AcceleratorT = TypeVar("AcceleratorT")

_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
_SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU")
_REPLACED_HANDLERS = {
    "GradScalerKwargs": (
        "scaler_handler",
        "pass its values to use(accelerator, ..., scaler=mezzo.GradScaler(init_scale=...))",
    ),
    "AutocastKwargs": ("autocast_handler", "set the policy's ops, or cache=, in use(...)"),
}
"""Class of `kwargs_handlers` that has no effect → its attribute, and what to do instead."""


def use(
    accelerator: AcceleratorT, policy: PolicyArg = "O2", *, scaler: ScalerArg = None, **options: Any
) -> AcceleratorT:
    """Make an `Accelerator` train with a policy of mezzo, and return it.

    Call it before `accelerator.prepare`, which then decorates models together with the optimizers
    that are passed in the same call; models that are decorated already keep their policy. The mixed
    precision of the accelerator itself is switched off. `accelerator.backward` scales the loss in
    float16; clipping, accumulation, prepared schedulers, `save_state` and `load_state` work as
    before, with every optimizer. `optimizer.step()` returns a `mezzo.StepResult`, and
    `optimizer.step_was_skipped` is True if gradients were not finite. Outputs of models are cast to
    float32, as Accelerate does.

    `mezzo.TrainStep(model, loss_fn, optimizer)` of what `prepare` returned runs whole steps, as
    CUDA graphs where possible, with the same scaler; pass `clip_norm=` here. The optimizer then
    reports skipped steps, and its own `step()` does nothing.

    Runs on one device, and on several with DistributedDataParallel.

    Args:
        accelerator: The accelerator, before its first `prepare`.
        policy: A level such as `"O2"`, a `mezzo.Policy`, or the path of a TOML file.
        scaler: A `mezzo.GradScaler`; False for none. By default one is created for float16.
        **options: Further arguments of `mezzo.decorate`, such as `dtype=` or `keep_full=`. The
            default dtype is that of the accelerator's `mixed_precision=`.

    Raises:
        PolicyError: Something was prepared already, the policy is invalid, or `kwargs_handlers` has
            a GradScalerKwargs or AutocastKwargs.
        UnsupportedError: The accelerator uses FSDP, DeepSpeed or FP8.

    >>> import accelerate, torch
    >>> accelerator = use(accelerate.Accelerator(cpu=True), "O2", dtype="bfloat16")
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = accelerator.prepare(model, optimizer)
    >>> model.weight.dtype
    torch.bfloat16
    """
    _check(accelerator)
    target: Any = accelerator
    dtype = _DTYPES.get(target.mixed_precision)
    defaults = {"output_dtype": "float32"} | ({} if dtype is None else {"dtype": dtype})
    precision = Precision(policy, scaler, {**defaults, **options})
    target._mezzo = precision
    target.native_amp, target.scaler = False, None
    target.__class__ = type(f"Mezzo{type(target).__name__}", (_MezzoAccelerator, type(target)), {})
    return accelerator


def _check(accelerator: Any) -> None:
    if not isinstance(accelerator, _accelerate.Accelerator):
        raise PolicyError(
            f"use() takes an accelerate.Accelerator, got {type(accelerator).__name__}. Pass the"
            " accelerator itself, before prepare()."
        )
    if isinstance(accelerator, _MezzoAccelerator) or accelerator._models or accelerator._optimizers:
        raise PolicyError(
            "This accelerator is in use already: a model or an optimizer was prepared, or use() was"
            " called before. Call use(accelerator, ...) once, before accelerator.prepare(...)."
        )
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind not in _SUPPORTED or accelerator.mixed_precision not in {"no", *_DTYPES}:
        raise UnsupportedError(
            f"mezzo does not run in an Accelerator with distributed_type={kind} and"
            f" mixed_precision={accelerator.mixed_precision!r}. Use one device or"
            " DistributedDataParallel, and mixed_precision='no'. For FSDP2 shard the model with"
            " torch's fully_shard and call mezzo.decorate without an Accelerator."
        )
    for name, (handler, remedy) in _REPLACED_HANDLERS.items():
        if getattr(accelerator, handler, None) is not None:
            raise PolicyError(
                f"{name} sets up the mixed precision of Accelerate, which mezzo replaces: it would"
                f" have no effect. Leave it out of kwargs_handlers, and {remedy}."
            )


class _MezzoAccelerator:
    """The methods of an accelerator that mezzo replaces."""

    _mezzo: Precision

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Decorate models and optimizers, then prepare them."""
        models = [
            arg
            for arg in args
            if _is_new(arg, nn.Module)
            or (isinstance(arg, nn.Module) and self._mezzo.evaluates(arg))
        ]
        optimizers = [arg for arg in args if _is_new(arg, Optimizer)]
        _refuse_lomo(optimizers)
        owners = _owners(models, optimizers)
        for one, placed in zip(args, device_placement or [None] * len(args), strict=True):
            if _is_new(one, nn.Module):
                self._move(one, placed=placed)
        if owners:
            self._decorate(owners, optimizers)
        elif self._mezzo.level in CASTS:
            _refuse_plain(optimizers)
        for model in models:
            if model not in owners:
                self._prepare_alone(model)
        return super().prepare(*args, device_placement=device_placement)  # type: ignore[misc]

    def _move(self, model: nn.Module, *, placed: bool | None) -> None:
        """Move a model before it is decorated: master weights do not follow a later move."""
        target: Any = self
        if target.device_placement if placed is None else placed:
            model.to(target.device)

    def _decorate(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        self._mezzo.decorate(models, optimizers)
        target: Any = self
        target.scaler = None if self._mezzo.scaler is None else self._mezzo

    def _prepare_alone(self, model: nn.Module) -> None:
        """Prepare a model without its optimizer: to evaluate it, or to train it at O1."""
        if self._mezzo.trains_alone(model):
            self._decorate([model], [])
        elif not is_trained(model):
            self._mezzo.wrap_untrained(model)
        else:
            raise PolicyError(
                f"prepare() was called with a {type(model).__name__} in training mode and without"
                f" its optimizer, and {self._mezzo.level.value} needs both: the optimizer steps"
                " master weights. Call accelerator.prepare(model, optimizer); for inference"
                " model.eval() first."
            )

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,  # noqa: FBT001 - Accelerate's call shape
        evaluation_mode: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Prepare a model alone; one that is evaluated only runs in the autocast region."""
        if _is_new(model, nn.Module) and (evaluation_mode or decoration_of(model) is None):
            self._move(model, placed=device_placement)
            if evaluation_mode:
                self._mezzo.wrap_untrained(model)
            else:
                self._prepare_alone(model)
        return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[misc]

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """Prepare an optimizer whose steps report what was skipped."""
        target: Any = self
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)  # type: ignore[misc]
        placed = target.device_placement if device_placement is None else device_placement
        prepared = MezzoOptimizer(optimizer, self._mezzo, device_placement=placed)
        target._optimizers.append(prepared)
        return prepared

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients of some optimizers, or of all that have any."""
        target: Any = self
        chosen = target._optimizers if optimizer is None else optimizer
        for chosen_optimizer in chosen if isinstance(chosen, list | tuple) else [chosen]:
            plain = (
                chosen_optimizer.optimizer
                if isinstance(chosen_optimizer, _optimizer.AcceleratedOptimizer)
                else chosen_optimizer
            )
            if any(parameter.grad is not None for parameter in parameters(plain)):
                self._mezzo.unscale_(plain)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients; return the norm of a training step that has clipped them itself."""
        if self._mezzo.training_step is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[misc]
        return torch.tensor(self._mezzo.training_step.grad_norm)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Return the policy's autocast region, or that of a handler."""
        if autocast_handler is not None:
            region: AbstractContextManager[Any] = super().autocast(autocast_handler)  # type: ignore[misc]
            return region
        return self._mezzo.autocast()


class MezzoOptimizer(_optimizer.AcceleratedOptimizer):  # type: ignore[misc,name-defined]
    """An optimizer that `accelerator.prepare` returns, after `use(accelerator, ...)`."""

    def __init__(
        self, optimizer: Optimizer, precision: Precision, *, device_placement: bool
    ) -> None:
        super().__init__(optimizer, device_placement=device_placement, scaler=None)
        self._mezzo = precision
        self._result: StepResult | None = None

    def step(self, closure: Any = None) -> StepResult | None:
        """Step the optimizer, unless gradients are being accumulated."""
        if not self.gradient_state.sync_gradients:
            return None
        arguments = {} if closure is None else {"closure": closure}
        result = self._mezzo.step(self.optimizer, **arguments)
        self._result = result if isinstance(result, StepResult) else None
        return self._result

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. This may synchronize."""
        if self._result is None:
            return self._mezzo.skipped_by_step(self.optimizer)
        return self._result.skipped


def _is_new(candidate: Any, kind: type) -> bool:
    return isinstance(candidate, kind) and not getattr(candidate, "_is_accelerate_prepared", False)


def _refuse_plain(optimizers: list[Optimizer]) -> None:
    """Raise for optimizers without their models: they would step 16-bit parameters themselves."""
    for optimizer in optimizers:
        if decoration_of(optimizer) is None:
            raise PolicyError(
                f"prepare() was called with {type(optimizer).__name__} and without its model, or"
                " with a model that was prepared before. Pass both in one call:"
                " accelerator.prepare(model, optimizer). For a second optimizer of the same model"
                " call mezzo.undecorate(model) and create a new Accelerator."
            )


def _refuse_lomo(optimizers: list[Optimizer]) -> None:
    """Raise for LOMO, which updates each parameter when the backward pass has its gradient."""
    for optimizer in optimizers:
        if hasattr(optimizer, "fused_backward"):
            raise UnsupportedError(
                f"{type(optimizer).__name__} updates the parameters in the backward pass, without"
                " master weights and without the scaler. Train without use(accelerator) and with"
                " Accelerator(mixed_precision='bf16'), or choose another optimizer."
            )


def _owners(models: list[nn.Module], optimizers: list[Optimizer]) -> list[nn.Module]:
    """Return the models that have a parameter in one of the optimizers."""
    trained = {id(parameter) for optimizer in optimizers for parameter in parameters(optimizer)}
    return [
        model
        for model in models
        if any(id(parameter) in trained for parameter in model.parameters())
    ]
