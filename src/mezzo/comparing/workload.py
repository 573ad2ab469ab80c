"""A workload of `mezzo compare`: a model, its batches, its loss and its optimizer at one size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Any, ...]
"""Inputs of the model, then targets: what `Workload.loss` takes after the model."""


class Preset(StrEnum):
    """Size of a workload."""

    FULL = "full"
    """The shapes of the document that the workload is from."""
    SMALL = "small"
    """The same network, smaller: a few seconds in each mode on a CPU."""


@dataclass(frozen=True)
class Documented:
    """A number that a document reports for a workload, shown beside the measured one."""

    mode: str
    """The mode that it belongs to, as `ModeResult.mode` has it."""
    speedup: float
    """Times as fast as float32."""
    source: str
    """System, machine and document: `PaddlePaddle, V100`."""


@dataclass(frozen=True)
class Workload:
    """A model, its batches, its loss and its optimizer at one size.

    Functions take no device: the caller seeds, builds on the CPU and moves what it gets.
    """

    name: str
    """Name on the command line: `linears`."""
    title: str
    """One line with sizes: `9 × Linear(8192), batch 2048, SGD`."""
    preset: Preset
    data: str
    """Where the batches come from: `synthetic`, or `scikit-learn's digits, 32 × 32 × 3`."""
    make_model: Callable[[], nn.Module]
    """Returns the model in float32; the same weights after the same `torch.manual_seed`."""
    make_optimizer: Callable[[nn.Module], Optimizer]
    """Returns the optimizer over the parameters of a model, in float32 or 16 bits."""
    make_batch: Callable[[int], Batch]
    """Returns the batch of a step: the same for the same number."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """Runs the model on a batch and returns the mean loss."""
    samples: int
    """Samples of a batch, for samples per second."""
    steps: int
    """Steps after which the losses of modes are compared."""
    epoch_steps: int | None = None
    """Steps of an epoch, if curves over epochs are recorded."""
    evaluate: Callable[[nn.Module], float] | None = None
    """Returns the accuracy on data that are not trained on, from 0 to 1. The model is in eval mode
    and in the precision of the mode; its device is that of its parameters."""
    channels_last: bool = False
    """Whether images and convolutions are faster in channels_last on a GPU."""
    documented: tuple[Documented, ...] = ()
    """What documents report."""
