"""Parts of a file are read as they were written, or not at all."""

from io import BytesIO
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

import pytest

from mezzo import CheckpointError, UnsupportedError
from mezzo.conversion.archive import reading, writing


@pytest.fixture
def path(tmp_path):
    return tmp_path / "archive"


def write(path):
    with path.open("wb") as file, writing(file) as archive:
        archive.json("plan.json", {"rows": [1, 2.5, None, "½"]})
        archive.raw(
            "tensors", [memoryview(bytes(range(256)) * 10), memoryview(b""), memoryview(b"end")]
        )
        archive.raw("nothing", [])


def read(path, name, *sizes):
    """The part in pieces; each is asked for once the one before is filled."""
    pieces = []

    def buffers():
        for size in sizes:
            pieces.append(bytearray(size))
            yield pieces[-1]

    with path.open("rb") as file, reading(file) as archive:
        archive.raw(name, sum(sizes), buffers())
    return pieces


def test_parts_come_back(path):
    write(path)
    with path.open("rb") as file, reading(file) as archive:
        assert archive.names == {"plan.json", "tensors", "nothing"}
        assert archive.json("plan.json") == {"rows": [1, 2.5, None, "½"]}
    assert read(path, "tensors", 2560, 0, 3) == [bytes(range(256)) * 10, b"", b"end"]
    assert read(path, "nothing") == []


def test_equal_parts_make_equal_files(path, tmp_path):
    write(path)
    write(tmp_path / "other")
    assert path.read_bytes() == (tmp_path / "other").read_bytes()


def test_a_number_that_json_does_not_know_is_not_written(path):
    with (
        pytest.raises(ValueError, match="not JSON compliant"),
        path.open("wb") as file,
        writing(file) as archive,
    ):
        archive.json("plan.json", float("nan"))


def test_a_changed_byte_is_noticed(path):
    write(path)
    content = path.read_bytes()
    place = content.index(bytes(range(256)))
    path.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    with pytest.raises(BadZipFile, match="Bad CRC-32"):
        read(path, "tensors", 2560, 3)


@pytest.mark.parametrize(
    "sizes", [(), (2560,), (2563, 1), (2**60,)], ids=["none", "fewer", "more", "huge"]
)
def test_pieces_that_do_not_make_the_whole_are_refused_before_anything_is_read(path, sizes):
    write(path)
    with pytest.raises(
        CheckpointError, match=r"its part 'tensors' has 2563 bytes, and \d+ were expected"
    ):
        read(path, "tensors", *sizes)


def test_a_part_that_is_not_there_is_named(path):
    write(path)
    with pytest.raises(CheckpointError, match="it has no part named 'weights'"):
        read(path, "weights")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_parts_of_one_name_are_refused(path):
    with ZipFile(path, "w") as archive:
        archive.writestr("a", b"1")
        archive.writestr("a", b"2")
    with pytest.raises(CheckpointError, match="it has two parts named 'a'"):
        read(path, "a")


@pytest.mark.parametrize("name", ["", "A", "../a", "/a", "a/", "a//b", "a.py", "a\\b", "ä"])
def test_other_names_are_refused(path, name):
    with ZipFile(path, "w") as archive:
        archive.writestr(ZipInfo(name), b"1")
    with pytest.raises(CheckpointError, match="odd name"):
        read(path, name)


def test_other_ways_of_packing_are_refused(path):
    with ZipFile(path, "w") as archive:
        archive.writestr("a", b"1", ZIP_BZIP2)
    with pytest.raises(CheckpointError, match="packed in a way that is never written"):
        read(path, "a")


def test_json_that_grows_beyond_reason_is_refused_even_in_many_parts(path):
    with ZipFile(path, "w") as archive:
        for place in range(10):
            archive.writestr(f"{place}.json", bytes(1_000_000), ZIP_DEFLATED)
    with pytest.raises(
        CheckpointError,
        match=r"its JSON parts unpack to 10000000 bytes, and a file of \d+ bytes may hold \d+",
    ):
        read(path, "0.json")


def test_a_large_graph_is_read_beside_large_weights(path):
    with ZipFile(path, "w") as archive:
        archive.writestr("a.json", b" " * 10_000_000 + b"[]", ZIP_DEFLATED)
        archive.writestr("tensors", bytes(2_000_000))
    with path.open("rb") as file, reading(file) as archive:
        assert archive.json("a.json") == []


def test_graphs_that_could_not_be_read_again_are_not_written(path):
    refused = pytest.raises(
        UnsupportedError,
        match=r"its graphs take 9000002 bytes, and a file with so few weights may hold \d+",
    )
    with refused, path.open("wb") as file, writing(file) as archive:
        archive.json("a.json", "a" * 9_000_000)


def test_tensors_are_never_packed(path):
    with ZipFile(path, "w") as archive:
        archive.writestr("tensors", bytes(10_000_000), ZIP_DEFLATED)
    with pytest.raises(
        CheckpointError, match="its part 'tensors' is packed in a way that is never written"
    ):
        read(path, "tensors")


def test_parts_that_share_their_bytes_are_refused(path):
    """A hundred entries of the table that all point to one part: a small file that unpacks to a hundred times its size."""
    buffer = BytesIO()
    with ZipFile(buffer, "w") as archive:
        archive.writestr("a", bytes(1000))
        first = archive.infolist()[0]
        for number in range(100):
            entry = ZipInfo(f"a{number}")
            entry.file_size = entry.compress_size = first.file_size
            entry.CRC, entry.header_offset = first.CRC, first.header_offset
            archive.filelist.append(entry)
    path.write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError, match="its parts overlap"):
        read(path, "a0")
