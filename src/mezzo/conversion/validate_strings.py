"""Validate the strings of a saved graph.

torch executes strings of a saved program: it evaluates the expressions of dynamic sizes, writes
names into Python source that it executes, executes guards, and imports the modules that a nested
output names. Each kind of string has a rule here that accepts only harmless ones.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from keyword import iskeyword
from typing import Any

from mezzo._errors import CheckpointError
from mezzo._torch import pytree

_LONGEST = 20_000
_DEEPEST = 60
_WIDEST = 2**63

_NUMBER = re.compile(r"-?[0-9.]{1,40}(e[+-]?[0-9]{1,3})?")
_SYMBOL = re.compile(r"[A-Za-z_]{1,40}[0-9]{0,5}")
_RANGED = re.compile(r"[A-Za-z0-9_ +*/()-]{1,200}")
_EXPRESSION_CHARACTERS = re.compile(r"[A-Za-z0-9_(),'=.+ -]*")

_FUNCTIONS = frozenset(
    # Functions of sympy, and functions of torch that its loader supports.
    "Add Mul Mod Max Min Abs Rational Equality Unequality StrictLessThan LessThan StrictGreaterThan"
    " GreaterThan And Or Not Where FloorDiv ModularIndexing PythonMod CleanDiv CeilToInt FloorToInt"
    " CeilDiv FloatTrueDiv IntTrueDiv TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat"
    " Identity".split()
)
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow"})
_LEAVES = frozenset({"Integer", "Float", "Symbol"})
_ASSUMPTIONS = frozenset(
    {"integer", "positive", "nonnegative", "nonzero", "real", "finite", "precision"}
)
_LARGEST_POWER = 16

_GUARD_FUNCTIONS = frozenset(
    "Max Min Mod PythonMod FloorDiv CeilDiv IntTrueDiv FloatTrueDiv CeilToInt FloorToInt TruncToInt"
    " ToFloat max min abs".split()
)
_GUARD_METHODS = frozenset({"size", "stride", "storage_offset", "dim", "numel"})
_GUARD_NODES = (
    ast.BoolOp,
    ast.Compare,
    ast.UnaryOp,
    ast.BinOp,
    ast.boolop,
    ast.cmpop,
    ast.unaryop,
    ast.expr_context,
)
_GUARD_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod)

_FACTORIES = frozenset({"list", "dict", "set", "tuple", "int", "float", "str", "bool"})


def free_text(text: str) -> None:
    """Accept a message, which torch writes only as a quoted literal."""
    _require(len(text) <= _LONGEST, "a text is too long", text)


def text(text: str) -> None:
    """Accept a name that torch writes between quotes, if nothing in it ends them."""
    _require(
        len(text) <= _LONGEST and text.isprintable() and not set(text) & set("\"'\\"),
        "a name has quotes, backslashes or control characters",
        text,
    )


def trace(text: str) -> None:
    """Accept a source line or list of modules, which torch may write into a comment or string."""
    _require(
        len(text) <= _LONGEST and text.isprintable() and '"""' not in text and "\\" not in text,
        "a source line has control characters, backslashes or triple quotes",
        text,
    )


def identifier(text: str) -> None:
    """Accept a name that torch writes into source code."""
    _require(
        len(text) <= _LONGEST and text.isidentifier() and not iskeyword(text),
        "a name is not an identifier",
        text,
    )


def argument_name(text: str) -> None:
    """Accept the name of an op's argument; it is empty for the inputs of a subgraph."""
    _require(not text or text.isidentifier(), "an argument's name is not an identifier", text)


def path(name: str) -> None:
    """Accept the dotted name of a module, parameter or buffer."""
    text(name)
    _require(
        not any(part.startswith("__") for part in name.split(".")),
        "a parameter's name has a part that starts with two underscores",
        name,
    )


def symbol_range(text: str) -> None:
    """Accept the name of a dynamic size. torch counts up to the number after `u`: it is limited."""
    _require(bool(_RANGED.fullmatch(text)), "a dynamic size has an invalid name", text)
    _require(
        not any(len(digits) > 5 for digits in re.findall(r"[0-9]+", text)),
        "a dynamic size has too large a number",
        text,
    )


def expression(text: str) -> None:
    """Accept the expression of a dynamic size, which torch evaluates.

    It may call a few functions on symbols and numbers.

    >>> expression("Mul(Integer(2), Symbol('s0', positive=True, integer=True))")
    >>> expression("__import__('os')")
    Traceback (most recent call last):
    mezzo._errors.CheckpointError: a size has an expression that is not allowed: "__import__('os')"
    """
    _require(
        len(text) <= _LONGEST
        and bool(_EXPRESSION_CHARACTERS.fullmatch(text))
        and _is_expression(_parsed(text)),
        "a size has an expression that is not allowed",
        text,
    )


def guard(text: str) -> None:
    """Accept a condition on the sizes of inputs, which torch executes.

    >>> guard("(L['x'].size()[0] % 2) == 0")
    """
    _require(
        len(text) <= _LONGEST and "\n" not in text and _is_guard(_parsed(text), _DEEPEST),
        "a guard has an expression that is not allowed",
        text,
    )


def tree(text: str) -> None:
    """Accept the structure of nested inputs or outputs.

    torch imports modules and looks up classes that it names.
    """
    protocol, spec = json.loads(text)
    _require(protocol == 1, "a structure has an unknown version", text)
    _tree(spec, _DEEPEST)


def signature_tree(text: str) -> None:
    """Accept the structure of the inputs, whose keyword arguments are written into source code."""
    tree(text)
    _, spec = json.loads(text)
    children = spec["children_spec"]
    if len(children) == len(("args", "kwargs")) and children[1]["type"] == "builtins.dict":
        for name in json.loads(children[1]["context"]):
            identifier(name)


def _require(allowed: bool, what: str, text: object) -> None:  # noqa: FBT001
    if not allowed:
        shown = str(text)
        raise CheckpointError(f"{what}: {shown[:200]!r}")


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise CheckpointError(f"an expression cannot be read: {text[:200]!r}") from error


def _is_expression(node: ast.expr, depth: int = _DEEPEST) -> bool:
    match node:
        case ast.Name(id=name):
            return name in {"true", "false", "oo"}
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            if name in _LEAVES:
                return _is_leaf(name, arguments, keywords)
            if name in _POWERS:
                return not keywords and _is_power(arguments, depth)
            return (
                name in _FUNCTIONS
                and not keywords
                and depth > 0
                and all(
                    _is_number(argument) or _is_expression(argument, depth - 1)
                    for argument in arguments
                )
            )
    return False


def _is_leaf(name: str, arguments: list[ast.expr], keywords: list[ast.keyword]) -> bool:
    if len(arguments) != 1 or not all(_is_assumption(keyword) for keyword in keywords):
        return False
    match arguments[0]:
        case ast.Constant(value=str() as word) if name == "Symbol":
            return bool(_SYMBOL.fullmatch(word)) and word not in _FUNCTIONS | _POWERS | _LEAVES
        case ast.Constant(value=str() as word):
            return name == "Float" and bool(_NUMBER.fullmatch(word))
    return name == "Integer" and _is_number(arguments[0])


def _is_assumption(keyword: ast.keyword) -> bool:
    match keyword.value:
        case ast.Constant(value=bool()):
            return keyword.arg in _ASSUMPTIONS
        case ast.Constant(value=int() as precision):
            return keyword.arg == "precision" and 0 < precision <= _LARGEST_POWER**2
    return False


def _is_number(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=int() as value) if type(value) is int:
            return abs(value) <= _WIDEST
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return isinstance(operand, ast.Constant) and _is_number(operand)
    return False


def _is_power(arguments: list[ast.expr], depth: int) -> bool:
    """Return whether this is a small power of a symbolic expression.

    A power of numbers would be computed, and could exhaust the memory.
    """
    match arguments:
        case [base, ast.Call(func=ast.Name(id="Integer"), args=[exponent], keywords=[])]:
            small = _is_number(exponent) and abs(ast.literal_eval(exponent)) <= _LARGEST_POWER
            return (
                small
                and any(
                    isinstance(node, ast.Name) and node.id == "Symbol" for node in ast.walk(base)
                )
                and _is_expression(base, depth - 1)
            )
    return False


def _is_guard(node: ast.AST, depth: int) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) in {bool, float} or (type(value) is int and abs(value) <= _WIDEST)
        case ast.Subscript():
            return _is_source(node)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return name in _GUARD_FUNCTIONS and _all_guards(arguments, depth)
        case ast.Call(func=ast.Attribute(value=source, attr=name), args=[], keywords=[]):
            return name in _GUARD_METHODS and _is_source(source)
        case ast.BinOp(op=operator) if not isinstance(operator, _GUARD_OPERATORS):
            return False
        case ast.BinOp(left=left, right=right):
            return _all_guards([left, right], depth)
        case _ if isinstance(node, _GUARD_NODES):
            return _all_guards(list(ast.iter_child_nodes(node)), depth)
    return False


def _all_guards(nodes: list[Any], depth: int) -> bool:
    return depth > 0 and all(_is_guard(node, depth - 1) for node in nodes)


def _is_source(node: ast.expr) -> bool:
    """Return whether this is an input or its size: `L['x']['mask'].size()[0]`."""
    match node:
        case ast.Name(id="L"):
            return True
        case ast.Subscript(value=value, slice=ast.Constant(value=str() as key)):
            text(key)
            return _is_source(value)
        case ast.Subscript(value=value, slice=ast.Constant(value=int())):
            return _is_source(value)
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]):
            return name in _GUARD_METHODS and _is_source(value)
    return False


def _tree(spec: Any, depth: int) -> None:
    shaped = (
        isinstance(spec, dict)
        and spec.keys() == {"type", "context", "children_spec"}
        and isinstance(spec["children_spec"], list)
    )
    _require(shaped and depth > 0, "a structure is malformed or too deep", spec)
    kind = spec["type"]
    if kind is None:
        _require(
            spec["context"] is None and not spec["children_spec"],
            "a structure has a leaf with children",
            spec,
        )
        return
    known = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    named = isinstance(kind, str) and kind in known and kind != pytree.NO_SERIALIZED_TYPE_NAME_FOUND
    _require(
        named,
        "a structure has a class that is not registered with torch's pytree; import what defines it"
        " first",
        kind,
    )
    _require(
        _is_context(kind, pytree.SUPPORTED_SERIALIZED_TYPES[known[kind]], spec["context"]),
        "a structure has an invalid context for its class",
        spec,
    )
    for child in spec["children_spec"]:
        _tree(child, depth - 1)


def _is_context(kind: str, registered: Any, context: Any) -> bool:
    """Return whether the context of a class, its data besides the children, holds plain values.

    torch would import modules for an enum or for the factory of a defaultdict.
    """
    if registered.from_dumpable_context is None:
        return isinstance(context, str) and all(
            _is_plain(value) for value in _flat(json.loads(context))
        )
    if kind == "collections.defaultdict":
        factory = (
            isinstance(context, dict)
            and context.get("default_factory_module") == "builtins"
            and context.get("default_factory_name") in _FACTORIES
        )
        return factory and all(_is_plain(value) for value in _flat(context.get("dict_context")))
    named = (
        pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(context)
        if kind == "collections.namedtuple" and isinstance(context, str)
        else None
    )
    return named is not None and pytree.is_namedtuple_class(named)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        text(value)
    return value is None or isinstance(value, str | bool | int | float)
