"""Describe the public API of mezzo, a line for each name.

`mezzo` and the integrations are read from their source, which needs none of the packages that they
import, and gives the same on every version of Python and torch. After an intended change,
`python tests/support/public_api.py --write` updates tests/data/public_api.txt.
"""

from __future__ import annotations

import ast
import copy
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests" / "data" / "public_api.txt"
COMMAND = "python tests/support/public_api.py --write"
_SOURCE = ROOT / "src"
_CALLED = ("__init__", "__call__")
_SHARED = {"precision"}
"""Modules of the integrations that only the others import."""
_Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class PublicName:
    """A public function, class, method, property or field."""

    name: str
    """`mezzo.Policy.parse`, say."""
    signature: str
    """Parameters with their defaults, or the default of a field; as in the source."""
    docstring: str | None
    needs_docstring: bool
    """Whether it is a function, a class, a method or a property; a field may go without."""


def lines() -> list[str]:
    """Return the lines of the file that freezes the API."""
    described = [f"{one.name}{one.signature}" for one in public_names()]
    return [*described, *dialect_names()]


def public_names() -> Iterator[PublicName]:
    """Yield the public names of `mezzo` and of its integrations."""
    for name, module in sorted(_imports("mezzo").items()):
        if not name.startswith("_") and module.startswith("mezzo."):
            yield from _describe(f"mezzo.{name}", module, name)
    for path in sorted((_SOURCE / "mezzo" / "integrations").glob("[a-z]*.py")):
        module = f"mezzo.integrations.{path.stem}"
        for name in _exported(module) if path.stem not in _SHARED else ():
            yield from _describe(f"{module}.{name}", _imports(module).get(name, module), name)


def dialect_names() -> Iterator[str]:
    """Yield the names of each module of a dialect; their signatures mirror another system."""
    compat = _SOURCE / "mezzo" / "compat"
    for path in sorted(compat.rglob("*.py")):
        parts = path.relative_to(_SOURCE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            module = ".".join(parts)
            # Some are made of lists of other modules.
            names = getattr(importlib.import_module(module), "__all__", None) or _exported(module)
            yield from (f"{module}.{name}" for name in sorted(names))


def _describe(shown: str, module: str, name: str) -> Iterator[PublicName]:
    if name not in _definitions(module) and name in _imports(module):
        module = _imports(module)[name]
    match node := _definitions(module).get(name):
        case ast.FunctionDef():
            yield PublicName(shown, _parameters(node.args), ast.get_docstring(node), True)
        case ast.ClassDef():
            bases = [ast.unparse(base) for base in node.bases]
            signature = f": class({', '.join(bases)})" if bases else ": class"
            yield PublicName(shown, signature, ast.get_docstring(node), True)
            for member in _members(module, node).values():
                yield from _describe_member(shown, member)
        case ast.Assign() | ast.AnnAssign():
            yield PublicName(shown, ": value", None, False)
        case None:
            raise LookupError(f"{module} does not define {name}, which is public as {shown}.")


def _describe_member(owner: str, node: _Definition) -> Iterator[PublicName]:
    match node:
        case ast.FunctionDef():
            kinds = [ast.unparse(one) for one in node.decorator_list]
            is_property = any(one in {"property", "cached_property"} for one in kinds)
            signature = ": property" if is_property else _parameters(node.args)
            needs_docstring = node.name not in _CALLED
            name = f"{owner}.{node.name}"
            yield PublicName(name, signature, ast.get_docstring(node), needs_docstring)
        case ast.AnnAssign(target=ast.Name(id=name)):
            value = getattr(node, "value", None)
            default = f" = {ast.unparse(value)}" if value else ""
            yield PublicName(f"{owner}.{name}", default or ": field", None, False)
        case ast.Assign(targets=[ast.Name(id=name)]):
            yield PublicName(f"{owner}.{name}", f" = {ast.unparse(node.value)}", None, False)


def _members(module: str, node: ast.ClassDef) -> dict[str, _Definition]:
    """Return the public members of a class, with those that it inherits from other classes here."""
    members: dict[str, _Definition] = {}
    for base in reversed(node.bases):
        name = ast.unparse(base).partition("[")[0]
        owner = _imports(module).get(name, module)
        found = _definitions(owner).get(name) if owner.startswith("mezzo") else None
        if isinstance(found, ast.ClassDef):
            members |= _members(owner, found)
    for member in node.body:
        for name in _names(member):
            if not name.startswith("_") or name in _CALLED:
                members[name] = member
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            members |= {name: ast.AnnAssign(ast.Name(name)) for name in _attributes(member)}
    return members


def _attributes(init: ast.FunctionDef) -> Iterator[str]:
    """Yield the public attributes that `__init__` sets."""
    for node in ast.walk(init):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                match one:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name) if name[0] != "_":
                        yield name


def _parameters(arguments: ast.arguments) -> str:
    """Return parameters and defaults without annotations.

    >>> _parameters(ast.parse("def f(a: int, *, b: str = 'x', **c: int): ...").body[0].args)
    "(a, *, b='x', **c)"
    """
    bare = copy.deepcopy(arguments)
    for one in ast.walk(bare):
        if isinstance(one, ast.arg):
            one.annotation = None
    return f"({ast.unparse(bare)})"


def _names(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            yield node.name
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Assign():
            yield from (one.id for one in node.targets if isinstance(one, ast.Name))


@cache
def _tree(module: str) -> ast.Module:
    path = _SOURCE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


@cache
def _definitions(module: str) -> dict[str, _Definition]:
    return {name: node for node in _tree(module).body for name in _names(node)}


@cache
def _imports(module: str) -> dict[str, str]:
    """Return the names that a module imports, for type checkers too, with where from."""
    blocks = [node.body for node in _tree(module).body if isinstance(node, ast.If)]
    found = {}
    for node in [*_tree(module).body, *(node for body in blocks for node in body)]:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: node.module for alias in node.names}
    return found


def _exported(module: str) -> list[str]:
    """Return `__all__`, or without one the public functions and classes that are defined there."""
    definitions = _definitions(module)
    if "__all__" in definitions:
        return sorted(ast.literal_eval(definitions["__all__"].value))
    return sorted(
        name
        for name, node in definitions.items()
        if not name.startswith("_") and isinstance(node, ast.FunctionDef | ast.ClassDef)
    )


if __name__ == "__main__":
    text = "".join(f"{line}\n" for line in lines())
    if "--write" in sys.argv[1:]:
        STORED.write_text(text)
    else:
        sys.stdout.write(text)
