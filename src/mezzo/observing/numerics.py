"""Sample the tensors of a step: parameters, activations, gradients and updates; print a table."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils.weak import WeakIdKeyDictionary

from mezzo._torch import (
    DisableTorchFunction,
    after_backward,
    current_autograd_node,
    is_functorch_tensor,
)
from mezzo.observing.module_hooks import ModuleHook
from mezzo.observing.records import Record, TensorsRecord, TensorStats
from mezzo.observing.tensor_stats import (
    PendingStats,
    SampledTensor,
    Update,
    compute_stats,
    places_of,
    sample,
    sample_all,
    sample_updates,
)
from mezzo.optim.master_weights import MasterWeights, version_of
from mezzo.prepare.master_params import ModelMasters
from mezzo.scaling.mesh import named_shards

_P = ParamSpec("_P")

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Containers: their output is that of a module inside."""


class Collector(Protocol):
    """Collects records from the steps that a run samples. Methods are in call order."""

    def start(self, step: int) -> None:
        """Begin to collect: the forward pass of a sampled step is next."""

    def stop(self) -> None:
        """End after the update of the step, also if it raised; remove all hooks."""

    def take(self, time: float) -> list[Record]:
        """Return the records that have arrived. Does not synchronize."""


class _Weights(NamedTuple):
    """Trained parameters of a dtype by name, and samples of their values before an update."""

    parameters: dict[str, torch.nn.Parameter]
    masters: MasterWeights | None
    """What holds their float32 values; None if they hold them themselves."""
    stored: torch.Tensor
    """Their own values, one parameter after the other."""
    values: torch.Tensor
    """Their float32 values."""


def _plain_ops(method: Callable[_P, None]) -> Callable[_P, None]:
    """Run a method without gradients, and without the policy of a region around the model."""

    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        with torch.no_grad(), DisableTorchFunction():
            method(*args, **kwargs)

    return run


class NumericsCollector:
    """Statistics of the parameters, activations, gradients and updates of a sampled step."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._handles: list[Any] = []
        self._samples: dict[str, dict[str, SampledTensor]] = {}
        self._weights: list[_Weights] = []
        self._arrived: dict[str, torch.Tensor] = {}
        """Parameters that got gradients in the backward pass that runs."""
        self._seen = WeakIdKeyDictionary()
        """Versions of the outputs that were sampled."""
        self._step = 0
        self._pending: deque[_PendingStep] = deque()
        self.latest: dict[str, Mapping[str, TensorStats]] = {}
        """The last statistics of each kind of tensors."""

    # -- one sampled step, in order ----------------------------------------------------------------

    @_plain_ops
    def start(self, step: int) -> None:
        """Sample the parameters, and register hooks for activations and gradients."""
        self._samples = {"parameters": {}, "activations": {}, "gradients": {}}
        self._step, self._arrived = step, {}
        parameters: dict[str, nn.Parameter] = {}
        trained: dict[Any, dict[str, nn.Parameter]] = {}
        for prefix, model in named_models(self._models):
            masters = ModelMasters(model)
            for name, parameter in named_shards(model):
                if not parameter.is_floating_point():
                    continue
                parameters[prefix + name] = parameter
                if parameter.requires_grad and parameter.is_leaf:
                    self._await_gradient(prefix + name, parameter)
                    key = (masters.masters(parameter), parameter.dtype)
                    trained.setdefault(key, {})[prefix + name] = parameter
            for name, module in model.named_modules():
                if not isinstance(module, _CONTAINERS):
                    self._watch(prefix + name or type(module).__name__, module)
        if parameters:
            samples = sample_all(list(parameters.values()))
            self._samples["parameters"] = dict(zip(parameters, samples, strict=True))
        self._weights = [
            _Weights(group, masters, *_sampled_values(group, masters))
            for (masters, _), group in trained.items()
        ]

    def _await_gradient(self, name: str, parameter: nn.Parameter) -> None:
        def add_gradient(owner: torch.Tensor) -> None:
            if is_compiling():
                return
            if not self._arrived:
                after_backward(self._wait_for_other_callbacks)
            self._arrived[name] = owner

        self._handles.append(parameter.register_post_accumulate_grad_hook(add_gradient))

    def _wait_for_other_callbacks(self) -> None:
        # Gradients of several processes are complete after the callback that reduces them.
        after_backward(self._sample_gradients)

    @_plain_ops
    def _sample_gradients(self) -> None:
        """Sample all gradients of a backward pass at once, before they are unscaled."""
        arrived, self._arrived = self._arrived, {}
        owners = {
            name: owner
            for name, owner in arrived.items()
            if owner.grad is not None and owner.grad.layout is torch.strided
        }
        gradients = [owner.grad for owner in owners.values() if owner.grad is not None]
        if gradients and "gradients" in self._samples:
            samples = sample_all(gradients, list(owners.values()))
            self._samples["gradients"] |= dict(zip(owners, samples, strict=True))

    def _watch(self, name: str, module: nn.Module) -> None:
        # The signature of a forward hook.
        def add_outputs(_: nn.Module, _inputs: Any, outputs: Any) -> None:
            if current_autograd_node() is not None:
                # Computed again by a checkpoint.
                return
            for index, tensor in enumerate(_tensors(outputs)):
                # Its values end with the transform that it belongs to.
                if is_functorch_tensor(tensor):
                    continue
                # A block returns what its last layer returned.
                version = 0 if tensor.is_inference() else version_of(tensor)
                if tensor.is_floating_point() and self._seen.get(tensor) != version:
                    self._seen[tensor] = version
                    self._add_activation(f"{name}[{index}]" if index else name, tensor)

        self._handles.append(module.register_forward_hook(ModuleHook(add_outputs)))

    @_plain_ops
    def _add_activation(self, name: str, tensor: torch.Tensor) -> None:
        activations = self._samples["activations"]
        unique, call = name, 1
        while unique in activations:
            call += 1
            unique = f"{name} (call {call})"
        activations[unique] = sample(tensor)

    @_plain_ops
    def stop(self) -> None:
        """Remove the hooks, and compute the statistics on the device."""
        self._remove_hooks()
        samples, self._samples = self._samples, {}
        samples["updates"] = self._updates(samples)
        self._weights = []
        named = [
            ((which, name), tensor)
            for which, all_ in samples.items()
            for name, tensor in all_.items()
        ]
        if named:
            self._pending.append(_PendingStep(self._step, compute_stats(named)))

    def _updates(self, samples: Mapping[str, dict[str, SampledTensor]]) -> dict[str, SampledTensor]:
        gradients, parameters = samples["gradients"], samples["parameters"]
        updates: dict[str, SampledTensor] = {}
        for weights in self._weights:
            before = [parameters[name].values for name in weights.parameters]
            gradient_samples = [
                gradients[name].values
                if name in gradients and gradients[name].values.shape == sample.shape
                else None
                for name, sample in zip(weights.parameters, before, strict=True)
            ]
            if all(gradient is None for gradient in gradient_samples):
                continue
            stored, values = _sampled_values(weights.parameters, weights.masters)
            update = Update(
                list(weights.parameters.values()),
                [vector.numel() for vector in before],
                torch.cat(
                    [
                        torch.zeros_like(sample) if gradient is None else gradient
                        for gradient, sample in zip(gradient_samples, before, strict=True)
                    ]
                ),
                weights.values,
                values,
                weights.stored,
                stored,
            )
            changes = zip(weights.parameters, sample_updates(update), gradient_samples, strict=True)
            updates |= {name: sample for name, sample, gradient in changes if gradient is not None}
        return {name: updates[name] for name in parameters if name in updates}

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
                TensorsRecord(step=step, time=time, which=which, stats=group)
                for which, group in stats.items()
            ]
        return records


class _PendingStep(NamedTuple):
    """The statistics of one sampled step, on their way to the host."""

    step: int
    stats: PendingStats[tuple[str, str]]

    def arrived(self) -> bool:
        return self.stats.arrived()

    def read(self) -> tuple[int, dict[str, Mapping[str, TensorStats]]]:
        stats: dict[str, dict[str, TensorStats]] = {}
        for (which, name), one in self.stats.read().items():
            stats.setdefault(which, {})[name] = one
        if all(update.zero == update.sampled for update in stats.get("updates", {}).values()):
            # The update was skipped, or the call did not update.
            stats.pop("updates", None)
        return self.step, {**stats}


def _sampled_values(
    parameters: Mapping[str, nn.Parameter], masters: MasterWeights | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of sampled values of parameters, as they are stored and in float32."""
    stored = torch.cat([places_of(parameter) for parameter in parameters.values()])
    if masters is None:
        return stored, stored
    # Formats are elementwise, so that samples merge as whole tensors do.
    return stored, masters.format.merge(stored, _companions(parameters.values(), masters))


def _companions(parameters: Iterable[nn.Parameter], masters: MasterWeights) -> torch.Tensor | None:
    """Return samples of companion tensors at the places of their parameters, as one vector."""
    parts = []
    for parameter in parameters:
        masters.prepare_companion(parameter)
        companion = masters.companion_tensor(parameter)
        if companion is not None:
            parts.append(places_of(companion, parameter))
    return torch.cat(parts) if parts else None


def named_models(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each model with the prefix of its names: `models[0].` if there are several."""
    for index, model in enumerate(models):
        yield (f"models[{index}]." if len(models) > 1 else ""), model


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        yield from (output for output in outputs.values() if isinstance(output, torch.Tensor))
    elif isinstance(outputs, tuple | list):
        yield from (output for output in outputs if isinstance(output, torch.Tensor))


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
    rows = [(which, *_HEADER), *[_row(name, stats) for name, stats in order[:_LINES]]]
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
