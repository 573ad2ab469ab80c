"""`keep_full`: which modules and parameters stay float32, in a user's words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

from torch import nn

from mezzo._errors import PolicyError, nearest
from mezzo._torch import BatchNorm
from mezzo.autocasting.module_rules import plan_modules
from mezzo.policy.policy import Policy
from mezzo.policy.types import NORMS, Level, Rule, Selector

_SHOWN = 20
_DEFAULT = frozenset(Selector.parse(kind) for kind in NORMS)
_BATCH_NORMS = (Selector.parse(BatchNorm),)
_TYPE_RANK = 0


@dataclass(frozen=True, eq=False)
class Keep:
    """What stays float32: what selectors match, instances, and what the policy runs in float32; of a module its whole subtree."""

    selectors: tuple[Selector, ...]
    instances: tuple[nn.Module, ...] = ()
    ruled: tuple[nn.Module, ...] = ()
    """Modules that run in float32 by a rule of the policy: 16-bit parameters would have lost what float32 is asked for."""

    def reasons(self, model: nn.Module) -> dict[str, str]:
        """Why a tensor stays float32, by its qualified name in the model, for those that do."""
        modules = {name: self._of_module(name, module) for name, module in model.named_modules(remove_duplicate=False)}
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
        return next((_said(selector, module) for selector in self.selectors if selector.matches(name, module)), "")

    def _of_tensor(self, name: str) -> str:
        return next((f"keep_full has {one.text!r}" for one in self.selectors if one.rank > _TYPE_RANK and fnmatchcase(name, one.text)), "")

    def refuse_idle(self, models: tuple[nn.Module, ...]) -> None:
        """Refuse what matches nothing, but for the normalisation layers, which one writes down to be safe."""
        for instance in self.instances:
            if not any(instance is module for model in models for module in model.modules()):
                raise PolicyError(f"keep_full has a {type(instance).__name__} that is no part of the model. Pass one of its modules: keep_full=[model.head].")
        for selector in self.selectors:
            if selector not in (*_DEFAULT, *_BATCH_NORMS) and not any(_matches_anything(selector, model) for model in models):
                names = [name for model in models for name in _module_names(model)]
                known = [*names, *(name for model in models for name in _tensor_names(model))]
                raise PolicyError(
                    f"keep_full={selector.text!r} matches nothing in {', '.join(type(model).__name__ for model in models)}.{nearest(selector.text, known)} "
                    f"Its modules: {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}."
                )


def read(policy: Any, overrides: dict[str, Any], models: tuple[nn.Module, ...]) -> tuple[Policy, Keep]:
    """Read a policy whose `keep_full` may also hold modules themselves, which a policy names by their place in the model."""
    words = overrides.get("keep_full", NORMS)
    several = tuple(words) if isinstance(words, list | tuple | set | frozenset) else (words,)
    instances = tuple(word for word in several if isinstance(word, nn.Module))
    if instances:
        named = [escape(name) for instance in instances for name in _names_of(instance, models)]
        others = tuple(word for word in several if not isinstance(word, nn.Module))
        plain, full = (Policy.of(policy, **{**overrides, "keep_full": kept}) for kept in (others, (*others, *named)))
    else:
        plain = full = Policy.of(policy, **overrides)
    if "keep_full" not in overrides and set(full.keep_full) == _DEFAULT:
        plain = full = replace(full, keep_full=_by_default(full))
    keep = Keep(plain.keep_full, instances, _in_float32(full, models))
    keep.refuse_idle(models)
    return full, keep


def _by_default(policy: Policy) -> tuple[Selector, ...]:
    """What stays float32 where nobody says otherwise: the norms at O2, nothing at O3."""
    if policy.level is Level.O3:
        return ()
    # Apex casts no op inside a 16-bit model, and only batch norm's kernels take float32 parameters beside a 16-bit input wherever they run.
    return _BATCH_NORMS if policy.level is Level.O2 and policy.preset == "apex" else policy.keep_full


def _in_float32(policy: Policy, models: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    return tuple(ruled.module for model in models for ruled in plan_modules(model, policy) if ruled.rule is Rule.FULL)


def _names_of(instance: nn.Module, models: tuple[nn.Module, ...]) -> list[str]:
    return [name for model in models for name, module in model.named_modules() if module is instance]


def _said(selector: Selector, module: nn.Module) -> str:
    if selector in (*_DEFAULT, *_BATCH_NORMS):
        return f"{type(module).__name__} is a normalisation layer"
    return f"keep_full has {type(module).__name__ if selector.rank == _TYPE_RANK else repr(selector.text)}"


def _matches_anything(selector: Selector, model: nn.Module) -> bool:
    modules = model.named_modules(remove_duplicate=False)
    if any(selector.matches(name, module) for name, module in modules):
        return True
    return selector.rank > _TYPE_RANK and any(fnmatchcase(name, selector.text) for name in _tensor_names(model))


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
