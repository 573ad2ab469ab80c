"""Every floating-point tensor of the models, once, with what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo.policy.types import Level, Master
from mezzo.prepare.given import Given, Optimizer
from mezzo.prepare.keep import Keep
from mezzo.prepare.row import Row
from mezzo.scaling.gradients import parameters


@dataclass(frozen=True, eq=False)
class Found:
    """A tensor and the places where it lies: a tied one lies in several."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    is_buffer: bool
    kept: str
    """Why it stays float32, if one of its places says so."""
    optimizer: Optimizer | None
    """Who updates it."""


@dataclass(frozen=True, eq=False)
class Planned:
    """A tensor beside its row of the plan."""

    found: Found
    row: Row

    @property
    def converted(self) -> bool:
        """Whether its dtype changes."""
        return self.row.before is not self.row.after


@dataclass(frozen=True)
class Verdict:
    """What decides for every tensor alike."""

    level: Level
    half: torch.dtype | None
    """What float32 tensors become; None leaves them."""
    why_not: str
    """Why they are left."""
    master: Master

    def row(self, found: Found) -> Row:
        """What becomes of one tensor, and why."""
        name, *tied = found.names
        after, master, reason = self._decide(found)
        if tied:
            reason = f"{reason}; tied with {', '.join(tied)}"
        return Row(name, "buffer" if found.is_buffer else "parameter", tuple(found.tensor.shape), found.tensor.dtype, after, master, reason)

    def _decide(self, found: Found) -> tuple[torch.dtype, bool, str]:
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

    def _beside(self, found: Found) -> tuple[bool, str]:
        if found.is_buffer:
            # A buffer is not trained: where weights are exact, so is what it was.
            exact = self.master in (Master.FLOAT32, Master.SPLIT)
            return exact, "follows its module"
        if found.optimizer is None:
            return False, "no master: it is in no optimizer" if found.tensor.requires_grad else "no master: it is frozen and in no optimizer"
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


def survey(given: Given, keep: Keep) -> tuple[Found, ...]:
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
        Found(tensor, tuple(name for name, _ in places[key]), is_buffer, _why_kept(places[key]), owners.get(key))
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
