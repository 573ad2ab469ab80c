"""`torch.amp.GradScaler` in all its spellings, carried out by mezzo's scaler."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as torchs_own  # noqa: N813 - said as what it is

from mezzo._errors import ScalerError
from mezzo.compat.torch._errors import TorchValueError, in_torchs_words
from mezzo.compat.torch._regions import warn_of_old
from mezzo.compat.torch._state import StatefulScaler
from mezzo.scaling.stepping import refuse_closures
from mezzo.scaling.words import Stage

Optimizer = torch.optim.Optimizer

_FIX = "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the iteration."


class _StandsFor(type):
    """The class of scalers that stand for one of torch's: instances of classes that torch derives from its own, as FSDP's, are theirs too."""

    stands_for: type | None

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], stands_for: type | None = None) -> Any:
        """A class, and which of torch's it stands for. Its subclasses stand for themselves."""
        made = super().__new__(cls, name, bases, namespace)
        made.stands_for = stands_for
        return made

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, namespace)

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or (cls.stands_for is not None and isinstance(instance, cls.stands_for))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or (cls.stands_for is not None and issubclass(subclass, cls.stands_for))


class GradScaler(StatefulScaler, torchs_own, metaclass=_StandsFor, stands_for=torchs_own):  # type: ignore[misc]
    """`torch.amp.GradScaler`: the same arguments, defaults, return values and errors, on mezzo's scales.

    >>> scaler = GradScaler("cpu", init_scale=4.0)
    >>> scaler.scale(torch.tensor(2.0))
    tensor(8.)
    >>> scaler.state_dict()
    {'scale': 4.0, 'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000, '_growth_tracker': 0}
    """

    advises = False

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,  # noqa: FBT001, FBT002 - torch's call shape
    ) -> None:
        self._device, self._enabled = device, enabled
        if enabled and device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
            warnings.warn("torch.cuda.amp.GradScaler is enabled, but CUDA is not available. Disabling.", UserWarning, stacklevel=2)
            self._enabled = False
        if self._enabled:
            _refuse_factors(growth_factor, backoff_factor)
            super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval)

    def scale(self, outputs: Any) -> Any:  # type: ignore[override]
        """Multiply a tensor, or tensors in a nested iterable, by the scale."""
        return self._scaled(outputs, 0) if self._enabled else outputs

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale; 16-bit gradients too, which torch refuses."""
        if self._enabled:
            self._require("unscale_")
            stage = self._record(optimizer).stage
            if stage is Stage.UNSCALED:
                raise ScalerError("unscale_() has already been called on this optimizer since the last update(). Call it once, before step().")
            if stage is Stage.STEPPED:
                raise ScalerError("unscale_() is being called after step(). Call it before, or call update() first.")
            super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step unless gradients are not finite; what the optimizer's own step returned, None where it was skipped."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise ScalerError("Closure use is not currently supported if GradScaler is enabled. Compute the loss and its gradients first, then step.")
        self._require("step")
        if self._record(optimizer).stage is Stage.STEPPED:
            raise ScalerError("step() has already been called since the last update(). Call update() once at the end of the iteration.")
        refuse_closures(args, kwargs)
        with in_torchs_words("No inf checks were recorded for this optimizer."):
            return super().step(optimizer, *args, **kwargs).value

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale, or set it."""
        if self._enabled:
            self._require("update")
            reason = (
                "No inf checks were recorded prior to update." if new_scale is None else "new_scale should be a float or a 1-element tensor without a gradient."
            )
            with in_torchs_words(reason):
                super().update(new_scale)

    def get_scale(self) -> float:
        """The scale; 1.0 where scaling is off."""
        return super().get_scale() if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether this scaler does anything."""
        return self._enabled

    def _get_growth_tracker(self) -> int:
        return super()._get_growth_tracker() if self._enabled else 0

    # -- saving ----------------------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries; nothing where scaling is off."""
        return {name: value for name, value in super().state_dict().items() if not name.startswith("mezzo_")} if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of torch's scaler or of mezzo's; ignored where scaling is off."""
        if self._enabled:
            if not state_dict:
                raise ScalerError("The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler.")
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        if not self._enabled:
            return dict(self.__dict__)
        with in_torchs_words("A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after scaler.update()."):
            inner = super().__getstate__()
        return {name: value for name, value in self.__dict__.items() if name not in _INNER} | {"inner": inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "inner" in state:
            super().__setstate__(state["inner"])
        self.__dict__.update({name: value for name, value in state.items() if name != "inner"})

    def _require(self, call: str) -> None:
        with in_torchs_words(f"Attempted {call} but _scale is None. {_FIX}"):
            self._scales.require(f"{call}()")


_INNER = frozenset(("_settings", "_scales", "_records", "_names", "_checker", "_schedules"))
"""What mezzo's scaler saves by itself."""


def _refuse_factors(growth: float, backoff: float) -> None:
    if growth <= 1.0:
        raise TorchValueError(f"The growth factor must be > 1.0, got {growth!r}.")
    if backoff >= 1.0:
        raise TorchValueError(f"The backoff factor must be < 1.0, got {backoff!r}.")


class _OldGradScaler(GradScaler):
    """A scaler whose name says its device, which torch is giving up."""

    _of: str

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,  # noqa: FBT001, FBT002 - torch's call shape
    ) -> None:
        warn_of_old("GradScaler", self._of)
        super().__init__(self._of, init_scale, growth_factor, backoff_factor, growth_interval, enabled)


class CudaGradScaler(_OldGradScaler, stands_for=torch.cuda.amp.GradScaler):
    """`torch.cuda.amp.GradScaler`."""

    _of = "cuda"


class CpuGradScaler(_OldGradScaler, stands_for=torch.cpu.amp.GradScaler):
    """`torch.cpu.amp.GradScaler`."""

    _of = "cpu"
