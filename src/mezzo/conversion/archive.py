"""The file format of a converted model: a zip archive with checksums, tensors as raw bytes."""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, BinaryIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import torch
from torch import nn

from mezzo._dtypes import dtype_name
from mezzo._errors import CheckpointError, UnsupportedError

_NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)*(\.json)?")
_ENCRYPTED = 0x1
_JSON = ".json"
_JSON_ROOM = 2**23
"""Bytes of JSON that a file may unpack to beyond its own size: about 8,000 nodes. Reading JSON as a
graph takes up to 32 times its size in memory, so that a small file cannot take more than 300 MB. A
large graph comes with large weights, which allow more."""
_CHUNK = 2**24
"""Bytes copied at a time."""


class ArchiveWriter:
    """Writes the parts of an archive."""

    def __init__(self, archive: ZipFile) -> None:
        self._zip = archive
        self.json_size = 0
        """Unpacked bytes of JSON written so far."""

    def json(self, name: str, value: object) -> None:
        """Write JSON values."""
        # ZipInfo has the date 1980 by default, so that equal programs make equal files.
        text = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        self.json_size += len(text)
        self._zip.writestr(ZipInfo(name), text, ZIP_DEFLATED, compresslevel=9)

    def raw(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Write bytes without compression, one piece after the other."""
        # force_zip64: the header is written before the size is known.
        with self._zip.open(ZipInfo(name), "w", force_zip64=True) as stream:
            for piece in pieces:
                for start in range(0, len(piece), _CHUNK):
                    stream.write(piece[start : start + _CHUNK])


class ArchiveReader:
    """Reads the parts of an archive by name, and checks their checksums."""

    def __init__(self, archive: ZipFile, size: int) -> None:
        self._zip = archive
        self._parts = {entry.filename: entry for entry in archive.infolist()}
        repeated = [
            name
            for name, count in Counter(entry.filename for entry in archive.infolist()).items()
            if count > 1
        ]
        if repeated:
            raise CheckpointError(f"it has two parts named {repeated[0]!r}")
        for part in self._parts.values():
            _check(part)
        # Parts that share their bytes would let a small file expand without limit.
        if sum(part.compress_size for part in self._parts.values()) > size:
            raise CheckpointError("its parts overlap")
        unpacked = sum(part.file_size for name, part in self._parts.items() if name.endswith(_JSON))
        if unpacked > _JSON_ROOM + size:
            raise CheckpointError(
                f"its JSON parts unpack to {unpacked} bytes, and a file of {size} bytes may hold"
                f" {_JSON_ROOM + size}"
            )

    @property
    def names(self) -> frozenset[str]:
        """The names of the parts."""
        return frozenset(self._parts)

    def json(self, name: str) -> Any:
        """Read JSON values."""
        content = bytearray(self._part(name).file_size)
        self.raw(name, len(content), [content])
        return json.loads(content)

    def raw(self, name: str, size: int, buffers: Iterable[bytearray | memoryview]) -> None:
        """Read a part of `size` bytes into buffers, one after the other.

        `buffers` is not iterated before the size has been checked, so that it may allocate.
        """
        part = self._part(name)
        if size != part.file_size:
            raise CheckpointError(
                f"its part {name!r} has {part.file_size} bytes, and {size} were expected"
            )
        with self._zip.open(part) as stream:
            for buffer in buffers:
                _fill(buffer, stream)
            # Read beyond the end: zipfile checks the checksum when it reaches it.
            stream.read(1)

    def _part(self, name: str) -> ZipInfo:
        if name not in self._parts:
            raise CheckpointError(f"it has no part named {name!r}")
        return self._parts[name]


def _fill(buffer: bytearray | memoryview, stream: IO[bytes]) -> None:
    done = 0
    while chunk := stream.read(min(_CHUNK, len(buffer) - done)):
        buffer[done : done + len(chunk)] = chunk
        done += len(chunk)
    if done != len(buffer):
        raise CheckpointError("it ends too early")


@contextmanager
def writing(file: BinaryIO) -> Iterator[ArchiveWriter]:
    """Write an archive to an open file; an incomplete one cannot be read."""
    with ZipFile(file, "w", ZIP_STORED) as archive:
        writer = ArchiveWriter(archive)
        yield writer
        if writer.json_size > (room := _JSON_ROOM + file.tell()):
            raise UnsupportedError(
                f"The program cannot be saved: its graphs take {writer.json_size} bytes, and a file"
                f" with so few weights may hold {room}. Convert parts of the model."
            )


@contextmanager
def reading(file: BinaryIO) -> Iterator[ArchiveReader]:
    """Read an archive from an open file.

    Raises the errors of `zipfile` if it is not a zip archive, and `CheckpointError` if it is one
    that `writing` never writes.
    """
    with ZipFile(file) as archive:
        yield ArchiveReader(archive, os.fstat(file.fileno()).st_size)


def _check(part: ZipInfo) -> None:
    name = part.filename
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"it has a part with the invalid name {name!r}")
    if part.flag_bits & _ENCRYPTED or part.compress_type not in {ZIP_STORED, ZIP_DEFLATED}:
        raise CheckpointError(
            f"its part {name!r} is encrypted, or compressed with an unexpected method"
        )
    if part.compress_type == ZIP_DEFLATED and not name.endswith(_JSON):
        raise CheckpointError(f"its part {name!r} is compressed with an unexpected method")
    if part.compress_type == ZIP_STORED and part.file_size != part.compress_size:
        raise CheckpointError(
            f"its part {name!r} would grow from {part.compress_size} to {part.file_size} bytes"
        )


_DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.complex32,
            torch.complex64,
            torch.complex128,
        ),
        *(
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2fnuz,
            torch.float8_e8m0fnu,
        ),
        *(
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.uint16,
            torch.int16,
            torch.uint32,
            torch.int32,
            torch.uint64,
            torch.int64,
        ),
    )
}

PART = "tensors"
"""The part of the file that holds the bytes of all tensors."""

Names = Mapping[str, torch.Tensor]
Entries = dict[str, dict[str, Any]]


class TensorWriter:
    """Collects tensors by name, and writes each one once."""

    def __init__(self) -> None:
        self._places: dict[tuple[object, ...], int] = {}
        self._tensors: list[torch.Tensor] = []

    def add(self, tensors: Names) -> Entries:
        """Add tensors; return the index of each name's tensor and whether it is a parameter."""
        entries: Entries = {}
        for name, tensor in tensors.items():
            _check_can_save(name, tensor)
            entries[name] = {
                "tensor": self._place(tensor),
                "parameter": isinstance(tensor, nn.Parameter),
                "requires_grad": tensor.requires_grad,
            }
        return entries

    def write(self, archive: ArchiveWriter) -> list[dict[str, Any]]:
        """Write the tensors, and return their dtypes, shapes, strides and devices in order."""
        archive.raw(PART, self._pieces())
        return [
            {
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "device": str(tensor.device),
            }
            for tensor in self._tensors
        ]

    def _pieces(self) -> Iterator[memoryview]:
        for tensor in self._tensors:
            # All memory from the first element to the last, so that any strides are kept. Weights
            # are nearly always dense.
            span = tensor.as_strided((_span(tensor.shape, tensor.stride()),), (1,)).cpu()
            # `span` stays alive here while its bytes are written.
            yield _bytes(span)

    def _place(self, tensor: torch.Tensor) -> int:
        key = (
            tensor.device,
            tensor.dtype,
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        if key not in self._places:
            self._places[key] = len(self._tensors)
            self._tensors.append(tensor.detach().resolve_conj().resolve_neg())
        return self._places[key]


class TensorReader:
    """Reads tensors by name; names of one tensor share it again, across all programs."""

    def __init__(
        self, archive: ArchiveReader, records: list[dict[str, Any]], device: torch.device | None
    ) -> None:
        self._tensors: list[torch.Tensor] = []
        sizes = [_size(record) for record in records]
        archive.raw(PART, sum(sizes), self._buffers(records, sizes, device))
        self._parameters: dict[tuple[int, bool], nn.Parameter] = {}

    def _buffers(
        self, records: list[dict[str, Any]], sizes: list[int], device: torch.device | None
    ) -> Iterator[memoryview]:
        """Iterate over the memory of each tensor, which the caller fills before it takes the next.

        No second copy is made, and a tensor is moved to its device as soon as it is filled.
        """
        for record, size in zip(records, sizes, strict=True):
            flat = torch.empty(size, dtype=torch.uint8)
            yield _bytes(flat)
            self._tensors.append(_tensor(flat, record, device))

    def named(self, entries: Entries) -> dict[str, torch.Tensor]:
        """Return the tensors of entries that `TensorWriter.add` returned."""
        return {
            name: self._one(
                entry["tensor"], parameter=entry["parameter"], requires_grad=entry["requires_grad"]
            )
            for name, entry in entries.items()
        }

    def _one(self, place: int, *, parameter: bool, requires_grad: bool) -> torch.Tensor:
        if not _is_count(place) or place >= len(self._tensors):
            raise CheckpointError(
                f"it refers to tensor {place!r:.80}, and has {len(self._tensors)} tensors"
            )
        tensor = self._tensors[place]
        if not parameter:
            return tensor
        if (place, requires_grad) not in self._parameters:
            self._parameters[place, requires_grad] = nn.Parameter(
                tensor, requires_grad=requires_grad
            )
        return self._parameters[place, requires_grad]


def _size(record: dict[str, Any]) -> int:
    """Return the bytes of a tensor from its description."""
    shape, stride = record["shape"], record["stride"]
    if len(shape) != len(stride) or not all(map(_is_count, (*shape, *stride))):
        raise CheckpointError(f"it has a tensor of shape {shape!r:.80} with strides {stride!r:.80}")
    return _span(shape, stride) * _DTYPES[record["dtype"]].itemsize


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _tensor(
    flat: torch.Tensor, record: dict[str, Any], device: torch.device | None
) -> torch.Tensor:
    dtype, shape, stride, target = (
        _DTYPES[record["dtype"]],
        record["shape"],
        record["stride"],
        device or torch.device(record["device"]),
    )
    if dtype == torch.bool:
        # Kernels rely on bools being 0 or 1.
        flat.clamp_(max=1)
    return flat.view(dtype).as_strided(shape, stride).to(target)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last, gaps included."""
    return (
        0
        if 0 in shape
        else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    )


def _bytes(span: torch.Tensor) -> memoryview:
    """Return a view of the bytes, without numpy, which torch does not require."""
    count = span.numel() * span.element_size()
    return (
        memoryview((ctypes.c_ubyte * count).from_address(span.data_ptr())).cast("B")
        if count
        else memoryview(b"")
    )


def _check_can_save(name: str, tensor: object) -> None:
    kinds = (torch.Tensor, nn.Parameter, nn.Buffer)
    if (
        type(tensor) not in kinds
        or not isinstance(tensor, torch.Tensor)
        or tensor.layout != torch.strided
        or dtype_name(tensor.dtype) not in _DTYPES
    ):
        what = (
            f"a {type(tensor).__name__}"
            if not isinstance(tensor, torch.Tensor)
            else f"a {type(tensor).__name__} of {tensor.dtype} and {tensor.layout}"
        )
        raise UnsupportedError(
            f"{name!r} is {what}, which cannot be saved. A program may hold plain dense tensors"
            " only: replace it before you convert."
        )
