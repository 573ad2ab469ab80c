"""Errors for names of other systems that a dialect lacks: each names what to use instead.

A dialect has one table of substitutions, whose keys are its dotted names ("nn.Layer"), and each of
its modules has one line: `__getattr__ = module_getattr(__name__, SUBSTITUTIONS)`.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping
from types import FrameType, ModuleType
from typing import Any

from mezzo._errors import nearest

_COMPAT = __name__.rpartition(".")[0]
_PAGES = {"gluoncv": "mxnet"}
"""Dialects that are described on the page of another one."""
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]

_tables: dict[str, tuple[Mapping[str, str], ModuleType | None]] = {}
"""Substitutions and counterpart by module, for imports of submodules that do not exist."""


def module_getattr(
    module_name: str,
    substitutions: Mapping[str, str],
    *,
    fallback: ModuleType | None = None,
    counterpart: ModuleType | None = None,
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a dialect's module, which raises with what to use instead.

    `import module.name` raises `ModuleNotFoundError`, `from module import name` an `ImportError`
    and `module.name` an `AttributeError`, all with the same text. Names of `fallback` are names of
    this module too; names of `counterpart`, a module of torch, are suggested.

    >>> import torch
    >>> getattr_ = module_getattr("mezzo.compat.paddle", {"seed": "torch.manual_seed"})
    >>> getattr_("seed")
    Traceback (most recent call last):
    AttributeError: mezzo.compat.paddle has no seed. Use torch.manual_seed.
    """
    _tables[module_name] = substitutions, counterpart
    if _MissingSubmodules not in sys.meta_path:
        # Last, so that it is called for modules that do not exist. Other names are not affected.
        sys.meta_path.append(_MissingSubmodules)

    def __getattr__(name: str) -> Any:  # noqa: N807 - the name that tracebacks show
        if name.startswith("__"):
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}", name=name)
        if fallback is not None and hasattr(fallback, name):
            return getattr(fallback, name)
        message = missing_message(module_name, name, substitutions, counterpart)
        if _executes_from_import(sys._getframe(1)):
            # Python replaces an AttributeError by an ImportError of its own.
            raise ImportError(message, name=module_name)
        raise AttributeError(message, name=name, obj=sys.modules.get(module_name))

    return __getattr__


def missing_message(
    module_name: str,
    name: str,
    substitutions: Mapping[str, str],
    counterpart: ModuleType | None = None,
) -> str:
    """Return the message for a name that a dialect's module lacks.

    >>> missing_message("mezzo.compat.paddle", "io", {"io.Dataset": "torch.utils.data.Dataset"})
    'mezzo.compat.paddle has no io. Use torch: io.Dataset is torch.utils.data.Dataset.'
    """
    dialect, _, place = module_name.removeprefix(f"{_COMPAT}.").partition(".")
    dotted = f"{place}.{name}" if place else name
    return f"{module_name} has no {name}. " + (
        _substitution(dotted, substitutions)
        or _in_counterpart(name, counterpart)
        or _similar(module_name, name)
        + f"docs/coming-from/{_PAGES.get(dialect, dialect)}.md lists what is there; use torch for"
        " the rest."
    )


def _substitution(dotted: str, substitutions: Mapping[str, str]) -> str:
    if dotted in substitutions:
        return f"Use {substitutions[dotted]}."
    parent = dotted.rpartition(".")[0]
    if parent in substitutions:
        return f"Use {substitutions[parent]}."
    members = [call for call in substitutions if call.startswith(f"{dotted}.")]
    listed = "; ".join(f"{member} is {substitutions[member]}" for member in members)
    return f"Use torch: {listed}." if members else ""


def _in_counterpart(name: str, counterpart: ModuleType | None) -> str:
    """Name the member of a torch module that has this name, in any case (`Conv2D`)."""
    if counterpart is None:
        return ""
    public = {
        attribute.lower(): attribute
        for attribute in reversed(dir(counterpart))
        if not attribute.startswith("_")
    }
    match = name if name in public.values() else public.get(name.lower())
    return f"Use {counterpart.__name__}.{match}." if match else ""


def _similar(module_name: str, name: str) -> str:
    names = [
        attribute
        for attribute in dir(sys.modules.get(module_name))
        if not attribute.startswith("_")
    ]
    suggestion = nearest(name, names).strip()
    return f"{suggestion} " if suggestion else ""


def _executes_from_import(frame: FrameType) -> bool:
    """Return whether a frame executes `from module import name`."""
    code = frame.f_code.co_code
    return 0 <= frame.f_lasti < len(code) and code[frame.f_lasti] == _IMPORT_FROM


class _MissingSubmodules:
    """Finder that raises for `import mezzo.compat.<dialect>.<name>` if there is no such module."""

    @staticmethod
    def find_spec(fullname: str, *_: object) -> None:
        """Raise `ModuleNotFoundError` with what to use, if the parent is a dialect's module."""
        parent, __, name = fullname.rpartition(".")
        # `parent` may be an alias: "apex" after `mezzo.compat.apex.install()`.
        module_name = getattr(sys.modules.get(parent), "__name__", "") if parent else ""
        if module_name in _tables:
            message = missing_message(module_name, name, *_tables[module_name])
            raise ModuleNotFoundError(message, name=fullname)
