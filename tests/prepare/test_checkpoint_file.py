"""A checkpoint file that is damaged, or would allocate too much memory, is rejected."""

import io
import pickle
import struct
import zipfile

import pytest
import torch
from support.checkpoint_fuzzer import ALLOWED, fuzz, memory_limited, refuse_out_of_memory
from support.tiers import EXHAUSTIVE

import mezzo
from mezzo.prepare import checkpoint_file

CONTENT = {
    "a": torch.arange(300.0),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "c": {1, 2},
    "d": [b"bytes", "text", 2**40, None],
}


def saved(content=CONTENT):
    buffer = io.BytesIO()
    checkpoint_file.save(content, buffer)
    return buffer.getvalue()


def loaded(content):
    try:
        with memory_limited(len(content) + ALLOWED):
            return checkpoint_file.load(io.BytesIO(content))
    except mezzo.CheckpointError as error:
        refuse_out_of_memory(error)
        raise


def archived(pickled, method=zipfile.ZIP_STORED, **entries):
    """Return a file as torch writes it, with any pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in {
            "data.pkl": pickled,
            "version": b"3\n",
            "byteorder": b"little",
            **entries,
        }.items():
            archive.writestr(f"archive/{name}", content, method)
    return buffer.getvalue()


def test_saved_content_is_loaded():
    content = loaded(saved())
    assert torch.equal(content["a"], CONTENT["a"])
    assert content["c"] == {1, 2}
    assert content["d"] == CONTENT["d"]


def test_a_changed_byte_of_any_entry_is_rejected():
    whole = saved()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        entries = [one for one in archive.infolist() if one.file_size]
    assert len(entries) > 6
    for entry in entries:
        start = (
            entry.header_offset
            + 30
            + sum(struct.unpack_from("<HH", whole, entry.header_offset + 26))
        )
        for at in (start, start + entry.file_size - 1):
            changed = bytearray(whole)
            changed[at] ^= 1
            with pytest.raises(mezzo.CheckpointError):
                loaded(bytes(changed))


def test_checksums_are_written_if_the_process_has_switched_them_off():
    torch.serialization.set_crc32_options(False)
    try:
        whole = saved()
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert archive.testzip() is None


def without_checksums():
    torch.serialization.set_crc32_options(False)
    try:
        buffer = io.BytesIO()
        torch.save(CONTENT, buffer)
    finally:
        torch.serialization.set_crc32_options(True)
    return buffer.getvalue()


def test_a_file_without_checksums_is_loaded():
    assert torch.equal(loaded(without_checksums())["a"], CONTENT["a"])


def test_a_file_that_has_lost_one_checksum_is_rejected():
    whole = bytearray(saved())
    at = whole.rindex(b"PK\1\2")
    whole[at + 16 : at + 20] = bytes(4)
    with pytest.raises(mezzo.CheckpointError, match="does not match its checksum"):
        loaded(bytes(whole))


def test_an_entry_marked_as_a_folder_is_rejected():
    # torch would read nothing, and return memory that was never written.
    whole = bytearray(saved())
    at = whole.index(b"PK\1\2", whole.index(b"PK\1\2") + 1)
    whole[at + 38] |= 16
    with pytest.raises(mezzo.CheckpointError, match="directory is damaged"):
        loaded(bytes(whole))


@pytest.mark.parametrize("length", [0, 1, 21, 22, 1000, -1, -22, -100])
def test_a_truncated_file_is_rejected(length):
    with pytest.raises(mezzo.CheckpointError):
        loaded(saved()[:length])


def test_files_with_a_prefix_a_suffix_or_two_directories_are_rejected():
    whole = saved()
    with pytest.raises(mezzo.CheckpointError, match="directory is damaged"):
        loaded(b"before" + whole)
    with pytest.raises(mezzo.CheckpointError, match="does not end"):
        loaded(whole + b"after")
    # Two directories: zipfile reads the one before the locator, torch the one that the locator
    # points to.
    start, end = struct.unpack_from("<I", whole, len(whole) - 6)[0], whole[-22:]
    second = struct.pack(
        "<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(whole) - 22 - start, start
    )
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, 10, 1)
    with pytest.raises(mezzo.CheckpointError, match="directory is damaged"):
        loaded(whole[:-22] + second + locator + end)


@pytest.mark.parametrize("legacy", [False, True])
def test_other_files_of_torch_are_rejected(tmp_path, legacy):
    if legacy:
        torch.save(CONTENT, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    else:
        (tmp_path / "x.pt").write_bytes(archived(P + b"}.", **{"constants.pkl": P + b"}."}))
    with pytest.raises(mezzo.CheckpointError, match="does not end" if legacy else "another kind"):
        loaded((tmp_path / "x.pt").read_bytes())


# -- small files that would allocate much memory ---------------------------------------------------

P = b"\x80\x02"


def reference(name):
    return b"c" + name.replace(" ", "\n").encode() + b"\n"


def number(value):
    data = pickle.encode_long(value)
    return b"\x8a" + bytes([len(data)]) + data


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


LARGE = {
    "a bytearray of a size": P + reference("__builtin__ bytearray") + number(2**36) + b"\x85R.",
    "a tensor of a size": P + reference("torch FloatTensor") + number(2**34) + b"\x85R.",
    "an empty tensor of a size": P + reference("torch Tensor") + number(2**34) + b"\x85R.",
    "copies of a list": (
        P
        + b"]("
        + b"".join(b"M" + struct.pack("<H", n) for n in range(60000))
        + b"eq\0("
        + (reference("__builtin__ set") + b"h\0\x85R") * 5000
        + b"t."
    ),
    "copies of a text": (
        P
        + text("x" * 2**18)
        + b"q\0("
        + (reference("_codecs encode") + b"h\0" + text("utf-32") + b"\x86R") * 5000
        + b"t."
    ),
    "characters of a text": (
        P
        + text("".join(map(chr, range(0x10000, 0x40000))))
        + b"q\0("
        + (reference("__builtin__ set") + b"h\0\x85R") * 99
        + b"t."
    ),
    "many objects": P + b"(" + b"\x8f" * 100_000 + b"t.",
    "doubled lists": (
        P
        + b"]q\0"
        + b"".join(b"](" + (b"h" + bytes([n])) * 2 + b"eq" + bytes([n + 1]) for n in range(100))
        + reference("__builtin__ set")
        + b"hd\x85R."
    ),
}


@pytest.mark.parametrize("pickled", LARGE.values(), ids=LARGE)
def test_a_pickle_that_allocates_large_objects_is_rejected(pickled, monkeypatch):
    monkeypatch.setattr(checkpoint_file, "_BUDGET", 2**24)
    with pytest.raises(
        mezzo.CheckpointError, match=r"which no checkpoint needs|make objects of more than"
    ):
        loaded(archived(pickled))


def storage(numel, size=(4,), stride=(1,), offset=0):
    """Return the pickle of a tensor, over a storage entry of 16 bytes."""

    def sequence(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    persistent = (
        b"("
        + text("storage")
        + reference("torch FloatStorage")
        + text("0")
        + text("cpu")
        + number(numel)
        + b"tQ"
    )
    called = (
        persistent
        + number(offset)
        + sequence(size)
        + sequence(stride)
        + b"\x89"
        + reference("collections OrderedDict")
        + b")R"
    )
    return reference("torch._utils _rebuild_tensor_v2") + b"(" + called + b"tR"


@pytest.mark.parametrize(
    "tensor",
    [
        storage(2**40),
        storage(4, size=(2**40,)),
        storage(4, size=(2**40,), stride=(0,)),
        storage(4, size=(2**62, 2**62), stride=(0, 0)),
        storage(4, offset=4),
        storage(4, offset=-1),
        storage(4, size=(2, 2), stride=(-1, 1)),
        storage(4, size=(-4,)),
        storage(4, size=(2, 2), stride=(2**60, 2**60)),
    ],
)
def test_a_tensor_beyond_its_storage_is_rejected(tensor):
    entry = {"data/0": struct.pack("<4f", 1, 2, 3, 4)}
    assert loaded(archived(P + storage(4) + b".", **entry)).tolist() == [1, 2, 3, 4]
    with pytest.raises(mezzo.CheckpointError):
        loaded(archived(P + tensor + b".", **entry))


def test_views_larger_than_the_file_are_rejected():
    wide = torch.ones(1).expand(2**26)
    buffer = io.BytesIO()
    torch.save([wide, wide], buffer)
    with pytest.raises(mezzo.CheckpointError, match="claim 536870912 bytes"):
        loaded(buffer.getvalue())
    with pytest.raises(mezzo.CheckpointError, match="claim 536870912 bytes"):
        saved([wide, wide])
    assert len(loaded(saved([torch.ones(1).expand(2**24), torch.ones(2)]))) == 2


def test_compressed_entries_are_rejected():
    with pytest.raises(mezzo.CheckpointError, match="compressed"):
        loaded(archived(P + b"}.", zipfile.ZIP_DEFLATED, **{"data/0": bytes(2**25)}))


def test_overlapping_entries_are_rejected():
    whole = bytearray(archived(P + b"}.", **{f"data/{n}": bytes(1000) for n in range(9)}))
    offsets = [at for at in range(len(whole)) if whole[at : at + 4] == b"PK\1\2"]
    for at in offsets[3:]:
        whole[at + 42 : at + 46] = whole[offsets[3] + 42 : offsets[3] + 46]
        whole[at + 20 : at + 28] = struct.pack("<II", 5000, 5000)
    with pytest.raises(mezzo.CheckpointError, match="overlap"):
        loaded(bytes(whole))


@pytest.mark.parametrize("name", ["DATA.PKL", "constants.pkl", "other/data.pkl"])
def test_archives_with_two_pickles_are_rejected(name):
    with pytest.raises(mezzo.CheckpointError, match=r"same name|another kind"):
        loaded(archived(P + b"}.", **{name: P + b"}."}))


def test_a_pickle_that_calls_other_functions_is_rejected():
    with pytest.raises(
        mezzo.CheckpointError, match=r"it calls os\.system, which no checkpoint needs"
    ):
        loaded(archived(P + reference("os system") + text("true") + b"\x85R."))


class Declared:
    """A class for `torch.serialization.safe_globals`."""

    def __init__(self):
        self.value = 3


def test_safe_globals_of_the_process_are_loaded():
    with torch.serialization.safe_globals([Declared]):
        assert loaded(saved({"x": Declared()}))["x"].value == 3
    with pytest.raises(mezzo.CheckpointError, match="Declared, which no checkpoint needs"):
        loaded(saved({"x": Declared()}))


def test_mutated_checkpoints_are_rejected_or_load_what_was_saved(tmp_path):
    count = 500 if EXHAUSTIVE else 200
    counts = fuzz(tmp_path, range(count))
    assert counts.total() == count
    # Many mutations have correct checksums, and some of them are valid.
    assert counts["content: refused"] > count / 5
    assert counts["content: loaded"] > count / 25
    assert counts["damaged: loaded"] > count / 100
