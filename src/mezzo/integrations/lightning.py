"""`MezzoPrecision`: mezzo as the precision plugin of Lightning's Trainer.

from mezzo.integrations.lightning import MezzoPrecision

trainer = Trainer(plugins=[MezzoPrecision("O2", dtype="float16")])
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mezzo._errors import UnsupportedError
from mezzo.integrations.fabric import MezzoFabricPrecision
from mezzo.integrations.precision import CASTS, Optimizer, PrecisionPlugin, import_extra

__all__ = ["MezzoFabricPrecision", "MezzoPrecision"]

_USES_LIGHTNING = "lightning" in sys.modules or (
    "pytorch_lightning" not in sys.modules and find_spec("lightning") is not None
)
_pl = import_extra("lightning.pytorch" if _USES_LIGHTNING else "pytorch_lightning", "lightning")
_plugins = import_extra(f"{_pl.__name__}.plugins", "lightning")
_strategies = import_extra(f"{_pl.__name__}.strategies", "lightning")
_overrides = import_extra(f"{_pl.__name__}.utilities.model_helpers", "lightning")
_optimizers = import_extra(f"{_pl.__name__}.core.optimizer", "lightning")


class MezzoPrecision(PrecisionPlugin, _plugins.Precision):  # type: ignore[misc,name-defined]
    """A precision plugin of Lightning's Trainer that trains with a policy of mezzo.

    The LightningModule is decorated together with its optimizers when training starts, and is a
    plain float32 module with the exact weights again when it ends. Steps run in the policy's
    autocast region. In float16 the loss is scaled, and steps with non-finite gradients are skipped:
    `opt.step()` returns a `mezzo.StepResult` in manual optimization, and `plugin.scaler.state()`
    counts them. Checkpoints hold float32 weights, the master weights and the loss scale; a resumed
    run continues exactly.

    In manual optimization a `mezzo.TrainStep` of `trainer.strategy.model` runs whole steps, as CUDA
    graphs where possible; pass `clip_norm=` here. `opt.step()` then only counts the step.

    `Trainer(gradient_clip_val=...)` works with every optimizer, fused ones too. Runs on one device,
    with the strategy DDP, and with ModelParallelStrategy for modules that are sharded by FSDP2.

    Args:
        policy: A level such as `"O2"`, a `mezzo.Policy`, or the path of a TOML file.
        scaler: A `mezzo.GradScaler`; False for none. By default one is created for float16.
        **options: Further arguments of `mezzo.decorate`, such as `dtype=` or `keep_full=`.

    >>> plugin = MezzoPrecision("O2", dtype="bfloat16")
    >>> plugin.precision
    'mezzo-O2'
    """

    # -- setup and teardown ------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Decorate a module for DDP, which wraps it before Lightning creates its optimizers.

        They are created here instead, and Lightning uses them.
        """
        trainer: Any = module.trainer
        strategy = trainer.strategy
        _refuse_strategy(strategy)
        # Lightning moves the module to the CPU before it calls the plugin's `teardown`.
        vars(strategy)["teardown"] = partial(self._undecorate_before_teardown, strategy)
        if trainer.state.fn == "fit" and isinstance(strategy, _strategies.DDPStrategy):
            strategy.model_to_device()
            strategy.setup_optimizers(trainer)
            self._shared.decorate([module], strategy.optimizers)
            vars(strategy)["setup_optimizers"] = lambda _trainer: None
        return module

    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> tuple[Any, Any, Any]:
        """Decorate the module with its optimizers, unless it is to be evaluated."""
        module = model.module if isinstance(model, DistributedDataParallel) else model
        # For the next run.
        vars(module.trainer.strategy).pop("setup_optimizers", None)
        if module.trainer.state.fn == "fit":
            if self._shared.level in CASTS:
                _warn_of_averages(module.trainer.callbacks, self._shared.level.value)
            self._shared.decorate([module], optimizers)
        else:
            self._shared.evaluate(module)
        return model, optimizers, lr_schedulers

    def _undecorate_before_teardown(self, strategy: Any) -> None:
        for name in ("teardown", "setup_optimizers"):
            vars(strategy).pop(name, None)
        self._shared.update()
        self._shared.undecorate()
        strategy.teardown()

    # -- steps -------------------------------------------------------------------------------------

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the autocast region that steps run in."""
        return self._shared.autocast()

    def convert_input(self, data: Any) -> Any:
        """Cast a batch at O3."""
        return self._shared.cast_inputs(data)

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        """Scale a loss."""
        return super().pre_backward(self._shared.scale(tensor), module)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, clip, and step; return a `StepResult` if the loss is scaled."""
        if not model.automatic_optimization and self._shared.is_stepped(optimizer):
            return None
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        if model.automatic_optimization and (result is None or self._shared.has_stepped(optimizer)):
            # `training_step` returned None, or a callback such as SWA skips the backward pass.
            self._after_closure(model, optimizer)
            return None
        if _reads_gradients(model):
            self._shared.unscale_(optimizer)
        self._after_closure(model, optimizer)
        return self._shared.step(optimizer, **kwargs)

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, *args: Any, **kwargs: Any
    ) -> None:
        """Clip gradients, after they are unscaled."""
        if clip_val > 0:
            self._shared.unscale_(_plain(optimizer))
        super().clip_gradients(optimizer, clip_val, *args, **kwargs)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler."""
        return self._shared.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the scaler."""
        self._shared.load_state_dict(state_dict)


def _plain(optimizer: Any) -> Optimizer:
    is_wrapped = isinstance(optimizer, _optimizers.LightningOptimizer)
    plain: Optimizer = optimizer.optimizer if is_wrapped else optimizer
    return plain


def _reads_gradients(model: Any) -> bool:
    """Return whether a hook or a callback may read gradients before the step.

    Unscaled gradients of 16-bit parameters take 4 bytes for each element; the step itself does not
    need them.
    """
    hooks = ("on_before_optimizer_step", "configure_gradient_clipping")
    return any(_overrides.is_overridden(hook, model) for hook in hooks) or any(
        type(callback).on_before_optimizer_step is not _pl.Callback.on_before_optimizer_step
        for callback in model.trainer.callbacks
    )


def _warn_of_averages(callbacks: list[Any], level: str) -> None:
    kinds = ("StochasticWeightAveraging", "WeightAveraging")
    averaging = tuple(
        getattr(_pl.callbacks, kind) for kind in kinds if hasattr(_pl.callbacks, kind)
    )
    for callback in callbacks:
        if isinstance(callback, averaging):
            warnings.warn(
                f"{type(callback).__name__} averages the 16-bit weights of {level}, and rounds the"
                " averages to 16 bits when it writes them to the module. Use 'O1', or average the"
                " exact weights: create mezzo.EMA(self) in on_train_start, and update it in"
                " on_train_batch_end.",
                UserWarning,
                stacklevel=3,
            )


def _refuse_strategy(strategy: Any) -> None:
    supported = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
    if not isinstance(strategy, tuple(getattr(_strategies, name) for name in supported)):
        raise UnsupportedError(
            f"MezzoPrecision does not run with {type(strategy).__name__}. Use one device,"
            " strategy='ddp', or ModelParallelStrategy with fully_shard in configure_model()."
        )
