"""A step bound to the user's own optimizer: its parameters are 16-bit, its arithmetic is not.

The optimizer stays the object it was, with its groups, hooks, schedulers and state. Only what its
`step` does is replaced: by the fused pass where there is one, else by the optimizer's own step over
float32 stand-ins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mezzo._casting import cast
from mezzo._dtypes import HALF_DTYPES
from mezzo._errors import UnsupportedError
from mezzo.optim.fused_algorithms import algorithm_name
from mezzo.optim.master_formats import RandomDraw
from mezzo.optim.master_weights import MasterWeights
from mezzo.policy.types import Master
from mezzo.scaling.gradients import Flags, parameters
from mezzo.scaling.loss_scales import binding_of
from mezzo.scaling.step_result import FlaggedSource

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter

_PROTOCOL = ("_step_supports_amp_scaling", "_bound", "__deepcopy__")


class OptimizerBinding:
    """An optimizer whose step runs over exact weights."""

    reads_on_device = False
    """Whether scheduled values may be tensors, for nothing reads them on the host."""

    def __init__(
        self, optimizer: Optimizer, masters: MasterWeights, *, clip_norm: float | None = None
    ) -> None:
        self.optimizer, self.masters, self.clip_norm = optimizer, masters, clip_norm
        self._norm: torch.Tensor | None = None
        self.newcomers: Callable[[list[torch.Tensor]], None] | None = None
        """Called before a step with 16-bit parameters that have gradients and no master: they
        joined the optimizer, or are trained, since it was bound."""
        self.active = True
        self._own_step = without_hooks(type(optimizer).step)
        self._replaced = {
            name: optimizer.__dict__[name] for name in _PROTOCOL if name in optimizer.__dict__
        }
        self._entered = False
        self._restore_step = replace_step(optimizer, self._make_step())
        # torch's protocol, by which a scaler tells the optimizer the scale and the flag; and ours,
        # which holds on a CPU too.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        optimizer._bound = self  # type: ignore[attr-defined]
        optimizer.__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
        self._watch = optimizer.register_step_pre_hook(self._refuse_old_step)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients at the last step, unscaled and before clipping; only with `clip_norm`."""
        return self._norm

    def unbind(self) -> None:
        """Let the optimizer's own step run again. A wrapper that somebody put around ours meanwhile stays, and reaches it too."""
        self.active = False
        self._watch.remove()
        self._restore_step()
        for name in _PROTOCOL:
            self.optimizer.__dict__.pop(name, None)
        self.optimizer.__dict__.update(self._replaced)

    def _make_step(self) -> Any:
        """The optimizer's new step: torch's hooks around ours."""
        hooked = Optimizer.profile_hook_step(self._called)

        @wraps(hooked)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._entered = True
            try:
                return hooked(*args, **kwargs)
            finally:
                self._entered = False

        step.hooked = True  # type: ignore[attr-defined]
        return step

    def _refuse_old_step(self, optimizer: Optimizer, *_: Any) -> None:
        """torch runs this before every step: refuse the step of the optimizer's class, called by somebody who took hold of it before it was replaced."""
        if not self._entered:
            raise UnsupportedError(
                f"The own step of this {type(optimizer).__name__} was called, which would update"
                " the parameters without their master weights: a wrapper or a variable has held it"
                " since before mezzo.decorate. First decorate, then wrap."
            )

    def _called(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if not self.active:
            return (
                self._own_step(optimizer) if closure is None else self._own_step(optimizer, closure)
            )
        loss = None if closure is None else self._once(closure)
        found = getattr(optimizer, "found_inf", None)
        with torch.no_grad():
            self.step(getattr(optimizer, "grad_scale", None), found)
        return loss

    def _once(self, closure: Callable[[], Any]) -> Any:
        if not _calls_once(self.optimizer):
            raise UnsupportedError(
                f"{type(self.optimizer).__name__}.step(closure) over 16-bit parameters would"
                " evaluate the closure while the exact weights are elsewhere. Compute the loss and"
                " its gradients first, then call step()."
            )
        with torch.enable_grad():
            return closure()

    def step(self, scale: torch.Tensor | None, found: torch.Tensor | None) -> None:
        """Update from gradients that are `scale` times too large, unless `found` says that they are not finite: the optimizer's own step over stand-ins."""
        if found is not None and bool(found):
            return
        self._admit(parameters(self.optimizer))
        with self._float32_parameters(self._factor(scale)) as stand_ins, self._alone(stand_ins):
            self._own_step(self.optimizer)
        for place, (parameter, stand_in) in enumerate(stand_ins):
            if parameter in self.masters and stand_in.grad is not None:
                self.masters.write(parameter, stand_in.detach(), self._draw(parameter, place))
                # Only now: torch's optimizers take a state that is not empty for one that they have
                # begun.
                self.masters.show(parameter, self.optimizer.state)

    def check(self, scale: torch.Tensor, flags: Flags, source: FlaggedSource) -> bool:  # noqa: ARG002
        """Nothing to add to the scaler's own check."""
        return False

    def widen_gradients(self) -> None:
        """Turn 16-bit gradients into float32 ones, for whoever is going to unscale them in place: in float16 small ones would be gone."""
        self._admit(parameters(self.optimizer))
        for parameter in self.masters:
            if parameter.grad is not None and parameter.grad.dtype is not torch.float32:
                gradient = parameter.grad
                parameter.grad_dtype = None
                parameter.grad = cast(gradient, torch.float32)

    def _admit(self, candidates: list[torch.Tensor]) -> None:
        """Let parameters without a master have one before they are stepped."""
        if self.newcomers is not None:
            found = [
                one
                for one in candidates
                if one.grad is not None and one.dtype in HALF_DTYPES and one not in self.masters
            ]
            if found:
                self.newcomers(found)

    def _draw(self, parameter: torch.Tensor, place: int) -> RandomDraw | None:
        if self.masters.kind.master is not Master.STOCHASTIC:
            return None
        state = self.optimizer.state[parameter]
        # A float32 tensor, as torch's own step counts: what else is in a state,
        # torch.distributed.checkpoint does not gather.
        state["draws"] = torch.as_tensor(state.get("draws", 0), dtype=torch.float32) + 1
        return RandomDraw(self.masters.seed, place, state["draws"].long())

    def _factor(self, scale: torch.Tensor | None) -> torch.Tensor | None:
        # Rounded once from float64, as the scaler's own inverse.
        return None if scale is None else scale.double().reciprocal().float()

    @contextmanager
    def _alone(self, stand_ins: list[tuple[torch.Tensor, Parameter]]) -> Iterator[None]:
        """Refuse that the optimizer's own step lets another optimizer step the same parameters, or their stand-ins under which that has no state."""
        if _is_known(self.optimizer):
            yield
            return
        ours = {id(tensor) for pair in stand_ins for tensor in pair}

        def before_step(other: Optimizer, *_: Any) -> None:
            if other is not self.optimizer and any(
                id(tensor) in ours for tensor in parameters(other)
            ):
                raise UnsupportedError(
                    f"{type(self.optimizer).__name__} steps another optimizer, a"
                    f" {type(other).__name__}, which would update the parameters without their"
                    " master weights. Pass that one to mezzo.decorate, before it is wrapped."
                )

        # Heard by every optimizer, for as long as this step runs.
        handle = register_optimizer_step_pre_hook(before_step)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _float32_parameters(
        self, factor: torch.Tensor | None
    ) -> Iterator[list[tuple[torch.Tensor, Parameter]]]:
        """Float32 parameters in the place of the 16-bit ones, with gradients as the optimizer expects them, for as long as its own step runs."""
        optimizer = self.optimizer
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        pairs = [
            (parameter, self._float32_parameter(parameter, factor))
            for _, own in groups
            for parameter in own
        ]
        self._clip([stand_in for _, stand_in in pairs])
        there, back = dict(pairs), {stand_in: parameter for parameter, stand_in in pairs}
        told: dict[str, Any] = {
            name: optimizer.__dict__[name]
            for name in ("grad_scale", "found_inf")
            if name in optimizer.__dict__
        }
        # The gradients of the stand-ins are unscaled and checked: torch's fused steps are not to do
        # it again.
        optimizer.__dict__.update(dict.fromkeys(told))
        for group, own in groups:
            group["params"] = [there[parameter] for parameter in own]
        _rename(optimizer, there)
        try:
            yield pairs
        finally:
            for group, own in groups:
                group["params"] = own
            _rename(optimizer, back)
            optimizer.__dict__.update(told)

    def _float32_parameter(self, parameter: torch.Tensor, factor: torch.Tensor | None) -> Parameter:
        # Without a master an alias: what the step writes to it, it writes to the parameter.
        value = (
            self.masters.read(parameter)
            if parameter in self.masters and parameter.grad is not None
            else parameter.detach()
        )
        stand_in = Parameter(value, requires_grad=parameter.requires_grad)
        gradient = parameter.grad
        if gradient is not None:
            stand_in.grad_dtype = None
            # Clipping writes to the stand-in's gradient, which is not to be the parameter's own.
            wide = gradient.to(dtype=value.dtype, copy=self.clip_norm is not None)
            stand_in.grad = wide if factor is None else wide * factor.to(wide.device)
        return stand_in

    def _clip(self, stand_ins: list[Parameter]) -> None:
        if self.clip_norm is not None:
            gradients = [stand_in.grad for stand_in in stand_ins if stand_in.grad is not None]
            self._norm = torch.nn.utils.get_total_norm(gradients)
            torch.nn.utils.clip_grads_with_norm_(stand_ins, self.clip_norm, self._norm)


def replace_step(optimizer: Optimizer, step: Callable[..., Any]) -> Callable[[], None]:
    """Replace an optimizer's `step` by a function that takes the optimizer first; return a function that restores the old one.

    Schedulers notice nothing: they warn of a step that was replaced or that they did not see
    called, and every call of the new step counts, also one that updates nothing. If another wrapper
    was put around the new step meanwhile, restoring leaves it there.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> restore = replace_step(optimizer, lambda optimizer, closure=None: print("skipped"))
    >>> optimizer.step()
    skipped
    >>> restore()
    >>> optimizer.step()
    """
    before = optimizer.__dict__.get("step")

    @wraps(step)
    def counted(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    if hasattr(before, "_wrapped_by_lr_sched"):
        # The mark of a scheduler that was made earlier.
        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    # A scheduler that is made later needs a bound method: it wraps the function in it.
    replaced = optimizer.step = MethodType(counted, optimizer)  # type: ignore[method-assign]

    def restore() -> None:
        if optimizer.__dict__.get("step") is replaced:
            del optimizer.step
            if before is not None:
                optimizer.step = before  # type: ignore[method-assign]

    return restore


def optimizer_binding(optimizer: Optimizer) -> OptimizerBinding | None:
    """What an optimizer's step was bound to."""
    bound = binding_of(optimizer)
    return bound if isinstance(bound, OptimizerBinding) else None


def _refuse_copy(_: object) -> None:
    raise UnsupportedError(
        "A decorated optimizer steps over exact weights, which a deep copy of it would train"
        " without. Copy optimizer.state_dict(), or call mezzo.undecorate first."
    )


def grad_norm(optimizer: Optimizer) -> torch.Tensor:
    """The norm of all gradients at an optimizer's last step, unscaled and before clipping, on its device: reading it waits, keeping it does not.

    >>> import mezzo
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> model, optimizer = mezzo.decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bfloat16", clip_norm=1.0)
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> optimizer.step()
    >>> grad_norm(optimizer)
    tensor(5.)
    """
    bound = optimizer_binding(optimizer)
    if bound is None or bound.clip_norm is None:
        raise UnsupportedError(
            f"This {type(optimizer).__name__} takes no norm, for it does not clip. Use"
            " mezzo.decorate(model, optimizer, ..., clip_norm=1.0), or"
            " torch.nn.utils.get_total_norm of unscaled gradients."
        )
    norm = bound.grad_norm
    if norm is None:
        raise UnsupportedError(
            "There is no norm before the first step. Call optimizer.step() first."
        )
    return norm


def _rename(optimizer: Optimizer, names: dict[Any, Any]) -> None:
    """State under other tensors."""
    state: defaultdict[Any, Any] = defaultdict(dict)
    state.update({names.get(key, key): value for key, value in optimizer.state.items()})
    optimizer.state = state


def _calls_once(optimizer: Optimizer) -> bool:
    """Whether a step calls its closure once, before anything else. torch's do, but for LBFGS, and so do mezzo's; of others nothing is known."""
    return _is_known(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


def _is_known(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step is torch's or mezzo's."""
    return algorithm_name(optimizer).__module__.startswith(("torch.optim.", "mezzo.optim."))


def without_hooks(step: Any) -> Callable[..., Any]:
    """An optimizer class's step as it was written: torch wraps it so that hooks run, and ours runs them already."""
    function: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return function
