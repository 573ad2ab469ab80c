"""Run a copy of a model at one level and dtype, as a training step or a forward pass."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mezzo.advising.advice import Precision, Setting
from mezzo.advising.lint_subject import device_of
from mezzo.prepare.arguments import Optimizers, optimizers_of
from mezzo.prepare.kept_results import copy_with_results
from mezzo.step.eval_step import EvalStep
from mezzo.step.train_step import TrainStep

_CALLS_TO_CAPTURE = 4
"""Calls before the timed ones: a step is captured after a few."""


class Workload(NamedTuple):
    """What is timed: a model, its sample, and how it trains."""

    model: nn.Module
    sample: Any
    loss_fn: Callable[..., Any] | None
    optimizer: Optimizers | None
    training: bool
    overrides: dict[str, Any]

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return device_of(self.model)


class SettingRun:
    """A copy of a model that runs at one setting. Calls change the copy only."""

    def __init__(self, workload: Workload, setting: Setting) -> None:
        self.setting, self.device = setting, workload.device
        self._sample, self._has_target = workload.sample, workload.loss_fn is not None
        dtype = {} if setting.level == "O0" else {"dtype": setting.precision.value}
        options = {"capture": setting.captured, **dtype, **workload.overrides}
        with self._precision():
            # Copied together, so that the copy of the optimizer has the copied parameters.
            model, optimizer = copy_with_results((workload.model, workload.optimizer))
            self._call: Any
            if workload.training:
                optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-6)
                self._call = TrainStep(model, workload.loss_fn, optimizer, setting.level, **options)
            else:
                self._call = EvalStep(model.eval(), setting.level, **options)
            self._model, self._optimizer = model, optimizer
            for _ in range(_CALLS_TO_CAPTURE if setting.captured else 1):
                self()

    def __call__(self) -> Any:
        """Run one call."""
        with self._precision():
            if self._has_target:
                return self._call(*self._sample)
            return self._call(self._sample)

    def state_bytes(self) -> int:
        """Return the bytes of parameters, buffers, gradients and optimizer states."""
        optimizers = () if self._optimizer is None else optimizers_of(self._optimizer)
        return state_bytes(self._model, optimizers)

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """Compute float32 products in TF32, if that is the setting."""
        if self.setting.precision is not Precision.TF32:
            yield
            return
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


class Peak:
    """Measures the peak of memory of a setting on CUDA, from before it is built."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        if device.type == "cuda":
            free_memory(device)
            # cuBLAS keeps a workspace from its first product on, which belongs to no setting.
            torch.mm(*[torch.zeros(8, 8, device=device)] * 2)
            self._before = torch.cuda.memory_allocated(device)
            self.restart()

    def restart(self) -> None:
        """Forget the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self, state_bytes: Callable[[], int]) -> int:
        """Return the peak since, or on other devices the bytes of all state."""
        if self._device.type != "cuda":
            return state_bytes()
        return torch.cuda.max_memory_allocated(self._device) - self._before


def state_bytes(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return the bytes of parameters, buffers, gradients and optimizer states.

    >>> model = nn.Linear(4, 4, bias=False)
    >>> state_bytes(model, [torch.optim.SGD(model.parameters())])
    64
    """
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def free_memory(device: torch.device) -> None:
    """Release what deleted copies occupied on a GPU."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
