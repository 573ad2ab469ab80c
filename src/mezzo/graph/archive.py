"""One file of named parts with a checksum each: a zip, read without trust in what it says about itself."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

from mezzo._errors import CheckpointError, UnsupportedError

_NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)*(\.json)?")
_ENCRYPTED = 0x1
_JSON = ".json"
_JSON_ROOM = 2**23
"""Bytes of JSON that any file may unpack to beyond its own size: about 8,000 nodes. Reading JSON as a graph takes up to 32 times its size in memory, so that a small
file cannot take more than 300 MB. A large graph has large weights beside it."""
_CHUNK = 2**24
"""Bytes that are copied at a time."""


class ArchiveWriter:
    """Writes parts, one after the other."""

    def __init__(self, archive: ZipFile) -> None:
        self._zip = archive
        self.json_size = 0
        """Bytes of JSON so far, unpacked."""

    def json(self, name: str, value: object) -> None:
        """Write plain values."""
        # A name alone gives the zip's first date, 1980: equal programs make equal files.
        text = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        self.json_size += len(text)
        self._zip.writestr(ZipInfo(name), text, ZIP_DEFLATED, compresslevel=9)

    def raw(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Write bytes as they are, one piece behind the other."""
        # Told beforehand that it may be large: the header comes before the first byte.
        with self._zip.open(ZipInfo(name), "w", force_zip64=True) as stream:
            for piece in pieces:
                for start in range(0, len(piece), _CHUNK):
                    stream.write(piece[start : start + _CHUNK])


class ArchiveReader:
    """Reads parts by name. Each is checked against its checksum when its last byte is read."""

    def __init__(self, archive: ZipFile, size: int) -> None:
        self._zip = archive
        self._parts = {one.filename: one for one in archive.infolist()}
        repeated = [name for name, count in Counter(one.filename for one in archive.infolist()).items() if count > 1]
        if repeated:
            raise CheckpointError(f"it has two parts named {repeated[0]!r}")
        for part in self._parts.values():
            _check(part)
        # Parts that share their bytes make a small file expand without end.
        if sum(part.compress_size for part in self._parts.values()) > size:
            raise CheckpointError("its parts overlap")
        unpacked = sum(part.file_size for name, part in self._parts.items() if name.endswith(_JSON))
        if unpacked > _JSON_ROOM + size:
            raise CheckpointError(f"its JSON parts unpack to {unpacked} bytes, and a file of {size} bytes may hold {_JSON_ROOM + size}")

    @property
    def names(self) -> frozenset[str]:
        """What is in it."""
        return frozenset(self._parts)

    def json(self, name: str) -> Any:
        """Plain values."""
        content = bytearray(self._part(name).file_size)
        self.raw(name, len(content), [content])
        return json.loads(content)

    def raw(self, name: str, size: int, buffers: Iterable[bytearray | memoryview]) -> None:
        """Read bytes into buffers, one behind the other, `size` bytes in all. Nothing is asked of `buffers` before the size is known to be right."""
        part = self._part(name)
        if size != part.file_size:
            raise CheckpointError(f"its part {name!r} has {part.file_size} bytes, and {size} were expected")
        with self._zip.open(part) as stream:
            for buffer in buffers:
                _fill(buffer, stream)
            # One byte more than there is: zipfile looks at the checksum when it meets the end.
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
    """Write an archive into an open file. The table of contents, without which nothing can be read, comes last."""
    with ZipFile(file, "w", ZIP_STORED) as archive:
        writer = ArchiveWriter(archive)
        yield writer
        if writer.json_size > (room := _JSON_ROOM + file.tell()):
            raise UnsupportedError(
                f"The program cannot be saved: its graphs take {writer.json_size} bytes, and a file with so few weights may hold {room}. Convert parts of the model."
            )


@contextmanager
def reading(file: BinaryIO) -> Iterator[ArchiveReader]:
    """Read an archive from an open file; what is no archive raises whatever `zipfile` finds, what is a strange one `CheckpointError`."""
    with ZipFile(file) as archive:
        yield ArchiveReader(archive, os.fstat(file.fileno()).st_size)


def _check(part: ZipInfo) -> None:
    name = part.filename
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"it has a part with the odd name {name!r}")
    if part.flag_bits & _ENCRYPTED or part.compress_type not in {ZIP_STORED, ZIP_DEFLATED}:
        raise CheckpointError(f"its part {name!r} is encrypted, or packed in a way that is never written")
    if part.compress_type == ZIP_DEFLATED and not name.endswith(_JSON):
        raise CheckpointError(f"its part {name!r} is packed in a way that is never written")
    if part.compress_type == ZIP_STORED and part.file_size != part.compress_size:
        raise CheckpointError(f"its part {name!r} would grow from {part.compress_size} to {part.file_size} bytes")
