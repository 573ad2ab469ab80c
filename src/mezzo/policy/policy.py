"""The value that drives everything: which op, module and parameter runs in which precision, and why."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from mezzo._dtypes import HALF_DTYPES, dtype_name, parse_dtype
from mezzo._errors import PolicyError, unknown
from mezzo._hardware import hardware
from mezzo.policy import decide, parse, presets
from mezzo.policy.decide import PolicyDiff, diff, resolve_quietly
from mezzo.policy.registry import registry
from mezzo.policy.types import (
    BY_USER,
    NORMS,
    Cache,
    Conditional,
    Level,
    Master,
    OnUnsupported,
    Rule,
    Selector,
)

Names = Collection[str] | str
"""Op names as a user writes them."""


@dataclass(frozen=True)
class _Fields:
    level: Level
    """How far the policy goes."""
    dtype: torch.dtype | None
    """The 16-bit dtype; None is `"auto"`, decided by the hardware."""
    preset: str
    """Whose op lists are the ground: torch's, or another system's."""
    half: frozenset[str]
    """Ops that run in the 16-bit dtype, on top of the preset's."""
    full: frozenset[str]
    """Ops that run in float32."""
    promote: frozenset[str]
    """Ops that run in the widest dtype of their inputs."""
    keep: frozenset[str]
    """Ops whose inputs are left alone."""
    refuse: frozenset[str]
    """Ops that raise."""
    default_rule: Rule | None
    """The rule for ops in no list; None leaves it to the preset."""
    exempt_args: tuple[tuple[str, tuple[str, ...]], ...]
    """Arguments that do not decide and are never cast down, by op: a norm's parameters and
    statistics."""
    conditional: tuple[Conditional, ...]
    """Ops that run in float32 for some values of an argument."""
    modules: tuple[tuple[Selector, Rule], ...]
    """Rules for whole modules."""
    keep_full: tuple[Selector, ...]
    """Modules whose parameters stay float32 at O2."""
    master: Master
    """Where exact weights live at O2."""
    grad_dtype: torch.dtype | None
    """The dtype gradients accumulate in; None is the parameter's own."""
    cache: Cache
    """How 16-bit copies of weights are remembered."""
    on_unsupported: OnUnsupported
    """What to do on a device that lacks the dtype."""


# A dataclass itself too: of a frozen base alone, Python freezes the fields and lets a misspelt one
# be set.
@dataclass(frozen=True, init=False, repr=False)
class Policy(_Fields):
    """Which op, module and parameter runs in which precision: frozen, hashable, equal by value, saved as TOML.

    >>> policy = Policy("O1", dtype="float16", full={"softmax"}, modules={"head": "half"})
    >>> policy
    Policy('O1', dtype='float16', full={'softmax'}, modules={'head': 'half'})
    >>> policy == eval(repr(policy))
    True
    """

    def __init__(
        self,
        level: str | Level = Level.O1,
        dtype: str | torch.dtype | None = "auto",
        *,
        preset: str = "torch",
        half: Names = (),
        full: Names = (),
        promote: Names = (),
        keep: Names = (),
        refuse: Names = (),
        default_rule: str | Rule | None = None,
        exempt_args: Mapping[str, Names] | tuple[Any, ...] = (),
        conditional: Collection[parse.ConditionalArg] = (),
        modules: Mapping[str | type, str | Rule] | tuple[Any, ...] = (),
        keep_full: Collection[str | type | Selector] | str | type = NORMS,
        master: str | Master | None = Master.AUTO,
        grad_dtype: str | torch.dtype | None = None,
        cache: str | Cache = Cache.AUTO,
        on_unsupported: str | OnUnsupported = OnUnsupported.WARN,
    ) -> None:
        super().__init__(
            level=Level.parse(level),
            dtype=None if dtype in ("auto", None) else parse_dtype(dtype, beside=("auto",)),
            preset=presets.parse_preset(preset),
            half=parse.op_names("half", half),
            full=parse.op_names("full", full),
            promote=parse.op_names("promote", promote),
            keep=parse.op_names("keep", keep),
            refuse=parse.op_names("refuse", refuse),
            default_rule=None if default_rule is None else Rule.parse(default_rule),
            exempt_args=parse.exemptions(exempt_args),
            conditional=parse.conditionals(conditional),
            modules=parse.module_rules(modules),
            keep_full=parse.selectors(keep_full),
            master=Master.NONE if master is None else Master.parse(master),
            grad_dtype=(
                None
                if grad_dtype is None
                else parse_dtype(
                    grad_dtype, allowed=(*HALF_DTYPES, torch.float32), what="grad_dtype"
                )
            ),
            cache=Cache.parse(cache),
            on_unsupported=OnUnsupported.parse(on_unsupported),
        )
        parse.refuse_overlaps({rule.value: self.ops_with_rule(rule) for rule in Rule})
        presets.check_preset(self.preset, self.level)

    @classmethod
    def parse(
        cls, policy: Policy | str | os.PathLike[str] | Level | None = None, **overrides: Any
    ) -> Policy:
        """Read a policy from what every entry point takes: a `Policy`, a level, a TOML file, and overrides of fields.

        >>> Policy.parse("O2", dtype="bfloat16")
        Policy('O2', dtype='bfloat16')
        """
        _refuse_unknown_fields(overrides)
        if isinstance(policy, Policy):
            return replace(policy, **overrides) if overrides else policy
        if isinstance(policy, os.PathLike) or (
            isinstance(policy, str) and Path(policy).suffix == ".toml"
        ):
            loaded = cls.load(policy)
            return replace(loaded, **overrides) if overrides else loaded
        if policy is None:
            return cls(**overrides)
        if isinstance(policy, str | Level):
            return cls(**{"level": _one_level(policy, overrides), **overrides})
        raise PolicyError(
            f"A policy is a level such as 'O1', a mezzo.Policy, or a .toml file, got {policy!r}."
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy from a TOML file."""
        words = parse.load_toml(path)
        try:
            _refuse_unknown_fields(words)
            return cls(**words)
        except PolicyError as error:
            raise PolicyError(f"In {os.fspath(path)!r}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a TOML file that `load` reads back equal."""
        parse.save_toml(path, self.to_dict())

    def ops_with_rule(self, rule: Rule) -> frozenset[str]:
        """The ops that this policy itself puts under a rule."""
        names: frozenset[str] = getattr(self, rule.value)
        return names

    def explain(
        self, op: str, *inputs: torch.dtype | str, device: str | None = None, **arguments: Any
    ) -> decide.Decision:
        """Say in which dtype an op runs for inputs of these dtypes (float32 where none is given) and these arguments on a device, and why.

        >>> print(Policy("O1", "float16", preset="torch-cuda").explain("softmax", torch.float16))
        softmax runs in float32: sums exponentials: float16 overflows past 65504.
        """
        found = hardware(device)
        chosen = resolve_quietly(self, found)
        if (
            chosen.dtype is None
            and self.level is not Level.O0
            and self.on_unsupported is OnUnsupported.ERROR
        ):
            return decide.Decision(
                registry().parse(op),
                Rule.REFUSE,
                None,
                f"on_unsupported='error', and {chosen.reason}",
            )
        if chosen.dtype is None:
            return decide.uncast_decision(op, inputs, f"nothing is cast: {chosen.reason}")
        return decide.explain(
            self, op, inputs, dtype=chosen.dtype, device=found.device, arguments=arguments
        )

    def diff(
        self, other: Policy | str | os.PathLike[str] | Level, device: str | None = None
    ) -> PolicyDiff:
        """What another policy says otherwise: the fields, and the ops that end up under another rule on a device.

        >>> print(Policy("O1").diff(Policy("O1", full={"linear"}, keep={"conv1d"}), device="cpu"))
        full: [] → ['linear']
        keep: [] → ['conv1d']
        op conv1d: half → keep
        op gru: keep → full
        op gru_cell: keep → full
        op linear: half → full
        op lstm: keep → full
        op lstm_cell: keep → full
        op rnn_relu: keep → full
        op rnn_relu_cell: keep → full
        op rnn_tanh: keep → full
        op rnn_tanh_cell: keep → full
        """
        return diff(self, Policy.parse(other), hardware(device))

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from a plain `Policy(level)`, in the words its constructor takes: plain strings, lists and tables."""
        plain = Policy(self.level)
        told = {
            field.name: self.format_field(field.name)
            for field in fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        }
        return {"level": self.level.value} | told

    def format_field(self, field: str) -> Any:
        """One field in plain words."""
        return _say(getattr(self, field))

    def __repr__(self) -> str:
        spoken = dict(self.to_dict())
        level = spoken.pop("level")
        parts = [
            repr(level),
            *(f"{name}={parse.format_value(name, value)}" for name, value in spoken.items()),
        ]
        return f"Policy({', '.join(parts)})"


def _refuse_unknown_fields(overrides: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(_Fields)]
    for word in overrides:
        if word not in known:
            raise PolicyError(unknown("policy field", word, known))


def _one_level(level: str | Level, overrides: Mapping[str, Any]) -> str | Level:
    if "level" in overrides:
        raise PolicyError(
            f"The level was given twice: {level!r} and level={overrides['level']!r}. Give it once."
        )
    if level in presets.NAMES:
        raise PolicyError(
            f"{level!r} is a preset, not a level. Write preset={level!r}, with a level if it is"
            " not O1."
        )
    return level


def _say(value: Any) -> Any:
    """A field in plain words: what TOML can hold and the constructor reads back."""
    match value:
        case Enum():
            return value.value
        case torch.dtype():
            return dtype_name(value)
        case Selector():
            return value.text
        case Conditional():
            spoken = [value.op, value.argument, list(value.values)]
            return spoken if value.reason == BY_USER else [*spoken, value.reason]
        case frozenset():
            return sorted(value)
        case tuple() if value and all(_is_pair(item) for item in value):
            return {_say(key): _say(item) for key, item in value}
        case tuple():
            return [_say(item) for item in value]
    return value


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == len(("key", "value"))
