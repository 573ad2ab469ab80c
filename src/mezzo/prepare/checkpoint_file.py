"""The file of a checkpoint: what `torch.save` writes, verified before and after `torch.load` reads it.

A checkpoint is an ordinary torch file, so that `torch.load` reads it without mezzo. It is a zip
archive of a pickle and one uncompressed entry for each storage, and the directory of the archive
holds a CRC32 of every entry. `torch.load` does not compare them; `load` does, in files of every
release. It also refuses what a small file could ask gigabytes for: compressed or overlapping
entries, constructors that take a size, and tensors that are larger than the memory behind them.
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

_BUDGET = 2**28
"""Bytes that a load may allocate for objects beside the file's own content."""
_CHUNK = 2**22
_END, _LOCATOR, _END64 = 22, 20, 56
"""Sizes of the records at the end of a zip archive: the end of the directory, and for large
files the locator of a second one and that itself."""
_FOLDER = 0x10
_FLAGS = 0x808
"""Flags of an entry: its name is UTF-8, and its checksum follows its content."""

_REBUILDS = (
    "parameter",
    "parameter_with_state",
    "sparse_tensor",
    "tensor_v2",
    "tensor_v3",
    "wrapper_subclass",
)
_CALLABLE = {
    "_codecs encode": 4,
    "collections Counter": 32,
    "collections OrderedDict": 4,
    "torch Size": 1,
    "torch device": 0,
    "torch.serialization _get_layout": 0,
    "torch.storage UntypedStorage": 0,
    "torch._tensor _rebuild_from_type_v2": 0,
    **{f"{module} complex": 1 for module in ("__builtin__", "builtins")},
    **{f"{module} set": 32 for module in ("__builtin__", "builtins")},
    **{f"torch._utils _rebuild_{name}": 0 for name in _REBUILDS},
}
"""What a pickle may call, of all that `torch.load(weights_only=True)` lets it: not
`bytearray(2**40)`, `torch.FloatTensor(2**40)` or `_rebuild_qtensor`.

With each, how many times the size of its arguments it may allocate: a set of the characters of a
string has an object for each."""

_COST = {
    "EMPTY_DICT": 64,
    "EMPTY_LIST": 56,
    "EMPTY_SET": 216,
    "REDUCE": 720,
    "NEWOBJ": 720,
    "BINPERSID": 160,
}
"""About how many bytes an operation of a pickle allocates. A tensor takes 710, its storage 160."""
_OBJECT, _SLOT = 40, 8
"""The same of a number, and of a place in a container."""
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
"""How many objects an operation of a pickle takes from the stack."""


def save(content: Any, file: BinaryIO) -> None:
    """Write a checkpoint with its checksums, also where the process has switched them off. What `load` would refuse for its size is refused."""
    storages = [one.untyped_storage() for one in _plain_tensors(content)]
    _refuse_claims(content, sum({one.data_ptr(): one.nbytes() for one in storages}.values()))
    checked = torch.serialization.get_crc32_options()
    if not checked:
        torch.serialization.set_crc32_options(True)
    try:
        torch.save(content, file)
    finally:
        if not checked:
            torch.serialization.set_crc32_options(False)


def load(file: BinaryIO) -> Any:
    """Read what `save` or `torch.save` wrote; raise CheckpointError for a file that is damaged, or that asks for more memory than it holds."""
    try:
        size = file.seek(0, 2)
        _refuse_ambiguous(file, size)
        with ZipFile(file) as archive:
            _refuse_large(archive, size)
            _refuse_damaged(archive)
            _refuse_costly(archive.read(_pickle(archive)), 2 * size + _BUDGET)
        file.seek(0)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=False)
        _refuse_claims(content, size)
    except CheckpointError:
        raise
    except Exception as error:
        # Without torch's own words, which advise to load without safeguards; they are the cause and
        # are shown above.
        raise CheckpointError("torch cannot read it") from error
    return content


def _refuse_ambiguous(file: BinaryIO, size: int) -> None:
    """Refuse an archive that does not end where its directory ends: `zipfile` and torch could then read two different directories."""
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


def _refuse_large(archive: ZipFile, size: int) -> None:
    """Refuse entries that expand, or that share their bytes: together they must fit into the file."""
    entries = archive.infolist()
    if any(
        one.compress_type != ZIP_STORED
        or one.flag_bits & ~_FLAGS
        or one.file_size != one.compress_size
        for one in entries
    ):
        raise CheckpointError(
            "it has compressed or encrypted entries, which save_checkpoint never writes"
        )
    # Where an attribute says that an entry is a folder, torch reads nothing, and gives memory that
    # was never written.
    if any(one.external_attr & _FOLDER or one.is_dir() for one in entries):
        raise CheckpointError("its directory is damaged")
    if sum(one.file_size for one in entries) > size:
        raise CheckpointError("its entries overlap")
    if any(count > 1 for count in Counter(one.filename.lower() for one in entries).values()):
        raise CheckpointError("it has two entries of the same name")


def _pickle(archive: ZipFile) -> ZipInfo:
    """Return the entry of the pickle."""
    # torch finds an entry whatever its case, in the folder of the first.
    found = [one for one in archive.infolist() if one.filename.lower().endswith("data.pkl")]
    if len(found) != 1 or any(
        one.filename.lower().endswith("constants.pkl") for one in archive.infolist()
    ):
        raise CheckpointError("it is an archive of another kind")
    return found[0]


def _refuse_damaged(archive: ZipFile) -> None:
    """Compare the checksum of every entry."""
    if not any(one.CRC for one in archive.infolist()):
        # Written while torch.serialization.set_crc32_options(False) held. Damage does not look like
        # that: each of at least five checksums is some other number.
        for entry in archive.infolist():
            # zipfile does not compare what an entry does not have.
            del entry.CRC
    for entry in archive.infolist():
        try:
            # zipfile compares when it meets the end.
            with archive.open(entry) as content:
                while content.read(_CHUNK):
                    pass
        except BadZipFile as error:
            raise CheckpointError(
                f"its entry {entry.filename!r} does not have its checksum"
            ) from error


def _refuse_costly(pickled: bytes, budget: int) -> None:
    """Refuse a pickle that calls what a checkpoint does not need, or that makes objects of more bytes than the budget.

    Follows the stack of the unpickler with the size of each object instead of the object: what is
    fetched again and again from the memo and copied, as by `set`, takes its size each time.
    """
    spent, stack, marks = 0, list[_Item](), list[int]()
    memo: dict[Any, _Item] = {}
    number = _Item(_OBJECT)
    allowed: dict[Any, int] = _CALLABLE | dict.fromkeys(_of_the_user(), 4)
    for opcode, argument, _ in genops(pickled):
        name = opcode.name
        if name in _NUMBERS:
            # Most of a pickle, of which the states of generators are the greater part.
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
            _refuse_unknown(argument, allowed)
        elif name not in _NOTHING:
            start = marks.pop() if name in _TO_MARK else len(stack) - _TAKES.get(name, 0)
            operands = stack[start:]
            size = min(sum(one.size + _SLOT for one in operands), budget)
            del stack[start:]
            if name in _GROWS:
                stack[-1].size += size
            else:
                own = _COST.get(name, _OBJECT) + (
                    4 * len(argument) if isinstance(argument, str | bytes) else 0
                )
                spent += own + (
                    size * operands[0].copies if name in _CALLS else _SLOT * len(operands)
                )
                stack.append(_Item(size + (own if name not in _CALLS else 0)))
        if spent > budget:
            raise CheckpointError(
                f"its {len(pickled)} bytes of structure make objects of more than {budget >> 20} MB"
            )


class _Item:
    """An object on the stack of an unpickler, as far as its size is concerned."""

    __slots__ = ("copies", "size")

    def __init__(self, size: int, copies: int = 1) -> None:
        self.size, self.copies = size, copies


def _refuse_unknown(name: Any, allowed: Mapping[Any, int]) -> None:
    module, _, own = name.partition(" ")
    if name not in allowed and not (
        module == "torch"
        and (own.endswith("Storage") or isinstance(getattr(torch, own, None), torch.dtype))
    ):
        raise CheckpointError(f"it calls {module}.{own}, which no checkpoint needs")


def _of_the_user() -> set[str]:
    """What the process has declared safe with torch.serialization.add_safe_globals."""
    named = (
        (one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}")
        for one in torch.serialization.get_safe_globals()
    )
    return {" ".join(one.rpartition(".")[::2]) for one in named}


def _refuse_claims(content: Any, size: int) -> None:
    """Refuse tensors that are together much larger than the file: expanded ones, or many views of one storage, which a copy would make real."""
    claimed = sum(one.numel() * one.element_size() for one in _plain_tensors(content))
    # Tied weights are in a file once, under several names.
    if claimed > 2 * size + _BUDGET:
        raise CheckpointError(f"its tensors claim {claimed} bytes, and the file has {size}")


def _plain_tensors(content: Any) -> Iterator[torch.Tensor]:
    """Every dense tensor in nested containers, however deep; a container that several places refer to is looked into once."""
    left, seen = [content], set()
    while left:
        one = left.pop()
        if type(one) in {torch.Tensor, torch.nn.Parameter}:
            if one.layout is torch.strided and not one.is_meta:
                yield one
        elif isinstance(one, dict | list | tuple | set) and id(one) not in seen:
            seen.add(id(one))
            left.extend(one.values() if isinstance(one, dict) else one)
