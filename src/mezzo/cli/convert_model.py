"""`mezzo convert`: convert the model of a factory to a file, and measure what that changed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mezzo
from mezzo._dtypes import dtype_name
from mezzo._errors import MezzoError
from mezzo.cli.factory import load_setup, sample_arguments, user_code
from mezzo.policy.policy import Policy

_SUFFIXES = (".pt2", ".onnx")
_TOKENS = 100
"""Integer inputs are token numbers below this."""


@dataclass(frozen=True)
class Conversion:
    """A converted model in files, beside the model."""

    files: tuple[Path, ...]
    dtype: str
    model_bytes: int
    """Bytes of the parameters and buffers before."""
    file_bytes: int
    casts: int
    autocast_casts: int
    """Casts that torch.autocast would make."""
    relative_error: float
    """The largest relative error of an output of the sample against float32."""
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return vars(self) | {"files": [str(file) for file in self.files]}

    def __str__(self) -> str:
        return (
            f"{', '.join(map(str, self.files))}: {self.dtype},"
            f" {self.file_bytes / 1e6:.3g} MB (weights before: {self.model_bytes / 1e6:.3g} MB),"
            f" {self.casts} casts (torch.autocast: {self.autocast_casts}),"
            f" relative error {self.relative_error:.1e}"
        )


def check_output(path: Path) -> None:
    """Raise if a file of this name cannot be written, before anything is computed."""
    if path.suffix not in _SUFFIXES:
        raise MezzoError(
            f"{str(path)!r} ends with neither of {', '.join(_SUFFIXES)}. Pass, for example,"
            " -o model.pt2."
        )
    if path.is_dir() or not path.parent.is_dir():
        raise MezzoError(f"{str(path)!r} is no file in an existing folder. Make its folder first.")


def parse_input(text: str) -> torch.Tensor:
    """Make an example of a shape, such as `8,3,224,224` or, for tokens, `8,128:int64`.

    >>> parse_input("2,3").shape, parse_input("4:int64").dtype
    (torch.Size([2, 3]), torch.int64)
    """
    sizes, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    try:
        shape = [int(size) for size in sizes.split(",") if size.strip()]
    except ValueError:
        shape = [-1]
    if not isinstance(dtype, torch.dtype) or any(size < 0 for size in shape):
        raise MezzoError(
            f"--input {text!r} is not a shape. Pass sizes with commas, and a dtype of torch after a"
            " colon if it is not float32: 8,3,224,224 or 8,128:int64."
        )
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(2 if dtype == torch.bool else _TOKENS, shape).to(dtype)


def convert_model(
    factory: str, output: Path, policy: Policy, inputs: Sequence[str] = ()
) -> Conversion:
    """Convert the model of a factory in eval mode, and write it to a file."""
    check_output(output)
    examples = tuple(parse_input(text) for text in inputs)
    setup = load_setup(factory)
    arguments = (examples, dict[str, Any]()) if examples else sample_arguments(setup)
    if arguments is None:
        raise MezzoError(
            f"{factory} returns no sample, which a conversion needs. Return (model, sample), or"
            " pass shapes: --input 8,3,224,224."
        )
    model: nn.Module = setup["model"].eval()
    if examples:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        arguments = tuple(example.to(device) for example in examples), {}
    with user_code(factory):
        converted = mezzo.convert(model, arguments[0], arguments[1], policy)
        error = converted.compare(*arguments[0], **arguments[1]).worst
    files, notes = _write(converted, output)
    dtype = _dtype(converted)
    if not isfinite(error):
        remedy = "Convert with --dtype bfloat16, or keep ops in float32 with a policy."
        notes += (f"The outputs of the sample are not finite in {dtype}. {remedy}",)
    return Conversion(
        files,
        dtype,
        sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]),
        sum(file.stat().st_size for file in files),
        converted.casts.after.count,
        converted.casts.before.count,
        error,
        notes,
    )


def _write(converted: mezzo.Converted, output: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Write the file or files, and return their names and the warnings about them."""
    if output.suffix != ".onnx":
        converted.save(output)
        return (output,), ()
    with warnings.catch_warnings(record=True, action="always") as caught:
        files = converted.export_onnx(output)
    return files, tuple(str(warning.message) for warning in caught)


def _dtype(converted: mezzo.Converted) -> str:
    """Return the 16-bit dtype of a program; float32 if it has none."""
    halves = {row.dtype for row in converted.plan} & {"float16", "bfloat16"}
    return min(halves, default=dtype_name(torch.float32))
