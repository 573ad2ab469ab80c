"""Read and check `keep_full=`: which modules and tensors stay float32, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from mezzo._errors import PolicyError, nearest
from mezzo._torch import BatchNorm
from mezzo.autocasting.module_rules import plan_modules
from mezzo.policy.policy import Policy
from mezzo.policy.presets import is_torch
from mezzo.policy.types import NORMS, Level, Rule, Selector

_SHOWN = 20
_DEFAULT = frozenset(Selector.parse(kind) for kind in NORMS)
_BATCH_NORMS = (Selector.parse(BatchNorm),)
_TYPE_RANK = 0


@dataclass(frozen=True, eq=False)
class KeepFull:
    """Which tensors stay float32, of a module with all its submodules."""

    selectors: tuple[Selector, ...]
    """Names and types of modules, and names of tensors."""
    instances: tuple[nn.Module, ...] = ()
    """Modules that were passed themselves."""
    ruled: tuple[nn.Module, ...] = ()
    """Modules that run in float32 by a rule of the policy: with 16-bit parameters they would
    compute with rounded weights."""
    keeps_with_buffers: bool = False
    """Keep parameters float32 whose parametrization, or a norm that is not torch's, computes with
    buffers, which stay float32."""

    def reasons(self, model: nn.Module) -> dict[str, str]:
        """Return the tensors that stay float32: qualified name → reason."""
        modules = {
            name: self._of_module(name, module)
            for name, module in model.named_modules(remove_duplicate=False)
        }
        reasons = dict(_used_with_buffers(model)) if self.keeps_with_buffers else {}
        for name in _tensor_names(model):
            of_parents = (reason for parent in _parents(name) if (reason := modules[parent]))
            if reason := next(of_parents, "") or self._of_tensor(name):
                reasons[name] = reason
        return reasons

    def _of_module(self, name: str, module: nn.Module) -> str:
        if any(module is instance for instance in self.instances):
            return f"keep_full has this {type(module).__name__}"
        if any(module is ruled for ruled in self.ruled):
            return f"modules= runs this {type(module).__name__} in float32"
        return next(
            (
                _reason(selector, module)
                for selector in self.selectors
                if selector.matches(name, module)
            ),
            "",
        )

    def _of_tensor(self, name: str) -> str:
        return next(
            (
                f"keep_full has {selector.text!r}"
                for selector in self.selectors
                if selector.rank > _TYPE_RANK and fnmatchcase(name, selector.text)
            ),
            "",
        )

    def check_matches(self, models: tuple[nn.Module, ...]) -> None:
        """Raise `PolicyError` for an entry that matches nothing, except for `NORMS`."""
        for instance in self.instances:
            if not any(instance is module for model in models for module in model.modules()):
                raise PolicyError(
                    f"keep_full has a {type(instance).__name__} that is not in the model. Pass one"
                    " of its modules: keep_full=[model.head]."
                )
        for selector in self.selectors:
            if selector not in (*_DEFAULT, *_BATCH_NORMS) and not any(
                _matches_anything(selector, model) for model in models
            ):
                raise PolicyError(_no_match(selector, models))


def read_keep_full(
    policy: Any, overrides: dict[str, Any], models: tuple[nn.Module, ...]
) -> tuple[Policy, KeepFull]:
    """Read a policy and its `keep_full`, which may hold modules themselves.

    In the policy they are replaced by their names in the models.
    """
    argument = overrides.get("keep_full", NORMS)
    is_several = isinstance(argument, list | tuple | set | frozenset)
    entries = tuple(argument) if is_several else (argument,)
    instances = tuple(entry for entry in entries if isinstance(entry, nn.Module))
    if instances:
        names = [escape(name) for instance in instances for name in _names_of(instance, models)]
        others = tuple(entry for entry in entries if not isinstance(entry, nn.Module))
        without_instances, full = (
            Policy.parse(policy, **{**overrides, "keep_full": keep_full})
            for keep_full in (others, (*others, *names))
        )
    else:
        without_instances = full = Policy.parse(policy, **overrides)
    if "keep_full" not in overrides and set(full.keep_full) == _DEFAULT:
        without_instances = full = replace(full, keep_full=_default_keep_full(full))
    keep = KeepFull(
        without_instances.keep_full,
        instances,
        _in_float32(full, models),
        keeps_with_buffers=casts_only_parameters(full),
    )
    keep.check_matches(models)
    return full, keep


def casts_only_parameters(policy: Policy) -> bool:
    """Return whether buffers and inputs stay float32 where parameters are cast."""
    return policy.level is Level.O2 and is_torch(policy.preset)


def _default_keep_full(policy: Policy) -> tuple[Selector, ...]:
    """Return what stays float32 by default: the normalisation layers, but nothing at O3."""
    if policy.level is Level.O3:
        return ()
    # Apex casts no op inside a 16-bit model, and only batch norm's kernels accept float32
    # parameters with a 16-bit input on every device.
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


def _reason(selector: Selector, module: nn.Module) -> str:
    if selector in (*_DEFAULT, *_BATCH_NORMS):
        return f"{type(module).__name__} is a normalisation layer"
    is_type = selector.rank == _TYPE_RANK
    return f"keep_full has {type(module).__name__ if is_type else repr(selector.text)}"


def _no_match(selector: Selector, models: tuple[nn.Module, ...]) -> str:
    names = [name for model in models for name, _ in model.named_modules() if name]
    known = [*names, *(name for model in models for name in _tensor_names(model))]
    classes = ", ".join(type(model).__name__ for model in models)
    listed = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    return (
        f"keep_full={selector.text!r} matches nothing in {classes}.{nearest(selector.text, known)}"
        f" Its modules: {listed}."
    )


def _matches_anything(selector: Selector, model: nn.Module) -> bool:
    modules = model.named_modules(remove_duplicate=False)
    if any(selector.matches(name, module) for name, module in modules):
        return True
    return selector.rank > _TYPE_RANK and any(
        fnmatchcase(name, selector.text) for name in _tensor_names(model)
    )


def _used_with_buffers(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield parameters that a module computes with together with buffers, with the reason.

    These are spectral norms, parametrizations, and norms that are written by hand: some have a
    weight and a bias of zeros as a buffer, others running statistics.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                yield f"{prefix}{hook.name}_orig", "SpectralNorm computes it with float32 buffers"
        if isinstance(module, ParametrizationList) and any(
            buffer.is_floating_point() for buffer in module.buffers()
        ):
            classes = ", ".join(
                type(parametrization).__name__.lstrip("_") for parametrization in module
            )
            for name, _ in module.named_parameters(recurse=False):
                yield f"{prefix}{name}", f"{classes} computes it with float32 buffers"
        elif _is_norm_with_buffers(module):
            for name, _ in module.named_parameters(recurse=False):
                yield f"{prefix}{name}", f"{type(module).__name__} uses it with float32 buffers"


def _is_norm_with_buffers(module: nn.Module) -> bool:
    return (
        "norm" in type(module).__name__.lower()
        and not isinstance(module, NORMS)
        and next(module.children(), None) is None
        and any(buffer.is_floating_point() for buffer in module.buffers())
    )


def _tensor_names(model: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_parameters(remove_duplicate=False))
    yield from (name for name, _ in model.named_buffers(remove_duplicate=False))


def _parents(name: str) -> Iterator[str]:
    """Yield the names of the modules that hold a tensor, the model itself first.

    >>> list(_parents("encoder.norm.weight"))
    ['', 'encoder', 'encoder.norm']
    """
    parts = name.split(".")[:-1]
    yield from (".".join(parts[:count]) for count in range(len(parts) + 1))
