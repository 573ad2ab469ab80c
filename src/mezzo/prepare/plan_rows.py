"""Rows of a plan: each tensor's dtype before and after, and the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo.policy.types import Level, Master
from mezzo.prepare.arguments import Optimizer, Targets
from mezzo.prepare.keep_full import KeepFull
from mezzo.scaling.gradients import parameters
from mezzo.scaling.mesh import is_sharded


@dataclass(frozen=True)
class PlanRow:
    """One parameter or buffer: its dtype before and after, and why."""

    name: str
    """Its qualified name; with several models `models[0].encoder.weight`."""
    kind: str
    """`parameter` or `buffer`."""
    shape: tuple[int, ...]
    before: torch.dtype
    """Its dtype now."""
    after: torch.dtype
    """Its dtype when decorated."""
    master: bool
    """Whether it has a master, or is rounded stochastically, so that small updates count."""
    reason: str
    """Why it has this dtype and master."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def change(self) -> str:
        """The change of its dtype, `float32 → bfloat16`, or the dtype that stays."""
        before, after = dtype_name(self.before), dtype_name(self.after)
        return before if before == after else f"{before} → {after}"


def format_rows(rows: tuple[PlanRow, ...]) -> list[str]:
    """Return a heading and one line for each row, with aligned columns."""
    cells = [
        ("name", "shape", "dtype", "why"),
        *((row.name, _format_shape(row), row.change, row.reason) for row in rows),
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]
        ).rstrip()
        for line in cells
    ]


def format_bytes(count: int) -> str:
    """Return a number of bytes in the largest unit that fits.

    >>> format_bytes(12 * 2**20 + 2**19), format_bytes(300)
    ('12.5 MiB', '300 bytes')
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count} bytes"


def _format_shape(row: PlanRow) -> str:
    return " × ".join(map(str, row.shape)) or "scalar"


@dataclass(frozen=True, eq=False)
class TensorInfo:
    """A tensor of the models. A tied one has several names."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    is_buffer: bool
    keep_reason: str
    """Why `keep_full` keeps it float32 under one of its names; empty if it does not."""
    optimizer: Optimizer | None
    """The optimizer that updates it."""


@dataclass(frozen=True, eq=False)
class PlannedTensor:
    """A tensor with its row of the plan."""

    info: TensorInfo
    row: PlanRow

    @property
    def converted(self) -> bool:
        """Whether its dtype changes, or it gets a master."""
        return self.row.before is not self.row.after or self.row.master


class _Decision(NamedTuple):
    """The new dtype of a tensor, whether it gets a master, and why."""

    dtype: torch.dtype
    master: bool
    reason: str


@dataclass(frozen=True)
class TensorRule:
    """The rule that decides the dtype and master of every tensor."""

    level: Level
    half: torch.dtype | None
    """The dtype that float32 tensors are cast to; None if they stay float32."""
    float32_reason: str
    """Why they stay float32, if they do."""
    master: Master
    casts_buffers: bool = True
    """Whether buffers are cast with the parameters."""

    def row(self, info: TensorInfo, shard_reason: str | None = None) -> PlanRow:
        """Return the row of a tensor. `shard_reason` is why a shard stays float32."""
        name, *tied = info.names
        dtype, master, reason = self._decide(info)
        reason = shard_reason or reason
        if tied:
            reason = f"{reason}; tied with {', '.join(tied)}"
        return PlanRow(
            name,
            "buffer" if info.is_buffer else "parameter",
            tuple(info.tensor.shape),
            info.tensor.dtype,
            dtype,
            master,
            reason,
        )

    def _decide(self, info: TensorInfo) -> _Decision:
        dtype = info.tensor.dtype
        if dtype in HALF_DTYPES:
            name = dtype_name(dtype)
            has_master, reason = self._decide_master(info)
            is_trained = has_master and not info.is_buffer and not is_sharded(info.tensor)
            if self.half is not None and is_trained:
                return _Decision(self.half, master=True, reason=f"{reason}, from its {name} value")
            return _Decision(
                dtype, master=False, reason=f"is {name} already and has no float32 value to keep"
            )
        if dtype is not torch.float32:
            return _Decision(dtype, master=False, reason=f"{dtype_name(dtype)} is not cast")
        if self.half is None:
            return _Decision(dtype, master=False, reason=self.float32_reason)
        if info.keep_reason:
            return _Decision(dtype, master=False, reason=info.keep_reason)
        if info.is_buffer and not self.casts_buffers:
            reason = f"buffers stay float32 at {self.level.value}"
            return _Decision(dtype, master=False, reason=reason)
        return _Decision(self.half, *self._decide_master(info))

    def _decide_master(self, info: TensorInfo) -> tuple[bool, str]:
        if info.is_buffer:
            # A buffer is not trained: keep its original value where weights are exact.
            is_exact = self.master in (Master.FLOAT32, Master.SPLIT)
            return is_exact, "follows its module"
        if info.optimizer is None:
            return False, (
                "no master: it is in no optimizer"
                if info.tensor.requires_grad
                else "no master: it is frozen and in no optimizer"
            )
        if not info.tensor.requires_grad:
            return False, "no master while requires_grad is False"
        if self.master is Master.NONE:
            return False, f"no master at {self.level.value}: small updates are lost"
        return True, _MASTER_REASONS[self.master]


_MASTER_REASONS = {
    Master.FLOAT32: "float32 master",
    Master.SPLIT: "exact with a 16-bit remainder",
    Master.KAHAN: "16-bit compensation",
    Master.STOCHASTIC: "updates are rounded at random",
}


class _Place(NamedTuple):
    """Where a tensor is in the models."""

    name: str
    keep_reason: str


def list_tensors(targets: Targets, keep_full: KeepFull) -> tuple[TensorInfo, ...]:
    """Return every floating-point or complex tensor of the models, tied ones once.

    A tied tensor stays float32 if `keep_full` matches one of its names.
    """
    owners = {
        id(parameter): owner for owner in targets.optimizers for parameter in parameters(owner)
    }
    places: dict[int, list[_Place]] = {}
    tensors: dict[int, tuple[torch.Tensor, bool]] = {}
    for index, model in enumerate(targets.models):
        reasons = keep_full.reasons(model)
        prefix = f"models[{index}]." if len(targets.models) > 1 else ""
        for name, tensor, is_buffer in _tensors(model):
            tensors.setdefault(id(tensor), (tensor, is_buffer))
            place = _Place(prefix + name, reasons.get(name, ""))
            places.setdefault(id(tensor), []).append(place)
    return tuple(
        TensorInfo(
            tensor,
            tuple(place.name for place in places[key]),
            is_buffer,
            _keep_reason(places[key]),
            owners.get(key),
        )
        for key, (tensor, is_buffer) in tensors.items()
    )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield the name of each tensor, the tensor, and whether it is a buffer."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for tensors, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for name, tensor in tensors.items():
                if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
                    yield f"{prefix}.{name}" if prefix else name, tensor, is_buffer


def _keep_reason(places: list[_Place]) -> str:
    for name, reason in places:
        if reason:
            return f"{reason} ({name})" if len(places) > 1 else reason
    return ""
