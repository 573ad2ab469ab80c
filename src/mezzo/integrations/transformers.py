"""`MezzoTrainer`: the Trainer of transformers with mezzo instead of its mixed precision.

from mezzo.integrations.transformers import MezzoTrainer

trainer = MezzoTrainer(model, args, train_dataset=data, policy="O2", dtype="float16")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mezzo._errors import PolicyError
from mezzo.autocasting.autocast import autocast
from mezzo.integrations.precision import Precision, import_extra
from mezzo.prepare.plan import PolicyArg
from mezzo.step.components import ScalerArg
from mezzo.step.function_step import FunctionStep, train_step
from mezzo.step.options import Capture, Reduction

_transformers = import_extra("transformers", "transformers")
import_extra("accelerate", "transformers")

from mezzo.integrations.accelerate import use  # noqa: E402 - needs the package checked above


class MezzoTrainerMixin:
    """What `MezzoTrainer` adds, for other trainers: `class T(MezzoTrainerMixin, Seq2SeqTrainer)`.

    Args:
        *args: Arguments of the trainer.
        policy: A level such as `"O2"`, a `mezzo.Policy`, or the path of a TOML file.
        dtype: The 16-bit dtype. By default that of `TrainingArguments(fp16=True)` or `bf16=True`,
            else the policy's.
        scaler: A `mezzo.GradScaler`; False for none. By default one is created for float16.
        decorate_options: Further arguments of `mezzo.decorate`, such as `{"master": "split"}`.
        capture: Whether to run each step, from the forward pass to the update, as one CUDA graph:
            `"auto"` if that is possible, with a warning if not; True with an error instead; False,
            the default, for the eager steps of the trainer.
        **kwargs: Arguments of the trainer.
    """

    def __init__(
        self,
        *args: Any,
        policy: PolicyArg = "O2",
        dtype: torch.dtype | str | None = None,
        scaler: ScalerArg = None,
        decorate_options: Mapping[str, Any] | None = None,
        capture: str | bool = False,
        **kwargs: Any,
    ) -> None:
        self._mezzo_capture = Capture.parse(capture)
        self.mezzo_step: FunctionStep | None = None
        """The captured step of this or the last training; None before, and without `capture`."""
        options = dict(decorate_options or {})
        if dtype is not None:
            options["dtype"] = dtype
        self._mezzo_arguments = {"policy": policy, "scaler": scaler, **options}
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and let it train with mezzo."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        target: Any = self
        _refuse_cast_for_evaluation(target.args)
        clip = {} if self._mezzo_capture is Capture.OFF else {"clip_norm": self._clip_norm}
        use(target.accelerator, **{**clip, **self._mezzo_arguments})

    # -- captured steps ----------------------------------------------------------------------------

    # Not `train`, which runs this again with a smaller batch if memory does not suffice.
    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        precision = self._mezzo_precision
        self.mezzo_step = None
        precision.step_with(None)
        try:
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            precision.step_with(None)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of a batch; a captured step also updates with the last of them."""
        if self._mezzo_capture is Capture.OFF:
            return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        target: Any = self
        model.train()
        step = self.mezzo_step
        if step is None:
            step = self.mezzo_step = self._make_step(model)
            self._mezzo_precision.step_with(step)
        # The loss is divided by this number, which a graph must depend on.
        loss = step(inputs, target.current_gradient_accumulation_steps, *args, **kwargs)
        if target.accelerator.sync_gradients and step.position:
            # The last batches of an epoch.
            step.flush()
        return loss

    def _make_step(self, model: nn.Module) -> FunctionStep:
        target: Any = self
        compute = super().training_step  # type: ignore[misc]

        def body(inputs: Any, _accumulated: int, *args: Any, **kwargs: Any) -> Any:
            # The loss is computed outside of the model's region, as it is without a capture.
            with autocast(device_type=target.args.device.type, enabled=False):
                return compute(model, {**inputs}, *args, **kwargs)

        return train_step(
            models=model,
            optimizers=target.optimizer,
            clip_norm=self._clip_norm,
            accumulate=target.args.gradient_accumulation_steps,
            accumulate_reduction=Reduction.SUM,
            capture=self._mezzo_capture,
            grad_norm=True,
        )(body)

    @property
    def _clip_norm(self) -> float | None:
        target: Any = self
        return target.args.max_grad_norm or None

    @property
    def _mezzo_precision(self) -> Precision:
        target: Any = self
        precision: Precision = target.accelerator._mezzo
        return precision


def _refuse_cast_for_evaluation(arguments: Any) -> None:
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(arguments, name):
            raise PolicyError(
                f"TrainingArguments({name}=True) casts the model to evaluate it, and its exact"
                " weights would be lost. Leave it out: evaluation computes in 16 bits by the policy"
                " already."
            )


class MezzoTrainer(MezzoTrainerMixin, _transformers.Trainer):  # type: ignore[misc,name-defined]
    """The Trainer of transformers, trained with a policy of mezzo.

    Takes the arguments of `transformers.Trainer` and those of `MezzoTrainerMixin`. Accumulation,
    clipping, schedulers, evaluation, checkpoints and `resume_from_checkpoint` work as before; a
    skipped step does not advance the scheduler. Checkpoints hold float32 weights, the master
    weights and the loss scale, and a resumed run continues exactly. After training the model stays
    decorated: `mezzo.undecorate(trainer.model)` makes it a plain float32 model.

    >>> from transformers import TrainingArguments
    >>> arguments = TrainingArguments("out", use_cpu=True, report_to="none")
    >>> trainer = MezzoTrainer(torch.nn.Linear(2, 1), arguments, dtype="bfloat16")
    >>> type(trainer.accelerator).__name__
    'MezzoAccelerator'
    """
