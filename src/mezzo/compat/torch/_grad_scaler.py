"""torch's `GradScaler` on mezzo's engine, its states and error messages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.amp.grad_scaler import GradScaler as torchs_own  # noqa: N813 - said as what it is
from torch.amp.grad_scaler import OptState

from mezzo._errors import PolicyError, ScalerError
from mezzo.compat.torch._autocast import warn_of_old
from mezzo.scaling.loss_scales import OptimizerRecord
from mezzo.scaling.optimizer_step import refuse_closures
from mezzo.scaling.scale_state import OptimizerStage
from mezzo.scaling.scaler import GradScaler as MezzoScaler

_STAGES = {
    OptimizerStage.READY: OptState.READY,
    OptimizerStage.UNSCALED: OptState.UNSCALED,
    OptimizerStage.STEPPED: OptState.STEPPED,
}
_BACK = {theirs: ours for ours, theirs in _STAGES.items()}


class OptimizerState(dict[str, Any]):
    """One optimizer's entry; what is written to it counts."""

    def __init__(self, record: OptimizerRecord) -> None:
        super().__init__(stage=_STAGES[record.stage], found_inf_per_device=record.flags(0))
        self._record = record

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "stage":
            self._record.stage = _BACK[value]
        elif key == "found_inf_per_device":
            self._record.found_inf[0] = value
            # Nobody told the host what these flags hold.
            self._record.known.append(None)


class OptimizerStates(MutableMapping[Any, dict[str, Any]]):
    """Every optimizer's entry by its `id`; a new one is made by looking, as in torch's defaultdict."""

    def __init__(self, records: dict[Any, OptimizerRecord]) -> None:
        self._records = records

    def __getitem__(self, key: Any) -> dict[str, Any]:
        return OptimizerState(self._records.setdefault(key, OptimizerRecord()))

    def __setitem__(self, key: Any, value: dict[str, Any]) -> None:
        self._records[key] = OptimizerRecord(
            _BACK[value["stage"]], {0: value["found_inf_per_device"]}, [None]
        )

    def __delitem__(self, key: Any) -> None:
        del self._records[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


class StatefulScaler(MezzoScaler):
    """mezzo's scaler with the states of its optimizers under torch's name, and one class for enabled and disabled ones."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """A disabled one is of the same class, as in torch, where a subclass reads `_enabled`."""
        return object.__new__(cls)

    @property
    def _per_optimizer_states(self) -> OptimizerStates:
        return OptimizerStates(self._records)

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: MutableMapping[Any, dict[str, Any]]) -> None:
        self._records.clear()
        OptimizerStates(self._records).update(states)


class TorchScalerError(ScalerError, AssertionError):
    """What torch's scaler asserts."""


class TorchValueError(PolicyError, AssertionError):
    """What torch's scaler asserts of its arguments."""


@contextmanager
def as_torch_error(torchs: str) -> Iterator[None]:
    """Let what is refused inside be refused as torch does, an assertion that says what torch says and what to do."""
    try:
        yield
    except ScalerError as error:
        raise TorchScalerError(f"{torchs} {error}") from None


Optimizer = torch.optim.Optimizer

_FIX = (
    "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the"
    " iteration."
)


class _StandsFor(type):
    """The class of scalers that stand for one of torch's: instances of classes that torch derives from its own, as FSDP's, are theirs too."""

    stands_for: type | None

    def __new__(
        cls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        stands_for: type | None = None,
    ) -> Any:
        """A class, and which of torch's it stands for. Its subclasses stand for themselves."""
        made = super().__new__(cls, name, bases, namespace)
        made.stands_for = stands_for
        return made

    def __init__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: Any
    ) -> None:
        super().__init__(name, bases, namespace)

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or (
            cls.stands_for is not None and isinstance(instance, cls.stands_for)
        )

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or (
            cls.stands_for is not None and issubclass(subclass, cls.stands_for)
        )


class GradScaler(StatefulScaler, torchs_own, metaclass=_StandsFor, stands_for=torchs_own):  # type: ignore[misc]
    """`torch.amp.GradScaler`: the same arguments, defaults, return values and errors, on mezzo's scales.

    >>> scaler = GradScaler("cpu", init_scale=4.0)
    >>> scaler.scale(torch.tensor(2.0))
    tensor(8.)
    >>> scaler.state_dict()
    {'scale': 4.0, 'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000, '_growth_tracker': 0}
    """

    _advises = False

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
        """Step unless gradients are not finite; what the optimizer's own step returned, None where it was skipped."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise ScalerError(
                "Closure use is not currently supported if GradScaler is enabled. Compute the loss"
                " and its gradients first, then step."
            )
        self._require("step")
        if self._record(optimizer).stage is OptimizerStage.STEPPED:
            raise ScalerError(
                "step() has already been called since the last update(). Call update() once at the"
                " end of the iteration."
            )
        refuse_closures(args, kwargs)
        with as_torch_error("No inf checks were recorded for this optimizer."):
            return super().step(optimizer, *args, **kwargs).value

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale, or set it."""
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
        """The scale; 1.0 where scaling is off."""
        return super().get_scale() if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether this scaler does anything."""
        return self._enabled

    def _get_growth_tracker(self) -> int:
        return super()._get_growth_tracker() if self._enabled else 0

    # -- saving ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries; nothing where scaling is off."""
        return (
            {
                name: value
                for name, value in super().state_dict().items()
                if not name.startswith("mezzo_")
            }
            if self._enabled
            else {}
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of torch's scaler or of mezzo's; ignored where scaling is off."""
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
        return {name: value for name, value in self.__dict__.items() if name not in _INNER} | {
            "inner": inner
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "inner" in state:
            super().__setstate__(state["inner"])
        self.__dict__.update({name: value for name, value in state.items() if name != "inner"})

    def _require(self, call: str) -> None:
        with as_torch_error(f"Attempted {call} but _scale is None. {_FIX}"):
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
        enabled: bool = True,
    ) -> None:
        warn_of_old("GradScaler", self._of)
        super().__init__(
            self._of, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )


class CudaGradScaler(_OldGradScaler, stands_for=torch.cuda.amp.GradScaler):
    """`torch.cuda.amp.GradScaler`."""

    _of = "cuda"


class CpuGradScaler(_OldGradScaler, stands_for=torch.cpu.amp.GradScaler):
    """`torch.cpu.amp.GradScaler`."""

    _of = "cpu"
