"""`apex.amp._amp_state`: options of the opt levels, loss scalers, `master_params`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mezzo._dtypes import HALF_DTYPES
from mezzo._errors import choices
from mezzo.optim.binding import optimizer_binding
from mezzo.optim.master_weights import MasterWeights
from mezzo.scaling.scale_state import is_scale

if TYPE_CHECKING:
    from mezzo.compat.apex.amp._casts import Handle
    from mezzo.compat.apex.amp._scale_loss import LossScaler


class AmpState:
    """Process-wide state of amp; `opt_properties` exists once `initialize` was called.

    Holds no reference to a model or optimizer, so it keeps none alive.
    """

    opt_properties: Properties
    loss_scalers: list[LossScaler]
    handle: Handle | None

    def __init__(self) -> None:
        self.hard_override = False
        """Whether contradictory options are printed instead of raised."""
        self.allow_incoming_model_not_fp32 = False
        """Whether `initialize` accepts models with 16-bit parameters."""
        self.verbosity = 1
        """How much is printed; 0 prints nothing."""
        self.loss_scalers = []
        self.handle = None
        """The handle of O1's casts while they are active."""

    def initialize(self, properties: Properties, scalers: list[LossScaler]) -> None:
        """Replace the options and the loss scalers."""
        self.opt_properties, self.loss_scalers = properties, scalers

    def set_verbosity(self, verbosity: int) -> None:
        """Set how much is printed."""
        self.verbosity = verbosity

    def set_handle(self, handle: Handle | None) -> None:
        """Set the handle of O1's casts; None if they are not active."""
        self.handle = handle


_amp_state = AmpState()


def warn_or_err(message: str) -> None:
    """Raise `RuntimeError`, or print the message if `hard_override` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(message)
    print("Warning:  " + message)  # noqa: T201 - Apex prints it


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print unless `verbosity` is 0; with `rank0`, only in the process of rank 0."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if _amp_state.verbosity > 0 and not (
        rank0 and distributed and torch.distributed.get_rank() > 0
    ):
        print(message)  # noqa: T201 - Apex prints it


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the float32 tensors that an optimizer updates, whose `.grad` can be clipped.

    After `scale_loss` their gradients are unscaled. The yielded master of a 16-bit parameter shares
    memory with its master weight and has the parameter's gradient. Writing to its value is not
    supported.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> [parameter is weight for parameter in master_params(torch.optim.SGD([weight], lr=0.1))]
    [True]
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"amp.master_params takes an optimizer, got {type(optimizer).__name__}. Pass the"
            " optimizer that amp.initialize returned."
        )
    binding = optimizer_binding(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if binding is None or parameter not in binding.masters:
                yield parameter
            else:
                yield _master_with_gradient(parameter, binding.masters)


def _master_with_gradient(parameter: torch.Tensor, masters: MasterWeights) -> torch.Tensor:
    companion = masters.companion_tensor(parameter)
    if companion is None:
        return parameter
    value = masters.read(parameter) if masters.resync(parameter) else companion
    master = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    master.grad_dtype = None
    master.grad = parameter.grad
    return master


@dataclass(frozen=True)
class Properties:
    """Options of an opt level, after the user's overrides."""

    enabled: bool = False
    """Whether amp is enabled."""
    opt_level: str | None = None
    cast_model_type: torch.dtype | bool | None = None
    """Dtype of parameters and inputs; None and False cast nothing."""
    patch_torch_functions: bool = False
    """Whether ops are cast by Apex's op lists, inside the models and outside."""
    keep_batchnorm_fp32: bool | None = None
    """Whether batch norms stay float32 when parameters are cast."""
    master_weights: bool | None = None
    """Whether 16-bit parameters have float32 master weights."""
    loss_scale: float | str = 1.0
    """A number, or "dynamic"."""

    @property
    def options(self) -> dict[str, Any]:
        """All options by name."""
        return asdict(self)


@dataclass(frozen=True)
class OptLevel:
    """An opt level: its one-line description and its options."""

    brief: str
    properties: Properties


OPT_LEVELS = {
    "O3": OptLevel(
        "O3:  Everything float16, no masters.",
        Properties(True, "O3", torch.float16, False, False, False, 1.0),
    ),
    "O2": OptLevel(
        "O2:  float16 parameters with float32 masters; batch norms stay float32.",
        Properties(True, "O2", torch.float16, False, True, True, "dynamic"),
    ),
    "O1": OptLevel(
        "O1:  float32 parameters; ops are cast by lists.",
        Properties(True, "O1", None, True, None, None, "dynamic"),
    ),
    "O0": OptLevel(
        "O0:  Everything float32.", Properties(True, "O0", torch.float32, False, None, False, 1.0)
    ),
}


def find_opt_level(opt_level: object) -> OptLevel:
    """Return the opt level of this name; raise Apex's `RuntimeError` if it is unknown."""
    level = OPT_LEVELS.get(opt_level) if isinstance(opt_level, str) else None
    if level is None:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level}."
            f" {choices(repr(name) for name in reversed(OPT_LEVELS))} The prefix is the letter O,"
            " not the number zero."
        )
    return level


def apply_overrides(level: Properties, **overrides: Any) -> Properties:
    """Return the level's options with the user's overrides; None keeps the default.

    Overrides that contradict the level raise (see `warn_or_err`).
    """
    options = {name: value for name, value in overrides.items() if value is not None}
    if level.opt_level == "O1":
        _check_o1_overrides(options)
    elif options.get("patch_torch_functions"):
        warn_or_err(
            "patch_torch_functions=True is allowed with opt_level='O1' only, got opt_level="
            f"{level.opt_level!r}. Use opt_level='O1', or leave patch_torch_functions out."
        )
    if "cast_model_type" in options:
        _check_model_dtype(options["cast_model_type"])
    if "keep_batchnorm_fp32" in options:
        options["keep_batchnorm_fp32"] = _parse_bool(options["keep_batchnorm_fp32"])
    if "loss_scale" in options:
        options["loss_scale"] = _parse_loss_scale(options["loss_scale"])
    return replace(level, **options)


def _check_o1_overrides(options: dict[str, Any]) -> None:
    cast = options.get("cast_model_type")
    if cast not in (None, False, torch.float32):
        warn_or_err(
            "With opt_level='O1' parameters stay FP32 and casts are inserted around ops, so"
            f" cast_model_type={cast} makes no sense. Use opt_level='O2' or 'O3'."
        )
    if "keep_batchnorm_fp32" in options:
        warn_or_err(
            "With opt_level='O1' batch norms run in FP32 anyway: keep_batchnorm_fp32 should be"
            f" None, got {options['keep_batchnorm_fp32']!r}."
        )
    if "master_weights" in options:
        warn_or_err(
            f"master_weights={options['master_weights']!r} makes no sense with opt_level='O1',"
            " whose parameters are FP32 themselves. Leave it out."
        )


def _check_model_dtype(dtype: Any) -> None:
    if dtype is not False and dtype not in (*HALF_DTYPES, torch.float32):
        raise ValueError(
            "cast_model_type must be torch.float16, torch.bfloat16, torch.float32, or False to cast"
            f" nothing; got {dtype!r}."
        )


def _parse_loss_scale(value: Any) -> float | str:
    try:
        scale = value if value == "dynamic" else float(value)
    except (TypeError, ValueError):
        scale = 0.0
    if isinstance(scale, str) or is_scale(scale):
        return scale
    raise ValueError(
        "loss_scale must be a positive number, such a number as a string ('128.0'), or 'dynamic';"
        f" got {value!r}."
    )


def _parse_bool(value: object) -> bool:
    if value in (True, False):
        return bool(value)
    if value in ("True", "False"):
        return value == "True"
    raise AssertionError(
        "keep_batchnorm_fp32 must be True, False, the string 'True' or 'False', or None; got"
        f" {value!r}."
    )
