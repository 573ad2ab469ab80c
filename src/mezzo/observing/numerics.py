"""Sample the tensors of a step: parameters, activations, gradients and updates; print a table."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils.weak import WeakIdKeyDictionary

from mezzo._torch import DisableTorchFunction
from mezzo.observing.records import Record, TensorsRecord, TensorStats
from mezzo.observing.tensor_stats import (
    LostUpdates,
    PendingStats,
    SampledTensor,
    compute_stats,
    sample,
    values_at_places,
)
from mezzo.optim.master_weights import version_of
from mezzo.prepare.master_params import ModelMasters

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules whose outputs are those of a module in them."""


class Collector(Protocol):
    """Collects records from the steps that a run samples. Methods are in call order."""

    def start(self, step: int) -> None:
        """Begin to collect: the forward pass of a sampled step is next."""

    def stop(self) -> None:
        """End it after the update of the step, also of one that raised: leave no hook behind."""

    def take(self, time: float) -> list[Record]:
        """Return the records that have arrived. Does not synchronize."""


class _Weight(NamedTuple):
    """A parameter before the update: samples of its stored value and of its master weight."""

    parameter: torch.Tensor
    stored: torch.Tensor
    master: torch.Tensor


class NumericsCollector:
    """Statistics of the parameters, activations, gradients and updates of a sampled step."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._handles: list[Any] = []
        self._samples: dict[str, dict[str, SampledTensor]] = {}
        self._weights: dict[str, _Weight] = {}
        self._seen = WeakIdKeyDictionary()
        """Versions of the outputs that were sampled."""
        self._step = 0
        self._pending: deque[_PendingStep] = deque()
        self.latest: dict[str, Mapping[str, TensorStats]] = {}
        """The last statistics of each kind of tensors."""

    # -- one sampled step, in order ----------------------------------------------------------------

    def start(self, step: int) -> None:
        """Sample the parameters, and register hooks for activations and gradients."""
        self._samples = {"parameters": {}, "activations": {}, "gradients": {}}
        self._step, self._weights = step, {}
        for prefix, model in named_models(self._models):
            masters = ModelMasters(model)
            for name, parameter in model.named_parameters():
                if parameter.is_floating_point():
                    self._add_parameter(prefix + name, parameter, masters)
            for name, module in model.named_modules():
                if not isinstance(module, _CONTAINERS):
                    self._watch(prefix + name or type(module).__name__, module)

    def _add_parameter(
        self, name: str, parameter: torch.nn.Parameter, masters: ModelMasters
    ) -> None:
        self._samples["parameters"][name] = one = sample(parameter)
        if not parameter.requires_grad or not parameter.is_leaf:
            return
        has_master = masters.masters(parameter) is not None
        master = (
            values_at_places(masters.current(parameter), parameter) if has_master else one.values
        )
        self._weights[name] = _Weight(parameter, one.values, master)

        def add_gradient(owner: torch.Tensor) -> None:
            if is_compiling():
                return
            if owner.grad is not None and owner.grad.layout is torch.strided:
                self._samples["gradients"][name] = sample(owner.grad, owner)

        self._handles.append(parameter.register_post_accumulate_grad_hook(add_gradient))

    def _watch(self, name: str, module: nn.Module) -> None:
        # The signature of a forward hook.
        def add_outputs(_: nn.Module, _inputs: Any, outputs: Any) -> None:
            # Code that is compiled in this call must not keep the hook.
            if is_compiling():
                return
            for index, tensor in enumerate(_tensors(outputs)):
                # A block returns what its last layer returned.
                version = 0 if tensor.is_inference() else version_of(tensor)
                if tensor.is_floating_point() and self._seen.get(tensor) != version:
                    self._seen[tensor] = version
                    self._add_activation(f"{name}[{index}]" if index else name, tensor)

        self._handles.append(module.register_forward_hook(add_outputs))

    def _add_activation(self, name: str, tensor: torch.Tensor) -> None:
        activations = self._samples["activations"]
        unique, call = name, 1
        while unique in activations:
            call += 1
            unique = f"{name} (call {call})"
        # The policy of the region around the model is not for these ops.
        with DisableTorchFunction():
            activations[unique] = sample(tensor)

    def stop(self) -> None:
        """Remove the hooks, and compute the statistics on the device."""
        self._remove_hooks()
        samples, self._samples = self._samples, {}
        weights, self._weights = self._weights, {}
        pending = {
            which: compute_stats(list(tensors.items()))
            for which, tensors in samples.items()
            if tensors
        }
        updates = self._updates(weights, samples.get("gradients", {}))
        if updates is not None:
            pending["updates"] = updates
        self._pending.append(_PendingStep(self._step, pending))

    def _updates(
        self, weights: Mapping[str, _Weight], gradients: Mapping[str, SampledTensor]
    ) -> PendingStats | None:
        masters = [ModelMasters(model) for model in self._models]
        updates: list[tuple[str, SampledTensor]] = []
        lost = []
        for name, (parameter, stored, master) in weights.items():
            if name not in gradients or gradients[name].values.shape != stored.shape:
                continue
            owner = next((one for one in masters if one.masters(parameter) is not None), None)
            stored_now = values_at_places(parameter)
            master_now = (
                stored_now
                if owner is None
                else values_at_places(owner.current(parameter), parameter)
            )
            change = master_now.float() - master.float()
            largest = change.abs().amax() if change.numel() else change.new_zeros(())
            updates.append(
                (name, SampledTensor(change, largest, parameter.numel(), parameter.dtype))
            )
            gradient = gradients[name].values
            lost.append(LostUpdates.between(gradient, master, master_now, stored, stored_now))
        return compute_stats(updates, lost) if updates else None

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()

    def take(self, time: float) -> list[Record]:
        """Return the records of sampled steps that have arrived."""
        records: list[Record] = []
        while self._pending and self._pending[0].arrived():
            step, stats = self._pending.popleft().read()
            self.latest |= stats
            records += [
                TensorsRecord(step=step, time=time, which=which, stats=one)
                for which, one in stats.items()
            ]
        return records


class _PendingStep(NamedTuple):
    """The statistics of one sampled step, on their way to the host."""

    step: int
    stats: dict[str, PendingStats]

    def arrived(self) -> bool:
        return all(one.arrived() for one in self.stats.values())

    def read(self) -> tuple[int, dict[str, Mapping[str, TensorStats]]]:
        stats: dict[str, Mapping[str, TensorStats]] = {
            which: one.read() for which, one in self.stats.items()
        }
        if all(one.zero == one.sampled for one in stats.get("updates", {}).values()):
            # The update was skipped, or the call did not update.
            stats.pop("updates", None)
        return self.step, stats


def named_models(models: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each model with the prefix of its names: `models[0].` if there are several."""
    for index, model in enumerate(models):
        yield (f"models[{index}]." if len(models) > 1 else ""), model


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        yield from (one for one in outputs.values() if isinstance(one, torch.Tensor))
    elif isinstance(outputs, tuple | list):
        yield from (one for one in outputs if isinstance(one, torch.Tensor))


# -- the table -------------------------------------------------------------------------------------

_HEADER = ("dtype", "values", "rms", "largest", "headroom", "underflow", "NaN/inf", "lost")
_LINES = 40


class NumericsTable(Mapping[str, Mapping[str, TensorStats]]):
    """The last sampled statistics: `table["gradients"]["0.weight"].headroom`; prints as a table.

    The keys are `"parameters"`, `"activations"`, `"gradients"` and `"updates"`.
    """

    def __init__(self, stats: Mapping[str, Mapping[str, TensorStats]]) -> None:
        self._stats = dict(stats)

    def __getitem__(self, which: str) -> Mapping[str, TensorStats]:
        return self._stats[which]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stats)

    def __len__(self) -> int:
        return len(self._stats)

    def __repr__(self) -> str:
        if not self._stats:
            return "No step was sampled yet."
        return "\n\n".join(_table(which, stats) for which, stats in self._stats.items())


def _table(which: str, stats: Mapping[str, TensorStats]) -> str:
    # Those with the least headroom first: they overflow first.
    order = sorted(stats.items(), key=lambda item: _least(item[1].headroom))
    rows = [(which, *_HEADER), *[_row(name, one) for name, one in order[:_LINES]]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if len(order) > _LINES:
        lines.append(f"... and {len(order) - _LINES} more")
    return "\n".join(lines)


def _row(name: str, stats: TensorStats) -> tuple[str, ...]:
    largest = max(abs(stats.min or 0.0), abs(stats.max or 0.0))
    return (
        name,
        stats.dtype,
        str(stats.count),
        "-" if stats.rms is None else f"{stats.rms:.2g}",
        f"{largest:.3g}",
        "-" if stats.headroom is None else f"{stats.headroom:.1f} bits",
        f"{stats.underflow:.2%}",
        f"{stats.nan}/{stats.inf}",
        "-" if stats.lost is None else f"{stats.lost:.2%}",
    )


def _least(headroom: float | None) -> float:
    return float("inf") if headroom is None else headroom
