"""Check the arguments of `mezzo.observe`, and describe the run in the header of its log."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from mezzo._dtypes import dtype_name
from mezzo._errors import PolicyError
from mezzo.observing.attachments import Attachment
from mezzo.observing.records import RunStarted
from mezzo.policy.policy import Policy
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.keep_full import read_keep_full
from mezzo.scaling import observed_scaler
from mezzo.step.base import Step

Optimizer = torch.optim.Optimizer


def check_target(target: Any, optimizer: Any, scaler: Any, *, ops: bool = False) -> list[Optimizer]:
    """Return the optimizers of a loop; raise `PolicyError` for what cannot be observed."""
    if isinstance(target, Step):
        if optimizer is not None or scaler is not None:
            raise PolicyError(
                "observe(step, ...) got an optimizer or a scaler, which the step has already. Pass"
                " the step alone: mezzo.observe(step)."
            )
        return []
    if not isinstance(target, nn.Module):
        raise PolicyError(
            f"observe() takes a TrainStep, a @train_step function or a model, got"
            f" {type(target).__name__}. Pass mezzo.observe(model, optimizer, scaler) for a loop of"
            " your own."
        )
    if ops:
        raise PolicyError(
            "ops=True is for a TrainStep or a @train_step function, got a model. Count the ops of a"
            " loop with mezzo.op_stats: with mezzo.op_stats(model) as ops: ..."
        )
    if optimizer is None:
        optimizers = []
    else:
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    wrong = next((other for other in optimizers if not isinstance(other, Optimizer)), None)
    if wrong is not None:
        raise PolicyError(
            f"optimizer={wrong!r} is not a torch.optim.Optimizer. Pass the optimizer of the loop,"
            " or a list of them."
        )
    if scaler is not None and (not optimizers or not observed_scaler.is_scaler(scaler)):
        raise PolicyError(
            f"scaler={type(scaler).__name__} is observed together with the optimizers that it"
            " steps. Pass mezzo.observe(model, optimizer, scaler) with a mezzo.GradScaler or a"
            " torch.amp.GradScaler."
        )
    return optimizers


def check_number(name: str, value: Any) -> None:
    """Raise `PolicyError` unless an argument is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PolicyError(f"{name}={value!r} is not a positive integer. Pass 1 or more.")


def ranks() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; 0 and 1 without a process group."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def header(attachment: Attachment, rank: int, ranks: int) -> RunStarted:
    """Return the first record of a run: what runs, and where."""
    decoration = next(
        (decoration for decoration in map(decoration_of, attachment.models) if decoration), None
    )
    plan = None if decoration is None else decoration.plan
    dtypes = {parameter.dtype for model in attachment.models for parameter in model.parameters()}
    dtype = plan.dtype if plan is not None else next(iter(dtypes)) if len(dtypes) == 1 else None
    return RunStarted(
        model=", ".join(type(model).__name__ for model in attachment.models),
        policy=None if plan is None else _policy_text(plan.policy),
        dtype=None if dtype is None else dtype_name(dtype),
        device=str(attachment.device),
        torch=torch.__version__,
        mezzo=_version(),
        rank=rank,
        ranks=ranks,
        started=time.time(),
    )


def _policy_text(policy: Policy) -> str:
    """Return the level of a policy, or the whole policy if it has more than a level and a dtype.

    >>> _policy_text(Policy("O2", "float16")), _policy_text(Policy("O2", full={"mul"}))
    ('O2', "Policy('O2', full={'mul'})")
    """
    of_level, _ = read_keep_full(policy.level.value, {"dtype": policy.dtype}, ())
    return policy.level.value if policy == of_level else repr(policy)


def _version() -> str | None:
    try:
        return version("mezzo")
    except PackageNotFoundError:
        return None
