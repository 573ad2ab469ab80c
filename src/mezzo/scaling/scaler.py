"""`mezzo.GradScaler`: torch's scaler without its waits and without its collapse."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mezzo._errors import ScalerError
from mezzo.scaling import gradients, saved, stepping
from mezzo.scaling.backward import backward_apart
from mezzo.scaling.binding import binding_of
from mezzo.scaling.culprit import NOBODY, Culprit, Flagged, Known, Names
from mezzo.scaling.device import HostScale
from mezzo.scaling.needless import say_if_needless
from mezzo.scaling.record import Record, combine, meeting_place
from mezzo.scaling.result import StepResult
from mezzo.scaling.scales import Scales, first_states
from mezzo.scaling.state import LARGEST, ScaleRule, ScaleState
from mezzo.scaling.torch_names import TorchNames
from mezzo.scaling.watch import Watcher
from mezzo.scaling.words import OnCollapse, Stage
from mezzo.scaling.wrapped import bindings_of

Optimizer = torch.optim.Optimizer

_ENABLED_PLACE = 5
"""Where `enabled` stands among torch's positional arguments."""


@dataclass(frozen=True)
class _Settings:
    patience: int
    on_collapse: OnCollapse
    reduce_flag: Callable[[torch.Tensor], object] | None
    """Reduces a flag over a process group in place: its largest value, or its sum."""


class GradScaler(TorchNames):
    """Scales losses so that 16-bit gradients stay representable, skips steps whose gradients are not finite, and adapts the scale.

    torch's constructor and methods, and what torch lacks: a floor, back-off only after several bad steps, a scale for each loss, and steps that tell what
    happened.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = GradScaler("cpu", init_scale=1024.0, min_scale=1.0)
    >>> scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    >>> scaler.step(optimizer).skipped
    False
    >>> scaler.update()
    """

    advises = True
    """Whether it says that a loss computed in bfloat16 needs no scaling."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """A scaler that is not enabled is another object, which does nothing and costs nothing."""
        enabled = kwargs.get("enabled", args[_ENABLED_PLACE] if len(args) > _ENABLED_PLACE else True)
        device = args[0] if args else kwargs.get("device")
        if enabled and device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
            warnings.warn(f"GradScaler({str(device)!r}) is enabled, but no CUDA device is available: it is disabled.", UserWarning, stacklevel=2)
            enabled = False
        return object.__new__(cls if enabled else DisabledGradScaler)  # type: ignore[return-value]

    def __init__(
        self,
        device: str | torch.device | None = None,  # noqa: ARG002 - a scale is where its loss is; __new__ looks whether there is such a device
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,  # noqa: FBT001, FBT002 - torch's call shape
        *,
        backoff_every: int = 1,
        consecutive: bool = True,
        min_scale: float = 2.0**-24,
        max_scale: float = LARGEST,
        dynamic: bool = True,
        warmup: int = 0,
        losses: int = 1,
        patience: int = 50,
        on_collapse: str | OnCollapse = OnCollapse.WARN,
        reduce_flag: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        if not enabled and not isinstance(self, DisabledGradScaler):
            raise ScalerError(
                f"{type(self).__name__} was made without enabled=False, which its base class got. Let its own constructor take `enabled` by keyword."
            )
        rule = ScaleRule(growth_factor, backoff_factor, growth_interval, backoff_every, consecutive, min_scale, max_scale, dynamic, warmup)
        self._begin(rule, first_states(rule, init_scale, losses), _Settings(patience, OnCollapse.parse(on_collapse), reduce_flag))

    def _begin(self, rule: ScaleRule, states: list[ScaleState], settings: _Settings) -> None:
        self._settings = settings
        self._scales = Scales(rule, states, [Watcher(settings.patience, settings.on_collapse) for _ in states])
        self._records: dict[int, Record] = {}
        self._names = Names()
        self._checker = gradients.Checker()
        self._schedules = stepping.Schedules()

    # -- scaling ---------------------------------------------------------------------------------------------------------------------------------

    def scale(self, outputs: Any, index: int = 0) -> Any:
        """Multiply a loss, or losses in a nested iterable, by the scale; `index` chooses among the scales of a scaler with several losses."""
        return self._scaled(outputs, index)

    def _scaled(self, outputs: Any, index: int) -> Any:
        if isinstance(outputs, torch.Tensor):
            return outputs * self._scale_for(outputs, index)
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes | Mapping):
            # Not by `scale`, which a subclass may have replaced by one that counts its calls.
            scaled = (self._scaled(output, index) for output in outputs)
            if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
                return type(outputs)(*scaled)
            return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled
        raise ValueError(f"scale() takes a tensor or an iterable of tensors, got {type(outputs).__name__}. Pass the loss itself.")

    def backward(self, loss: torch.Tensor, *, index: int = 0, optimizers: Optimizer | Sequence[Optimizer], **kwargs: Any) -> None:
        """Run backward of one of several losses. Each has a scale of its own, so its gradients are unscaled at once and added to what is there already.

        Gradients go to the parameters of `optimizers` and nowhere else: in other tensors, gradients of different scales would meet unseen.
        """
        chosen = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        for optimizer in chosen:
            self._refuse(self._record(optimizer), (Stage.STEPPED,), "backward()")
        with backward_apart(self.scale(loss, index), chosen, **kwargs) as own:
            for optimizer in own:
                record = self._record(optimizer)
                self._check(optimizer, record, index, self._scales.of(index).inverse())
                record.stage = Stage.UNSCALED

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale in place, and check them; do this before clipping."""
        self._scales.require("unscale_()")
        record = self._record(optimizer)
        self._refuse(record, (Stage.UNSCALED, Stage.STEPPED), "unscale_()")
        self._refuse_mixed_scales("unscale_()")
        self._check(optimizer, record, 0, self._scales.of(0).inverse())
        record.stage = Stage.UNSCALED

    # -- stepping --------------------------------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, *args: Any, scheduler: LRScheduler | None = None, **kwargs: Any) -> StepResult:
        """Step an optimizer if its gradients are finite, skip it otherwise, and say which without waiting unless it is asked.

        A scheduler that is passed advances only with a good step, and must be one of torch's whose coming values can be computed: not a
        `ReduceLROnPlateau`. Where only the device knows which steps were good, scheduler and optimizer catch up when `optimizer.param_groups`, a state dict or
        `get_last_lr()` is read, which waits for the device once; a group that was kept from an earlier read shows an old rate. Other arguments are the
        optimizer's.
        """
        if args or kwargs:
            stepping.refuse_closures(args, kwargs)
        if scheduler is not None:
            self._schedules.accept(optimizer, scheduler)
        self._scales.require("step()")
        record = self._record(optimizer)
        if record.stage is Stage.STEPPED:
            self._refuse(record, (Stage.STEPPED,), "step()")
        if stepping.skips_by_itself(optimizer):
            result = self._step_by_protocol(optimizer, record, scheduler, args, kwargs)
        else:
            result = self._step(optimizer, record, scheduler, args, kwargs)
        record.stage = Stage.STEPPED
        return result

    def _step(self, optimizer: Optimizer, record: Record, scheduler: LRScheduler | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepResult:
        if record.stage is Stage.READY:
            self._refuse_mixed_scales("step()")
            self._check(optimizer, record, 0, self._scales.of(0).inverse())
            record.stage = Stage.UNSCALED
        bad = record.bad
        # What the host knows already is not asked of the flags again.
        if bad is None:
            flags = self._flags_of(record)
            bad = bool(combine(flags, meeting_place(flags)))
        if bad:
            return StepResult.known(None, skipped=True, culprit=self._blame(optimizer, record))
        value = optimizer.step(*args, **kwargs)
        if scheduler is not None:
            stepping.advance(optimizer, scheduler)
        return StepResult.known(value, skipped=False)

    def _step_by_protocol(
        self, optimizer: Optimizer, record: Record, scheduler: LRScheduler | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepResult:
        """Let the optimizer skip by itself: it reads the scale and the flag on the device."""
        if stepping.takes_the_scaler(optimizer):
            value = optimizer.step(*args, **kwargs, grad_scaler=self)  # type: ignore[call-overload]
            # Whether it checked its gradients is its own affair.
            flags = record.all_flags()
            found = combine(flags, meeting_place(flags)) if flags else None
            if scheduler is not None and (found is None or not bool(found)):
                stepping.advance(optimizer, scheduler)
            return StepResult(value, found, record.culprit)
        unscaled = record.stage is Stage.UNSCALED
        if not unscaled:
            self._refuse_mixed_scales("step()")
            self._check(optimizer, record, 0, None)
        scale = next(scale for scale in self._scales.made if scale is not None).scale
        found = combine(self._flags_of(record), scale.device)
        with stepping.told(optimizer, scale, found, unscaled=unscaled):
            if scheduler is None:
                return StepResult(optimizer.step(*args, **kwargs), found, record.culprit)
            with self._schedules.applied(optimizer, scheduler, found):
                return StepResult(optimizer.step(*args, **kwargs), found, record.culprit)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to what the steps since the last update found; a given scale is set instead, within the floor and the ceiling."""
        self._scales.require("update()")
        if new_scale is not None:
            self._scales.set(new_scale)
        else:
            self._advance()
        self._checker.take_back()
        self._records.clear()

    def _advance(self) -> None:
        recorded = False
        for index in range(len(self._scales)):
            flags: list[torch.Tensor] = []
            culprit: Culprit = NOBODY
            for record in self._records.values():
                found = record.found.get(index)
                if found:
                    flags.extend(found.values())
                    if culprit is NOBODY or not culprit.suspects():
                        culprit = record.culprit
            if flags:
                recorded = True
                self._scales.advance(index, flags, culprit)
        if not recorded:
            raise ScalerError(
                "update() found no gradients that were checked since the last one. Call scaler.step(optimizer) or scaler.unscale_(optimizer) before it, "
                "with gradients in place."
            )

    # -- asking ----------------------------------------------------------------------------------------------------------------------------------

    def watch(self, model: nn.Module) -> None:
        """Learn the names of a model's parameters, so that a skipped step can name the first bad one."""
        self._names.watch(model)

    def state(self, index: int = 0) -> ScaleState:
        """The scale of a loss and its counters as a value; this waits for the device. Schedulers that were passed to `step` catch up."""
        self._schedules.reconcile()
        return self._scales.state(index)

    def get_scale(self) -> float:
        """The scale; this waits for the device."""
        return self.state().scale

    def is_enabled(self) -> bool:
        """Whether this scaler does anything."""
        return True

    # -- saving ----------------------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state: torch's five entries, which torch's scaler reads, and mezzo's own beside them."""
        self._schedules.reconcile()
        return saved.to_dict(self._scales.states(), self._scales.rule)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, from mezzo's scaler or from torch's. A scale that is not a positive finite number is refused, and nothing is changed."""
        self._scales.load(*saved.from_dict(state_dict, self._scales.rule, len(self._scales)))

    def __getstate__(self) -> dict[str, Any]:
        if self._records:
            raise ScalerError("A scaler is pickled between iterations only, for flags on a device cannot be saved. Call update() first.")
        return {"rule": self._scales.rule, "states": self._scales.states(), "settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(**state)

    # -- inside ----------------------------------------------------------------------------------------------------------------------------------

    def _scale_for(self, output: torch.Tensor, index: int) -> torch.Tensor:
        made = self._scales.made
        scale = made[index] if 0 <= index < len(made) else None
        if scale is None:
            scale = self._scales.make(output.device, index)
            if self.advises:
                say_if_needless(output)
        return scale.scale if scale.scale.device == output.device else scale.scale.to(output.device, non_blocking=output.device.type != "cpu")

    def _check(self, optimizer: Optimizer, record: Record, index: int, factor: torch.Tensor | None) -> None:
        """Check the gradients of an optimizer, and multiply them by a factor if there is one."""
        flags = record.flags(index)
        bound = binding_of(optimizer)
        if factor is not None:
            for one in bindings_of(optimizer):
                one.widen_gradients()
        if factor is not None and isinstance(self._scales.of(index), HostScale):
            bad = self._checker.check(optimizer, factor, flags)
            record.told.append(bad)
            if bad:
                record.culprit = self._blame(optimizer, record)
        else:
            culprit = record.culprit if isinstance(record.culprit, Flagged) else Flagged(self._names, optimizer)
            if bound is None or factor is not None or not bound.check(self._scales.of(index).scale, flags, culprit):
                gradients.check_sorted(optimizer, factor, flags, culprit)
            record.culprit = culprit
        if self._settings.reduce_flag is not None:
            self._reduce(self._settings.reduce_flag, record, flags, self._scales.of(index).scale.device)

    def _reduce(self, reduce_flag: Callable[[torch.Tensor], object], record: Record, flags: gradients.Flags, device: torch.device) -> None:
        """One flag for all devices, reduced once; a process without gradients takes part, or the others would wait for it."""
        found = combine(list(flags.values()), meeting_place(list(flags.values()))).clone() if flags else torch.zeros((), device=device)
        reduce_flag(found)
        record.told.append(None)
        flags.clear()
        flags[found.device] = found.clamp_(max=1.0)

    def _blame(self, optimizer: Optimizer, record: Record) -> Culprit:
        """Who spoiled a step that the host knows to be bad. Noted when the gradients are checked, for clipping spreads a NaN to all of them."""
        if record.culprit.suspects():
            return record.culprit
        bad = gradients.first_nonfinite(gradients.parameters(optimizer))
        return record.culprit if bad is None else Known(self._names.of(bad, optimizer))

    def _flags_of(self, record: Record) -> list[torch.Tensor]:
        flags = record.all_flags()
        if not flags:
            raise ScalerError(
                "step() found no gradients: no parameter of this optimizer has one. Call scaler.scale(loss).backward() first, with a loss that reaches them."
            )
        return flags

    def _refuse(self, record: Record, stages: tuple[Stage, ...], call: str) -> None:
        if record.stage in stages:
            done = "step()" if record.stage is Stage.STEPPED else "unscale_() or backward()"
            remedy = "Call it once, before step()." if record.stage is Stage.UNSCALED else "Call update() once at the end of the iteration, then go on."
            raise ScalerError(f"{call} was called, but {done} has already been called on this optimizer since the last update(). {remedy}")

    def _refuse_mixed_scales(self, call: str) -> None:
        if len(self._scales) > 1:
            raise ScalerError(
                f"{call} cannot tell which of {len(self._scales)} scales these gradients have. With several losses call "
                "scaler.backward(loss, index=..., optimizers=...), which unscales them, instead of scaler.scale(loss).backward()."
            )


class DisabledGradScaler(GradScaler):
    """The scaler that does nothing: losses pass as they are, steps are the optimizer's own."""

    def scale(self, outputs: Any, index: int = 0) -> Any:  # noqa: ARG002
        """The outputs as they are."""
        return outputs

    def backward(self, loss: torch.Tensor, *, index: int = 0, optimizers: Optimizer | Sequence[Optimizer] = (), **kwargs: Any) -> None:  # noqa: ARG002
        """Plain backward."""
        loss.backward(**kwargs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Nothing was scaled."""

    def step(self, optimizer: Optimizer, *args: Any, scheduler: LRScheduler | None = None, **kwargs: Any) -> StepResult:
        """The optimizer's own step, closures included, and the scheduler's."""
        if scheduler is not None:
            self._schedules.accept(optimizer, scheduler)
        value = optimizer.step(*args, **kwargs)
        if scheduler is not None:
            stepping.advance(optimizer, scheduler)
        return StepResult.known(value, skipped=False)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """There is no scale."""

    def get_scale(self) -> float:
        """One: nothing is scaled."""
        return 1.0

    def is_enabled(self) -> bool:
        """Whether this scaler does anything."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Empty, as torch's."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is no state."""
