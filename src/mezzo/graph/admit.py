"""Admit a saved graph, or refuse it: what torch gets has in every field the type that its schema says, and in every string what the field's rule allows.

A string whose field has no rule is refused, so that what a later torch adds to its schema is closed until somebody has looked at it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from functools import cache, partial
from typing import Any

from mezzo._errors import CheckpointError
from mezzo._torch import Union as _Union
from mezzo._torch import schema
from mezzo.graph import grammar, targets
from mezzo.graph.origin import own_frame

Rule = Callable[[str], None]

_METADATA = ("stack_trace", "nn_module_stack", "torch_fn")
"""What is kept of a node's notes. The rest names Python objects, or holds what a user has put there."""
_DIALECTS = ("TRAINING", "ATEN")
_FLOATS = ("Infinity", "-Infinity", "NaN")
_WIDEST = 2**64


def one_of(*allowed: str) -> Rule:
    """A rule that lets through some words."""

    def check(text: str) -> None:
        if text not in allowed:
            raise CheckpointError(f"it says {text[:200]!r} where only {', '.join(map(repr, allowed)) or 'tensors and numbers'} can stand")

    return check


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        "TensorArgument.name SymIntArgument.as_name SymFloatArgument.as_name SymBoolArgument.as_name GraphArgument.name Node.name "
        "GradientToUserInputSpec.user_input_name UserInputMutationSpec.user_input_name ModuleCallSignature.forward_arg_names NamedTupleDef.field_names "
        "Graph.tensor_values[] Graph.sym_int_values[] Graph.sym_bool_values[] Graph.sym_float_values[]".split(),
        grammar.identifier,
    ),
    **dict.fromkeys(
        "InputToParameterSpec.parameter_name InputToBufferSpec.buffer_name InputToTensorConstantSpec.tensor_constant_name BufferMutationSpec.buffer_name "
        "ParameterMutationSpec.parameter_name GradientToParameterSpec.parameter_name ModuleCallEntry.fqn".split(),
        grammar.path,
    ),
    **dict.fromkeys(
        "ConstantValue.as_string Graph.inputs>Argument.as_string Argument.as_string_to_argument[] Device.type ExportedProgram.torch_version "
        "GraphModule.treespec_namedtuple_fields[]".split(),
        grammar.text,
    ),
    # The name of a constant input is written into source code, and is empty for one that has none.
    "InputToConstantInputSpec.name": grammar.argument_name,
    "NamedArgument.name": grammar.argument_name,
    "Argument.as_string": grammar.free_text,
    "Argument.as_strings": grammar.free_text,
    "Graph.outputs>Argument.as_string": one_of(),
    "SymExpr.expr_str": grammar.expression,
    "ExportedProgram.guards_code": grammar.guard,
    "ExportedProgram.range_constraints[]": grammar.symbol_range,
    "ExportedProgram.opset_version[]": one_of("aten"),
    "ExportedProgram.verifiers": one_of(*_DIALECTS),
    "ModuleCallSignature.in_spec": grammar.signature_tree,
    "ModuleCallSignature.out_spec": grammar.tree,
    "Node.metadata[]": one_of(*_METADATA),
    "Node.metadata": grammar.trace,
}


def admit(program: object, custom_ops: Collection[str] = ()) -> schema.ExportedProgram:
    """Read a saved program from plain values, or refuse it: nothing in what is returned can run as code."""
    called = partial(targets.check, custom_ops=custom_ops)
    admitted: schema.ExportedProgram = _admit(
        program, schema.ExportedProgram, "ExportedProgram", {**_RULES, "Node.target": called, "Argument.as_operator": called}
    )
    return admitted


def without_notes(program: Any) -> Any:
    """The same program with notes that are admitted alone, and of a traceback the line where the op was called."""
    if isinstance(program, list):
        return [without_notes(one) for one in program]
    if not isinstance(program, dict):
        return program
    return {name: _notes(value) if name == "metadata" else without_notes(value) for name, value in program.items()}


def _notes(metadata: dict[str, str]) -> dict[str, str]:
    kept = {name: metadata[name] for name in _METADATA if name in metadata}
    if "stack_trace" in kept:
        # The place without the source text: a saved file should not tell more of its maker than it must.
        frame = own_frame(kept["stack_trace"])
        kept["stack_trace"] = frame[0].replace("\\", "/") if frame else ""
    return kept


def _admit(value: Any, kind: Any, field: str, rules: Mapping[str, Rule]) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in {typing.Union, types.UnionType}:
        return None if value is None else _admit(value, arguments[0], field, rules)
    if origin is list:
        return [_admit(one, arguments[0], field, rules) for one in _typed(value, list, field)]
    if origin is dict:
        return {_text(name, f"{field}[]", rules): _admit(one, arguments[1], field, rules) for name, one in _typed(value, dict, field).items()}
    if dataclasses.is_dataclass(kind):
        return _admit_fields(_typed(value, dict, field), kind, field, rules)
    if kind is str:
        return _text(value, field, rules)
    return _number(value, kind, field)


def _admit_fields(value: dict[str, Any], kind: Any, field: str, rules: Mapping[str, Rule]) -> Any:
    hints = _hints(kind)
    if unknown := value.keys() - hints.keys():
        raise CheckpointError(f"{field} has {min(unknown)!r}, which this torch does not know")
    is_union = issubclass(kind, _Union)
    if is_union and len(value) != 1:
        raise CheckpointError(f"{field} is {len(value)} things at once")
    fields = {}
    for name, one in value.items():
        own = f"{kind.__name__}.{name}"
        fields[name] = _admit(one, hints[name], f"{field}>{own}" if f"{field}>{own}" in rules else own, rules)
    return kind.create(**fields) if is_union else kind(**fields)


def _number(value: Any, kind: Any, field: str) -> Any:
    if kind is schema.Layout and value != schema.Layout.Strided:
        raise CheckpointError(f"{field} is {str(value)[:200]!r}, and a saved program has dense tensors only")
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        fits = type(value) is int and value in kind.__members__.values()
    elif kind is float:
        fits = value in _FLOATS if isinstance(value, str) else type(value) in {int, float}
    elif kind is int:
        fits = type(value) is int and abs(value) <= _WIDEST
    else:
        fits = kind is bool and type(value) is bool
    if not fits:
        raise CheckpointError(f"{field} is {str(value)[:200]!r}, which is no {kind.__name__}")
    return float(value) if kind is float else value


def _text(value: Any, field: str, rules: Mapping[str, Rule]) -> str:
    if field not in rules:
        raise CheckpointError(f"it has {field}, which a saved program never has")
    text: str = _typed(value, str, field)
    rules[field](text)
    return text


def _typed(value: Any, kind: type, field: str) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"{field} is a {type(value).__name__} and should be a {kind.__name__}")
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, globalns=vars(schema))
