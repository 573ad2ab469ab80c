"""The modes of `mezzo compare`: each trains the same model with the same optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo._dtypes import dtype_name
from mezzo._errors import PolicyError, choices, nearest
from mezzo._torch import set_cudnn_allow_tf32
from mezzo.autocasting.autocast import set_thread_region
from mezzo.comparing.workload import Batch, Workload
from mezzo.compat.apex import amp
from mezzo.compat.apex.amp._amp_state import _amp_state
from mezzo.compat.apex.amp._casts import deactivate_casts
from mezzo.prepare.kept_results import copy_with_results
from mezzo.step.function_step import FunctionStep, train_step
from mezzo.step.inputs import move_inputs

_SEED = 0


class Mode(StrEnum):
    """A way to train, or to infer."""

    FLOAT32 = "float32"
    TF32 = "TF32"
    """float32 whose products and convolutions are computed in TF32, on NVIDIA GPUs."""
    TORCH_AMP = "torch.amp"
    """torch.autocast with torch.amp.GradScaler, as torch documents it."""
    APEX_O1 = "Apex O1"
    APEX_O2 = "Apex O2"
    O1 = "O1"
    O2 = "O2"
    O2_CAPTURED = "O2 captured"
    """O2 as a CUDA graph."""
    CONVERTED = "converted"
    """Forward passes of `mezzo.convert` of the model that was trained in float32."""

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Return the mode of a name; spaces, hyphens and capitals do not matter.

        >>> Mode.parse("o2-captured").value
        'O2 captured'
        """
        for mode in cls:
            if _plain(mode) == _plain(text):
                return mode
        names = [mode.value for mode in cls]
        raise PolicyError(f"There is no mode {text!r}. {choices(names)}{nearest(text, names)}")


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


@dataclass(frozen=True)
class Setting:
    """A workload on a device, and the 16-bit dtype of the modes that have one."""

    workload: Workload
    device: torch.device
    dtype: torch.dtype

    @property
    def channels_last(self) -> bool:
        """Whether model and images are channels_last, in every mode alike."""
        return self.workload.channels_last and self.device.type == "cuda"

    @cached_property
    def _initial(self) -> nn.Module:
        """The model on the host: large ones take longer to initialize than to train."""
        torch.manual_seed(_SEED)
        return self.workload.make_model()

    def make_model(self) -> nn.Module:
        """Return the model on the device, with the same weights in each call."""
        model = copy_with_results(self._initial).to(self.device)
        torch.manual_seed(_SEED)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def make_batch(self, number: int) -> Batch:
        """Return the batch of a step, without an effect on random generators."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(_SEED + number)
            return self.workload.make_batch(number)

    def move(self, batch: Batch) -> Batch:
        """Return a batch on the device."""
        moved: Batch = move_inputs(batch, self.device, channels_last=self.channels_last)
        return moved


@dataclass(frozen=True)
class Training:
    """A model that trains in one mode."""

    model: nn.Module
    optimizer: Optimizer
    step: Callable[[Batch], Tensor]
    """Trains on a batch and returns its loss, detached."""
    dtype: str | None = None
    region: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The precision of a forward pass outside of the step."""
    skipped: Callable[[], int | None] = lambda: None
    """Returns the number of steps that were skipped so far; None if none can be."""
    tf32: bool = False
    captured: FunctionStep | None = None
    """The step if it is captured after some calls."""

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a batch and return its loss."""
        with float32_products(tf32=self.tf32):
            return self.step(batch)

    def evaluate(self, function: Callable[[nn.Module], float]) -> float:
        """Return the accuracy of the model in eval mode, in the precision of the mode."""
        self.model.eval()
        try:
            with float32_products(tf32=self.tf32), self.region(), torch.no_grad():
                return float(function(self.model))
        finally:
            self.model.train()


@contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Compute float32 products and convolutions in TF32, or in float32.

    By default torch computes convolutions in TF32, which is not the float32 to compare with.
    """
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    set_cudnn_allow_tf32(tf32)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        set_cudnn_allow_tf32(convolutions)


def why_not(mode: Mode, device: torch.device) -> str | None:
    """Return why a mode does not run on a device; None if it does."""
    if device.type == "cuda":
        return None
    if mode is Mode.TF32:
        return "not run: needs an NVIDIA GPU"
    if mode is Mode.O2_CAPTURED:
        return "not run: steps are captured on CUDA only, and run eagerly here, as O2 does"
    return None


def make_training(mode: Mode, setting: Setting) -> Training:
    """Return a model that trains in a mode, always from the same weights."""
    model = setting.make_model()
    with float32_products(tf32=mode is Mode.TF32):
        made = _MAKERS[mode](setting, model, setting.workload.make_optimizer(model))
    # Whatever was drawn so far, all modes train with the same random numbers.
    torch.manual_seed(_SEED)
    return made


def _train_float32(
    setting: Setting, model: nn.Module, optimizer: Optimizer, *, tf32: bool = False
) -> Training:
    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = setting.workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step, tf32=tf32)


def _train_torch_amp(setting: Setting, model: nn.Module, optimizer: Optimizer) -> Training:
    device, scales = setting.device.type, setting.dtype is torch.float16
    region = partial(torch.autocast, device, setting.dtype)
    scaler = torch.amp.GradScaler(device, enabled=scales)
    counter = _StepCounter(optimizer)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with region():
            loss = setting.workload.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        counter.count_call()
        return loss.detach()

    # A fused optimizer is called in each step, and skips the update itself.
    counts = scales and not optimizer.defaults.get("fused")
    skipped = counter.skipped if counts else (lambda: None)
    return Training(model, optimizer, step, dtype_name(setting.dtype), region, skipped)


@dataclass
class _StepCounter:
    """Counts the updates of an optimizer among the calls of a step."""

    optimizer: Optimizer
    calls: int = 0
    updates: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.optimizer.register_step_post_hook(self._count)

    def count_call(self) -> None:
        """Count a call of the step."""
        self.calls += 1

    def _count(self, *_: object) -> None:
        self.updates += 1

    def skipped(self) -> int:
        return self.calls - self.updates


def _train_apex(
    setting: Setting, model: nn.Module, optimizer: Optimizer, *, level: str
) -> Training:
    """Train with `mezzo.compat.apex`, whose dtype is float16, as Apex's is."""
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    state = _ApexState()

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with state.active():
            loss = setting.workload.loss(model, batch)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step, "float16", state.active, state.skipped)


class _ApexState:
    """The process-wide state of amp that one `initialize` made, taken from the process.

    Apex knows one at a time; here two train in turn, beside modes that must not be cast.
    """

    def __init__(self) -> None:
        self._properties, self._scalers = _amp_state.opt_properties, _amp_state.loss_scalers
        self._handle = _amp_state.handle
        deactivate_casts()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Put the state in place for a block."""
        _amp_state.initialize(self._properties, self._scalers)
        _amp_state.set_handle(self._handle)
        if self._handle is not None:
            set_thread_region(self._handle._region)
        try:
            yield
        finally:
            deactivate_casts()

    def skipped(self) -> int:
        return self._scalers[0]._scales.state(0).skipped_steps


def _train_mezzo(
    setting: Setting, model: nn.Module, optimizer: Optimizer, *, level: str, capture: str | bool
) -> Training:
    name = dtype_name(setting.dtype)

    @train_step(models=model, optimizers=optimizer, policy=level, dtype=name, capture=capture)
    def step(*batch: Any) -> Tensor:
        return setting.workload.loss(model, batch)

    def skipped() -> int | None:
        return None if step.scaler is None else step.scaler.state().skipped_steps

    return Training(
        model,
        optimizer,
        lambda batch: step(*batch),
        name,
        skipped=skipped,
        captured=step if capture else None,
    )


_MAKERS: dict[Mode, Callable[[Setting, nn.Module, Optimizer], Training]] = {
    Mode.FLOAT32: _train_float32,
    Mode.TF32: partial(_train_float32, tf32=True),
    Mode.TORCH_AMP: _train_torch_amp,
    Mode.APEX_O1: partial(_train_apex, level="O1"),
    Mode.APEX_O2: partial(_train_apex, level="O2"),
    Mode.O1: partial(_train_mezzo, level="O1", capture=False),
    Mode.O2: partial(_train_mezzo, level="O2", capture=False),
    Mode.O2_CAPTURED: partial(_train_mezzo, level="O2", capture="auto"),
}
