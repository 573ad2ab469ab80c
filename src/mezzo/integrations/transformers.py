"""`MezzoTrainer`: the Trainer of transformers with mezzo instead of its mixed precision.

from mezzo.integrations.transformers import MezzoTrainer

trainer = MezzoTrainer(model, args, train_dataset=data, policy="O2", dtype="float16")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mezzo.integrations.precision import import_extra
from mezzo.prepare.plan import PolicyArg
from mezzo.step.components import Scaler

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
        **kwargs: Arguments of the trainer.
    """

    def __init__(
        self,
        *args: Any,
        policy: PolicyArg = "O2",
        dtype: torch.dtype | str | None = None,
        scaler: Scaler = None,
        decorate_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        options = dict(decorate_options or {})
        if dtype is not None:
            options["dtype"] = dtype
        self._mezzo_arguments = {"policy": policy, "scaler": scaler, **options}
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and let it train with mezzo."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        target: Any = self
        use(target.accelerator, **self._mezzo_arguments)


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
