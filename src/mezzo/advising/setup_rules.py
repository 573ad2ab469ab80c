"""Lint rules on a training setup: scaler, optimizers, masters, averages, dtypes of the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo.advising.findings import LintFinding
from mezzo.advising.lint_subject import Subject, device_of
from mezzo.advising.loop_trace import half_states
from mezzo.advising.op_trace import SOFTMAX
from mezzo.policy.types import Level, Master
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.ema import EMA
from mezzo.scaling.gradients import parameters

_SHOWN = 4
"""Names that a finding lists; the others are counted."""
_TENSOR_CORES = (7, 0)
_USEFUL = 1.05
"""Gains below this are noise: 16 bits are not worth their precision then."""
_SMALL_SHARE = 0.2
_IDLE = 0.3
"""Utilisation below which a GPU waits for the host."""


def float16_without_scaler(subject: Subject) -> Iterator[LintFinding]:
    """Find float16 training whose loss is not scaled."""
    if subject.dtype != torch.float16 or not subject.trains:
        return
    uses = subject.loop is None or bool(subject.loop.scaler_calls["scale"])
    if subject.scales and uses:
        return
    state = "there is no scaler" if subject.scaler is None else "the scaler is disabled"
    yield LintFinding(
        "float16-without-scaler",
        "float16 gradients are not scaled: "
        + (state if not subject.scales else "the step never calls scaler.scale"),
        subject.name,
        "Gradients below 6e-8 become zero in float16, and the layers they belong to do not train.",
        "scaler = mezzo.GradScaler()\n"
        "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()\n"
        'or dtype="bfloat16", which needs no scaling.',
    )


def scaler_with_bfloat16(subject: Subject) -> Iterator[LintFinding]:
    """Find loss scaling in bfloat16, which has the range of float32."""
    if subject.dtype == torch.bfloat16 and subject.scales:
        yield LintFinding(
            "scaler-with-bfloat16",
            "the loss is scaled, and the products run in bfloat16",
            type(subject.scaler).__name__,
            "bfloat16 has the range of float32: gradients do not underflow. Checking and unscaling"
            " them takes a pass over all gradients in each step, and skips lose steps.",
            "Leave the scaler out, or pass enabled=False to it.",
        )


def half_optimizer_states(subject: Subject) -> Iterator[LintFinding]:
    """Find moments and other states of optimizers that are kept in 16 bits."""
    found = dict.fromkeys(half_states(subject.optimizers))
    if subject.loop is not None:
        found |= dict.fromkeys(subject.loop.half_states)
    if found:
        yield LintFinding(
            "16-bit-optimizer-state",
            "the optimizer keeps its states in 16 bits",
            _listed(list(found)),
            "Moments are averages over many steps: an addition smaller than 1/256 of the average"
            " (bfloat16) or than 6e-8 (float16) is lost, and squares of gradients overflow.",
            'model, optimizer = mezzo.decorate(model, optimizer, "O2")  # states in float32',
        )


def missing_masters(subject: Subject) -> Iterator[LintFinding]:
    """Find 16-bit parameters that an optimizer updates without float32 masters."""
    names = {id(parameter): name for name, parameter in subject.model.named_parameters()}
    for optimizer in subject.optimizers:
        decoration = decoration_of(optimizer)
        master = Master.NONE if decoration is None else decoration.plan.master
        held = [
            parameter
            for parameter in parameters(optimizer)
            if parameter.requires_grad and parameter.dtype in HALF_DTYPES
        ]
        if master is Master.NONE and held:
            yield _without_masters(
                type(optimizer).__name__,
                _listed([names.get(id(parameter), "?") for parameter in held]),
                subject,
            )


def _without_masters(optimizer: str, where: str, subject: Subject) -> LintFinding:
    decoration = subject.decoration
    is_bypassed = decoration is not None and decoration.plan.master is not Master.NONE
    why = (
        "An update smaller than 1/512 of a weight (bfloat16; 1/4096 in float16) rounds to nothing:"
        " training stops improving when the learning rate decays."
    )
    if is_bypassed:
        return LintFinding(
            "masters-bypassed",
            f"{optimizer} updates 16-bit parameters, and not the masters that decorate made",
            where,
            why,
            "Create the optimizer before decorate, and pass it:\n"
            "model, optimizer = mezzo.decorate(model, optimizer, ...)",
        )
    return LintFinding(
        "masters-missing",
        f"{optimizer} updates 16-bit parameters without float32 masters",
        where,
        why,
        "Keep the model in float32 (no .half(), no .bfloat16()), and write\n"
        'model, optimizer = mezzo.decorate(model, optimizer, "O2")',
    )


def parameters_in_no_optimizer(subject: Subject) -> Iterator[LintFinding]:
    """Find parameters that need gradients and that no optimizer has."""
    if not subject.optimizers:
        return
    held = {
        id(parameter) for optimizer in subject.optimizers for parameter in parameters(optimizer)
    }
    missing = [
        name
        for name, parameter in subject.model.named_parameters()
        if parameter.requires_grad and id(parameter) not in held
    ]
    if missing:
        yield LintFinding(
            "parameter-in-no-optimizer",
            f"parameters with requires_grad in no optimizer: {len(missing)}",
            _listed(missing),
            "Gradients are computed and kept for them, and they never change. A model that is cast"
            " or moved after the optimizer was created can lose its parameters this way.",
            "Create the optimizer from model.parameters() after the model is complete, or call"
            " parameter.requires_grad_(False) on what should not train.",
        )


def half_average(subject: Subject) -> Iterator[LintFinding]:
    """Find a moving average of weights that is kept in 16 bits."""
    if subject.ema is None or isinstance(subject.ema, EMA):
        return
    half = [name for name, tensor in _tensors(subject.ema) if tensor.dtype in HALF_DTYPES]
    if half:
        yield LintFinding(
            "16-bit-ema",
            "the moving average of the weights is kept in 16 bits",
            _listed(half),
            "With a decay of 0.999 an update adds 1/1000 of a difference, which rounds to nothing"
            " in 16 bits: the average stays where it began.",
            "ema = mezzo.EMA(model, decay=0.999)  # float32, from the master weights",
        )


def _tensors(ema: Any) -> Iterator[tuple[str, Tensor]]:
    named = ema.named_parameters() if isinstance(ema, nn.Module) else dict(ema).items()
    yield from ((name, tensor) for name, tensor in named if isinstance(tensor, Tensor))


def unsupported_dtype(subject: Subject) -> Iterator[LintFinding]:
    """Find a 16-bit dtype that the device does not have."""
    if subject.dtype is None:
        return
    support = subject.hardware.support(subject.dtype)
    if not support.supported:
        yield LintFinding(
            "unsupported-dtype",
            f"{subject.hardware.name} does not support {dtype_name(subject.dtype)}",
            subject.hardware.device,
            f"Ops fail, or fall back to float32: {support.reason}.",
            _other_dtype(subject),
        )


def slow_dtype(subject: Subject) -> Iterator[LintFinding]:
    """Find a 16-bit dtype that the device computes no faster than float32."""
    if subject.dtype is None:
        return
    support = subject.hardware.support(subject.dtype)
    if support.supported and not support.native:
        yield LintFinding(
            "slow-dtype",
            f"{dtype_name(subject.dtype)} is slow on {subject.hardware.name}"
            + _capability(subject),
            subject.hardware.device,
            f"It runs, but not faster than float32, and each cast adds to that: {support.reason}.",
            _other_dtype(subject),
        )


def _capability(subject: Subject) -> str:
    capability = subject.capability
    if capability is None or capability >= _TENSOR_CORES:
        return ""
    return (
        f": mixed precision gains speed from compute capability 7.0 on, this GPU has"
        f" {subject.hardware.capability}"
    )


def _other_dtype(subject: Subject) -> str:
    native = [dtype_name(dtype) for dtype in subject.hardware.native_dtypes]
    if native:
        return f'dtype="{native[0]}", which it computes natively, or dtype="auto".'
    return 'Switch it off: policy="O0". It saves memory only.'


def little_gain(subject: Subject) -> Iterator[LintFinding]:
    """Find a model that spends too little time in products to be faster in 16 bits."""
    cost = subject.cost
    if cost is None or subject.dtype is None:
        return
    is_small = cost.share < _SMALL_SHARE or (cost.utilisation or 1.0) < _IDLE
    if cost.gain is not None and (cost.gain * _USEFUL < 1.0 or (cost.gain < _USEFUL and is_small)):
        gains = (
            f"forward takes {1 / cost.gain:.2f} of its float32 time in {dtype_name(subject.dtype)}"
        )
    elif cost.gain is None and is_small:
        gains = "the gain is at most small"
    else:
        return
    yield LintFinding(
        "little-gain",
        f"{gains}, products take {cost.share:.0%} of it{_resources(cost)}",
        subject.name,
        "Only matrix products and convolutions become faster. Here other ops, casts or the launches"
        " of kernels take the time.",
        'Switch it off: policy="O0". Or use larger batches and layers; on a GPU, a captured step:'
        " mezzo.TrainStep(model, loss_fn, optimizer). mezzo.advise(model, sample) times each.",
        # Of switching it off.
        None if cost.gain is None or cost.gain * _USEFUL > 1.0 else 1.0 / cost.gain,
    )


def _resources(cost: Any) -> str:
    parts = []
    if cost.utilisation is not None:
        parts.append(f"the GPU computes {cost.utilisation:.0%} of the time")
    if cost.memory is not None:
        parts.append(f"{cost.memory:.0%} of its memory is used")
    return "".join(f", {part}" for part in parts)


def half_softmax(subject: Subject) -> Iterator[LintFinding]:
    """Find a softmax or a loss that runs in 16 bits."""
    seen: set[tuple[str, str]] = set()
    for half_op in (half for trace in subject.traces() for half in trace.half_ops):
        rule = "16-bit-softmax" if half_op.op in SOFTMAX else "16-bit-loss"
        where = str(half_op.place) or subject.name
        if (rule, where) in seen or _is_chosen(subject, half_op.op):
            continue
        seen.add((rule, where))
        yield LintFinding(
            rule,
            f"{half_op.op.strip('_')} runs in {dtype_name(half_op.dtype)}",
            where,
            "It sums over many values: small probabilities and the digits of the loss are rounded"
            " away, and sums past 65504 are infinite in float16.",
            "softmax(x, dim=-1, dtype=torch.float32), loss_fn(outputs.float(), y), or a policy with"
            " autocast (O1, O2), which runs both in float32.",
        )


def _is_chosen(subject: Subject, op: str) -> bool:
    """Return whether the policy itself runs the op in 16 bits."""
    if subject.policy is not None and subject.policy.level is Level.O3:
        return True
    stores_half = any(parameter.dtype in HALF_DTYPES for parameter in subject.model.parameters())
    is_autocast = subject.policy is not None or not stores_half
    # On a CPU autocast leaves softmax in the dtype of its input, elsewhere the log_softmax of
    # F.cross_entropy, which passes that dtype explicitly. Both kernels sum in float32.
    left_alone = SOFTMAX if device_of(subject.model).type == "cpu" else {"_log_softmax"}
    return is_autocast and op in left_alone


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
