"""`torch.amp.GradScaler` on mezzo's engine, with torch's private state and error messages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.amp.grad_scaler import GradScaler as TorchScaler
from torch.amp.grad_scaler import OptState

from mezzo._errors import PolicyError, ScalerError
from mezzo.compat.torch._autocast import warn_deprecated
from mezzo.compat.torch._counterparts import AcceptsTorch
from mezzo.scaling.loss_scales import OptimizerRecord
from mezzo.scaling.optimizer_step import refuse_closures
from mezzo.scaling.scale_state import OptimizerStage
from mezzo.scaling.scaler import GradScaler as MezzoScaler

_TORCH_STAGES = {
    OptimizerStage.READY: OptState.READY,
    OptimizerStage.UNSCALED: OptState.UNSCALED,
    OptimizerStage.STEPPED: OptState.STEPPED,
}
_MEZZO_STAGES = {torch_stage: stage for stage, torch_stage in _TORCH_STAGES.items()}


class OptimizerState(dict[str, Any]):
    """Entry of `_per_optimizer_states`; writes change the scaler's record."""

    def __init__(self, record: OptimizerRecord) -> None:
        super().__init__(stage=_TORCH_STAGES[record.stage], found_inf_per_device=record.flags(0))
        self._record = record

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "stage":
            self._record.enter(_MEZZO_STAGES[value])
        elif key == "found_inf_per_device":
            self._record.found_inf[0] = value
            # The values of these flags are on the device only.
            self._record.known.append(None)


class OptimizerStates(MutableMapping[Any, dict[str, Any]]):
    """Entries by `id(optimizer)`, created on access as in torch's defaultdict."""

    def __init__(self, records: dict[Any, OptimizerRecord]) -> None:
        self._records = records

    def __getitem__(self, key: Any) -> dict[str, Any]:
        return OptimizerState(self._records.setdefault(key, OptimizerRecord()))

    def __setitem__(self, key: Any, value: dict[str, Any]) -> None:
        self._records[key] = OptimizerRecord(
            _MEZZO_STAGES[value["stage"]], {0: value["found_inf_per_device"]}, [None]
        )

    def __delitem__(self, key: Any) -> None:
        del self._records[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


class _StatefulScaler(MezzoScaler):
    """mezzo's scaler with torch's `_per_optimizer_states`, and one class for both `enabled`."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Create an instance of this class even if disabled, as torch does."""
        return object.__new__(cls)

    @property
    def _per_optimizer_states(self) -> OptimizerStates:
        return OptimizerStates(self._records.by_id)

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: MutableMapping[Any, dict[str, Any]]) -> None:
        self._records.by_id.clear()
        OptimizerStates(self._records.by_id).update(states)


class TorchScalerError(ScalerError, AssertionError):
    """An assertion of torch's scaler."""


class TorchValueError(PolicyError, AssertionError):
    """An assertion of torch's scaler about its arguments."""


@contextmanager
def as_torch_error(torch_message: str) -> Iterator[None]:
    """Raise a `ScalerError` as an assertion, with torch's message before mezzo's."""
    try:
        yield
    except ScalerError as error:
        raise TorchScalerError(f"{torch_message} {error}") from None


Optimizer = torch.optim.Optimizer

_SCALE_HINT = (
    "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the"
    " iteration."
)


class GradScaler(_StatefulScaler, TorchScaler, metaclass=AcceptsTorch, counterpart=TorchScaler):  # type: ignore[misc]
    """`torch.amp.GradScaler`: the same arguments, defaults, return values and errors.

    Differs from torch: the scale has a floor, and 16-bit gradients can be unscaled.

    >>> scaler = GradScaler("cpu", init_scale=4.0)
    >>> scaler.scale(torch.tensor(2.0))
    tensor(8.)
    >>> sorted(scaler.state_dict())
    ['_growth_tracker', 'backoff_factor', 'growth_factor', 'growth_interval', 'scale']
    """

    _warns_if_not_needed = False

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._device, self._enabled = device, enabled
        if enabled and device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
            warnings.warn(
                "torch.cuda.amp.GradScaler is enabled, but CUDA is not available. Disabling.",
                UserWarning,
                stacklevel=2,
            )
            self._enabled = False
        if self._enabled:
            _check_factors(growth_factor, backoff_factor)
            super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval)

    def scale(self, outputs: Any) -> Any:  # type: ignore[override]
        """Return a tensor, or nested iterables of tensors, times the loss scale."""
        return self._scaled(outputs, 0) if self._enabled else outputs

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients, including 16-bit ones, which torch rejects."""
        if self._enabled:
            self._require("unscale_")
            stage = self._records.of(optimizer).stage
            if stage is OptimizerStage.UNSCALED:
                raise ScalerError(
                    "unscale_() has already been called on this optimizer since the last update()."
                    " Call it once, before step()."
                )
            if stage is OptimizerStage.STEPPED:
                raise ScalerError(
                    "unscale_() is being called after step(). Call it before, or call update()"
                    " first."
                )
            super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step unless a gradient is non-finite; return the result of `optimizer.step`, or None."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise ScalerError(
                "Closure use is not currently supported if GradScaler is enabled. Compute the loss"
                " and its gradients first, then step."
            )
        self._require("step")
        if self._records.of(optimizer).stage is OptimizerStage.STEPPED:
            raise ScalerError(
                "step() has already been called since the last update(). Call update() once at the"
                " end of the iteration."
            )
        refuse_closures(args, kwargs)
        with as_torch_error("No inf checks were recorded for this optimizer."):
            return super().step(optimizer, *args, **kwargs).value

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Grow the scale, back off, or set it."""
        if self._enabled:
            self._require("update")
            reason = (
                "No inf checks were recorded prior to update."
                if new_scale is None
                else "new_scale should be a float or a 1-element tensor without a gradient."
            )
            with as_torch_error(reason):
                super().update(new_scale)

    def get_scale(self) -> float:
        """Return the loss scale; 1.0 if disabled. This synchronizes."""
        return super().get_scale() if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Return whether the scaler is enabled."""
        return self._enabled

    def _get_growth_tracker(self) -> int:
        return super()._get_growth_tracker() if self._enabled else 0

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries; an empty dict if disabled."""
        if not self._enabled:
            return {}
        state = super().state_dict()
        return {name: value for name, value in state.items() if not name.startswith("mezzo_")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a torch or mezzo scaler; ignored if disabled."""
        if self._enabled:
            if not state_dict:
                raise ScalerError(
                    "The source state dict is empty, possibly because it was saved from a disabled"
                    " instance of GradScaler."
                )
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        if not self._enabled:
            return dict(self.__dict__)
        with as_torch_error(
            "A GradScaler instance may only be pickled at the beginning of an iteration, or at the"
            " end after scaler.update()."
        ):
            inner = super().__getstate__()
        attributes = self.__dict__.items()
        return {n: value for n, value in attributes if n not in _ENGINE_ATTRIBUTES} | {
            "inner": inner
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "inner" in state:
            super().__setstate__(state["inner"])
        self.__dict__.update({name: value for name, value in state.items() if name != "inner"})

    def _require(self, call: str) -> None:
        with as_torch_error(f"Attempted {call} but _scale is None. {_SCALE_HINT}"):
            self._scales.require(f"{call}()")


_ENGINE_ATTRIBUTES = frozenset(("_settings", "_scales", "_records", "_schedules"))
"""Attributes that `mezzo.GradScaler` pickles itself."""


def _check_factors(growth: float, backoff: float) -> None:
    if growth <= 1.0:
        raise TorchValueError(f"The growth factor must be > 1.0, got {growth!r}.")
    if backoff >= 1.0:
        raise TorchValueError(f"The backoff factor must be < 1.0, got {backoff!r}.")


class _DeprecatedGradScaler(GradScaler):
    """A scaler for one device, which torch deprecates."""

    _device_name: str

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        warn_deprecated("GradScaler", self._device_name)
        super().__init__(
            self._device_name, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )


class CudaGradScaler(_DeprecatedGradScaler, counterpart=torch.cuda.amp.GradScaler):
    """`torch.cuda.amp.GradScaler`."""

    _device_name = "cuda"


class CpuGradScaler(_DeprecatedGradScaler, counterpart=torch.cpu.amp.GradScaler):
    """`torch.cpu.amp.GradScaler`."""

    _device_name = "cpu"
