"""Atomic file writes."""

import errno
import os
import resource
import subprocess
import sys
from zipfile import ZipFile

import pytest
import torch
from torch import nn

import mezzo
from mezzo._files import atomic_writer, write_text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write_half(path, error):
    with atomic_writer(path) as file:
        file.write(b"half of the ")
        raise error


def test_text_is_written_as_utf8(tmp_path):
    write_text(tmp_path / "policy.toml", "größer als 65504 → inf\n")
    assert (tmp_path / "policy.toml").read_text(encoding="utf-8") == "größer als 65504 → inf\n"


def test_a_path_may_be_a_string(tmp_path):
    write_text(str(tmp_path / "a.txt"), "a")
    assert names(tmp_path) == ["a.txt"]


def test_the_file_appears_only_when_it_is_complete(tmp_path):
    target = tmp_path / "model.bin"
    with atomic_writer(target) as file:
        file.write(b"bytes")
        assert not target.exists()
    assert target.read_bytes() == b"bytes"


@pytest.mark.parametrize(
    "error", [ValueError("bad"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path, error):
    target = tmp_path / "policy.toml"
    target.write_text("old")
    with pytest.raises(type(error)):
        write_half(target, error)
    assert target.read_text() == "old"
    assert names(tmp_path) == ["policy.toml"]


def test_a_failed_first_write_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="bad"):
        write_half(tmp_path / "new", ValueError("bad"))
    assert names(tmp_path) == []


def test_a_process_that_dies_while_writing_keeps_the_old_file(tmp_path):
    target = tmp_path / "policy.toml"
    target.write_text("old")
    program = (
        f"import os; from mezzo._files import atomic_writer\nwith atomic_writer({str(target)!r}) as"
        " file: file.write(b'new'); file.flush(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert target.read_text() == "old"
    assert len(names(tmp_path)) == 2
    write_text(target, "new")
    assert names(tmp_path) == ["policy.toml"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "directory"])
def test_a_path_that_is_not_a_regular_file_raises_and_is_not_replaced(make, tmp_path):
    make(tmp_path / "special")
    with pytest.raises(OSError, match=r"special': it is not a regular file"):
        write_text(tmp_path / "special", "x")
    assert names(tmp_path) == ["special"]
    assert not (tmp_path / "special").is_file()


def test_a_temporary_file_that_is_being_written_is_not_removed(tmp_path):
    target = tmp_path / "shared"
    with atomic_writer(target) as first:
        first.write(b"first")
        write_text(target, "second")
        assert len(names(tmp_path)) == 2
    assert target.read_bytes() == b"first"


def test_a_new_file_has_the_mode_that_open_gives(tmp_path):
    (tmp_path / "plain").write_text("x")
    write_text(tmp_path / "atomic", "x")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_keeps_its_mode_when_it_is_written_again(tmp_path):
    target = tmp_path / "private"
    target.touch(mode=0o600)
    write_text(target, "new")
    assert target.stat().st_mode & 0o777 == 0o600


def test_a_link_is_followed_and_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    write_text(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_missing_directory_raises_with_its_name(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"there is no directory '.*missing'. Create it first"
    ):
        write_text(tmp_path / "missing" / "file", "x")


def test_two_writers_of_one_file_do_not_mix(tmp_path):
    target = tmp_path / "shared"
    with atomic_writer(target) as first, atomic_writer(target) as second:
        first.write(b"first")
        second.write(b"second")
    assert target.read_bytes() == b"first"
    assert names(tmp_path) == ["shared"]


def test_a_relative_path_is_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text("here", "x")
    assert names(tmp_path) == ["here"]


@pytest.fixture
def limited():
    """Limit files to 4000 bytes, as `ulimit -f` does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def plain(path):
    with atomic_writer(path) as file:
        file.write(bytes(10_000))


def buffered(path):
    with atomic_writer(path) as file:
        for _ in range(1000):
            file.write(b"0123456789")


def zipped(path):
    with atomic_writer(path) as file, ZipFile(file, "w") as archive:
        archive.writestr("zeros", bytes(10_000))


def torch_saved(path):
    with atomic_writer(path) as file:
        torch.save({"zeros": torch.zeros(2500)}, file)


def checkpoint(path):
    mezzo.save_checkpoint(path, nn.Linear(64, 64))


@pytest.mark.parametrize("write", [plain, buffered, zipped, torch_saved, checkpoint])
def test_a_limit_on_file_sizes_raises_one_error_and_keeps_the_old_file(write, tmp_path, limited):
    target = tmp_path / "model"
    target.write_text("old")
    with pytest.raises(
        OSError,
        match=(
            r"Cannot write '.*model': File too large, after 4000 bytes. What was at this path"
            r" before is unchanged. .*ulimit -f"
        ),
    ) as caught:
        write(target)
    assert caught.value.errno == errno.EFBIG
    assert target.read_text() == "old"
    assert names(tmp_path) == ["model"]


def test_a_full_disk_at_the_final_flush_raises_the_same_error(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError,
        match=r"Cannot write '.*model': No space left on device, after 10 bytes. .*Free disk space",
    ) as caught:
        write_text(tmp_path / "model", "0123456789")
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == []


def test_an_oserror_of_the_block_itself_is_raised_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError, match="elsewhere"), atomic_writer(tmp_path / "model"):
        (tmp_path / "elsewhere").read_bytes()
