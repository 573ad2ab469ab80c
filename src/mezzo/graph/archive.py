"""One file of named parts with a checksum each: a zip, read without trust in what it says about itself."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO
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
        self._zip.writestr(ZipInfo(name), text.encode(), ZIP_DEFLATED)

    def raw(self, name: str, content: memoryview) -> None:
        """Write bytes as they are."""
        with self._zip.open(ZipInfo(name), "w", force_zip64=len(content) >= 2**31) as stream:
            for start in range(0, len(content), _CHUNK):
                stream.write(content[start : start + _CHUNK])


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
        return json.loads(self.raw(name))

    def raw(self, name: str) -> bytearray:
        """Bytes, in memory of their own."""
        if name not in self._parts:
            raise CheckpointError(f"it has no part named {name!r}")
        content, done = bytearray(self._parts[name].file_size), 0
        with self._zip.open(self._parts[name]) as stream:
            while chunk := stream.read(_CHUNK):
                content[done : done + len(chunk)] = chunk
                done += len(chunk)
        if done != len(content):
            raise CheckpointError(f"its part {name!r} ends too early")
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
