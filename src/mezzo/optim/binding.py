"""Optimizer binding: replace `optimizer.step` so that 16-bit parameters are updated in float32.

The optimizer stays the same object, with its groups, hooks, schedulers and state. Only what `step`
does is replaced: by a step on the device where there is one (`fused_step.py`, `capturable_step.py`,
`muon_step.py`), else by the optimizer's original step over temporary float32 parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mezzo._casting import cast
from mezzo._dtypes import HALF_DTYPES
from mezzo._errors import UnsupportedError
from mezzo.optim.fused_algorithms import is_known, without_hooks
from mezzo.optim.master_formats import RandomDraw
from mezzo.optim.master_weights import MasterWeights
from mezzo.optim.sharded_norm import CheckedNorm, check_with_norm, clip_over
from mezzo.policy.types import Master
from mezzo.scaling.gradients import Flags, parameters
from mezzo.scaling.loss_scales import binding_of
from mezzo.scaling.mesh import ProcessMesh, first_element, is_sharded, local, mesh_of
from mezzo.scaling.schedule_sync import groups_of
from mezzo.scaling.step_result import FlaggedSource

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter

_MODES = ("train", "eval")
"""Methods with which some optimizers, as those of schedulefree, exchange the parameters' values."""
_ATTRIBUTES = ("_step_supports_amp_scaling", "_bound", "__deepcopy__", *_MODES)
"""What a binding sets on its optimizer."""


class _FoundMesh(NamedTuple):
    """The processes that hold the parameters of an optimizer."""

    parameters: int
    """Number of parameters that the mesh was found for."""
    mesh: ProcessMesh | None


class OptimizerBinding:
    """An optimizer whose step updates master weights."""

    captures = False
    """Whether the step can be captured in a CUDA graph: then it is a `DeviceBinding`."""
    device_values: frozenset[str] = frozenset()
    """Entries of a group that may be tensors on a device, as a schedule makes them, because the
    host does not read them."""

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterWeights,
        *,
        clip_norm: float | None = None,
        takes_scale: bool = True,
    ) -> None:
        self.optimizer, self.masters, self.clip_norm = optimizer, masters, clip_norm
        self._tracks_norm = False
        """Whether steps compute `grad_norm` also without `clip_norm`."""
        self._norm: torch.Tensor | None = None
        self._checked_norm: CheckedNorm | None = None
        self._found_mesh: _FoundMesh | None = None
        self.device_rate: torch.Tensor | None = None
        """Where the last step read its learning rates on a device: a tensor whose first element
        is that of the first group."""
        self._add_masters: Callable[[list[torch.Tensor]], None] | None = None
        self._check_first_step: Callable[[], None] | None = None
        self.active = True
        self._original_step = without_hooks(type(optimizer).step)
        self._has_known_step = is_known(optimizer)
        self._replaced_attributes = {
            name: optimizer.__dict__[name] for name in _ATTRIBUTES if name in optimizer.__dict__
        }
        self._entered = False
        self._restore_step = replace_step(optimizer, self._make_step())
        if takes_scale:
            # torch's protocol, with which a scaler passes the scale and found_inf to the optimizer.
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        # mezzo's protocol, which is used on a CPU too.
        optimizer._bound = self  # type: ignore[attr-defined]
        optimizer.__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
        optimizer.__dict__.update(
            {
                name: partial(self._switch, getattr(type(optimizer), name))
                for name in _MODES
                if hasattr(type(optimizer), name)
            }
        )
        self._pre_hook = optimizer.register_step_pre_hook(self._refuse_original_step)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of all gradients at the last step, unscaled and before clipping.

        None before the first step, and if the binding neither clips nor tracks the norm. On the
        device of the gradients; getting it does not synchronize.
        """
        return self._norm

    @property
    def computes_norm(self) -> bool:
        """Whether steps compute `grad_norm`."""
        return self._tracks_norm or self.clip_norm is not None

    @property
    def mesh(self) -> ProcessMesh | None:
        """The processes that hold the parameters; None if no parameter is sharded."""
        # Found once for each number of parameters, which only `add_param_group` changes.
        count = sum([len(group["params"]) for group in groups_of(self.optimizer)])
        if self._found_mesh is None or self._found_mesh.parameters != count:
            self._found_mesh = _FoundMesh(count, mesh_of(parameters(self.optimizer)))
        return self._found_mesh.mesh

    @property
    def square_sum(self) -> torch.Tensor | None:
        """Square of `grad_norm`, float64: the sum of squares of all unscaled gradients."""
        return None if self._norm is None else self._norm.double().square()

    def track_norm(self) -> None:
        """Compute `grad_norm` in every step, also without `clip_norm`."""
        self._tracks_norm = True

    def add_masters_with(self, add: Callable[[list[torch.Tensor]], None]) -> None:
        """Call `add` before a step with 16-bit parameters that have a gradient and no master."""
        self._add_masters = add

    def check_first_step_with(self, check: Callable[[], None]) -> Callable[[], None]:
        """Call `check` before the next steps, until it raises no error; return what removes it."""
        self._check_first_step = check
        return self._remove_check

    def _remove_check(self) -> None:
        self._check_first_step = None

    def unbind(self) -> None:
        """Restore the optimizer's original step.

        If other code has wrapped the replaced step meanwhile, its wrapper stays, and calls the
        original step too.
        """
        self.active, self._add_masters = False, None
        self._pre_hook.remove()
        self._restore_step()
        for name in _ATTRIBUTES:
            self.optimizer.__dict__.pop(name, None)
        self.optimizer.__dict__.update(self._replaced_attributes)

    def step(self, scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Update from gradients that are multiplied by `scale`, unless `found_inf` is set.

        Runs the optimizer's original step over temporary float32 parameters. Synchronizes if
        `found_inf` is on a device.
        """
        checked, self._checked_norm = self._checked_norm, None
        if found_inf is not None and bool(found_inf):
            if self.computes_norm:
                self._norm = torch.full_like(found_inf, torch.inf)
            return
        with (
            self._float32_parameters(unscale_factor(scale), checked) as swapped,
            self._refuse_nested_steps(swapped),
        ):
            self._original_step(self.optimizer)
        for index, (parameter, temporary) in enumerate(swapped):
            if parameter in self.masters and temporary.grad is not None:
                draw = self._random_draw(parameter, index)
                self.masters.write(parameter, temporary.detach(), draw)
                # After the step, because torch's optimizers initialize a state only if it is empty.
                self.masters.add_to_state(parameter, self.optimizer.state)

    def check(self, scale: torch.Tensor, flags: Flags, source: FlaggedSource) -> bool:
        """Return False, so that the scaler checks the gradients of this optimizer itself.

        If they are sharded and the step needs their norm, check them here: one all-reduce then
        carries the flag and the norm.
        """
        mesh = self.mesh if self.computes_norm else None
        if mesh is None:
            return False
        self._checked_norm = check_with_norm(self.optimizer, mesh, scale, flags, source)
        return self._checked_norm is not None

    def widen_gradients(self) -> None:
        """Cast 16-bit gradients to float32 before they are unscaled in place.

        In float16 small gradients would underflow when they are divided by the loss scale.
        """
        self._add_missing_masters(parameters(self.optimizer))
        for parameter in self.masters:
            if parameter.grad is not None and parameter.grad.dtype is not torch.float32:
                gradient = parameter.grad
                parameter.grad_dtype = None
                parameter.grad = cast(gradient, torch.float32)

    # -- the replaced step -------------------------------------------------------------------------

    def _make_step(self) -> Any:
        """Return the new step of the optimizer, which runs torch's step hooks."""
        hooked = Optimizer.profile_hook_step(self._run_step)

        @wraps(hooked)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._entered = True
            try:
                return hooked(*args, **kwargs)
            finally:
                self._entered = False

        step.hooked = True  # type: ignore[attr-defined]
        return step

    def _run_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if not self.active:
            arguments = () if closure is None else (closure,)
            return self._original_step(optimizer, *arguments)
        if self._check_first_step is not None:
            self._check_first_step()
            self._remove_check()
        loss = None if closure is None else self._evaluate(closure)
        found_inf = getattr(optimizer, "found_inf", None)
        with torch.no_grad():
            self.step(getattr(optimizer, "grad_scale", None), found_inf)
        return loss

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        if not self._has_known_step or isinstance(self.optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                f"{type(self.optimizer).__name__}.step(closure) is not supported over 16-bit"
                " parameters: it would evaluate the closure before the parameters are updated from"
                " their master weights. Compute the loss and its gradients first, then call step();"
                " or train at O1, which has none, if the optimizer needs the closure."
            )
        with torch.enable_grad():
            return closure()

    def _refuse_original_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Raise if the original step runs, as a step pre-hook.

        Code that stored `optimizer.step` before it was replaced can still call it.
        """
        if not self._entered:
            raise UnsupportedError(
                f"The original step of this {type(optimizer).__name__} was called, which would"
                " update the parameters without their master weights: a wrapper or a variable has"
                " stored optimizer.step before mezzo.decorate replaced it. First decorate, then"
                " wrap."
            )

    def _switch(self, switch: Callable[[Optimizer], Any]) -> Any:
        """Call a method of the optimizer that exchanges the values of the parameters."""
        stepped = [one for one in parameters(self.optimizer) if self.optimizer.state.get(one)]
        swapped = [_Swapped(one, self._float32_copy(one)) for one in stepped]
        with self._in_groups(swapped):
            result = switch(self.optimizer)
        for index, (parameter, temporary) in enumerate(swapped):
            if parameter in self.masters:
                draw = self._random_draw(parameter, index)
                self.masters.write(parameter, temporary.detach(), draw)
        return result

    # -- the original step over float32 parameters -------------------------------------------------

    def _add_missing_masters(self, candidates: list[torch.Tensor]) -> None:
        if self._add_masters is None:
            return
        missing = [
            parameter
            for parameter in candidates
            if parameter.grad is not None
            and parameter.dtype in HALF_DTYPES
            and parameter not in self.masters
        ]
        if missing:
            self._add_masters(missing)

    def _random_draw(self, parameter: torch.Tensor, index: int) -> RandomDraw | None:
        if self.masters.format.master is not Master.STOCHASTIC:
            return None
        state = self.optimizer.state[parameter]
        # A float32 tensor, as torch's own step count: torch.distributed.checkpoint gathers only
        # tensors.
        state["draws"] = torch.as_tensor(state.get("draws", 0), dtype=torch.float32) + 1
        first = first_element(parameter)
        return RandomDraw(self.masters.seed, index, state["draws"].long(), first)

    @contextmanager
    def _float32_parameters(
        self, factor: torch.Tensor | None, checked: CheckedNorm | None
    ) -> Iterator[list[_Swapped]]:
        """Replace the optimizer's parameters by float32 ones with unscaled, clipped gradients."""
        mesh = self.mesh
        owned = parameters(self.optimizer)
        self._add_missing_masters(owned)
        swapped = [
            _Swapped(parameter, self._float32_parameter(parameter, factor, mesh))
            for parameter in owned
        ]
        self._clip(swapped, mesh, checked)
        with self._in_groups(swapped):
            yield swapped

    @contextmanager
    def _in_groups(self, swapped: list[_Swapped]) -> Iterator[None]:
        """Put the temporary parameters into the groups and the state of the optimizer."""
        optimizer = self.optimizer
        originals = [(group, group["params"]) for group in optimizer.param_groups]
        to_temporary: dict[torch.Tensor, torch.Tensor] = dict(swapped)
        to_original = {temporary: parameter for parameter, temporary in swapped}
        # The gradients are unscaled and checked already: torch's fused steps must not do it again.
        scaling: dict[str, Any] = {
            name: optimizer.__dict__[name]
            for name in ("grad_scale", "found_inf")
            if name in optimizer.__dict__
        }
        optimizer.__dict__.update(dict.fromkeys(scaling))
        for group, params in originals:
            group["params"] = [to_temporary.get(parameter, parameter) for parameter in params]
        _rekey_state(optimizer, to_temporary)
        try:
            yield
        finally:
            for group, params in originals:
                group["params"] = params
            _rekey_state(optimizer, to_original)
            optimizer.__dict__.update(scaling)

    def _float32_parameter(
        self, parameter: torch.Tensor, factor: torch.Tensor | None, mesh: ProcessMesh | None
    ) -> Parameter:
        gradient = parameter.grad
        if gradient is None:
            return Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        temporary = self._float32_copy(parameter)
        temporary.grad_dtype = None
        # Clipping writes to the gradient in place: copy it, to leave parameter.grad unchanged.
        # Sharded gradients are unscaled in place too, because a DTensor takes no plain factor.
        sharded = mesh is not None and is_sharded(gradient)
        copies = self.clip_norm is not None or (sharded and factor is not None)
        cast_gradient = gradient.to(dtype=temporary.dtype, copy=copies)
        if factor is not None and sharded:
            local(cast_gradient).mul_(factor)
        elif factor is not None:
            cast_gradient = cast_gradient * factor.to(cast_gradient.device)
        temporary.grad = cast_gradient
        return temporary

    def _float32_copy(self, parameter: torch.Tensor) -> Parameter:
        # Without a master it shares the parameter's memory, so that the step updates the parameter.
        has_master = parameter in self.masters
        value = self.masters.read(parameter) if has_master else parameter.detach()
        return Parameter(value, requires_grad=parameter.requires_grad)

    def _clip(
        self, swapped: list[_Swapped], mesh: ProcessMesh | None, checked: CheckedNorm | None
    ) -> None:
        if not self.computes_norm:
            return
        if mesh is not None:
            self._norm = clip_over(mesh, swapped, self.clip_norm, checked)
            return
        temporaries = [temporary for _, temporary in swapped if temporary.grad is not None]
        gradients = [
            _values(temporary.grad) for temporary in temporaries if temporary.grad is not None
        ]
        self._norm = torch.nn.utils.get_total_norm(gradients)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(temporaries, self.clip_norm, self._norm)

    @contextmanager
    def _refuse_nested_steps(self, swapped: list[_Swapped]) -> Iterator[None]:
        """Raise if the original step lets another optimizer step the same parameters.

        That optimizer would update 16-bit parameters, or temporary ones it has no state for.
        """
        if self._has_known_step:
            yield
            return
        ours = {id(tensor) for pair in swapped for tensor in pair}

        def before_step(other: Optimizer, *_: Any) -> None:
            if other is not self.optimizer and any(
                id(tensor) in ours for tensor in parameters(other)
            ):
                raise UnsupportedError(
                    f"{type(self.optimizer).__name__} steps another optimizer, a"
                    f" {type(other).__name__}, which would update the parameters without their"
                    " master weights. Pass that one to mezzo.decorate, before it is wrapped."
                )

        # A hook of all optimizers, registered only while this step runs.
        handle = register_optimizer_step_pre_hook(before_step)
        try:
            yield
        finally:
            handle.remove()


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values whose norm is that of a gradient, which may be sparse."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


class _Swapped(NamedTuple):
    """A parameter and the float32 parameter that replaces it while the original step runs."""

    parameter: torch.Tensor
    temporary: Parameter


def optimizer_binding(optimizer: Optimizer) -> OptimizerBinding | None:
    """Return the binding of an optimizer, or None if its step was not replaced."""
    binding = binding_of(optimizer)
    return binding if isinstance(binding, OptimizerBinding) else None


def replace_step(optimizer: Optimizer, step: Callable[..., Any]) -> Callable[[], None]:
    """Replace `optimizer.step` by a function of the optimizer; return one that restores it.

    Learning rate schedulers do not warn: they accept the new step as the optimizer's own, and every
    call of it counts, also one that updates nothing. If other code has wrapped the new step
    meanwhile, restoring leaves that wrapper in place.

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
        # The mark of a scheduler that was created earlier.
        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    # A scheduler that is created later needs a bound method, whose function it wraps.
    replaced = optimizer.step = MethodType(counted, optimizer)  # type: ignore[method-assign]

    def restore() -> None:
        if optimizer.__dict__.get("step") is replaced:
            del optimizer.step
            if before is not None:
                optimizer.step = before  # type: ignore[method-assign]

    return restore


def _refuse_copy(_: object) -> None:
    raise UnsupportedError(
        "A decorated optimizer cannot be deep-copied: the copy would train without the master"
        " weights. Copy optimizer.state_dict(), or call mezzo.undecorate first."
    )


def unscale_factor(scale: torch.Tensor | None) -> torch.Tensor | None:
    """Return the inverse of the loss scale; None if gradients are not scaled."""
    # Rounded once from float64, as the scaler's own inverse.
    return None if scale is None else scale.double().reciprocal().float()


def _rekey_state(optimizer: Optimizer, replacements: dict[Any, Any]) -> None:
    """Store the optimizer's state under other tensors, in the same dictionary.

    Captured steps and user code may hold it.
    """
    state = {replacements.get(key, key): value for key, value in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(state)
