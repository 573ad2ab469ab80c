"""Load a model or a training setup from `module:factory`, and report the errors of its code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from torch import nn

from mezzo._errors import MEZZO_FOLDER, MezzoError, choices, nearest
from mezzo.policy.policy import Policy

_OWN = (MEZZO_FOLDER, str(Path(importlib.__file__).parent), "<frozen importlib")
"""Where frames before those of the user's code are: mezzo, and the import system."""


class UserCodeError(MezzoError):
    """The user's code raised; `traceback` has its frames, without mezzo's before them."""

    def __init__(self, name: str, error: BaseException) -> None:
        text = str(error).strip().partition("\n")[0]
        super().__init__(f"{name} raised {type(error).__name__}{f': {text}' if text else '.'}")
        frames = _user_frames(error.__traceback__)
        self.traceback = "".join(traceback.format_exception(type(error), error, frames)).rstrip()


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Raise `UserCodeError` for what the code of a module, a factory or a model raises.

    Errors of mezzo, and those that have no frame outside of mezzo, propagate as they are. What the
    code prints goes to stderr: stdout is for the result of the command.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except MezzoError:
        raise
    except (Exception, SystemExit) as error:
        if _user_frames(error.__traceback__) is None and not isinstance(error, SyntaxError):
            raise
        raise UserCodeError(name, error) from error


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OWN):
        frames = frames.tb_next
    return frames


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
        public = [name for name in vars(module) if not name.startswith("_")]
        raise MezzoError(f"{source} has no {name!r}.{nearest(name, public)}")
    if not callable(factory) or _is_model(factory):
        return _arguments(text, factory)
    _check_takes_no_arguments(text, factory)
    with user_code(text):
        result = factory()
    return _arguments(text, result)


def _check_takes_no_arguments(text: str, factory: Callable[..., Any]) -> None:
    with suppress(ValueError):
        # Some functions written in C have no signature.
        try:
            signature(factory).bind()
        except TypeError as error:
            raise MezzoError(
                f"{text} is called without arguments: {error}. Pass a factory that needs none."
            ) from None


def check_names(text: str, setup: Iterable[str], function: Callable[..., Any]) -> None:
    """Raise unless a function takes the arguments that a factory returned, or a policy does."""
    parameters = signature(function).parameters.values()
    known = [one.name for one in parameters if one.kind is not Parameter.VAR_KEYWORD]
    names = [*known, *(field.name for field in fields(Policy))]
    for name in setup:
        if name not in names:
            raise MezzoError(
                f"{text} returned a dictionary with {name!r}. {choices(known)} Or pass a field of"
                f" mezzo.Policy.{nearest(name, names)}"
            )


def sample_arguments(setup: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments with which the sample of a setup is passed to its model.

    A tuple is passed by position, a dictionary by name. With `loss_fn` a sample has a target too.

    >>> sample_arguments({"sample": (1, 2)}), sample_arguments({"sample": (1, 2), "loss_fn": max})
    (((1, 2), {}), ((1,), {}))
    """
    if "sample" not in setup:
        return None
    sample = setup["sample"] if setup.get("loss_fn") is None else setup["sample"][0]
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample) if isinstance(sample, tuple | list) else (sample,)), {}


def _load(source: str) -> ModuleType:
    path = Path(source)
    if path.suffix != ".py":
        sys.path.insert(0, str(Path.cwd()))
        try:
            with user_code(source):
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
    with user_code(source):
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
