"""State of Apex's `amp`: options of its opt levels, loss scalers, `master_params`."""

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
    """The state of amp; `opt_properties` is there once `initialize` was called. It holds no model and no optimizer, so that none is kept alive by it."""

    opt_properties: Properties
    loss_scalers: list[LossScaler]
    handle: Handle | None

    def __init__(self) -> None:
        self.hard_override = False
        """Whether what is refused is only printed."""
        self.allow_incoming_model_not_fp32 = False
        """Whether models may come in 16 bits."""
        self.verbosity = 1
        """0 prints nothing."""
        self.loss_scalers = []
        self.handle = None
        """The casts of O1, while they are on."""


_amp_state = AmpState()


def warn_or_err(message: str) -> None:
    """Refuse, or only say so where somebody has overridden that."""
    if not _amp_state.hard_override:
        raise RuntimeError(message)
    print("Warning:  " + message)  # noqa: T201 - as Apex tells it


# Apex's call shape.
def maybe_print(message: str, rank0: bool = False) -> None:
    """Print unless `verbosity` is 0; of several processes only the first, where `rank0` says so."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if _amp_state.verbosity > 0 and not (
        rank0 and distributed and torch.distributed.get_rank() > 0
    ):
        print(message)  # noqa: T201 - Apex's users know these lines


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The float32 parameters that an optimizer updates, with unscaled gradients after `scale_loss`: what to clip.

    Where parameters are 16-bit they share memory with the exact weights, and their gradients are
    those of the parameters: read the one and clip the other. What is written to their values is not
    taken over.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> [parameter is weight for parameter in master_params(torch.optim.SGD([weight], lr=0.1))]
    [True]
    """
    bound = optimizer_binding(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield (
                parameter
                if bound is None or parameter not in bound.masters
                else _stand_in(parameter, bound.masters)
            )


def _stand_in(parameter: torch.Tensor, masters: MasterWeights) -> torch.Tensor:
    beside = masters.companion_tensor(parameter)
    if beside is None:
        return parameter
    value = masters.read(parameter) if masters.resync(parameter) else beside
    stand_in = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    stand_in.grad_dtype = None
    stand_in.grad = parameter.grad
    return stand_in


@dataclass(frozen=True)
class Properties:
    """What a level comes to."""

    enabled: bool = False
    """Whether amp does anything."""
    opt_level: str | None = None
    cast_model_type: torch.dtype | bool | None = None
    """What parameters and inputs are cast to; None and False leave them."""
    patch_torch_functions: bool = False
    """Whether ops are cast by Apex's lists, inside the models and outside."""
    keep_batchnorm_fp32: bool | None = None
    """Whether batch norms stay float32 where parameters are cast."""
    master_weights: bool | None = None
    """Whether 16-bit parameters have float32 masters."""
    loss_scale: float | str = 1.0
    """A number, or "dynamic"."""

    @property
    def options(self) -> dict[str, Any]:
        """All of them by name."""
        return asdict(self)


@dataclass(frozen=True)
class OptLevel:
    """A level, and what it is for."""

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


def level_of(opt_level: object) -> OptLevel:
    """A level by its name."""
    level = OPT_LEVELS.get(opt_level) if isinstance(opt_level, str) else None
    if level is None:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level}."
            f" {choices(repr(name) for name in reversed(OPT_LEVELS))} The prefix is the letter O,"
            " not the number zero."
        )
    return level


def overridden(level: Properties, **given: Any) -> Properties:
    """A level with what the user says otherwise, as far as both go together; None says nothing."""
    said = {name: value for name, value in given.items() if value is not None}
    if level.opt_level == "O1":
        _refuse_at_o1(said)
    elif said.get("patch_torch_functions"):
        warn_or_err(
            "patch_torch_functions=True belongs to opt_level='O1', got it with"
            f" {level.opt_level!r}. Choose opt_level='O1', or leave it out."
        )
    if "cast_model_type" in said:
        _refuse_dtype(said["cast_model_type"])
    if "keep_batchnorm_fp32" in said:
        said["keep_batchnorm_fp32"] = _flag(said["keep_batchnorm_fp32"])
    if "loss_scale" in said:
        said["loss_scale"] = _scale(said["loss_scale"])
    return replace(level, **said)


def _refuse_dtype(word: Any) -> None:
    if word is not False and word not in (*HALF_DTYPES, torch.float32):
        raise ValueError(
            f"cast_model_type={word!r}: it is torch.float16, torch.bfloat16, torch.float32, or"
            " False to cast nothing."
        )


def _refuse_at_o1(said: dict[str, Any]) -> None:
    cast = said.get("cast_model_type")
    if cast not in (None, False, torch.float32):
        warn_or_err(
            "With opt_level='O1' parameters stay FP32 and casts are inserted around ops, so"
            f" cast_model_type={cast} makes no sense. Use opt_level='O2' or 'O3'."
        )
    if "keep_batchnorm_fp32" in said:
        warn_or_err(
            "With opt_level='O1' batch norms run in FP32 anyway: keep_batchnorm_fp32 should be"
            f" None, got {said['keep_batchnorm_fp32']!r}."
        )
    if "master_weights" in said:
        warn_or_err(
            f"master_weights={said['master_weights']!r} makes no sense with opt_level='O1', whose"
            " parameters are FP32 themselves. Leave it out."
        )


def _scale(word: Any) -> float | str:
    try:
        scale = word if word == "dynamic" else float(word)
    except (TypeError, ValueError):
        scale = 0.0
    if isinstance(scale, str) or is_scale(scale):
        return scale
    raise ValueError(
        f"loss_scale={word!r}: it is a positive number, a string of one such as '128.0', or"
        " 'dynamic'."
    )


def _flag(word: object) -> bool:
    if word in (True, False):
        return bool(word)
    if word in ("True", "False"):
        return word == "True"
    raise AssertionError(
        f"keep_batchnorm_fp32={word!r}: it is True, False, the string 'True' or 'False', or None."
    )
