"""Validate a saved graph: reject unexpected fields and ops."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from functools import cache, partial
from typing import Any

from mezzo._errors import CheckpointError
from mezzo._torch import SYMBOLIC_SQRT, all_op_names, get_schema, schema
from mezzo._torch import Union as _Union
from mezzo.conversion import validate_strings
from mezzo.conversion.allowed_ops import is_allowed
from mezzo.conversion.export import user_frame

_OP = re.compile(r"torch\.ops\.([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)")

_SIZES = frozenset(
    [
        f"_operator.{name}"
        for name in (
            "eq ne le ge lt gt neg pos mul add sub floordiv mod pow truediv and_ or_ lshift rshift"
        ).split()
    ]
    + [f"torch.sym_{name}" for name in "not int float ite max min sum".split()]
    + ["math.trunc", SYMBOLIC_SQRT]
)
"""Functions of sizes, which take no tensors."""

_BODIES = frozenset(
    f"torch.ops.higher_order.{name}"
    for name in (
        "cond while_loop scan associative_scan map_impl wrap_with_autocast"
        " wrap_with_set_grad_enabled"
    ).split()
)
"""Control flow and regions: they run graphs of the same file only. Other higher-order operators
load libraries (`aoti_call_delegate`) or call Python objects."""


def check(name: str, custom_ops: Collection[str]) -> None:
    """Reject a function that is not allowed.

    Ops outside of `aten` are allowed if `custom_ops` names their namespace.
    """
    if name in _SIZES or name in _BODIES:
        return
    match = _OP.fullmatch(name)
    if match is None:
        raise CheckpointError(f"it calls {name[:200]!r}, which is not an op")
    namespace, op, overload = match.groups()
    qualified = f"{namespace}::{op}" if overload == "default" else f"{namespace}::{op}.{overload}"
    if namespace == "aten" and not is_allowed(op, overload):
        raise CheckpointError(
            f"it calls {qualified}, which is not on the list of ops that check their arguments"
            " (mezzo.conversion.allowed_ops). Use another op in the model, or wrap it in a custom"
            " op (torch.library.custom_op) and load with custom_ops="
        )
    if namespace != "aten" and namespace not in custom_ops:
        raise CheckpointError(
            f"it calls the custom op {qualified}. If you trust the file, name the op's namespace:"
            f" custom_ops=({namespace!r},)"
        )
    if qualified not in _registered():
        # Read again: the op may have been registered since.
        _registered.cache_clear()
        if qualified not in _registered():
            raise CheckpointError(
                f"it calls the op {qualified}, which is not registered here. Import the module that"
                " defines it first"
            )
    if namespace == "aten" and any(
        argument.is_out
        for argument in get_schema(
            f"aten::{op}", "" if overload == "default" else overload
        ).arguments
    ):
        raise CheckpointError(
            f"it calls {qualified}, which writes to out=; torch.export never writes such a call"
        )


@cache
def _registered() -> frozenset[str]:
    # Only ops of the dispatcher: `torch.ops.aten` also has the built-in functions of TorchScript,
    # and some of those write files.
    return frozenset(all_op_names())


Rule = Callable[[str], None]

_METADATA = ("stack_trace", "nn_module_stack", "torch_fn")
"""The metadata of a node that is saved. The rest names Python objects, or is the user's own."""
_DIALECTS = ("TRAINING", "ATEN")
_FLOATS = ("Infinity", "-Infinity", "NaN")
_WIDEST = 2**64


def one_of(*allowed: str) -> Rule:
    """Return a rule that accepts only some strings."""

    def check(text: str) -> None:
        if text not in allowed:
            raise CheckpointError(
                f"it has {text[:200]!r} where only"
                f" {', '.join(map(repr, allowed)) or 'tensors and numbers'} may be"
            )

    return check


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        "TensorArgument.name SymIntArgument.as_name SymFloatArgument.as_name"
        " SymBoolArgument.as_name GraphArgument.name Node.name"
        " GradientToUserInputSpec.user_input_name UserInputMutationSpec.user_input_name"
        " ModuleCallSignature.forward_arg_names NamedTupleDef.field_names Graph.tensor_values[]"
        " Graph.sym_int_values[] Graph.sym_bool_values[] Graph.sym_float_values[]".split(),
        validate_strings.identifier,
    ),
    **dict.fromkeys(
        "InputToParameterSpec.parameter_name InputToBufferSpec.buffer_name"
        " InputToTensorConstantSpec.tensor_constant_name BufferMutationSpec.buffer_name"
        " ParameterMutationSpec.parameter_name GradientToParameterSpec.parameter_name"
        " ModuleCallEntry.fqn".split(),
        validate_strings.path,
    ),
    **dict.fromkeys(
        "ConstantValue.as_string Graph.inputs>Argument.as_string Argument.as_string_to_argument[]"
        " Device.type ExportedProgram.torch_version"
        " GraphModule.treespec_namedtuple_fields[]".split(),
        validate_strings.text,
    ),
    # The name of a constant input is written into source code; it is empty if there is none.
    "InputToConstantInputSpec.name": validate_strings.argument_name,
    "NamedArgument.name": validate_strings.argument_name,
    "Argument.as_string": validate_strings.free_text,
    "Argument.as_strings": validate_strings.free_text,
    "Graph.outputs>Argument.as_string": one_of(),
    "SymExpr.expr_str": validate_strings.expression,
    "ExportedProgram.guards_code": validate_strings.guard,
    "ExportedProgram.range_constraints[]": validate_strings.symbol_range,
    "ExportedProgram.opset_version[]": one_of("aten"),
    "ExportedProgram.verifiers": one_of(*_DIALECTS),
    "ModuleCallSignature.in_spec": validate_strings.signature_tree,
    "ModuleCallSignature.out_spec": validate_strings.tree,
    "Node.metadata[]": one_of(*_METADATA),
    "Node.metadata": validate_strings.trace,
}


def validate_program(program: object, custom_ops: Collection[str] = ()) -> schema.ExportedProgram:
    """Validate a saved program; raise `CheckpointError` for any unexpected field.

    The result cannot execute code.
    """
    check_target = partial(check, custom_ops=custom_ops)
    validated: schema.ExportedProgram = _validate(
        program,
        schema.ExportedProgram,
        "ExportedProgram",
        {**_RULES, "Node.target": check_target, "Argument.as_operator": check_target},
    )
    return validated


def strip_metadata(program: Any) -> Any:
    """Return a program with only the metadata that may be saved.

    A stack trace is reduced to the line that called the op.
    """
    if isinstance(program, list):
        return [strip_metadata(item) for item in program]
    if not isinstance(program, dict):
        return program
    return {
        name: _saved_metadata(value) if name == "metadata" else strip_metadata(value)
        for name, value in program.items()
    }


def _saved_metadata(metadata: dict[str, str]) -> dict[str, str]:
    kept = {name: metadata[name] for name in _METADATA if name in metadata}
    if "stack_trace" in kept:
        # File and line without the source text, which may be private.
        frame = user_frame(kept["stack_trace"])
        kept["stack_trace"] = frame[0].replace("\\", "/") if frame else ""
    return kept


def _validate(value: Any, kind: Any, field: str, rules: Mapping[str, Rule]) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in {typing.Union, types.UnionType}:
        return None if value is None else _validate(value, arguments[0], field, rules)
    if origin is list:
        return [
            _validate(entry, arguments[0], field, rules) for entry in _typed(value, list, field)
        ]
    if origin is dict:
        return {
            _text(name, f"{field}[]", rules): _validate(item, arguments[1], field, rules)
            for name, item in _typed(value, dict, field).items()
        }
    if dataclasses.is_dataclass(kind):
        return _validate_fields(_typed(value, dict, field), kind, field, rules)
    if kind is str:
        return _text(value, field, rules)
    return _number(value, kind, field)


def _validate_fields(
    value: dict[str, Any], kind: Any, field: str, rules: Mapping[str, Rule]
) -> Any:
    hints = _hints(kind)
    if unknown := value.keys() - hints.keys():
        raise CheckpointError(f"{field} has the unknown field {min(unknown)!r}")
    is_union = issubclass(kind, _Union)
    if is_union and len(value) != 1:
        raise CheckpointError(f"{field} has {len(value)} values, and a union has one")
    fields = {}
    for name, item in value.items():
        own = f"{kind.__name__}.{name}"
        fields[name] = _validate(
            item, hints[name], f"{field}>{own}" if f"{field}>{own}" in rules else own, rules
        )
    return kind.create(**fields) if is_union else kind(**fields)


def _number(value: Any, kind: Any, field: str) -> Any:
    if kind is schema.Layout and value != schema.Layout.Strided:
        raise CheckpointError(
            f"{field} is {str(value)[:200]!r}, and a saved program may have dense tensors only"
        )
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        fits = type(value) is int and value in kind.__members__.values()
    elif kind is float:
        fits = value in _FLOATS if isinstance(value, str) else type(value) in {int, float}
    elif kind is int:
        fits = type(value) is int and abs(value) <= _WIDEST
    else:
        fits = kind is bool and type(value) is bool
    if not fits:
        raise CheckpointError(
            f"{field} is {str(value)[:200]!r}, which is not of type {kind.__name__}"
        )
    return float(value) if kind is float else value


def _text(value: Any, field: str, rules: Mapping[str, Rule]) -> str:
    if field not in rules:
        raise CheckpointError(f"it has the field {field}, which a saved program never has")
    text: str = _typed(value, str, field)
    rules[field](text)
    return text


def _typed(value: Any, kind: type, field: str) -> Any:
    if type(value) is not kind:
        raise CheckpointError(
            f"{field} has type {type(value).__name__} and should have type {kind.__name__}"
        )
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, globalns=vars(schema))
