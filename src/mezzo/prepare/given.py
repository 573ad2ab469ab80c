"""What a user hands over: models and optimizers, one or several, each refused with one clear error where it cannot be prepared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from mezzo._errors import PolicyError, UnsupportedError
from mezzo._torch import loaded
from mezzo.scaling.gradients import parameters

Optimizer = torch.optim.Optimizer
Models = nn.Module | Sequence[Any]
"""A model, or a list of models, nested as you like."""
Optimizers = Optimizer | Sequence[Any]
"""An optimizer, or a list of them."""

_SHARDED = (
    "at O1 wrap afterwards; at O2 leave 16-bit parameters to FSDP's own mixed precision, whose float32 shards are the masters: ours cannot follow into shards"
)
_WRAPPERS = {
    "DistributedDataParallel": "then DistributedDataParallel(model)",
    "DataParallel": "then DistributedDataParallel(model): DataParallel runs copies of the model that would call the original's forward",
    "FullyShardedDataParallel": _SHARDED,
    "FSDPModule": _SHARDED,
    "_FabricModule": "then fabric.setup(model, optimizer)",
}
"""Classes of torch and Lightning that take a model over, and what to do instead."""
_WRAPPING_PACKAGES = ("torch", "lightning", "lightning_fabric")


@dataclass(frozen=True, eq=False)
class Given:
    """Models and optimizers that can be prepared together."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]

    @property
    def device(self) -> str:
        """The one device type that the models live on."""
        kinds = dict.fromkeys(parameter.device.type for model in self.models for parameter in model.parameters() if parameter.is_floating_point())
        if len(kinds) > 1:
            raise UnsupportedError(f"The parameters live on {' and '.join(kinds)}, and a policy runs on one device type. Move the model to one: model.to(...).")
        return next(iter(kinds))


def read(models: Any, optimizers: Any) -> Given:
    """Read models and optimizers, and refuse what cannot be prepared."""
    given = Given(models_of(models), optimizers_of(optimizers))
    for model in given.models:
        _refuse_wrapped(model)
        _refuse_without_values(model)
        _refuse_without_floats(model)
    _refuse_strangers(given)
    return given


def models_of(words: Any) -> tuple[nn.Module, ...]:
    """The models in what was passed, each once; a compiled one is the model it was compiled from."""
    found = tuple(dict.fromkeys(_original(one) for one in flat(words)))
    for one in found:
        if not isinstance(one, nn.Module):
            raise PolicyError(f"model={one!r} is not a torch.nn.Module. Pass the model, or a list of models.")
        if isinstance(one, torch.jit.ScriptModule):
            raise UnsupportedError(f"{type(one).__name__} is scripted, and its forward cannot be replaced. Pass the model that was scripted.")
    if not found:
        raise PolicyError(f"model={words!r} holds no model. Pass the model, or a list of models.")
    return found


def bare(model: nn.Module) -> nn.Module:
    """The model itself, not what was wrapped around it: a run on one device reads what a run on several wrote."""
    wrapped: nn.Module = model.module if isinstance(model, DistributedDataParallel | DataParallel) else model
    return wrapped


def optimizers_of(words: Any) -> tuple[Optimizer, ...]:
    """The optimizers in what was passed, each once."""
    found = () if words is None else tuple(dict.fromkeys(flat(words)))
    for one in found:
        if not isinstance(one, Optimizer):
            hint = f" A policy is the third argument: policy={one!r}." if isinstance(one, str) else ""
            raise PolicyError(f"optimizer={one!r} is not a torch.optim.Optimizer. Pass the optimizer, a list of them, or None.{hint}")
    return found


def flat(words: Any) -> Iterable[Any]:
    """What a list holds, however nested; what is no list holds itself."""
    if isinstance(words, list | tuple):
        for word in words:
            yield from flat(word)
    else:
        yield words


def _original(model: Any) -> Any:
    # Asked of what is imported: the compiler itself costs a second to import.
    compiled = loaded("OptimizedModule")
    return model._orig_mod if compiled is not None and isinstance(model, compiled) else model


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for base in type(module).__mro__:
            if base.__name__ in _WRAPPERS and base.__module__.partition(".")[0] in _WRAPPING_PACKAGES:
                where = f"Its part {name!r}" if name else "The model"
                raise UnsupportedError(
                    f"{where} is wrapped by {base.__name__} already, which holds on to the model as it is. "
                    f"First decorate, then wrap: mezzo.decorate(model, optimizer, ...), {_WRAPPERS[base.__name__]}."
                )
        if "_original_forward" in module.__dict__:
            raise UnsupportedError(
                f"The forward of {f'the part {name!r}' if name else 'the model'} runs in an autocast region that Accelerate has put into it, where the policy does "
                "not hold. First decorate, then wrap: mezzo.decorate(model, optimizer, ...), then accelerator.prepare(model, optimizer)."
            )


def _refuse_without_floats(model: nn.Module) -> None:
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        kinds = sorted({str(parameter.dtype) for parameter in model.parameters()})
        what = f"only parameters of {', '.join(kinds)}" if kinds else "no parameters"
        raise PolicyError(f"{type(model).__name__} has {what}: there is nothing to compute in 16 bits. Pass a model with floating-point parameters.")


def _refuse_without_values(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UnsupportedError(f"The parameter {name!r} has no shape before the model has seen an input. Run the model on one batch first, then decorate.")
        if parameter.is_meta:
            raise UnsupportedError(
                f"The parameter {name!r} is on the meta device and has no values to keep. Materialise the model first: model.to_empty(device=...) and load its weights."
            )


def _refuse_strangers(given: Given) -> None:
    owned = {id(parameter) for model in given.models for parameter in model.parameters()}
    taken: dict[int, Optimizer] = {}
    for optimizer in given.optimizers:
        own = parameters(optimizer)
        strange = [parameter for parameter in own if id(parameter) not in owned]
        if strange:
            raise PolicyError(
                f"{type(optimizer).__name__} has {len(own)} parameters, of which {len(strange)} are not the model's (the first of shape "
                f"{tuple(strange[0].shape)}). Pass every model that it updates: decorate([model, other], optimizer)."
            )
        for parameter in own:
            if taken.setdefault(id(parameter), optimizer) is not optimizer:
                raise PolicyError("A parameter is in two of the optimizers, and its exact weight can follow only one. Give each parameter to one optimizer.")
