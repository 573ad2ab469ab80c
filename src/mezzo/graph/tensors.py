"""Tensors as raw bytes and plain descriptions, each stored once however many names it has."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mezzo._dtypes import dtype_name
from mezzo._errors import CheckpointError, UnsupportedError
from mezzo.graph.archive import ArchiveReader, ArchiveWriter

_DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
        *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64),
    )
}

PART = "tensors"
"""The part of the file that holds their bytes, in order."""

Names = Mapping[str, torch.Tensor]
Entries = dict[str, dict[str, Any]]


class TensorWriter:
    """Collects tensors by name, and writes each piece of memory once."""

    def __init__(self) -> None:
        self._places: dict[tuple[object, ...], int] = {}
        self._tensors: list[torch.Tensor] = []

    def add(self, tensors: Names) -> Entries:
        """Describe tensors: which stored one each name means, and whether it is a parameter."""
        entries: Entries = {}
        for name, tensor in tensors.items():
            _refuse_unwritable(name, tensor)
            entries[name] = {"tensor": self._place(tensor), "parameter": isinstance(tensor, nn.Parameter), "requires_grad": tensor.requires_grad}
        return entries

    def write(self, archive: ArchiveWriter) -> list[dict[str, Any]]:
        """Write what was collected, and give its descriptions in order."""
        archive.raw(PART, self._pieces())
        return [{"dtype": dtype_name(one.dtype), "shape": list(one.shape), "stride": list(one.stride()), "device": str(one.device)} for one in self._tensors]

    def _pieces(self) -> Iterator[memoryview]:
        for tensor in self._tensors:
            # From the first element to the last, and what lies between: strides are kept so, whatever they are; a stored weight is dense anyway.
            span = tensor.as_strided((_span(tensor.shape, tensor.stride()),), (1,)).cpu()
            # Held here while its bytes are written.
            yield _bytes(span)

    def _place(self, tensor: torch.Tensor) -> int:
        key = (tensor.device, tensor.dtype, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if key not in self._places:
            self._places[key] = len(self._tensors)
            self._tensors.append(tensor.detach().resolve_conj().resolve_neg())
        return self._places[key]


class TensorReader:
    """Gives tensors by name; names that meant one tensor mean one again, in every program of the file."""

    def __init__(self, archive: ArchiveReader, records: list[dict[str, Any]], device: torch.device | None) -> None:
        self._tensors: list[torch.Tensor] = []
        sizes = [_size(record) for record in records]
        archive.raw(PART, sum(sizes), self._buffers(records, sizes, device))
        self._parameters: dict[tuple[int, bool], nn.Parameter] = {}

    def _buffers(self, records: list[dict[str, Any]], sizes: list[int], device: torch.device | None) -> Iterator[memoryview]:
        """The memory of each tensor, to be filled by the reader before it takes the next: no second copy is made, and what goes to a device leaves the host at once."""
        for record, size in zip(records, sizes, strict=True):
            flat = torch.empty(size, dtype=torch.uint8)
            yield _bytes(flat)
            self._tensors.append(_tensor(flat, record, device))

    def named(self, entries: Entries) -> dict[str, torch.Tensor]:
        """The tensors of some entries."""
        return {name: self._one(entry["tensor"], parameter=entry["parameter"], requires_grad=entry["requires_grad"]) for name, entry in entries.items()}

    def _one(self, place: int, *, parameter: bool, requires_grad: bool) -> torch.Tensor:
        if not _is_count(place) or place >= len(self._tensors):
            raise CheckpointError(f"it names the tensor {place!r:.80}, and has {len(self._tensors)}")
        tensor = self._tensors[place]
        if not parameter:
            return tensor
        if (place, requires_grad) not in self._parameters:
            self._parameters[place, requires_grad] = nn.Parameter(tensor, requires_grad=requires_grad)
        return self._parameters[place, requires_grad]


def _size(record: dict[str, Any]) -> int:
    """How many bytes a described tensor takes."""
    shape, stride = record["shape"], record["stride"]
    if len(shape) != len(stride) or not all(map(_is_count, (*shape, *stride))):
        raise CheckpointError(f"it has a tensor of shape {shape!r:.80} with strides {stride!r:.80}")
    return _span(shape, stride) * _DTYPES[record["dtype"]].itemsize


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _tensor(flat: torch.Tensor, record: dict[str, Any], device: torch.device | None) -> torch.Tensor:
    dtype, shape, stride, target = _DTYPES[record["dtype"]], record["shape"], record["stride"], device or torch.device(record["device"])
    if dtype == torch.bool:
        # A bool is 0 or 1, and nothing else: kernels rely on it.
        flat.clamp_(max=1)
    return flat.view(dtype).as_strided(shape, stride).to(target)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements lie from the first to the last, between ones included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _bytes(span: torch.Tensor) -> memoryview:
    """The bytes themselves, without numpy, which torch does not require."""
    count = span.numel() * span.element_size()
    return memoryview((ctypes.c_ubyte * count).from_address(span.data_ptr())).cast("B") if count else memoryview(b"")


def _refuse_unwritable(name: str, tensor: object) -> None:
    kinds = (torch.Tensor, nn.Parameter, nn.Buffer)
    if type(tensor) not in kinds or not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or dtype_name(tensor.dtype) not in _DTYPES:
        what = f"a {type(tensor).__name__}" if not isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__} of {tensor.dtype} and {tensor.layout}"
        raise UnsupportedError(f"{name!r} is {what}, which cannot be saved. A program holds plain dense tensors: replace it before you convert.")
