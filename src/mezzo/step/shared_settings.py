"""Settings that a step must share with the other processes that it trains with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from mezzo._dtypes import dtype_name
from mezzo._torch import communication_hooks
from mezzo.parallel.process_groups import check_agreement
from mezzo.prepare.arguments import Optimizer
from mezzo.scaling.schedule_sync import groups_of
from mezzo.step.components import StepComponents
from mezzo.step.executor import StepOptions
from mezzo.step.shared_calls import process_groups

_PLAIN = (bool, int, float, str, type(None))


def check_shared_settings(
    components: StepComponents, options: StepOptions, others: Mapping[str, int | str]
) -> None:
    """Check before the first call that all ranks train the same step; raise on all if not.

    Only for steps whose models are wrapped or sharded: in other programs with several processes
    each may train a model of its own. Synchronizes.
    """
    replicas = components.replicas
    replicas.check(
        components.models, components.optimizers, scales_loss=components.scaler is not None
    )
    groups = process_groups(components)
    if groups:
        settings = shared_settings(components, options) | dict(_text(others.items()))
        for group in groups:
            check_agreement(settings, group, components.device)
    replicas.register_hooks()


def shared_settings(components: StepComponents, options: StepOptions) -> dict[str, str]:
    """Return the settings by name, as text."""
    return dict(_settings(components, options))


def _settings(components: StepComponents, options: StepOptions) -> Iterator[tuple[str, str]]:
    plan, policy, replicas = components.decoration.plan, components.policy, components.replicas
    yield from _text((one.name, policy.format_field(one.name)) for one in fields(policy))
    hooks = [hook.__qualname__ for one in replicas.wrappers for hook, _ in communication_hooks(one)]
    yield from _text(
        {
            "dtype": plan.dtype and dtype_name(plan.dtype),
            "master": plan.master.value,
            "clip_norm": plan.clip_norm,
            "accumulate": options.accumulate,
            "accumulate_reduction": options.reduction.value,
            "max_graphs": options.max_graphs,
            "same_shapes": options.same_shapes,
            "reduce_dtype": replicas.reduce_dtype and dtype_name(replicas.reduce_dtype),
            "communication hooks": ", ".join(hooks),
            **_scaler_settings(components),
        }.items()
    )
    for index, optimizer in enumerate(components.optimizers):
        yield f"optimizer {index}", type(optimizer).__name__
        yield from _text(_group_settings(index, optimizer))
    for model in components.models:
        for name, parameter in model.named_parameters():
            shape, dtype = tuple(parameter.shape), dtype_name(parameter.dtype)
            trained = "trained" if parameter.requires_grad else "frozen"
            yield f"parameter {name!r}", f"{shape} {dtype} {trained}"


def _scaler_settings(components: StepComponents) -> dict[str, Any]:
    if components.scaler is None:
        return {"scaler": None}
    return {"scaler": type(components.scaler).__name__, **components.scaler.state_dict()}


def _group_settings(index: int, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the plain hyper-parameters of the groups, such as learning rates."""
    for number, group in enumerate(groups_of(optimizer)):
        for name, value in group.items():
            is_plain = isinstance(value, _PLAIN) or (
                isinstance(value, tuple) and all(isinstance(one, _PLAIN) for one in value)
            )
            if is_plain:
                yield f"{name} of group {number} of optimizer {index}", value


def _text(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    for name, value in items:
        yield name, value if isinstance(value, str) else repr(value)
