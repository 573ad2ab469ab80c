"""`mezzo.lint`: find what costs precision or time in a training setup, and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from mezzo._errors import PolicyError
from mezzo._hardware import hardware
from mezzo.advising import loop_rules, setup_rules, shape_rules
from mezzo.advising.findings import LintFinding, LintFindings
from mezzo.advising.gpus import find_gpu
from mezzo.advising.lint_subject import SampleRun, Subject, device_of, dtype_in_use
from mezzo.advising.loop_trace import Loop, trace_loop
from mezzo.advising.measurements import measure_cost, measure_layout, padding_gain
from mezzo.policy.policy import Policy
from mezzo.prepare.arguments import Optimizers, optimizers_of, unwrapped
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.plan import PolicyArg
from mezzo.step.base import Step
from mezzo.step.inputs import is_channels_last, move_inputs


@dataclass(frozen=True)
class LintRule:
    """A function from what is known of a training setup to findings."""

    names: tuple[str, ...]
    """The names of its findings, mostly one."""
    check: Callable[[Subject], Iterator[LintFinding]]
    needs: tuple[str, ...] = ()
    """What must be known: attributes of `Subject`; empty if nothing but the model."""


RULES: Sequence[LintRule] = (
    LintRule(("float16-without-scaler",), setup_rules.float16_without_scaler, ("trains",)),
    LintRule(("scaler-with-bfloat16",), setup_rules.scaler_with_bfloat16, ("scaler",)),
    LintRule(("clip-before-unscale",), loop_rules.clip_before_unscale, ("loop",)),
    LintRule(("16-bit-optimizer-state",), setup_rules.half_optimizer_states, ("optimizers",)),
    LintRule(("masters-missing", "masters-bypassed"), setup_rules.missing_masters, ("optimizers",)),
    LintRule(("16-bit-softmax", "16-bit-loss"), setup_rules.half_softmax, ("traced",)),
    LintRule(("backward-in-autocast",), loop_rules.backward_in_autocast, ("loop",)),
    LintRule(("autocast-never-entered",), loop_rules.autocast_never_entered, ("loop",)),
    LintRule(
        ("parameter-in-no-optimizer",), setup_rules.parameters_in_no_optimizer, ("optimizers",)
    ),
    LintRule(("scheduler-on-skip",), loop_rules.scheduler_on_skip, ("loop", "schedulers")),
    LintRule(("16-bit-ema",), setup_rules.half_average, ("ema",)),
    LintRule(("channels-first",), shape_rules.channels_first, ("products",)),
    LintRule(("matrix-multiple",), shape_rules.matrix_sizes, ("products",)),
    LintRule(("batch-multiple",), shape_rules.batch_size, ("products",)),
    LintRule(("channel-multiple",), shape_rules.channel_counts, ("products",)),
    LintRule(("first-convolution",), shape_rules.first_convolution, ("products",)),
    LintRule(("little-gain",), setup_rules.little_gain, ("cost",)),
    LintRule(("unsupported-dtype",), setup_rules.unsupported_dtype),
    LintRule(("slow-dtype",), setup_rules.slow_dtype),
)
"""All rules, in the order of their findings: what breaks training, then what costs time."""


def lint(
    model: nn.Module | Step,
    optimizer: Optimizers | None = None,
    scaler: Any = None,
    policy: PolicyArg = None,
    sample: Any = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    step: Callable[[], object] | None = None,
    scheduler: Any = None,
    ema: Any = None,
    gpu: str | None = None,
    measure: bool = True,
    ignore: Iterable[str] = (),
    **overrides: Any,
) -> LintFindings:
    """Check a training setup, and return what costs precision or time, with the remedy.

    Pass what you have; each argument lets more rules run. With `sample` the forward pass runs, so
    that sizes, dtypes and memory formats are those of your model. With `step` your own training
    step runs, up to three times, and the order of its calls is checked. Afterwards parameters,
    buffers, gradients, optimizers, scaler, schedulers and random generators are as before.

    A `TrainStep` can be passed instead of a model: `mezzo.lint(step, sample=(x, y))`. Compiled code
    and replayed CUDA graphs are not seen.

    Args:
        model: The model, plain or decorated, or a `TrainStep`.
        optimizer: The optimizer of the model, or a list of them.
        scaler: `mezzo.GradScaler`, `torch.amp.GradScaler`, or None.
        policy: The policy that you train with; None for that of a decorated model, or the dtypes
            that are observed.
        sample: Inputs of the model, as `TrainStep` takes them; with `loss_fn` `(inputs, target)`.
        loss_fn: A function of the model's output and the target.
        step: A function without arguments that trains on one batch, always the same:
            `lambda: train(x, y)`.
        scheduler: The learning rate scheduler that `step` advances, or a list of them.
        ema: A moving average of the weights: a module such as `AveragedModel`, or tensors by name.
        gpu: Name of a GPU to check for, such as `"A100"`, instead of the model's device.
        measure: Whether to measure gains with the sample. Without it nothing is timed.
        ignore: Names of rules to leave out.
        **overrides: Fields of the policy to change, such as `dtype=`.

    >>> import mezzo, torch
    >>> model = nn.Linear(8, 8).half()
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> [finding.rule for finding in mezzo.lint(model, optimizer, ignore={"slow-dtype"})]
    ['float16-without-scaler', 'masters-missing']
    """
    ignored = _checked_rules(ignore)
    is_step = isinstance(model, Step)
    if isinstance(model, Step):
        inner = model.models[0]
        optimizer = optimizer or list(model.optimizers)
        scaler, loss_fn = scaler or model.scaler, loss_fn or getattr(model, "loss_fn", None)
        sample, model = _in_layout(sample, inner), inner
    subject = Subject(
        _checked_model(model),
        hardware(device_of(model)) if gpu is None else find_gpu(gpu).hardware,
        () if optimizer is None else optimizers_of(optimizer),
        _checked_scaler(scaler),
        _policy_of(model, policy, overrides),
        schedulers=_as_tuple(scheduler),
        ema=ema,
    )
    run = (
        None
        if sample is None
        else SampleRun(model, sample, loss_fn, subject.policy, is_step=is_step)
    )
    subject = _observed(subject, run, step)
    if measure and run is not None and gpu is None and subject.dtype is not None:
        subject = _measured(subject, run)
    return _apply(subject, ignored)


def _observed(
    subject: Subject, run: SampleRun | None, step: Callable[[], object] | None
) -> Subject:
    """Return the subject with traces of the sample and of the user's step."""
    if step is not None:
        loop = Loop(
            _checked_step(step),
            subject.model,
            subject.optimizers,
            subject.scaler,
            subject.schedulers,
        )
        subject = replace(subject, loop=trace_loop(loop))
    if run is not None:
        subject = replace(subject, forward=run.trace())
    return replace(subject, dtype=dtype_in_use(subject.model, subject.policy, subject.traces()))


def _measured(subject: Subject, run: SampleRun) -> Subject:
    device = device_of(subject.model)
    has_layout = any(product.channels_first for product in subject.products)
    return replace(
        subject,
        cost=measure_cost(run),
        layout_gain=measure_layout(run) if has_layout else None,
        padding_gain=padding_gain(device) if device.type == "cuda" else None,
    )


def _apply(subject: Subject, ignored: set[str]) -> LintFindings:
    findings: list[LintFinding] = []
    checked: list[str] = []
    skipped: list[str] = []
    for rule in RULES:
        names = [name for name in rule.names if name not in ignored]
        if not all(getattr(subject, need) for need in rule.needs):
            skipped += names
        elif names:
            checked += names
            findings += [finding for finding in rule.check(subject) if finding.rule in names]
    return LintFindings(tuple(findings), tuple(checked), tuple(skipped))


# -- arguments -------------------------------------------------------------------------------------


def _checked_rules(ignore: Iterable[str]) -> set[str]:
    ignored = {ignore} if isinstance(ignore, str) else set(ignore)
    known = [name for rule in RULES for name in rule.names]
    unknown = sorted(ignored - set(known))
    if unknown:
        raise PolicyError(f"ignore={unknown[0]!r} is no rule. Choose from: {', '.join(known)}.")
    return ignored


def _checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise PolicyError(
            f"lint takes a model or a TrainStep first, got {type(model).__name__}. Call"
            " mezzo.lint(model, optimizer, scaler)."
        )
    return model


def _checked_scaler(scaler: Any) -> Any:
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise PolicyError(
            f"scaler={type(scaler).__name__} is no gradient scaler. Pass mezzo.GradScaler,"
            " torch.amp.GradScaler, or None."
        )
    return scaler


def _checked_step(step: Any) -> Callable[[], object]:
    if isinstance(step, Step):
        raise PolicyError(
            "step= takes a function that trains on one batch. Pass a TrainStep first, with a batch:"
            " mezzo.lint(step, sample=(x, y))."
        )
    if not callable(step):
        raise PolicyError(
            f"step={step!r} cannot be called. Pass a function without arguments that trains on one"
            " batch: step=lambda: train(x, y)."
        )
    return step  # type: ignore[no-any-return]


def _policy_of(model: nn.Module, policy: PolicyArg, overrides: dict[str, Any]) -> Policy | None:
    decoration = decoration_of(unwrapped(model))
    if policy is None and not overrides:
        return None if decoration is None else decoration.plan.policy
    return Policy.parse("O1" if policy is None else policy, **overrides)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _in_layout(sample: Any, model: nn.Module) -> Any:
    """Return the sample as a step passes it: channels_last if the convolutions are."""
    last = any(
        is_channels_last(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Conv2d)
    )
    return move_inputs(sample, device_of(model), channels_last=last) if last else sample
