"""Read and check the arguments of `decorate`: models and optimizers."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from mezzo._errors import PolicyError, UnsupportedError
from mezzo._torch import loaded
from mezzo.scaling.gradients import parameters
from mezzo.scaling.mesh import any_sharded, is_sharded, named_shards

Optimizer = torch.optim.Optimizer
Models = nn.Module | Sequence[Any]
"""A model, or a list of models, which may be nested."""
Optimizers = Optimizer | Sequence[Any]
"""An optimizer, or a list of them."""

_FSDP1 = "FullyShardedDataParallel"
_WRAPPERS = {
    "DistributedDataParallel": "then DistributedDataParallel(model)",
    "DataParallel": (
        "then DistributedDataParallel(model): DataParallel runs copies of the model that would call"
        " the original's forward"
    ),
    _FSDP1: (
        "(FSDP1), which flattens parameters: masters and names cannot follow. Use FSDP2 instead:"
        " torch.distributed.fsdp.fully_shard(model), then create the optimizer, then"
        " mezzo.decorate(model, optimizer, ...)."
    ),
    "_FabricModule": "then fabric.setup(model, optimizer)",
}
"""Name of a wrapper class of torch or Lightning → what to do after `decorate`."""
_DDP = DistributedDataParallel
_MARK = "mezzo"
_WRAPPING_PACKAGES = ("torch", "lightning", "lightning_fabric")


@dataclass(frozen=True, eq=False)
class Targets:
    """Models and optimizers that are decorated together."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]

    @property
    def device(self) -> str:
        """The device type of the models' parameters; raises `UnsupportedError` if there are two."""
        types = dict.fromkeys(
            parameter.device.type
            for model in self.models
            for parameter in model.parameters()
            if parameter.is_floating_point()
        )
        if len(types) > 1:
            raise UnsupportedError(
                f"The parameters are on {' and '.join(types)}, and a policy runs on one device"
                " type. Move the model to one: model.to(...)."
            )
        return next(iter(types))


def read_targets(models: Any, optimizers: Any) -> Targets:
    """Read models and optimizers; raise an error for those that cannot be decorated."""
    targets = Targets(models_of(models), optimizers_of(optimizers))
    for model in targets.models:
        _refuse_wrapped(model)
        _refuse_without_values(model)
        _refuse_without_floats(model)
    _check_parameters(targets)
    return targets


def models_of(argument: Any) -> tuple[nn.Module, ...]:
    """Return the models in an argument, each once; of a compiled model the original."""
    models = tuple(dict.fromkeys(uncompiled(model) for model in flat(argument)))
    for model in models:
        if not isinstance(model, nn.Module):
            is_large = isinstance(model, torch.optim.Optimizer | torch.Tensor)
            shown = type(model).__name__ if is_large else repr(model)
            raise PolicyError(
                f"model={shown} is not a torch.nn.Module. Pass the model, or a list of models."
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{type(model).__name__} is scripted, and its forward cannot be replaced. Pass the"
                " model that was scripted."
            )
    if not models:
        raise PolicyError(
            f"model={argument!r} holds no model. Pass the model, or a list of models."
        )
    return models


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel or DataParallel, which may be compiled there.

    A checkpoint of it can be loaded with and without the wrapper.
    """
    if isinstance(model, DistributedDataParallel | DataParallel):
        inner: nn.Module = uncompiled(model.module)
        return inner
    return model


def without_fabric(models: Any) -> Any:
    """Return models without Fabric's wrappers: as they were, or in DistributedDataParallel.

    The outputs of a wrapper refuse every backward pass but that of `fabric.backward`.
    """
    if isinstance(models, list | tuple):
        return [without_fabric(model) for model in models]
    return models._forward_module if _is_wrapper(type(models), "_FabricModule") else models


def is_inside_ddp(models: Iterable[nn.Module]) -> bool:
    """Return whether a DistributedDataParallel wrapper has a parameter of the models.

    A wrapper leaves no mark on what it wraps, but it keeps the autograd nodes that accumulate
    gradients. Where such a node is kept, all objects of the process are searched for a wrapper,
    which takes 30 ms for each 100 000.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    trained = [
        parameter for model in models for parameter in model.parameters() if parameter.requires_grad
    ]
    if not keeps_autograd_graph(trained):
        return False
    # A deleted wrapper is in reference cycles, and found until it is collected.
    gc.collect()
    own = set(map(id, trained))
    # Not `isinstance`, which is slow for an abstract class and runs the code of proxies.
    wrappers: list[Any] = [
        candidate for candidate in gc.get_objects() if _DDP in type(candidate).__mro__
    ]
    return any(id(parameter) in own for wrapper in wrappers for parameter in wrapper.parameters())


def keeps_autograd_graph(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether an autograd graph of these parameters is in memory, such as that of a loss.

    It holds the nodes that accumulate gradients, as DistributedDataParallel does too. They run on
    the stream on which they were created, and a capture on another one that uses them fails.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> loss = weight * 2
    >>> keeps_autograd_graph([weight])
    True
    >>> del loss
    >>> keeps_autograd_graph([weight])
    False
    """
    return any(_keeps_node(parameter) for parameter in parameters if parameter.requires_grad)


def _keeps_node(parameter: torch.Tensor) -> bool:
    """Return whether the node of a parameter is the same if it is asked for twice."""
    _metadata(parameter)[_MARK] = True
    return _metadata(parameter).pop(_MARK, None) is not None


def _metadata(parameter: torch.Tensor) -> Any:
    """Return the dictionary of the node that accumulates the gradients of a parameter."""
    return get_gradient_edge(parameter).node.metadata


def optimizers_of(argument: Any) -> tuple[Optimizer, ...]:
    """Return the optimizers in an argument, each once."""
    optimizers = () if argument is None else tuple(dict.fromkeys(flat(argument)))
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            hint = (
                f" A policy is the third argument: policy={optimizer!r}."
                if isinstance(optimizer, str)
                else ""
            )
            raise PolicyError(
                f"optimizer={optimizer!r} is not a torch.optim.Optimizer. Pass the optimizer, a"
                f" list of them, or None.{hint}"
            )
    return optimizers


def flat(argument: Any) -> Iterable[Any]:
    """Yield the items of a nested list, or the argument itself if it is not a list."""
    if isinstance(argument, list | tuple):
        for item in argument:
            yield from flat(item)
    else:
        yield argument


def uncompiled(model: Any) -> Any:
    """Return the model that `torch.compile` wrapped, or the model itself."""
    # Only if it is imported already: importing the compiler takes a second.
    compiled = loaded("OptimizedModule")
    return model._orig_mod if compiled is not None and isinstance(model, compiled) else model


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for base in type(module).__mro__:
            if base.__name__ in _WRAPPERS and _is_wrapper(base, base.__name__):
                where = f"The submodule {name!r}" if name else "The model"
                if base.__name__ == _FSDP1:
                    raise UnsupportedError(f"{where} is wrapped by {_FSDP1} {_WRAPPERS[_FSDP1]}")
                raise UnsupportedError(
                    f"{where} is wrapped by {base.__name__} already, which keeps references to its"
                    " parameters and forward. First decorate, then wrap: mezzo.decorate(model,"
                    f" optimizer, ...), {_WRAPPERS[base.__name__]}."
                )
        if "_original_forward" in module.__dict__:
            raise UnsupportedError(
                f"The forward of {f'the submodule {name!r}' if name else 'the model'} runs in an"
                " autocast region of Accelerate, where the policy is not used. First decorate, then"
                " wrap: mezzo.decorate(model, optimizer, ...), then accelerator.prepare(model,"
                " optimizer)."
            )


def _is_wrapper(kind: type, name: str) -> bool:
    return any(
        base.__name__ == name and base.__module__.partition(".")[0] in _WRAPPING_PACKAGES
        for base in kind.__mro__
    )


def _refuse_without_floats(model: nn.Module) -> None:
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})
        what = f"only parameters of {', '.join(dtypes)}" if dtypes else "no parameters"
        raise PolicyError(
            f"{type(model).__name__} has {what}: there is nothing to compute in 16 bits. Pass a"
            " model with floating-point parameters."
        )


def _refuse_without_values(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UnsupportedError(
                f"The parameter {name!r} is lazy and has no shape yet. Run the model on one batch"
                " first, then decorate."
            )
        if parameter.is_meta:
            raise UnsupportedError(
                f"The parameter {name!r} is on the meta device and has no values. Materialize the"
                " model first: call model.to_empty(device=...) and load its weights."
            )
        if is_sharded(parameter) and parameter.device_mesh.device_type != parameter.device.type:
            raise UnsupportedError(
                f"The parameter {name!r} is a shard on {parameter.device.type}, and computes on"
                f" another device: CPUOffloadPolicy is not supported. Leave offload_policy out of"
                " fully_shard(...)."
            )


def _check_parameters(targets: Targets) -> None:
    """Raise `PolicyError` unless each optimizer has parameters of the models that no other has."""
    of_models = {id(parameter) for model in targets.models for _, parameter in named_shards(model)}
    owners: dict[int, Optimizer] = {}
    for optimizer in targets.optimizers:
        own = parameters(optimizer)
        unknown = [parameter for parameter in own if id(parameter) not in of_models]
        if unknown:
            raise PolicyError(
                f"{type(optimizer).__name__} has {len(own)} parameters, of which {len(unknown)} are"
                f" not the model's (the first of shape {tuple(unknown[0].shape)})."
                f" {_unknown_remedy(targets, own, unknown)}"
            )
        for parameter in own:
            if owners.setdefault(id(parameter), optimizer) is not optimizer:
                raise PolicyError(
                    "A parameter is in two of the optimizers, and its master weight can be updated"
                    " by one only. Pass each parameter to one optimizer."
                )


def _unknown_remedy(targets: Targets, own: list[torch.Tensor], unknown: list[torch.Tensor]) -> str:
    """Return what to do about parameters of an optimizer that no model has."""
    is_sharded = any(any_sharded(model.parameters()) for model in targets.models)
    if is_sharded and not any_sharded(unknown):
        return (
            "Sharding replaces the parameters of a model: create the optimizer after"
            " fully_shard(model)."
        )
    every = (
        "every model that it updates: decorate([model, other], optimizer). A parameter of no module"
        " is passed as nn.ParameterList([parameter])."
    )
    if len(unknown) == len(own):
        return f"Create it with model.parameters() of this model, or pass {every}"
    return f"Pass {every}"
