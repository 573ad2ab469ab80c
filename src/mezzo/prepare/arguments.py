"""Read the models, the optimizers and `keep_full=` that a user passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from mezzo._errors import PolicyError, UnsupportedError, nearest
from mezzo._torch import BatchNorm, loaded
from mezzo.autocasting.module_rules import plan_modules
from mezzo.policy.policy import Policy
from mezzo.policy.types import NORMS, Level, Rule, Selector
from mezzo.scaling.gradients import parameters

Optimizer = torch.optim.Optimizer
Models = nn.Module | Sequence[Any]
"""A model, or a list of models, nested as you like."""
Optimizers = Optimizer | Sequence[Any]
"""An optimizer, or a list of them."""

_SHARDED = (
    "at O1 wrap afterwards; at O2 leave 16-bit parameters to FSDP's own mixed precision, whose"
    " float32 shards are the masters: ours cannot follow into shards"
)
_WRAPPERS = {
    "DistributedDataParallel": "then DistributedDataParallel(model)",
    "DataParallel": (
        "then DistributedDataParallel(model): DataParallel runs copies of the model that would call"
        " the original's forward"
    ),
    "FullyShardedDataParallel": _SHARDED,
    "FSDPModule": _SHARDED,
    "_FabricModule": "then fabric.setup(model, optimizer)",
}
"""Classes of torch and Lightning that take a model over, and what to do instead."""
_WRAPPING_PACKAGES = ("torch", "lightning", "lightning_fabric")


@dataclass(frozen=True, eq=False)
class Targets:
    """Models and optimizers that can be prepared together."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]

    @property
    def device(self) -> str:
        """The one device type that the models live on."""
        kinds = dict.fromkeys(
            parameter.device.type
            for model in self.models
            for parameter in model.parameters()
            if parameter.is_floating_point()
        )
        if len(kinds) > 1:
            raise UnsupportedError(
                f"The parameters live on {' and '.join(kinds)}, and a policy runs on one device"
                " type. Move the model to one: model.to(...)."
            )
        return next(iter(kinds))


def read_targets(models: Any, optimizers: Any) -> Targets:
    """Read models and optimizers, and refuse what cannot be prepared."""
    given = Targets(models_of(models), optimizers_of(optimizers))
    for model in given.models:
        _refuse_wrapped(model)
        _refuse_without_values(model)
        _refuse_without_floats(model)
    _refuse_unknown_parameters(given)
    return given


def models_of(words: Any) -> tuple[nn.Module, ...]:
    """The models in what was passed, each once; a compiled one is the model it was compiled from."""
    found = tuple(dict.fromkeys(_original(one) for one in flat(words)))
    for one in found:
        if not isinstance(one, nn.Module):
            raise PolicyError(
                f"model={one!r} is not a torch.nn.Module. Pass the model, or a list of models."
            )
        if isinstance(one, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{type(one).__name__} is scripted, and its forward cannot be replaced. Pass the"
                " model that was scripted."
            )
    if not found:
        raise PolicyError(f"model={words!r} holds no model. Pass the model, or a list of models.")
    return found


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, not what was wrapped around it: a run on one device reads what a run on several wrote."""
    wrapped: nn.Module = (
        model.module if isinstance(model, DistributedDataParallel | DataParallel) else model
    )
    return wrapped


def optimizers_of(words: Any) -> tuple[Optimizer, ...]:
    """The optimizers in what was passed, each once."""
    found = () if words is None else tuple(dict.fromkeys(flat(words)))
    for one in found:
        if not isinstance(one, Optimizer):
            hint = (
                f" A policy is the third argument: policy={one!r}." if isinstance(one, str) else ""
            )
            raise PolicyError(
                f"optimizer={one!r} is not a torch.optim.Optimizer. Pass the optimizer, a list of"
                f" them, or None.{hint}"
            )
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
            if (
                base.__name__ in _WRAPPERS
                and base.__module__.partition(".")[0] in _WRAPPING_PACKAGES
            ):
                where = f"Its part {name!r}" if name else "The model"
                raise UnsupportedError(
                    f"{where} is wrapped by {base.__name__} already, which holds on to the model as"
                    " it is. First decorate, then wrap: mezzo.decorate(model, optimizer, ...),"
                    f" {_WRAPPERS[base.__name__]}."
                )
        if "_original_forward" in module.__dict__:
            raise UnsupportedError(
                f"The forward of {f'the part {name!r}' if name else 'the model'} runs in an"
                " autocast region that Accelerate has put into it, where the policy does not hold."
                " First decorate, then wrap: mezzo.decorate(model, optimizer, ...), then"
                " accelerator.prepare(model, optimizer)."
            )


def _refuse_without_floats(model: nn.Module) -> None:
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        kinds = sorted({str(parameter.dtype) for parameter in model.parameters()})
        what = f"only parameters of {', '.join(kinds)}" if kinds else "no parameters"
        raise PolicyError(
            f"{type(model).__name__} has {what}: there is nothing to compute in 16 bits. Pass a"
            " model with floating-point parameters."
        )


def _refuse_without_values(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UnsupportedError(
                f"The parameter {name!r} has no shape before the model has seen an input. Run the"
                " model on one batch first, then decorate."
            )
        if parameter.is_meta:
            raise UnsupportedError(
                f"The parameter {name!r} is on the meta device and has no values to keep."
                " Materialise the model first: model.to_empty(device=...) and load its weights."
            )


def _refuse_unknown_parameters(given: Targets) -> None:
    owned = {id(parameter) for model in given.models for parameter in model.parameters()}
    taken: dict[int, Optimizer] = {}
    for optimizer in given.optimizers:
        own = parameters(optimizer)
        strange = [parameter for parameter in own if id(parameter) not in owned]
        if strange:
            raise PolicyError(
                f"{type(optimizer).__name__} has {len(own)} parameters, of which {len(strange)} are"
                f" not the model's (the first of shape {tuple(strange[0].shape)}). Pass every model"
                " that it updates: decorate([model, other], optimizer)."
            )
        for parameter in own:
            if taken.setdefault(id(parameter), optimizer) is not optimizer:
                raise PolicyError(
                    "A parameter is in two of the optimizers, and its exact weight can follow only"
                    " one. Give each parameter to one optimizer."
                )


_SHOWN = 20
_DEFAULT = frozenset(Selector.parse(kind) for kind in NORMS)
_BATCH_NORMS = (Selector.parse(BatchNorm),)
_TYPE_RANK = 0


@dataclass(frozen=True, eq=False)
class KeepFull:
    """What stays float32: what selectors match, instances, and what the policy runs in float32; of a module its whole subtree."""

    selectors: tuple[Selector, ...]
    instances: tuple[nn.Module, ...] = ()
    ruled: tuple[nn.Module, ...] = ()
    """Modules that run in float32 by a rule of the policy: 16-bit parameters would have lost
    what float32 is asked for."""

    def reasons(self, model: nn.Module) -> dict[str, str]:
        """Why a tensor stays float32, by its qualified name in the model, for those that do."""
        modules = {
            name: self._of_module(name, module)
            for name, module in model.named_modules(remove_duplicate=False)
        }
        found = {}
        for name in _tensor_names(model):
            owners = (reason for parent in _parents(name) if (reason := modules[parent]))
            if reason := next(owners, "") or self._of_tensor(name):
                found[name] = reason
        return found

    def _of_module(self, name: str, module: nn.Module) -> str:
        if any(module is instance for instance in self.instances):
            return f"keep_full has this {type(module).__name__}"
        if any(module is one for one in self.ruled):
            return f"modules= runs this {type(module).__name__} in float32"
        return next(
            (
                _said(selector, module)
                for selector in self.selectors
                if selector.matches(name, module)
            ),
            "",
        )

    def _of_tensor(self, name: str) -> str:
        return next(
            (
                f"keep_full has {one.text!r}"
                for one in self.selectors
                if one.rank > _TYPE_RANK and fnmatchcase(name, one.text)
            ),
            "",
        )

    def check_matches(self, models: tuple[nn.Module, ...]) -> None:
        """Refuse what matches nothing, but for the normalisation layers, which one writes down to be safe."""
        for instance in self.instances:
            if not any(instance is module for model in models for module in model.modules()):
                raise PolicyError(
                    f"keep_full has a {type(instance).__name__} that is no part of the model. Pass"
                    " one of its modules: keep_full=[model.head]."
                )
        for selector in self.selectors:
            if selector not in (*_DEFAULT, *_BATCH_NORMS) and not any(
                _matches_anything(selector, model) for model in models
            ):
                names = [name for model in models for name in _module_names(model)]
                known = [*names, *(name for model in models for name in _tensor_names(model))]
                raise PolicyError(
                    f"keep_full={selector.text!r} matches nothing in"
                    f" {', '.join(type(model).__name__ for model in models)}.{nearest(selector.text, known)}"
                    " Its modules:"
                    f" {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}."
                )


def read_keep_full(
    policy: Any, overrides: dict[str, Any], models: tuple[nn.Module, ...]
) -> tuple[Policy, KeepFull]:
    """Read a policy whose `keep_full` may also hold modules themselves, which a policy names by their place in the model."""
    words = overrides.get("keep_full", NORMS)
    several = tuple(words) if isinstance(words, list | tuple | set | frozenset) else (words,)
    instances = tuple(word for word in several if isinstance(word, nn.Module))
    if instances:
        named = [escape(name) for instance in instances for name in _names_of(instance, models)]
        others = tuple(word for word in several if not isinstance(word, nn.Module))
        plain, full = (
            Policy.parse(policy, **{**overrides, "keep_full": kept})
            for kept in (others, (*others, *named))
        )
    else:
        plain = full = Policy.parse(policy, **overrides)
    if "keep_full" not in overrides and set(full.keep_full) == _DEFAULT:
        plain = full = replace(full, keep_full=_by_default(full))
    keep = KeepFull(plain.keep_full, instances, _in_float32(full, models))
    keep.check_matches(models)
    return full, keep


def _by_default(policy: Policy) -> tuple[Selector, ...]:
    """What stays float32 where nobody says otherwise: the norms at O2, nothing at O3."""
    if policy.level is Level.O3:
        return ()
    # Apex casts no op inside a 16-bit model, and only batch norm's kernels take float32 parameters
    # beside a 16-bit input wherever they run.
    return (
        _BATCH_NORMS if policy.level is Level.O2 and policy.preset == "apex" else policy.keep_full
    )


def _in_float32(policy: Policy, models: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    return tuple(
        ruled.module
        for model in models
        for ruled in plan_modules(model, policy)
        if ruled.rule is Rule.FULL
    )


def _names_of(instance: nn.Module, models: tuple[nn.Module, ...]) -> list[str]:
    return [
        name for model in models for name, module in model.named_modules() if module is instance
    ]


def _said(selector: Selector, module: nn.Module) -> str:
    if selector in (*_DEFAULT, *_BATCH_NORMS):
        return f"{type(module).__name__} is a normalisation layer"
    return (
        "keep_full has"
        f" {type(module).__name__ if selector.rank == _TYPE_RANK else repr(selector.text)}"
    )


def _matches_anything(selector: Selector, model: nn.Module) -> bool:
    modules = model.named_modules(remove_duplicate=False)
    if any(selector.matches(name, module) for name, module in modules):
        return True
    return selector.rank > _TYPE_RANK and any(
        fnmatchcase(name, selector.text) for name in _tensor_names(model)
    )


def _module_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name]


def _tensor_names(model: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_parameters(remove_duplicate=False))
    yield from (name for name, _ in model.named_buffers(remove_duplicate=False))


def _parents(name: str) -> Iterator[str]:
    """The modules that a tensor lies in, the model itself first.

    >>> list(_parents("encoder.norm.weight"))
    ['', 'encoder', 'encoder.norm']
    """
    parts = name.split(".")[:-1]
    yield from (".".join(parts[:count]) for count in range(len(parts) + 1))
