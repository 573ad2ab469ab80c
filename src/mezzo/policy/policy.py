"""`Policy`: the precision of every op, module and parameter, as one frozen value."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mezzo._dtypes import dtype_name
from mezzo._errors import PolicyError, unknown
from mezzo._hardware import hardware
from mezzo.policy import decide, parse, presets
from mezzo.policy.decide import PolicyDiff, diff, resolve_dtype_quietly
from mezzo.policy.parse import (
    ConditionalArg,
    DtypeArg,
    ExemptArgs,
    ModuleRules,
    OpNamesArg,
    Selectors,
)
from mezzo.policy.registry import registry
from mezzo.policy.types import (
    BY_USER,
    NORMS,
    Cache,
    Conditional,
    Level,
    Master,
    OnUnsupported,
    Parsed,
    Rule,
    Selector,
)

# A `Parsed` is a descriptor, which all instances share on purpose.
# ruff: noqa: RUF009


class OpList(Parsed[OpNamesArg, frozenset[str]]):
    """A field that holds op names in their canonical spelling."""

    def __init__(self) -> None:
        super().__init__(frozenset, default=())

    def __set_name__(self, owner: type, name: str) -> None:
        super().__set_name__(owner, name)
        self._parse = partial(parse.op_names, name)


@dataclass(frozen=True, repr=False)
class Policy:
    """The precision of every op, module and parameter: frozen, hashable, compared by value.

    Only the level and the dtype may be passed by position. `Parsed[A, B]` in the signature is an
    argument of type A that is stored as B, and `OpList` is a set of op names. This is the whole
    value with its defaults:

    >>> default = Policy(
    ...     "O1",  # level: O0 float32; O1 op lists choose; O2 16-bit parameters, master weights;
    ...     #        O3 16-bit parameters only; OD like O1, but float32 unless listed half
    ...     "auto",  # dtype: "float16", "bfloat16", or "auto" for the one the hardware prefers
    ...     preset="torch",  # op lists to start from: "torch", "torch-cuda", "torch-cpu", "paddle",
    ...     #                  "oneflow", "megengine", "mxnet" or "apex"
    ...     half=(),  # ops in the 16-bit dtype, such as {"add"}; these six override the preset
    ...     full=(),  # ops in float32
    ...     promote=(),  # ops in the widest dtype of their inputs
    ...     keep=(),  # ops whose inputs are not cast
    ...     refuse=(),  # ops that raise mezzo.RefusedOpError
    ...     float32_inside=(),  # ops that return the dtype of their input: {"softmax"}
    ...     default_rule=None,  # rule of unlisted ops, such as "full"; None for the preset's
    ...     exempt_args=(),  # arguments never cast to 16 bits: {"batch_norm": {"weight", "bias"}}
    ...     conditional=(),  # float32 for some values of an argument: [("softmax", "dim", [-1])]
    ...     modules=(),  # rules of whole modules: {"head": "full", nn.LSTM: "half"}
    ...     keep_full=NORMS,  # modules whose parameters stay float32 at O2: {"head", nn.LayerNorm}
    ...     master="auto",  # master weights: "float32", "split", "kahan", "stochastic" or "none"
    ...     grad_dtype=None,  # dtype in which gradients accumulate; None for the parameter's
    ...     cache="auto",  # 16-bit copies of weights: "versioned", "torch" or "off"
    ...     on_unsupported="warn",  # device without the dtype: "error", "warn" or "ignore"
    ... )
    >>> default == Policy()
    True

    Change a policy with `dataclasses.replace`, compare two with `diff`, look an op up with
    `explain`, and store it as TOML with `save` and `load`. The `repr` is the constructor call:

    >>> policy = Policy("O1", dtype="float16", full={"softmax"}, modules={"head": "half"})
    >>> policy
    Policy('O1', dtype='float16', full={'softmax'}, modules={'head': 'half'})
    >>> policy == eval(repr(policy))
    True
    """

    level: Parsed[str | Level, Level] = Parsed(Level.parse, default="O1")
    """Which parameters and ops become 16-bit."""
    dtype: Parsed[DtypeArg, torch.dtype | None] = Parsed(parse.half_dtype, default="auto")
    """The 16-bit dtype; None stands for `"auto"`, which the hardware decides."""

    _: KW_ONLY

    preset: Parsed[str, str] = Parsed(presets.parse_preset, default="torch")
    """The op lists to start from: torch's, or another system's."""
    half: OpList = OpList()
    """Ops that run in the 16-bit dtype, in addition to the preset's."""
    full: OpList = OpList()
    """Ops that run in float32."""
    promote: OpList = OpList()
    """Ops that run in the widest dtype of their inputs."""
    keep: OpList = OpList()
    """Ops whose inputs are not cast."""
    refuse: OpList = OpList()
    """Ops that raise `RefusedOpError`."""
    float32_inside: OpList = OpList()
    """Ops that take and return 16 bits and compute in float32 inside; see `FLOAT32_INSIDE_OPS`."""
    default_rule: Parsed[str | Rule | None, Rule | None] = Parsed(parse.default_rule, default=None)
    """The rule for ops in no list; None for the preset's."""
    exempt_args: Parsed[ExemptArgs, tuple[tuple[str, tuple[str, ...]], ...]] = Parsed(
        parse.exemptions, default=()
    )
    """Arguments that neither decide the dtype nor are cast to 16 bits, by op: the parameters and
    statistics of a norm."""
    conditional: Parsed[Collection[ConditionalArg], tuple[Conditional, ...]] = Parsed(
        parse.conditionals, default=()
    )
    """Ops that run in float32 for some values of an argument."""
    modules: Parsed[ModuleRules, tuple[tuple[Selector, Rule], ...]] = Parsed(
        parse.module_rules, default=()
    )
    """Rules for whole modules; of two that match equally well the later one applies."""
    keep_full: Parsed[Selectors, tuple[Selector, ...]] = Parsed(parse.selectors, default=NORMS)
    """Modules whose parameters stay float32 at O2."""
    master: Parsed[str | Master | None, Master] = Parsed(parse.master, default="auto")
    """Format of the master weights of 16-bit parameters."""
    grad_dtype: Parsed[DtypeArg, torch.dtype | None] = Parsed(parse.grad_dtype, default=None)
    """The dtype in which gradients accumulate; None for the parameter's."""
    cache: Parsed[str | Cache, Cache] = Parsed(Cache.parse, default="auto")
    """How 16-bit copies of weights are cached."""
    on_unsupported: Parsed[str | OnUnsupported, OnUnsupported] = Parsed(
        OnUnsupported.parse, default="warn"
    )
    """What to do on a device that does not support the dtype."""

    def __post_init__(self) -> None:
        """Check the fields against each other."""
        parse.refuse_overlaps({rule.value: self.ops_with_rule(rule) for rule in Rule})
        parse.check_float32_inside(self.float32_inside)
        presets.check_preset(self.preset, self.level)

    @classmethod
    def parse(
        cls, policy: Policy | str | os.PathLike[str] | Level | None = None, **overrides: Any
    ) -> Policy:
        """Make a policy of a `Policy`, a level or a TOML file, with some fields overridden.

        >>> Policy.parse("O2", dtype="bfloat16")
        Policy('O2', dtype='bfloat16')
        """
        _check_field_names(overrides)
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
            return cls(**{"level": _single_level(policy, overrides), **overrides})
        text = repr(policy)
        given = type(policy).__name__ if "\n" in text else text  # An optimizer has many lines.
        raise PolicyError(
            f"{given} is not a policy. Pass a level such as 'O1', a mezzo.Policy, or the path of"
            " a .toml file."
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy from a TOML file."""
        values = parse.load_toml(path)
        try:
            _check_field_names(values)
            return cls(**values)
        except PolicyError as error:
            raise PolicyError(f"In {os.fspath(path)!r}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a TOML file, from which `load` makes an equal policy."""
        parse.save_toml(path, self.to_dict())

    def ops_with_rule(self, rule: Rule) -> frozenset[str]:
        """Return the ops that this policy lists under a rule, without those of its preset."""
        names: frozenset[str] = getattr(self, rule.value)
        return names

    def explain(
        self, op: str, *inputs: torch.dtype | str, device: str | None = None, **arguments: Any
    ) -> decide.Decision:
        """Return the dtype in which an op runs on a device, with the rule and the reason.

        `inputs` are the dtypes of its floating-point inputs (float32 if none is passed), and
        `arguments` are other arguments of the call, which conditional entries may depend on. A
        device that this machine does not have is explained as if it were there, in float16 unless
        the policy has a dtype.

        >>> print(Policy("O1", "float16", preset="torch-cuda").explain("softmax", torch.float16))
        softmax runs in float32: sums exponentials: float16 overflows past 65504.
        """
        facts = hardware(device)
        resolved = resolve_dtype_quietly(self, facts)
        dtype = resolved.dtype
        if facts.absent is not None and self.level is not Level.O0:
            dtype = self.dtype or torch.float16
        if dtype is not None:
            return decide.explain(
                self, op, inputs, dtype=dtype, device=facts.device, arguments=arguments
            )
        if self.level is not Level.O0 and self.on_unsupported is OnUnsupported.ERROR:
            reason = f"on_unsupported='error', and {resolved.reason}"
            return decide.Decision(registry().parse(op), Rule.REFUSE, None, reason)
        return decide.uncast_decision(op, inputs, f"nothing is cast: {resolved.reason}")

    def diff(
        self, other: Policy | str | os.PathLike[str] | Level, device: str | None = None
    ) -> PolicyDiff:
        """Return the fields of another policy that differ, and the ops whose rule differs.

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
        """Return the level and all fields that differ from `Policy(level)`, as TOML values.

        >>> Policy("O2", "float16", full={"softmax"}).to_dict()
        {'level': 'O2', 'dtype': 'float16', 'full': ['softmax']}
        """
        default = Policy(self.level)
        changed = {
            field.name: self.format_field(field.name)
            for field in fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        }
        return {"level": self.level.value} | changed

    def format_field(self, field: str) -> Any:
        """Return a field as strings, numbers, lists and dicts, which the constructor accepts."""
        return _to_plain(getattr(self, field))

    def __repr__(self) -> str:
        values = self.to_dict()
        level = values.pop("level")
        arguments = [
            repr(level),
            *(f"{name}={parse.format_value(name, value)}" for name, value in values.items()),
        ]
        return f"Policy({', '.join(arguments)})"


def _check_field_names(names: Collection[str]) -> None:
    known = [field.name for field in fields(Policy)]
    for name in names:
        if name not in known:
            raise PolicyError(unknown("policy field", name, known))


def _single_level(level: str | Level, overrides: Mapping[str, Any]) -> str | Level:
    if "level" in overrides:
        raise PolicyError(
            f"The level is passed twice: {level!r} and level={overrides['level']!r}. Pass it once."
        )
    if level in presets.NAMES:
        raise PolicyError(
            f"{level!r} is a preset, not a level. Pass preset={level!r}, and the level if it is not"
            " O1."
        )
    return level


def _to_plain(value: Any) -> Any:
    """Convert a field to values that TOML can hold and the constructor accepts."""
    match value:
        case Enum():
            return value.value
        case torch.dtype():
            return dtype_name(value)
        case Selector():
            return value.text
        case Conditional():
            plain = [value.op, value.argument, list(value.values)]
            return plain if value.reason == BY_USER else [*plain, value.reason]
        case frozenset():
            return sorted(value)
        case tuple() if value and all(_is_pair(item) for item in value):
            return {_to_plain(key): _to_plain(item) for key, item in value}
        case tuple():
            return [_to_plain(item) for item in value]
    return value


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == len(("key", "value"))
