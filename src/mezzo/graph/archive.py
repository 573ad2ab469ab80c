"""One file of named parts with a checksum each: a zip, read without trust in what it says about itself."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, BinaryIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

from mezzo._errors import CheckpointError

_NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)*(\.json)?")
_ENCRYPTED = 0x1
_EXPANSION = 250
"""How many times its packed size a part may have. Graphs reach 60; deflate itself goes to 1032."""
_SMALL = 2**16
"""Parts up to this size are let through whatever their expansion: a few repeated lines pack well."""
_CHUNK = 2**24
"""Bytes that are copied at a time."""


class ArchiveWriter:
    """Writes parts, one after the other."""

    def __init__(self, archive: ZipFile) -> None:
        self._zip = archive

    def json(self, name: str, value: object) -> None:
        """Write plain values."""
        # A name alone gives the zip's first date, 1980: equal programs make equal files.
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        self._zip.writestr(ZipInfo(name), text.encode(), ZIP_DEFLATED, compresslevel=9)

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

    @property
    def names(self) -> frozenset[str]:
        """What is in it."""
        return frozenset(self._parts)

    def json(self, name: str) -> Any:
        """Plain values."""
        [content] = self.raw(name, [self._part(name).file_size])
        return json.loads(content)

    def raw(self, name: str, sizes: Sequence[int]) -> Iterator[bytearray]:
        """Bytes in pieces of these sizes, each in memory of its own. The checksum is known to be right when the last has come."""
        part = self._part(name)
        if sum(sizes) != part.file_size:
            raise CheckpointError(f"its part {name!r} has {part.file_size} bytes, and {sum(sizes)} were expected")
        with self._zip.open(part) as stream:
            for size in sizes:
                yield _read(stream, size)
            # One byte more than there is: zipfile looks at the checksum when it meets the end.
            stream.read(1)

    def _part(self, name: str) -> ZipInfo:
        if name not in self._parts:
            raise CheckpointError(f"it has no part named {name!r}")
        return self._parts[name]


def _read(stream: IO[bytes], size: int) -> bytearray:
    content, done = bytearray(size), 0
    while chunk := stream.read(min(_CHUNK, size - done)):
        content[done : done + len(chunk)] = chunk
        done += len(chunk)
    if done != size:
        raise CheckpointError("it ends too early")
    return content


@contextmanager
def writing(file: BinaryIO) -> Iterator[ArchiveWriter]:
    """Write an archive into an open file. The table of contents, without which nothing can be read, comes last."""
    with ZipFile(file, "w", ZIP_STORED) as archive:
        yield ArchiveWriter(archive)


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
    allowed = max(_SMALL, _EXPANSION * part.compress_size) if part.compress_type == ZIP_DEFLATED else part.compress_size
    if part.file_size > allowed:
        raise CheckpointError(f"its part {name!r} would grow from {part.compress_size} to {part.file_size} bytes")
