"""What the integrations share: decorate models, scale losses, and step optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mezzo._casting import cast_all
from mezzo._errors import PolicyError, UnsupportedError
from mezzo.autocasting.arguments import region_for
from mezzo.autocasting.autocast import autocast
from mezzo.autocasting.regions import enter_regions
from mezzo.optim.master_formats import MASTER_FORMATS
from mezzo.policy.policy import Policy
from mezzo.policy.types import Level, Master
from mezzo.prepare.decorate import decorate, undecorate
from mezzo.prepare.decoration import Accumulating, all_decorated, decoration_of
from mezzo.prepare.plan import Plan, PolicyArg, input_dtype_of
from mezzo.scaling.scaler import GradScaler
from mezzo.step.base import Step
from mezzo.step.components import ScalerArg, choose_scaler

Optimizer = torch.optim.Optimizer


def import_extra(name: str, extra: str) -> Any:
    """Import a module of a package that is an extra, or raise an error with the install command.

    >>> import_extra("json", "transformers").__name__
    'json'
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise UnsupportedError(
            f"This integration needs {package}, which is not installed. Run:"
            f" pip install 'mezzo[{extra}]'"
        ) from error


class Precision:
    """The precision of one training run: a policy, its autocast region, and a scaler.

    The loss scale is updated late: at the first loss after a step, not at the step. Where several
    optimizers step after one backward pass, all unscale with the scale of that pass.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> precision = Precision("O2", None, {"dtype": "float16"})
    >>> precision.decorate([model], [optimizer])
    >>> precision.scale(0.1 * model(torch.ones(1, 2)).float().sum()).backward()
    >>> precision.step(optimizer).skipped
    False
    """

    def __init__(self, policy: PolicyArg, scaler: ScalerArg, options: dict[str, Any]) -> None:
        self.policy = policy
        fields = {name: options[name] for name in options if name not in _DECORATE_ONLY}
        self._parsed = Policy.parse(policy, **fields)
        self.level = self._parsed.level
        # Checkpoints with exact weights, where there are any.
        exact = self.level is not Level.O3 and self._parsed.master in _EXACT
        self.options = {"save_dtype": "float32", **options} if exact else options
        # Checks the argument before anything changes; the scaler itself depends on the dtype.
        choose_scaler(scaler, torch.float16, self.level, torch.device("cpu"))
        self.scaler: GradScaler | None = None
        self.plan: Plan | None = None
        """The plan of the model that was decorated last."""
        self._scaler_argument = scaler
        self._enter: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Creates the autocast region that models run in."""
        self._device = "cpu"
        self._decorated: list[list[nn.Module]] = []
        """Models that were decorated here, and will be undecorated."""
        self._untrained: list[nn.Module] = []
        """Models that were decorated here for evaluation."""
        self._stepped: set[Optimizer] = set()
        """Optimizers that stepped since the last update of the scale."""
        self._unscaled: set[Optimizer] = set()
        """Optimizers whose gradients were unscaled since the last update of the scale."""
        self._updates: WeakKeyDictionary[Accumulating, dict[Optimizer, int]] = WeakKeyDictionary()
        """Updates of training steps, as they were when an optimizer was stepped last."""
        self.training_step: Step | None = None
        """A step that scales, clips and updates in place of the loop of a framework."""

    def step_with(self, step: Step | None) -> None:
        """Leave scaling, clipping and updates to a training step; None takes them back."""
        self.training_step = step

    # -- models ------------------------------------------------------------------------------------

    def decorate(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Decorate models together with their optimizers, and choose the scaler.

        Models that are decorated already keep their policy.
        """
        for model in filter(self.evaluates, list(models)):
            self._untrained.remove(model)
            undecorate(model)
        if all(decoration_of(model) is None for model in models):
            decorate(list(models), list(optimizers), self.policy, **self.options)
            self._decorated.append(list(models))
        decoration = decoration_of(models[0])
        both = all_decorated(models, optimizers)
        if decoration is None or any(decoration_of(owner) is not decoration for owner in both):
            raise PolicyError(
                "The model is decorated already, but not with these optimizers. Decorate both in"
                " one call, or call mezzo.undecorate(model) first."
            )
        plan = self._use(decoration.plan)
        if self.scaler is None:
            argument = self._scaler_argument
            for step in decoration.training_steps if argument is None else ():
                # A step that was created before keeps its scaler, which is saved here too.
                argument = False if step.scaler is None else step.scaler
            self.scaler = choose_scaler(
                argument, plan.dtype, plan.policy.level, torch.device(plan.device)
            )
        decoration.share_scaler(self.scaler)
        if self.scaler is not None:
            for model in models:
                self.scaler.register_parameter_names(model)

    def trains_alone(self, model: nn.Module) -> bool:
        """Return whether a model without its optimizer may be trained: at O1, which scales only.

        A model in evaluation mode may be, too: some packages load models in this mode.
        """
        clips = self.options.get("clip_norm") is not None
        is_trainable = any(parameter.requires_grad for parameter in model.parameters())
        return self.level not in CASTS and is_trainable and (model.training or not clips)

    def evaluate(self, model: nn.Module) -> None:
        """Use the policy's autocast region for a model that is not trained.

        Its parameters stay float32: without master weights their exact values would be lost.
        """
        decoration = decoration_of(model)
        if decoration is not None:
            self._use(decoration.plan)
        elif self.plan is None:
            self._device = next((parameter.device.type for parameter in model.parameters()), "cpu")
            region = autocast(self._parsed, device_type=self._device, model=model)
            self._enter = lambda: region

    def wrap_untrained(self, model: nn.Module) -> None:
        """Run a model that is not trained in the autocast region, until it is decorated."""
        self.evaluate(model)
        if decoration_of(model) is None:
            policy = replace(self._parsed, level=Level.O1)
            decorate(model, None, policy, output_dtype=self.options.get("output_dtype"))
            self._untrained.append(model)

    def evaluates(self, model: nn.Module) -> bool:
        """Return whether a model was wrapped for evaluation."""
        return model in self._untrained

    def _use(self, plan: Plan) -> Plan:
        self.plan, self._device = plan, plan.device
        self._enter = partial(enter_regions, region_for(plan.policy, plan.device))
        return plan

    def undecorate(self) -> None:
        """Restore the models that were decorated here; sharded ones at O2 stay as they are."""
        decorated, self._decorated = self._decorated, []
        for models in decorated:
            decoration = decoration_of(models[0])
            if decoration is not None and not decoration.plan.sharded:
                undecorate(models)
        self.plan, self._enter = None, nullcontext

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the policy's autocast region; a null context before there is a model."""
        return self._enter()

    def cast_inputs(self, data: Any) -> Any:
        """Cast inputs as the decorated model casts its own: at O3, and with some presets."""
        dtype = None if self.plan is None else input_dtype_of(self.plan)
        return data if dtype is None else cast_all(data, dtype, self._device)

    def cast_outputs(self, data: Any) -> Any:
        """Cast outputs to float32, for code outside of the autocast region."""
        return cast_all(data, torch.float32, self._device)

    # -- scaling -----------------------------------------------------------------------------------

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the loss scale, if there is one; a training step does it itself."""
        if self.scaler is None or self.training_step is not None:
            return loss
        self.update()
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of an optimizer, unless that was done since its last step."""
        if self.scaler is None:
            return
        if optimizer in self._stepped:
            self.update()
        if optimizer not in self._unscaled:
            self.scaler.unscale_(optimizer)
            self._unscaled.add(optimizer)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step an optimizer: return a `StepResult`, or what its step returns without a scaler.

        Does nothing if a `mezzo.TrainStep` has stepped it since the last call.
        """
        if self.is_stepped(optimizer):
            return None
        if self.scaler is None:
            return optimizer.step(**kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS computes the loss several times in a step, which cannot be scaled. Use"
                " dtype='bfloat16', which needs no loss scale, or another optimizer."
            )
        if optimizer in self._stepped:
            self.update()
        result = self.scaler.step(optimizer, **kwargs)
        self._stepped.add(optimizer)
        return result

    def is_stepped(self, optimizer: Optimizer) -> bool:
        """Return whether a training step updated since the last call, or accumulates gradients."""
        is_stepped = False
        for step in _training_steps(optimizer):
            seen = self._updates.setdefault(step, {})
            is_stepped |= step.position > 0 or step.updates != seen.get(optimizer, 0)
            seen[optimizer] = step.updates
        return is_stepped

    def skipped_by_step(self, optimizer: Optimizer) -> bool:
        """Return whether the last update of a training step was skipped. This synchronizes."""
        if self.scaler is None or not _training_steps(optimizer):
            return False
        return self.scaler.state().consecutive_skips > 0

    def get_scale(self) -> float:
        """Return the loss scale; 1 if there is none. This synchronizes."""
        self.update()
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has stepped since the last scaled loss."""
        return optimizer in self._stepped

    def update(self) -> None:
        """Update the loss scale, if an optimizer stepped since the last update."""
        if self.scaler is not None and self._stepped:
            self.scaler.update()
            self._stepped.clear()
            self._unscaled.clear()

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler; empty if there is none."""
        self.update()
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of the scaler."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def is_trained(model: nn.Module) -> bool:
    """Return whether a model is in training mode and has a parameter that is trained."""
    return model.training and any(parameter.requires_grad for parameter in model.parameters())


def _training_steps(optimizer: Optimizer) -> Sequence[Accumulating]:
    decoration = decoration_of(optimizer)
    return () if decoration is None else tuple(decoration.training_steps)


_DECORATE_ONLY = (
    *("clip_norm", "output_dtype", "save_dtype", "seed", "defer_to_autocast"),
    "keep_full",  # may hold modules
)
"""Arguments of `decorate` that are not fields of a policy alone."""

_EXACT = (
    Master.AUTO,
    *(name for name, master_format in MASTER_FORMATS.items() if master_format.exact),
)
"""Master formats with which the model has exact weights to save."""

CASTS = (Level.O2, Level.O3)
"""Levels that cast parameters."""


class PrecisionPlugin:
    """What the plugins of Lightning and Fabric share; the first base of both."""

    def __init__(
        self, policy: PolicyArg = "O2", *, scaler: ScalerArg = None, **options: Any
    ) -> None:
        super().__init__()
        self._shared = Precision(policy, scaler, options)
        self.precision = f"mezzo-{self._shared.level.value}"

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler; None if nothing is scaled, and before the model is decorated."""
        return self._shared.scaler
