"""`MezzoFabricPrecision`: mezzo as the precision plugin of Lightning Fabric.

from mezzo.integrations.fabric import MezzoFabricPrecision

fabric = Fabric(plugins=MezzoFabricPrecision("O2", dtype="float16"))
model, optimizer = fabric.setup(model, optimizer)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from types import FrameType
from typing import Any

import torch
from torch import nn

from mezzo._errors import UnsupportedError
from mezzo.integrations.precision import Optimizer, PrecisionPlugin, import_extra, is_trained
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.plan import PolicyArg
from mezzo.scaling.gradients import parameters
from mezzo.scaling.mesh import named_shards
from mezzo.step.components import ScalerArg

_USES_LIGHTNING = "lightning" in sys.modules or (
    "lightning_fabric" not in sys.modules and find_spec("lightning") is not None
)
_fabric = import_extra("lightning.fabric" if _USES_LIGHTNING else "lightning_fabric", "lightning")
_plugins = import_extra(f"{_fabric.__name__}.plugins", "lightning")
_strategies = import_extra(f"{_fabric.__name__}.strategies", "lightning")


class MezzoFabricPrecision(PrecisionPlugin, _plugins.Precision):  # type: ignore[misc,name-defined]
    """A precision plugin of Lightning Fabric that trains with a policy of mezzo.

    `fabric.setup(model, optimizer)` decorates the two together; a model that is decorated already
    keeps its policy. `fabric.backward` scales the loss in float16, and `optimizer.step()` returns a
    `mezzo.StepResult`. `fabric.clip_gradients` works with every optimizer, fused ones too; in
    float16 pass `error_if_nonfinite=False` to it, so that a step can be skipped instead.

    Save the plugin with the model: `fabric.save(path, {"model": model, "optimizer": optimizer,
    "precision": plugin})`. It holds the loss scale. Runs on one device, with the strategy DDP, and
    with ModelParallelStrategy for models that are sharded by FSDP2: there call `setup_module`, then
    create the optimizer and call `setup_optimizers`, which decorates.

    `mezzo.TrainStep(model, loss_fn, optimizer)` of what `setup` returned runs whole steps, as CUDA
    graphs where possible, with the same scaler; pass `clip_norm=` here.

    Args:
        policy: A level such as `"O2"`, a `mezzo.Policy`, or the path of a TOML file.
        scaler: A `mezzo.GradScaler`; False for none. By default one is created for float16.
        **options: Further arguments of `mezzo.decorate`, such as `dtype=` or `keep_full=`.

    >>> plugin = MezzoFabricPrecision("O2", dtype="bfloat16")
    >>> plugin.precision
    'mezzo-O2'
    """

    def __init__(
        self, policy: PolicyArg = "O2", *, scaler: ScalerArg = None, **options: Any
    ) -> None:
        super().__init__(policy, scaler=scaler, **options)
        self._sharded: list[nn.Module] = []
        """Models that a strategy shards."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Decorate a model with the optimizers that were passed to `fabric.setup` with it."""
        # Fabric passes the model only, and a strategy such as DDP wraps it right afterwards.
        fabric, optimizers, moves = _setup_call(sys._getframe(1))
        if fabric is not None:
            _refuse_strategy(fabric.strategy)
            if isinstance(fabric.strategy, _strategies.ModelParallelStrategy):
                self._decorate_with_shards(fabric, module)
                return module
            if moves and decoration_of(module) is None:
                fabric.to_device(module)
        is_alone = not optimizers and decoration_of(module) is None
        if not is_alone or self._shared.trains_alone(module):
            self._shared.decorate([module], optimizers)
        elif is_trained(module):
            raise UnsupportedError(
                f"fabric.setup(model) without its optimizer, and {self._shared.level.value} needs"
                " both: the optimizer steps master weights. Call fabric.setup(model, optimizer);"
                " or mezzo.decorate(model, optimizer, ...) first; for inference model.eval()."
            )
        else:
            self._shared.evaluate(module)
        return module

    def _decorate_with_shards(self, fabric: Any, module: nn.Module) -> None:
        """Decorate a model that the strategy shards next, once its optimizers are set up.

        They are created from the shards, and Fabric does not pass them to the plugin.
        """
        if decoration_of(module) is not None:
            raise UnsupportedError(
                "The model is decorated already, and ModelParallelStrategy shards it now. Leave out"
                " mezzo.decorate: fabric.setup_optimizers decorates the model after it is sharded."
            )
        self._shared.evaluate(module)
        self._sharded.append(module)

        def setup_optimizers(*optimizers: Optimizer) -> Any:
            self._shared.decorate(_models_of(optimizers, self._sharded), optimizers)
            return type(fabric).setup_optimizers(fabric, *optimizers)

        vars(fabric)["setup_optimizers"] = setup_optimizers

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the autocast region that the model runs in."""
        return self._shared.autocast()

    def convert_input(self, data: Any) -> Any:
        """Cast inputs at O3."""
        return self._shared.cast_inputs(data)

    def convert_output(self, data: Any) -> Any:
        """Cast outputs to float32, as Fabric's own plugins do: the loss is computed outside."""
        return self._shared.cast_outputs(data)

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Scale a loss and run its backward pass."""
        super().backward(self._shared.scale(tensor), model, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step an optimizer; return a `StepResult` if the loss is scaled."""
        return self._shared.step(optimizer, **kwargs)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale gradients before they are clipped."""
        self._shared.unscale_(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler."""
        return self._shared.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the scaler."""
        self._shared.load_state_dict(state_dict)


def _setup_call(frame: FrameType) -> tuple[Any, list[Optimizer], bool]:
    """Return Fabric, the optimizers, and whether the model is moved, of a call of its `setup`."""
    values = frame.f_locals
    if not isinstance(values.get("self"), _fabric.Fabric):
        return None, [], False
    return values["self"], list(values.get("optimizers", ())), bool(values.get("move_to_device"))


def _models_of(optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the models with a parameter of an optimizer."""
    held = {id(parameter) for optimizer in optimizers for parameter in parameters(optimizer)}
    found = [
        model for model in models if any(id(shard) in held for _, shard in named_shards(model))
    ]
    if not found:
        raise UnsupportedError(
            "The optimizer has no parameter of a model that is sharded. Create it after"
            " model = fabric.setup_module(model), from model.parameters()."
        )
    return found


def _refuse_strategy(strategy: Any) -> None:
    supported = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
    if not isinstance(strategy, tuple(getattr(_strategies, name) for name in supported)):
        raise UnsupportedError(
            f"MezzoFabricPrecision does not run with {type(strategy).__name__}. Use one device,"
            " strategy='ddp', or ModelParallelStrategy with fully_shard in its parallelize_fn."
        )
