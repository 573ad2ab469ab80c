"""The file of a checkpoint: written by `torch.save`, validated before and after `torch.load`.

`torch.load` can read a checkpoint without mezzo. The file is a zip archive of a pickle and one
uncompressed entry for each storage, and its directory has a CRC32 of every entry. `torch.load` does
not compare the checksums; `load` does, for files of every torch release. It also rejects what could
make a small file allocate gigabytes: compressed or overlapping entries, constructors that take a
size, and tensors that are larger than their storage.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pickletools import genops
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import torch

from mezzo._errors import CheckpointError
from mezzo._torch import PICKLED_REBUILDS

_BUDGET = 2**28
"""Bytes that a load may allocate for objects in addition to the size of the file."""
_CHUNK = 2**22
_END, _LOCATOR, _END64 = 22, 20, 56
"""Sizes of the records at the end of a zip archive: the end of central directory record, and for
large files the zip64 locator and the zip64 record."""
_FOLDER = 0x10
_FLAGS = 0x808
"""Allowed flags of an entry: its name is UTF-8, and its checksum follows its content."""

_CALLABLE = {
    "_codecs encode": 4,
    "collections Counter": 32,
    "collections OrderedDict": 4,
    "torch Size": 1,
    "torch device": 0,
    "torch.serialization _get_layout": 0,
    "torch.storage UntypedStorage": 0,
    **{f"{module} complex": 1 for module in ("__builtin__", "builtins")},
    **{f"{module} set": 32 for module in ("__builtin__", "builtins")},
    **dict.fromkeys(PICKLED_REBUILDS, 0),
}
"""What a pickle may call → how many times the size of its arguments it may allocate.

Fewer than `torch.load(weights_only=True)` allows: not `bytearray(2**40)`,
`torch.FloatTensor(2**40)` or `_rebuild_qtensor`. A set of the characters of a string has an object
for each."""

_COST = {
    "EMPTY_DICT": 64,
    "EMPTY_LIST": 56,
    "EMPTY_SET": 216,
    "REDUCE": 720,
    "NEWOBJ": 720,
    "BINPERSID": 160,
}
"""Bytes that a pickle operation allocates, about. A tensor takes 710, its storage 160."""
_OBJECT, _SLOT = 40, 8
"""Bytes of a number, and of an item of a container."""
_NUMBERS = {"BININT", "BININT1", "BININT2", "BINFLOAT", "NEWTRUE", "NEWFALSE", "NONE"}
_PUTS, _GETS, _NOTHING = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}, {"PROTO", "STOP"}
_CALLS, _GROWS, _TO_MARK = (
    {"REDUCE", "NEWOBJ", "BUILD"},
    {"APPEND", "APPENDS", "SETITEM", "SETITEMS"},
    {"TUPLE", "APPENDS", "SETITEMS"},
)
_TAKES = {
    "TUPLE1": 1,
    "TUPLE2": 2,
    "TUPLE3": 3,
    "APPEND": 1,
    "SETITEM": 2,
    "REDUCE": 2,
    "NEWOBJ": 2,
    "BUILD": 2,
    "BINPERSID": 1,
}
"""Number of objects that a pickle operation takes from the stack."""


def save(content: Any, file: BinaryIO) -> None:
    """Write a checkpoint, with checksums even if the process has switched them off.

    Raises `CheckpointError` for tensors that `load` would reject for their size.
    """
    storages = [tensor.untyped_storage() for tensor in _plain_tensors(content)]
    _check_tensor_sizes(
        content, sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    )
    has_checksums = torch.serialization.get_crc32_options()
    if not has_checksums:
        torch.serialization.set_crc32_options(True)
    try:
        torch.save(content, file)
    finally:
        if not has_checksums:
            torch.serialization.set_crc32_options(False)


def load(file: BinaryIO) -> Any:
    """Read a file of `save` or `torch.save`.

    Raises `CheckpointError` if it is damaged, or would allocate much more memory than its size.
    """
    try:
        size = file.seek(0, 2)
        _check_directory(file, size)
        with ZipFile(file) as archive:
            _check_entries(archive, size)
            _check_checksums(archive)
            _check_pickle(archive.read(_pickle_entry(archive)), 2 * size + _BUDGET)
        file.seek(0)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=False)
        _check_tensor_sizes(content, size)
    except CheckpointError:
        raise
    except Exception as error:
        # Without torch's message, which advises to load without safeguards; it is the cause of this
        # error and is shown above it.
        raise CheckpointError("torch cannot read it") from error
    return content


def is_complete(file: BinaryIO, text: str) -> bool:
    """Return whether a file ends as `save` ends it and holds a text; reads no tensors."""
    try:
        size = file.seek(0, 2)
        _check_directory(file, size)
        with ZipFile(file) as archive:
            _check_entries(archive, size)
            return text.encode() in archive.read(_pickle_entry(archive))
    except (CheckpointError, OSError, BadZipFile, struct.error):
        return False


def _check_directory(file: BinaryIO, size: int) -> None:
    """Raise unless the archive ends where its directory ends.

    Otherwise `zipfile` and torch could read two different directories.
    """
    file.seek(-min(size, _END + _LOCATOR), 2)
    tail = file.read()
    end, locator = tail[-_END:], tail[:-_END]
    if not end.startswith(b"PK\5\6") or end[-2:] != b"\0\0":
        raise CheckpointError("it does not end as a file of torch.save does")
    directory = size - _END
    if locator.startswith(b"PK\6\7"):
        directory -= _LOCATOR + _END64
        file.seek(directory)
        end64 = file.read(_END64)
        length, start = struct.unpack("<QQ", end64[40:56])
        if struct.unpack("<Q", locator[8:16]) != (directory,) or not end64.startswith(b"PK\6\6"):
            raise CheckpointError("its directory is damaged")
    else:
        length, start = struct.unpack("<II", end[12:20])
    if start + length != directory:
        raise CheckpointError("its directory is damaged")


def _check_entries(archive: ZipFile, size: int) -> None:
    """Raise for entries that are compressed or that overlap: together they must fit the file."""
    entries = archive.infolist()
    if any(
        entry.compress_type != ZIP_STORED
        or entry.flag_bits & ~_FLAGS
        or entry.file_size != entry.compress_size
        for entry in entries
    ):
        raise CheckpointError(
            "it has compressed or encrypted entries, which save_checkpoint never writes"
        )
    # Of an entry with the attribute of a folder, torch reads nothing, and returns memory that was
    # never written.
    if any(entry.external_attr & _FOLDER or entry.is_dir() for entry in entries):
        raise CheckpointError("its directory is damaged")
    if sum(entry.file_size for entry in entries) > size:
        raise CheckpointError("its entries overlap")
    if any(count > 1 for count in Counter(entry.filename.lower() for entry in entries).values()):
        raise CheckpointError("it has two entries of the same name")


def _pickle_entry(archive: ZipFile) -> ZipInfo:
    """Return the entry of the pickle."""
    # torch ignores the case of a name, and takes the folder of the first entry.
    names = [entry.filename.lower() for entry in archive.infolist()]
    pickles = [entry for entry in archive.infolist() if entry.filename.lower().endswith("data.pkl")]
    if len(pickles) != 1 or any(name.endswith("constants.pkl") for name in names):
        raise CheckpointError("it is an archive of another kind")
    return pickles[0]


def _check_checksums(archive: ZipFile) -> None:
    """Compare the checksum of every entry."""
    if not any(entry.CRC for entry in archive.infolist()):
        # Written after torch.serialization.set_crc32_options(False). Damage does not look like
        # that: at least five checksums would have to become 0.
        for entry in archive.infolist():
            # zipfile does not compare an entry without a checksum.
            del entry.CRC
    for entry in archive.infolist():
        try:
            # zipfile compares at the end of the entry.
            with archive.open(entry) as content:
                while content.read(_CHUNK):
                    pass
        except BadZipFile as error:
            raise CheckpointError(
                f"its entry {entry.filename!r} does not match its checksum"
            ) from error


def _check_pickle(pickled: bytes, budget: int) -> None:
    """Raise if a pickle calls what a checkpoint does not need, or allocates more than a budget.

    Simulates the stack of the unpickler with the size of each object instead of the object. What is
    taken from the memo again and copied, as by `set`, counts each time.
    """
    spent, stack, marks = 0, list[_Item](), list[int]()
    memo: dict[Any, _Item] = {}
    number = _Item(_OBJECT)
    allowed: dict[Any, int] = _CALLABLE | dict.fromkeys(_safe_globals(), 4)
    for opcode, argument, _ in genops(pickled):
        name = opcode.name
        if name in _NUMBERS:
            # First, because most operations are numbers: the states of random generators.
            stack.append(number)
            spent += _OBJECT
        elif name == "MARK":
            marks.append(len(stack))
        elif name in _PUTS:
            memo[argument] = stack[-1]
        elif name in _GETS:
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_Item(0, allowed.get(argument, 1)))
            _check_callable(argument, allowed)
        elif name not in _NOTHING:
            start = marks.pop() if name in _TO_MARK else len(stack) - _TAKES.get(name, 0)
            operands = stack[start:]
            size = min(sum(operand.size + _SLOT for operand in operands), budget)
            del stack[start:]
            if name in _GROWS:
                stack[-1].grow(size)
            else:
                cost = _COST.get(name, _OBJECT) + _text_size(argument)
                is_call = name in _CALLS
                spent += cost + (size * operands[0].copies if is_call else _SLOT * len(operands))
                stack.append(_Item(size if is_call else size + cost))
        if spent > budget:
            raise CheckpointError(
                f"its {len(pickled)} bytes of structure make objects of more than {budget >> 20} MB"
            )


class _Item:
    """The size of an object on the stack of an unpickler."""

    __slots__ = ("copies", "size")

    def __init__(self, size: int, copies: int = 1) -> None:
        self.size, self.copies = size, copies

    def grow(self, size: int) -> None:
        """Add the size of what is put into the object."""
        self.size += size


def _text_size(argument: Any) -> int:
    return 4 * len(argument) if isinstance(argument, str | bytes) else 0


def _check_callable(name: Any, allowed: Mapping[Any, int]) -> None:
    module, _, attribute = name.partition(" ")
    is_storage_or_dtype = module == "torch" and (
        attribute.endswith("Storage") or isinstance(getattr(torch, attribute, None), torch.dtype)
    )
    if name not in allowed and not is_storage_or_dtype:
        raise CheckpointError(f"it calls {module}.{attribute}, which no checkpoint needs")


def _safe_globals() -> set[str]:
    """Return what the process has passed to `torch.serialization.add_safe_globals`."""
    names = (
        (
            allowed[1]
            if isinstance(allowed, tuple)
            else f"{allowed.__module__}.{allowed.__qualname__}"
        )
        for allowed in torch.serialization.get_safe_globals()
    )
    return {" ".join(name.rpartition(".")[::2]) for name in names}


def _check_tensor_sizes(content: Any, size: int) -> None:
    """Raise for tensors that are together much larger than the file.

    Expanded tensors, or many views of one storage, would allocate that memory when they are copied.
    """
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in _plain_tensors(content))
    # Twice the size, because tied weights are in a file once, under several names.
    if claimed > 2 * size + _BUDGET:
        raise CheckpointError(f"its tensors claim {claimed} bytes, and the file has {size}")


def _plain_tensors(content: Any) -> Iterator[torch.Tensor]:
    """Yield every dense tensor in nested containers; each container is searched once."""
    remaining, seen = [content], set()
    while remaining:
        value = remaining.pop()
        if type(value) in {torch.Tensor, torch.nn.Parameter}:
            if value.layout is torch.strided and not value.is_meta:
                yield value
        elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            remaining.extend(value.values() if isinstance(value, dict) else value)
