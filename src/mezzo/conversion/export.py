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
from mezzo._torch import EXPORT_LOGGERS

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]

_WRAPPED_FORWARD = "mezzo_wrapped_forward"
"""Attribute of a decorated model's forward wrapper: the forward that it calls. As
`autocasting.module_rules.WRAPPED_FORWARD`, which is in another layer."""


def export(model: nn.Module, args: Args, kwargs: Kwargs, dynamic_shapes: Any) -> ExportedProgram:
    """Export a model without decomposing its ops, in the mode that it is in.

    An autocast region around the call has no effect.
    """
    _check_inputs(model, args, kwargs)
    # The error message explains why tracing failed; the logs would repeat it.
    with (
        _undecorated(model),
        _export_settings(model),
        preserve_node_meta(),
        quiet_loggers(*EXPORT_LOGGERS, below=logging.CRITICAL),
    ):
        try:
            return torch.export.export(
                model, args, dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
            )
        except Exception as error:
            raise _conversion_error(model, args, kwargs, error) from error


def unwrap_module(model: Any) -> nn.Module:
    """Return the module inside wrappers of data parallel training and of torch.compile."""
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


def _check_inputs(model: nn.Module, args: Args, kwargs: Kwargs) -> None:
    if not isinstance(args, tuple):
        several = (
            " To pass several examples, make each of them a tuple: [(x,), (y,)]."
            if isinstance(args, list)
            else ""
        )
        raise ConversionError(
            "The example inputs must be a tuple of the model's arguments, got"
            f" {type(args).__name__}. Write convert(model, (x,)).{several}"
        )
    if not isinstance(kwargs, Mapping):
        raise ConversionError(
            "kwargs= must be a mapping of the model's keyword arguments, got"
            f" {type(kwargs).__name__}. Write kwargs={{'mask': mask}}."
        )
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConversionError(
            f"The example inputs do not fit {type(model).__name__}.forward{signature}: {error}."
            " Pass its arguments as a tuple, and keyword arguments as kwargs=."
        ) from error


# Settings during the export


@contextmanager
def _undecorated(model: nn.Module) -> Iterator[None]:
    """Export a decorated float32 model without its autocast region.

    The policy of the conversion replaces it. A decorated 16-bit model keeps its forward wrapper,
    which casts the inputs.
    """
    wrapper = model.__dict__.get("forward")
    wrapped = getattr(wrapper, _WRAPPED_FORWARD, None)
    if wrapped is None or any(
        parameter.is_floating_point() and parameter.dtype is not torch.float32
        for parameter in model.parameters()
    ):
        yield
        return
    if wrapped is type(model).forward:
        del model.__dict__["forward"]
    else:
        model.__dict__["forward"] = wrapped
    try:
        yield
    finally:
        model.__dict__["forward"] = wrapper


@contextmanager
def _export_settings(model: nn.Module) -> Iterator[None]:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # The fast path of attention is a single op, whose inner ops no policy could choose.
    torch.backends.mha.set_fastpath_enabled(False)
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    try:
        with ExitStack() as stack:
            for device in devices & {"cpu", "cuda", "xpu", "mps"}:
                # A region around the call must not change the graph: the policy decides.
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(warnings.catch_warnings())
            # A recurrent layer assigns the list of its weights in forward. torch reads .grad of
            # non-leaf tensors when it traces a branch.
            for message in (
                r"(?s).*were assigned during export",
                r"The \.grad attribute of a Tensor that is not a leaf",
            ):
                warnings.filterwarnings("ignore", message=message, category=UserWarning)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def quiet_loggers(*names: str, below: int = logging.ERROR) -> Iterator[None]:
    """Suppress log records below a level, and restore the loggers' levels afterwards.

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


# Errors


def _conversion_error(
    model: nn.Module, args: Args, kwargs: Kwargs, error: Exception
) -> ConversionError:
    name = type(model).__name__
    eager = _eager_error(model, args, kwargs)
    if eager is not None:
        return ConversionError(
            f"{name} does not run on these example inputs{_raised_at(eager)}: {_summary(eager)}"
            " Pass inputs that the model itself takes."
        )
    return ConversionError(
        f"torch.export cannot trace {name}{_raised_at(error)}: {_summary(error)} {_remedy(error)}"
    )


def _eager_error(model: nn.Module, args: Args, kwargs: Kwargs) -> Exception | None:
    """Run a copy of the model without tracing; return the error that it raises, if any."""
    try:
        with torch.no_grad():
            copy.deepcopy(model)(*copy.deepcopy(args), **copy.deepcopy(dict(kwargs)))
    except Exception as error:  # noqa: BLE001 - code of the user
        return error
    return None


def _raised_at(error: BaseException) -> str:
    """Return where an error was raised: the last line that is neither torch's nor mezzo's."""
    libraries = tuple(
        str(Path(module.__file__ or "").parent)
        for module in (torch, inspect.getmodule(Event))
        if module is not None
    )
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*libraries, "<"))
    ]
    if not frames:
        return ""
    last = frames[-1]
    return f" at {Path(last.filename).name}:{last.lineno} in {last.name}: `{last.line}`"


def _summary(error: BaseException) -> str:
    """Return the first line of an error, or all violated constraints on dynamic sizes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    shown = (
        [line.removeprefix("- ").partition(". ")[0] for line in lines if line.startswith("- ")]
        if "Constraints violated" in str(error)
        else lines[:1]
    )
    return f"{type(error).__name__}: {'; '.join(shown)}".rstrip(".: ") + "."


def _remedy(error: Exception) -> str:
    text = f"{type(error).__name__} {error}"

    def mentions(*phrases: str) -> bool:
        return any(phrase in text for phrase in phrases)

    if mentions("data-dependent", "GuardOnDataDependent", "Dynamic control flow", "bool() on"):
        return (
            "A graph cannot branch on a tensor's values: use torch.cond or torch.where there, or"
            " take that part out of the model."
        )
    if mentions("Constraints violated", "ConstraintViolation", "dynamic_shapes", "specialized"):
        return (
            "Correct dynamic_shapes=, or convert with a list of example inputs, one for each size."
        )
    if mentions("not a known type", "register a pytree"):
        return (
            "A graph takes and returns tensors in tuples, lists and dicts: leave other objects out"
            " (for a model of transformers: use_cache=False)."
        )
    return (
        "`torch.export.export(model, args)` raises the same error; change that line, or convert the"
        " modules around it."
    )


# Source lines of nodes

_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in \S+)?')
_TORCH = str(Path(torch.__file__).parent)


def source_line(node: Node) -> str:
    """Return the file and line that called a node, such as `model.py:12`, or an empty string."""
    frame = user_frame(node.meta.get("stack_trace"))
    return f"{Path(frame[1]).name}:{frame[2]}" if frame else ""


def user_frame(trace: str | None) -> re.Match[str] | None:
    """Return the last frame of a stack trace that is not torch's, or else torch's last."""
    frames = [frame for frame in _FRAME.finditer(trace or "") if not frame[1].startswith("<")]
    candidates = [frame for frame in frames if not frame[1].startswith(_TORCH)] or frames
    return candidates[-1] if candidates else None
