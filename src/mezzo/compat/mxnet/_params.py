"""MXNet's `.params` files: named arrays, read defensively and written byte for byte.

A file has a list header, the arrays, and their names. Nothing in it is executed, and every size is
checked against the bytes that are left before memory is allocated.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from mezzo._errors import CheckpointError, UnsupportedError
from mezzo._files import atomic_writer

_LIST_MAGIC = 0x112
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
"""Version 1 has 64-bit dimensions, 2 a storage type, 3 NumPy's shapes (arrays of no dimension)."""

_MAX_DIMENSIONS = 32
_MAX_ELEMENTS = 2**63
_DENSE = 0
_STORAGE_TYPES = {1: "row_sparse", 2: "csr"}
_DEVICE_TYPES = range(1, 7)
_CPU = (1, 0)

DTYPE_FLAGS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.uint8: 3,
    torch.int32: 4,
    torch.int8: 5,
    torch.int64: 6,
    torch.bool: 7,
    torch.int16: 8,
    torch.uint16: 9,
    torch.uint32: 10,
    torch.uint64: 11,
    torch.bfloat16: 12,
}
"""MXNet's numbers of the dtypes, in `.params` files and in the `__dtype__` attribute."""

_DTYPES = {flag: dtype for dtype, flag in DTYPE_FLAGS.items()}


def read_params(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read a `.params` file; return its arrays by name, in the order of the file, on the CPU.

    Raises `CheckpointError` with the offset and what was expected there, and `UnsupportedError` for
    sparse arrays.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_params(f"{folder}/net-0000.params", {"arg:fc1_bias": torch.ones(2)})
    ...     read_params(f"{folder}/net-0000.params")
    {'arg:fc1_bias': tensor([1., 1.])}
    """
    arrays, names = read_arrays(path)
    if len(arrays) != len(names):
        raise CheckpointError(
            f"{os.fspath(path)!r} has {len(arrays)} arrays without names, as mx.nd.save writes for"
            " a list. Expected a dict of names and arrays."
        )
    return dict(zip(names, arrays, strict=True))


def read_arrays(path: str | os.PathLike[str]) -> tuple[list[torch.Tensor], list[str]]:
    """Read a `.params` file; return its arrays and their names, which may be none at all."""
    reader = _Reader(os.fspath(path), Path(path).read_bytes())
    if reader.number("<Q", "the list header") != _LIST_MAGIC:
        raise reader.error(f"the list header {_LIST_MAGIC:#x}, as in every .params file", at=0)
    reader.number("<Q", "the reserved field")
    arrays = [_read_array(reader) for _ in range(reader.count("arrays", min_size=4))]
    names: dict[str, None] = {}
    count_at = reader.offset
    count = reader.count("names", min_size=8)
    if count not in (0, len(arrays)):
        raise reader.error(f"{len(arrays)} names for as many arrays, found {count}", at=count_at)
    for _ in range(count):
        name_at = reader.offset
        name = _read_name(reader)
        if name in names:
            raise reader.error(f"names that differ, found {name!r} twice", at=name_at)
        names[name] = None
    if reader.left:
        raise reader.error(f"the end of the file, found {reader.left} more bytes")
    return arrays, list(names)


def write_params(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors by name, as MXNet 1 does; a file that MXNet wrote is equal byte for byte.

    A tensor without dimensions needs the arrays of MXNet 2, which all arrays are then.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_FLAGS:
            raise UnsupportedError(
                f"MXNet has no arrays of {tensor.dtype}, the dtype of {name!r}. Cast it to one of:"
                f" {', '.join(str(dtype) for dtype in DTYPE_FLAGS)}."
            )
    version = _V2 if all(tensor.dim() for tensor in tensors.values()) else _V3
    with atomic_writer(path) as file:
        file.write(struct.pack("<QQQ", _LIST_MAGIC, 0, len(tensors)))
        for tensor in tensors.values():
            _write_array(file, tensor.detach().cpu().contiguous(), version)
        file.write(struct.pack("<Q", len(tensors)))
        for name in tensors:
            encoded = name.encode()
            file.write(struct.pack("<Q", len(encoded)) + encoded)


class _Reader:
    """The bytes of a file and the position in them."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path, self.data, self.offset = path, data, 0

    @property
    def left(self) -> int:
        """The number of bytes not read yet."""
        return len(self.data) - self.offset

    def error(self, expected: str, at: int | None = None) -> CheckpointError:
        """Return the error for something else than expected, by default at the position."""
        return CheckpointError(
            f"{self.path!r} is not a valid .params file of MXNet: at byte"
            f" {self.offset if at is None else at} of {len(self.data)} expected {expected}. Copy"
            " the file again, or save it again with MXNet."
        )

    def take(self, size: int, what: str) -> memoryview:
        """Return the next bytes."""
        if size > self.left:
            raise self.error(f"{size} bytes of {what}, found {self.left}")
        self.offset += size
        return memoryview(self.data)[self.offset - size : self.offset]

    def numbers(self, form: str, what: str) -> tuple[int, ...]:
        """Return the next numbers, by a format of `struct`."""
        return struct.unpack(form, self.take(struct.calcsize(form), what))

    def number(self, form: str, what: str) -> int:
        """Return the next number."""
        return self.numbers(form, what)[0]

    def count(self, what: str, min_size: int) -> int:
        """Return a number of items, each of which has at least `min_size` bytes."""
        at = self.offset
        count = self.number("<Q", f"the number of {what}")
        if count * min_size > self.left:
            raise self.error(
                f"at most {self.left // min_size} {what} in {self.left} bytes, found {count}", at=at
            )
        return count


def _read_array(reader: _Reader) -> torch.Tensor:
    at = reader.offset
    version = reader.number("<I", "an array's version")
    if version in (_V2, _V3):
        _check_dense(reader)
    dimension = "q"
    if version in (_V1, _V2, _V3):
        dimensions = reader.number("<i", "a number of dimensions")
    else:
        # Before version 1 the number of dimensions came first, and dimensions had 32 bits.
        dimensions, dimension = version, "I"
    # Without NumPy's shapes, an array of no dimensions is one that was never assigned.
    least = 0 if version == _V3 else 1
    if not least <= dimensions <= _MAX_DIMENSIONS:
        raise reader.error(
            f"an array of version 1, 2 or 3 with {least} to {_MAX_DIMENSIONS} dimensions, found"
            f" {dimensions}",
            at=at,
        )
    shape_at = reader.offset
    shape = reader.numbers(f"<{dimensions}{dimension}", "a shape")
    if min(shape, default=0) < 0 or prod(size or 1 for size in shape) >= _MAX_ELEMENTS:
        raise reader.error(f"a shape, found {shape}", at=shape_at)
    if reader.numbers("<ii", "a context")[0] not in _DEVICE_TYPES:
        raise reader.error("a context (1: cpu, 2: gpu)", at=reader.offset - 8)
    flag = reader.number("<i", "a dtype")
    if flag not in _DTYPES:
        raise reader.error(
            f"the number of a dtype, 0 to {max(_DTYPES)}, found {flag}", at=reader.offset - 4
        )
    return _read_values(reader, _DTYPES[flag], shape)


def _check_dense(reader: _Reader) -> None:
    at = reader.offset
    storage = reader.number("<i", "a storage type")
    if storage in _STORAGE_TYPES:
        raise UnsupportedError(
            f"{reader.path!r} has a {_STORAGE_TYPES[storage]} array at byte {at}, which is not"
            " supported: arrays must be dense. Call tostype('default') on it in MXNet and save"
            " again."
        )
    if storage != _DENSE:
        raise reader.error(
            f"a storage type (0: dense, 1: row_sparse, 2: csr), found {storage}", at=at
        )


def _read_values(reader: _Reader, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    taken = reader.take(prod(shape) * dtype.itemsize, f"{shape} values of {dtype}")
    if not taken:
        return torch.empty(shape, dtype=dtype)
    # Copied, so that the values are aligned and the tensor can be changed.
    values = bytearray(taken)
    if dtype is torch.bool:
        # Bytes other than 0 and 1 are not valid in a tensor of truth values.
        return torch.frombuffer(values, dtype=torch.uint8).ne(0).reshape(shape)
    return torch.frombuffer(values, dtype=dtype).reshape(shape)


def _read_name(reader: _Reader) -> str:
    size = reader.number("<Q", "the length of a name")
    at = reader.offset
    try:
        return bytes(reader.take(size, "a name")).decode()
    except UnicodeDecodeError:
        raise reader.error("a name in UTF-8", at=at) from None


def _write_array(file: BinaryIO, tensor: torch.Tensor, version: int) -> None:
    file.write(struct.pack("<Iii", version, _DENSE, tensor.dim()))
    file.write(struct.pack(f"<{tensor.dim()}q", *tensor.shape))
    file.write(struct.pack("<iii", *_CPU, DTYPE_FLAGS[tensor.dtype]))
    if tensor.numel():
        # As bytes: NumPy has no bfloat16.
        file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
