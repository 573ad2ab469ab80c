"""Agree with the other ranks: on the settings of a step, then on how each call runs.

Settings are compared once, before the first call.

A captured graph holds collectives. NCCL requires that all ranks capture them in the same call, and
replay the graphs of one capture together. So each rank numbers the kinds of its inputs, and the
numbers of all ranks together are the kind of a call: given the same kinds, all ranks make the same
choice to run eagerly, to capture or to replay. What a rank finds by itself (inputs that cannot be
captured, graphs that it had to drop, a capture that failed) is exchanged as well, before anything
is launched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import distributed

from mezzo._dtypes import dtype_name
from mezzo._torch import communication_hooks
from mezzo.parallel.process_groups import HostGroup, check_agreement
from mezzo.prepare.arguments import Optimizer
from mezzo.prepare.sharding import is_sharded_model, refuse_lost_parameters
from mezzo.scaling.gradients import parameters
from mezzo.scaling.mesh import mesh_of, named_shards
from mezzo.scaling.schedule_sync import groups_of
from mezzo.step.components import StepComponents
from mezzo.step.cuda_graph import CaptureFailed, HostDrawsFound
from mezzo.step.input_kinds import REMEMBERED
from mezzo.step.options import StepOptions

_PLAIN = (bool, int, float, str, type(None))
"""Types of settings that are compared."""
_REFUSED = -1
"""Number of inputs that cannot be captured."""
_DONE, _DRAWS, _FAILED = range(3)
"""Outcomes of a capture; the largest of all ranks counts."""


def process_groups(components: StepComponents) -> tuple[distributed.ProcessGroup | None, ...]:
    """Return the groups of the ranks that train together; none if this process trains alone.

    Collectives over all ranks run in one group after the other; None is the default group.
    """
    if components.ddp:
        return (components.ddp.group,)
    mesh = mesh_of(
        [parameter for model in components.models for _, parameter in named_shards(model)]
    )
    return () if mesh is None else mesh.groups


# -- settings --------------------------------------------------------------------------------------


def check_shared_settings(
    components: StepComponents, options: StepOptions, others: Mapping[str, int | str]
) -> None:
    """Check before the first call that all ranks train the same step; raise on all if not.

    Only for steps whose models are wrapped or sharded: in other programs with several processes
    each may train a model of its own. Synchronizes.
    """
    ddp = components.ddp
    ddp.check(components.models, components.optimizers, scales_loss=components.scaler is not None)
    if is_sharded_model(components.models):
        # Before the forward pass, in which torch raises an error that does not name the order.
        for optimizer in components.optimizers:
            refuse_lost_parameters(optimizer, parameters(optimizer), components.models)
    groups = process_groups(components)
    if groups:
        settings = shared_settings(components, options) | dict(_text(others.items()))
        for group in groups:
            check_agreement(settings, group, components.device)
    ddp.register_hooks()


def shared_settings(components: StepComponents, options: StepOptions) -> dict[str, str]:
    """Return the settings by name, as text."""
    return dict(_settings(components, options))


def _settings(components: StepComponents, options: StepOptions) -> Iterator[tuple[str, str]]:
    plan, policy, ddp = components.decoration.plan, components.policy, components.ddp
    yield from _text((field.name, policy.format_field(field.name)) for field in fields(policy))
    hooks = [
        hook.__qualname__ for wrapper in ddp.wrappers for hook, _ in communication_hooks(wrapper)
    ]
    yield from _text(
        {
            "dtype": plan.dtype and dtype_name(plan.dtype),
            "master": plan.master.value,
            "clip_norm": plan.clip_norm,
            "accumulate": options.accumulate,
            "accumulate_reduction": options.reduction.value,
            "max_graphs": options.max_graphs,
            "same_shapes": options.same_shapes,
            "reduce_dtype": ddp.reduce_dtype and dtype_name(ddp.reduce_dtype),
            "communication hooks": ", ".join(hooks),
            **_scaler_settings(components),
        }.items()
    )
    for index, optimizer in enumerate(components.optimizers):
        yield f"optimizer {index}", type(optimizer).__name__
        yield from _text(_group_settings(index, optimizer))
    for model in components.models:
        for name, parameter in named_shards(model):
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
                isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value)
            )
            if is_plain:
                yield f"{name} of group {number} of optimizer {index}", value


def _text(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    for name, value in items:
        yield name, value if isinstance(value, str) else repr(value)


# -- calls -----------------------------------------------------------------------------------------


def do_all_capture(components: StepComponents, *, own: bool) -> bool:
    """Return whether the steps of all ranks are to be captured. Synchronizes."""
    flag = torch.tensor([own], dtype=torch.int32, device=components.device)
    for group in process_groups(components):
        distributed.all_reduce(flag, distributed.ReduceOp.MIN, group=group)
    return bool(flag.item())


def shared_calls(components: StepComponents, *, same_shapes: bool) -> SharedCalls | None:
    """Return the agreement about the calls of a step; None if this process trains alone."""
    groups = process_groups(components)
    if not groups:
        return None
    return SharedCalls(HostGroup(groups[0], components.device), same_shapes=same_shapes)


class CallState(NamedTuple):
    """What one rank contributes to the agreement about a call."""

    key: Hashable | None
    """The kind of its inputs; None if they cannot be captured."""
    size: int
    """Bytes of its inputs."""
    is_ready: bool
    """Whether it could capture the call."""
    has_dropped: bool
    """Whether it has dropped its graphs since the last call."""


class SharedCall(NamedTuple):
    """What all ranks have agreed about a call."""

    key: Hashable
    """The kinds of the inputs of all ranks."""
    size: int
    """Bytes of the largest inputs."""
    is_ready: bool
    """Whether all ranks can capture the call."""
    drops: bool
    """Whether all ranks drop their graphs first, since one of them has."""
    refusal: str | None
    """Why the call cannot be captured, if some rank has inputs that cannot."""


class SharedCalls:
    """The calls of a step that several ranks run together."""

    def __init__(self, hosts: HostGroup, *, same_shapes: bool = False) -> None:
        self._hosts = hosts
        self._same_shapes = same_shapes
        """Whether the user has promised that kinds are equal on all ranks: none are exchanged."""
        self._numbers: dict[Hashable, int] = {}
        self._count = 0

    def agree(self, state: CallState) -> SharedCall:
        """Exchange what the ranks would do in this call. Does not wait for devices."""
        own = (self._number(state.key), state.size, state.is_ready, state.has_dropped)
        rows = [own] if self._same_shapes else self._hosts.gather(own)
        numbers, sizes, ready, dropped = zip(*rows, strict=True)
        refusing = [rank for rank, number in enumerate(numbers) if number == _REFUSED]
        refusal = on_other_ranks(refusing) if refusing else None
        return SharedCall(numbers, max(sizes), all(ready), any(dropped), refusal)

    def _number(self, key: Hashable | None) -> int:
        """Return the number of a kind on this rank; numbers are not reused."""
        if key is None:
            return _REFUSED
        if key not in self._numbers:
            if len(self._numbers) >= REMEMBERED:
                self._numbers.clear()
            self._numbers[key] = self._count
            self._count += 1
        return self._numbers[key]

    def agree_on_reads(self, lines: Sequence[str]) -> CaptureFailed | None:
        """Return why a call is not captured: ranks read from their devices in different lines.

        A capture would fail on some of them only, and others might wait for those in NCCL, which
        prepares collectives with its peers while they are captured.
        """
        # Without folders, which may differ between machines.
        text = "\n".join(sorted({line.rpartition("/")[2] for line in lines}))
        digest = hashlib.sha256(text.encode()).digest()[:8]
        rows = self._hosts.gather([int.from_bytes(digest, signed=True)])
        if all(row == rows[0] for row in rows):
            return None
        here = f"in {lines[0]}" if lines else "nowhere"
        return CaptureFailed(
            f"the hosts of the ranks read from their devices in different lines, this one {here}"
        )

    def agree_on_capture(self, failure: CaptureFailed | None) -> CaptureFailed | None:
        """Return why the capture of a call failed on some rank; None if it failed on none."""
        own = (
            _DONE if failure is None else _DRAWS if isinstance(failure, HostDrawsFound) else _FAILED
        )
        outcomes = [row[0] for row in self._hosts.gather([own])]
        worst = max(outcomes)
        if own == worst:
            return failure
        if worst == _DRAWS:
            return HostDrawsFound()
        return CaptureFailed(
            on_other_ranks([i for i, outcome in enumerate(outcomes) if outcome == worst])
        )

    def agree_on_slower(self, *, slower: bool) -> bool:
        """Return whether replays take longer than eager calls on all ranks."""
        return all(row[0] for row in self._hosts.gather([slower]))


def on_other_ranks(ranks: Sequence[int]) -> str:
    """Name the ranks that prevent a capture.

    >>> on_other_ranks([1])
    'it cannot be captured on rank 1, whose warning states the reason'
    """
    if len(ranks) > 1:
        listed = ", ".join(map(str, ranks))
        return f"it cannot be captured on ranks {listed}, whose warnings state the reason"
    return f"it cannot be captured on rank {ranks[0]}, whose warning states the reason"
