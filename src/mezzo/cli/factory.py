"""Load a training setup from `module:factory`, for `mezzo lint` and `mezzo advise`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from mezzo._errors import MezzoError, nearest


def load_setup(text: str) -> dict[str, Any]:
    """Call a factory, and return the arguments of `mezzo.lint` or `mezzo.advise`.

    `text` is `module:factory` or `file.py:factory`. The factory returns a model, `(model, sample)`,
    or a dictionary of arguments.
    """
    source, _, name = text.rpartition(":")
    if not source or not name:
        raise MezzoError(
            f"{text!r} is not of the form module:factory. Pass, for example, train:make_model,"
            " where make_model() in train.py returns a model or (model, sample)."
        )
    module = _load(source)
    factory = getattr(module, name, None)
    if factory is None:
        public = [one for one in vars(module) if not one.startswith("_")]
        raise MezzoError(f"{source} has no {name!r}.{nearest(name, public)}")
    return _arguments(text, factory() if callable(factory) and not _is_model(factory) else factory)


def _load(source: str) -> ModuleType:
    path = Path(source)
    if path.suffix != ".py":
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{source}.".startswith(f"{error.name}."):
                raise
            raise MezzoError(
                f"There is no module {source!r} here or on sys.path. Run mezzo in the folder of the"
                " module, or pass file.py:factory."
            ) from None
    if not path.is_file():
        raise MezzoError(f"There is no file {source!r}. Pass file.py:factory or module:factory.")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise MezzoError(f"{source!r} cannot be imported. Pass a Python file.")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _arguments(text: str, result: Any) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return {str(name): value for name, value in result.items()}
    if isinstance(result, tuple) and result and _is_model(result[0]):
        model, *sample = result
        return {"model": model, "sample": sample[0] if len(sample) == 1 else tuple(sample)}
    if _is_model(result):
        return {"model": result}
    raise MezzoError(
        f"{text} returned {type(result).__name__!r}. Return a model, a tuple (model, sample), or a"
        " dictionary of arguments with 'model' in it."
    )


def _is_model(value: Any) -> bool:
    return isinstance(value, nn.Module)
