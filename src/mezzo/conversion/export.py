"""Export a model with torch.export, with errors that point to the user's lines."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.traceback import preserve_node_meta

from mezzo._errors import ConversionError
from mezzo._events import Event


@contextmanager
def quiet_loggers(*names: str, below: int = logging.ERROR) -> Iterator[None]:
    """Hold back what some loggers say below a level; afterwards they speak as before.

    >>> with quiet_loggers("torch.export"):
    ...     logging.getLogger("torch.export").isEnabledFor(logging.WARNING)
    False
    """
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(below)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_BEHIND = "mezzo_behind"
"""What a decorated model's forward calls the one behind it."""

_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def export(model: nn.Module, args: Args, kwargs: Kwargs, dynamic_shapes: Any) -> ExportedProgram:
    """Export a model as it is, undecomposed: in its own mode, outside of any region around the call."""
    _check_fit(model, args, kwargs)
    # What cannot be traced is told once, in the error.
    with (
        _undecorated(model),
        _plainly(model),
        preserve_node_meta(),
        quiet_loggers(*_LOGGERS, below=logging.CRITICAL),
    ):
        try:
            return torch.export.export(
                model, args, dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
            )
        except Exception as error:
            raise _explained(model, args, kwargs, error) from error


def unwrapped(model: Any) -> nn.Module:
    """The module itself, without what trains or compiles it around."""
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) or hasattr(
        model, "_orig_mod"
    ):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    if isinstance(model, torch.jit.ScriptModule):
        raise ConversionError(
            "A TorchScript module cannot be converted. Pass the module that it was scripted from."
        )
    if isinstance(model, nn.Module):
        return model
    raise ConversionError(
        f"mezzo.convert takes an nn.Module, got {type(model).__name__}. Put a function into a"
        " module's forward."
    )


def _check_fit(model: nn.Module, args: Args, kwargs: Kwargs) -> None:
    if not isinstance(args, tuple):
        several = (
            " A list holds several examples, each of them a tuple: [(x,), (y,)]."
            if isinstance(args, list)
            else ""
        )
        raise ConversionError(
            f"The example inputs are a tuple of the model's arguments, got {type(args).__name__}."
            f" Write convert(model, (x,)).{several}"
        )
    if not isinstance(kwargs, Mapping):
        raise ConversionError(
            f"kwargs= is a mapping of the model's keyword arguments, got {type(kwargs).__name__}."
            " Write kwargs={'mask': mask}."
        )
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConversionError(
            f"The example inputs do not fit {type(model).__name__}.forward{signature}: {error}."
            " Pass its arguments as a tuple, and keyword arguments as kwargs=."
        ) from error


@contextmanager
def _undecorated(model: nn.Module) -> Iterator[None]:
    """Without the region of a decorated float32 model: this conversion's policy takes its place. A 16-bit one needs its door to cast what goes in."""
    own = model.__dict__.get("forward")
    behind = getattr(own, _BEHIND, None)
    if behind is None or any(
        one.is_floating_point() and one.dtype is not torch.float32 for one in model.parameters()
    ):
        yield
        return
    if behind is type(model).forward:
        del model.__dict__["forward"]
    else:
        model.__dict__["forward"] = behind
    try:
        yield
    finally:
        model.__dict__["forward"] = own


@contextmanager
def _plainly(model: nn.Module) -> Iterator[None]:
    fast = torch.backends.mha.get_fastpath_enabled()
    # The fast path is one op that no policy can look into.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ExitStack() as stack:
            for device in {one.device.type for one in (*model.parameters(), *model.buffers())} & {
                "cpu",
                "cuda",
                "xpu",
                "mps",
            }:
                # torch.export drops a region around it; the policy speaks instead.
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(warnings.catch_warnings())
            # A recurrent layer sets the list of its own weights while it runs; torch looks for
            # gradients where there are none when it traces a branch.
            for message in (
                r"(?s).*were assigned during export",
                r"The \.grad attribute of a Tensor that is not a leaf",
            ):
                warnings.filterwarnings("ignore", message=message, category=UserWarning)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _explained(model: nn.Module, args: Args, kwargs: Kwargs, error: Exception) -> ConversionError:
    name, where = type(model).__name__, _users_line(error)
    failed = _fails_by_itself(model, args, kwargs)
    if failed is not None:
        return ConversionError(
            f"{name} does not run on these example inputs{_users_line(failed)}: {_short(failed)}"
            " Pass inputs that the model itself takes."
        )
    return ConversionError(
        f"torch.export cannot trace {name}{where}: {_short(error)} {_remedy(error)}"
    )


def _fails_by_itself(model: nn.Module, args: Args, kwargs: Kwargs) -> Exception | None:
    try:
        with torch.no_grad():
            copy.deepcopy(model)(*copy.deepcopy(args), **copy.deepcopy(dict(kwargs)))
    except Exception as failed:  # noqa: BLE001
        return failed
    return None


def _users_line(error: BaseException) -> str:
    """Where in the user's code an error came from: the last line that is neither torch's nor ours."""
    inside = tuple(
        str(Path(module.__file__ or "").parent)
        for module in (torch, inspect.getmodule(Event))
        if module is not None
    )
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*inside, "<"))
    ]
    if not frames:
        return ""
    return (
        f" at {Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}:"
        f" `{frames[-1].line}`"
    )


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Of sizes that were to change and cannot, torch tells which and why in a list.
    told = (
        [line.removeprefix("- ").partition(". ")[0] for line in lines if line.startswith("- ")]
        if "Constraints violated" in str(error)
        else lines[:1]
    )
    return f"{type(error).__name__}: {'; '.join(told)}".rstrip(".: ") + "."


def _remedy(error: Exception) -> str:
    text = f"{type(error).__name__} {error}"
    if any(
        word in text
        for word in ("data-dependent", "GuardOnDataDependent", "Dynamic control flow", "bool() on")
    ):
        return (
            "The graph cannot branch on a tensor's numbers: use torch.cond or torch.where there, or"
            " take that part out of the model."
        )
    if any(
        word in text
        for word in ("Constraints violated", "ConstraintViolation", "dynamic_shapes", "specialized")
    ):
        return (
            "Correct dynamic_shapes=, which says what sizes may change, or convert with a list of"
            " example inputs, one for each size."
        )
    if "not a known type" in text or "register a pytree" in text:
        return (
            "A graph takes and gives tensors in tuples, lists and dicts: leave other objects out"
            " (for a model of transformers: use_cache=False)."
        )
    return (
        "`torch.export.export(model, args)` shows the same; change that line, or convert the"
        " modules around it."
    )


_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in \S+)?')
_TORCH = str(Path(torch.__file__).parent)


def user_frame(trace: str | None) -> re.Match[str] | None:
    """The line of a traceback that called an op: the last that is not torch's, or torch's last where there is no other."""
    frames = [frame for frame in _FRAME.finditer(trace or "") if not frame[1].startswith("<")]
    own = [frame for frame in frames if not frame[1].startswith(_TORCH)] or frames
    return own[-1] if own else None


def source_line(node: Node) -> str:
    """The file and line of a node's call, or nothing: `model.py:12`."""
    frame = user_frame(node.meta.get("stack_trace"))
    return f"{Path(frame[1]).name}:{frame[2]}" if frame else ""
