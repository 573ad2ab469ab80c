"""Find the statements of mezzo that write an attribute of another object of mezzo."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FOREIGN = {
    "tensors of torch": "data grad grad_dtype requires_grad",
    "modules and optimizers of torch": "forward step training weight bias _opt_called",
    "nodes and values of graphs": "args kwargs meta name target",
    "functions": "__doc__ __kwdefaults__ __module__ __name__ __qualname__",
    "the protocol of torch's fused optimizers": "found_inf grad_scale",
}
"""Attributes that objects of torch and of Python have, and some class of mezzo too."""
OWNERS = {"self", "cls", "ctx"}
"""`ctx` is the context of an autograd function."""
SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}
CREATES = re.compile(
    r"(?:[\w.]+\.)?_?[A-Z]\w*|cls|type\(\w+\)|[\w.()]*__new__|copy|deepcopy"
    r"|.*\.as_subclass"
)
"""Functions whose result is a new object: classes, and what copies."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def foreign_writes(source: Path) -> list[str]:
    """Return `path: target` of each write to an attribute that a class of mezzo declares.

    Not those to `self` and `cls`, to an object that the same function has created, and to the
    state of a module by its own functions. A name or a text that is computed counts as declared.
    """
    trees = {path: ast.parse(path.read_text()) for path in sorted(source.rglob("*.py"))}
    declared = {name for tree in trees.values() for name in _declared(tree)}
    declared -= {name for names in FOREIGN.values() for name in names.split()}
    return sorted(
        {
            f"{path.relative_to(source).as_posix()}: {ast.unparse(target)}"
            for path, tree in trees.items()
            for target in _writes(tree, declared)
        }
    )


def _declared(tree: ast.Module) -> Iterator[str]:
    """Yield the attributes of the classes of a module, without methods."""
    for one in ast.walk(tree):
        if isinstance(one, ast.ClassDef):
            for statement in one.body:
                yield from map(ast.unparse, _targets(statement))
            for part in ast.walk(one):
                if _is_write(part) and ast.unparse(part.value) in OWNERS:
                    yield part.attr


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.AnnAssign):
        return [statement.target]
    return statement.targets if isinstance(statement, ast.Assign) else []


def _is_write(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)


def _writes(tree: ast.Module, declared: set[str]) -> Iterator[ast.expr]:
    own = {
        name
        for statement in tree.body
        for name in (
            [statement.name]
            if isinstance(statement, ast.ClassDef | Function)
            else map(ast.unparse, _targets(statement))
        )
    }
    pending: list[tuple[ast.AST, set[str]]] = [(tree, own | OWNERS)]
    while pending:
        node, known = pending.pop()
        if isinstance(node, Function):
            known = known | _created(node)
        if _is_write(node) and node.attr in declared and ast.unparse(node.value) not in known:
            yield node
        # Also as a function to call later: `callback(setattr, one, "name", before)`.
        for one in _arguments_of_setters(node):
            if ast.unparse(one) not in known:
                yield one
        pending.extend((child, known) for child in ast.iter_child_nodes(node))


def _arguments_of_setters(node: ast.AST) -> list[ast.expr]:
    """Return the object of a call of `setattr` and the like, or of a call that passes them on."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func).startswith("super()."):
        return []
    names = [ast.unparse(one).rpartition(".")[2] for one in (node.func, *node.args)]
    place = next((place for place, name in enumerate(names) if name in SETTERS), None)
    return [] if place is None else node.args[place : place + 1]


def _created(function: Function) -> set[str]:
    """Return the variables of a function that have an object which it has created."""
    return {
        ast.unparse(target)
        for statement in ast.walk(function)
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        and isinstance(statement.value, ast.Call)
        and CREATES.fullmatch(ast.unparse(statement.value.func))
        for target in _targets(statement)
    }
