"""Rows of a plan: each tensor's dtype before and after, and the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo.policy.types import Level, Master
from mezzo.prepare.arguments import KeepFull, Optimizer, Targets
from mezzo.scaling.gradients import parameters


@dataclass(frozen=True)
class PlanRow:
    """One parameter or buffer: its dtype before and after, and why."""

    name: str
    """Its qualified name; with several models `models[0].encoder.weight`."""
    kind: str
    """`parameter` or `buffer`."""
    shape: tuple[int, ...]
    before: torch.dtype
    after: torch.dtype
    master: bool
    """Whether something lies beside it, or updates are rounded, so that small updates count."""
    reason: str

    @property
    def numel(self) -> int:
        """How many elements."""
        return prod(self.shape)

    @property
    def change(self) -> str:
        """Its dtype in words: `float32 → bfloat16`, or just the one that stays."""
        before, after = dtype_name(self.before), dtype_name(self.after)
        return before if before == after else f"{before} → {after}"


def table(rows: tuple[PlanRow, ...]) -> list[str]:
    """Rows as aligned lines, under a heading."""
    cells = [
        ("name", "shape", "dtype", "why"),
        *((row.name, _shape(row), row.change, row.reason) for row in rows),
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]
        ).rstrip()
        for line in cells
    ]


def size(count: int) -> str:
    """Bytes as people read them.

    >>> size(12 * 2**20 + 2**19), size(300)
    ('12.5 MiB', '300 bytes')
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count} bytes"


def _shape(row: PlanRow) -> str:
    return " × ".join(map(str, row.shape)) or "scalar"


@dataclass(frozen=True, eq=False)
class TensorInfo:
    """A tensor and the places where it lies: a tied one lies in several."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    is_buffer: bool
    kept: str
    """Why it stays float32, if one of its places says so."""
    optimizer: Optimizer | None
    """Who updates it."""


@dataclass(frozen=True, eq=False)
class PlannedTensor:
    """A tensor beside its row of the plan."""

    info: TensorInfo
    row: PlanRow

    @property
    def converted(self) -> bool:
        """Whether its dtype changes."""
        return self.row.before is not self.row.after


@dataclass(frozen=True)
class TensorRule:
    """What decides for every tensor alike."""

    level: Level
    half: torch.dtype | None
    """What float32 tensors become; None leaves them."""
    why_not: str
    """Why they are left."""
    master: Master

    def row(self, found: TensorInfo) -> PlanRow:
        """What becomes of one tensor, and why."""
        name, *tied = found.names
        after, master, reason = self._decide(found)
        if tied:
            reason = f"{reason}; tied with {', '.join(tied)}"
        return PlanRow(
            name,
            "buffer" if found.is_buffer else "parameter",
            tuple(found.tensor.shape),
            found.tensor.dtype,
            after,
            master,
            reason,
        )

    def _decide(self, found: TensorInfo) -> tuple[torch.dtype, bool, str]:
        dtype = found.tensor.dtype
        if dtype in HALF_DTYPES:
            return dtype, False, f"is {dtype_name(dtype)} already and has no float32 value to keep"
        if dtype is not torch.float32:
            return dtype, False, f"{dtype_name(dtype)} is left alone"
        if self.half is None:
            return dtype, False, self.why_not
        if found.kept:
            return dtype, False, found.kept
        return self.half, *self._beside(found)

    def _beside(self, found: TensorInfo) -> tuple[bool, str]:
        if found.is_buffer:
            # A buffer is not trained: where weights are exact, so is what it was.
            exact = self.master in (Master.FLOAT32, Master.SPLIT)
            return exact, "follows its module"
        if found.optimizer is None:
            return False, (
                "no master: it is in no optimizer"
                if found.tensor.requires_grad
                else "no master: it is frozen and in no optimizer"
            )
        if not found.tensor.requires_grad:
            return False, "no master while requires_grad is False"
        if self.master is Master.NONE:
            return False, f"no master at {self.level.value}: small updates are lost"
        return True, _BESIDE[self.master]


_BESIDE = {
    Master.FLOAT32: "float32 master",
    Master.SPLIT: "exact with a 16-bit remainder",
    Master.KAHAN: "16-bit compensation",
    Master.STOCHASTIC: "updates are rounded at random",
}


def plan_tensors(given: Targets, keep: KeepFull) -> tuple[TensorInfo, ...]:
    """Find every floating-point or complex tensor of the models; one that lies in several places is kept if any of them keeps it."""
    owners = {id(one): optimizer for optimizer in given.optimizers for one in parameters(optimizer)}
    places: dict[int, list[tuple[str, str]]] = {}
    tensors: dict[int, tuple[torch.Tensor, bool]] = {}
    for index, model in enumerate(given.models):
        kept, label = keep.reasons(model), f"models[{index}]." if len(given.models) > 1 else ""
        for name, tensor, is_buffer in _tensors(model):
            tensors.setdefault(id(tensor), (tensor, is_buffer))
            places.setdefault(id(tensor), []).append((label + name, kept.get(name, "")))
    return tuple(
        TensorInfo(
            tensor,
            tuple(name for name, _ in places[key]),
            is_buffer,
            _why_kept(places[key]),
            owners.get(key),
        )
        for key, (tensor, is_buffer) in tensors.items()
    )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for name, tensor in own.items():
                if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
                    yield f"{prefix}.{name}" if prefix else name, tensor, is_buffer


def _why_kept(places: list[tuple[str, str]]) -> str:
    name, reason = next(((name, reason) for name, reason in places if reason), ("", ""))
    return f"{reason} ({name})" if reason and len(places) > 1 else reason
