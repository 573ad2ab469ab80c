"""`initialize`, and saving what it set up."""

from __future__ import annotations

from typing import Any

import torch

from mezzo.compat.apex.amp import _checks, _models
from mezzo.compat.apex.amp._amp_state import _amp_state, maybe_print
from mezzo.compat.apex.amp._casts import Handle, stop_casting
from mezzo.compat.apex.amp._properties import OptLevel, Properties, level_of, overridden
from mezzo.compat.apex.amp._scaler import LossScaler


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,  # noqa: FBT001, FBT002 - Apex's call shape
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,  # noqa: FBT001
    patch_torch_functions: bool | None = None,  # noqa: FBT001
    keep_batchnorm_fp32: bool | str | None = None,  # noqa: FBT001
    master_weights: bool | None = None,  # noqa: FBT001
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Make models and optimizers ready for a level; both come back as the objects they were, in lists where lists were passed.

    It may be called again, for other models or for the same ones with a new optimizer: the last call says which casts and scales hold.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = initialize(model, optimizer, opt_level="O2", verbosity=0)
    >>> model.weight.dtype, model(torch.ones(1, 4)).dtype
    (torch.float16, torch.float32)
    """
    _amp_state.verbosity = verbosity
    if not enabled:
        stop_casting()
        _amp_state.opt_properties, _amp_state.loss_scalers = Properties(), []
        return models if optimizers is None else (models, optimizers)
    level = level_of(opt_level)
    if not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"num_losses={num_losses!r}: it is the number of losses, 1 or more.")
    properties = overridden(
        level.properties,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    _tell(level, properties)
    scalers = [LossScaler(properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale) for _ in range(num_losses)]
    _set_up(models, optimizers, properties, cast_model_outputs)
    _amp_state.opt_properties, _amp_state.loss_scalers = properties, scalers
    return models if optimizers is None else (models, optimizers)


def _set_up(models: Any, optimizers: Any, properties: Properties, outputs: torch.dtype | None) -> None:
    several, stepping = _checks.models_of(models), _checks.optimizers_of(optimizers)
    _checks.refuse_wrapped(several)
    _checks.refuse_known(stepping)
    _models.release(several)
    _checks.refuse_half(several)
    stop_casting()
    _models.prepare(several, stepping, properties, outputs)
    if properties.patch_torch_functions:
        _amp_state.handle = Handle(_models.device_of(several), verbose=_amp_state.verbosity > 1)
        _amp_state.handle.last_as_long_as(several)


def _tell(level: OptLevel, properties: Properties) -> None:
    maybe_print(f"Selected optimization level {level.brief}\n\nDefaults for this optimization level are:", True)
    maybe_print(_listed(level.properties), True)
    maybe_print("After processing overrides, optimization options are:", True)
    maybe_print(_listed(properties), True)


def _listed(properties: Properties) -> str:
    return "\n".join(f"{name:22} : {value}" for name, value in properties.options.items())


def state_dict() -> dict[str, dict[str, float | int]]:
    """Every loss's scale and how many steps in a row were good; it belongs into a checkpoint beside model and optimizer."""
    return {f"loss_scaler{index}": {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped} for index, scaler in enumerate(_amp_state.loss_scalers)}


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Take over what `state_dict` gave, after `initialize`. Too many or too few are said, names that mean nothing are refused."""
    scalers = _amp_state.loss_scalers
    unknown = [name for name in state_dict if not name.startswith("loss_scaler")]
    if unknown:
        raise RuntimeError(f"Unexpected key(s) in state_dict: {', '.join(map(repr, unknown))}. Pass what amp.state_dict() returned.")
    if len(state_dict) != len(scalers):
        maybe_print(f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} loss_scalers are used")
    for scaler, entry in zip(scalers, state_dict.values(), strict=False):
        scaler._loss_scale, scaler._unskipped = entry["loss_scale"], entry["unskipped"]
