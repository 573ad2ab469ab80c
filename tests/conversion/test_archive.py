"""The zip archive of a saved model: its parts, and the tensors in it."""

from io import BytesIO
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

import pytest
import torch
from torch import nn

from mezzo import CheckpointError, UnsupportedError
from mezzo.conversion.archive import TensorReader, TensorWriter, reading, writing


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
    """Read a part in pieces; each buffer is allocated once the one before is filled."""
    pieces = []

    def buffers():
        for size in sizes:
            pieces.append(bytearray(size))
            yield pieces[-1]

    with path.open("rb") as file, reading(file) as archive:
        archive.raw(name, sum(sizes), buffers())
    return pieces


def test_parts_are_read_as_they_were_written(path):
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


def test_nan_is_not_written_as_json(path):
    with (
        pytest.raises(ValueError, match="not JSON compliant"),
        path.open("wb") as file,
        writing(file) as archive,
    ):
        archive.json("plan.json", float("nan"))


def test_a_changed_byte_fails_the_checksum(path):
    write(path)
    content = path.read_bytes()
    place = content.index(bytes(range(256)))
    path.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    with pytest.raises(BadZipFile, match="Bad CRC-32"):
        read(path, "tensors", 2560, 3)


@pytest.mark.parametrize(
    "sizes", [(), (2560,), (2563, 1), (2**60,)], ids=["none", "fewer", "more", "huge"]
)
def test_buffers_of_the_wrong_total_size_are_rejected_before_anything_is_read(path, sizes):
    write(path)
    with pytest.raises(
        CheckpointError, match=r"its part 'tensors' has 2563 bytes, and \d+ were expected"
    ):
        read(path, "tensors", *sizes)


def test_a_missing_part_raises_with_its_name(path):
    write(path)
    with pytest.raises(CheckpointError, match="it has no part named 'weights'"):
        read(path, "weights")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_parts_of_the_same_name_are_rejected(path):
    with ZipFile(path, "w") as archive:
        archive.writestr("a", b"1")
        archive.writestr("a", b"2")
    with pytest.raises(CheckpointError, match="it has two parts named 'a'"):
        read(path, "a")


@pytest.mark.parametrize("name", ["", "A", "../a", "/a", "a/", "a//b", "a.py", "a\\b", "ä"])
def test_invalid_part_names_are_rejected(path, name):
    with ZipFile(path, "w") as archive:
        archive.writestr(ZipInfo(name), b"1")
    with pytest.raises(CheckpointError, match="invalid name"):
        read(path, name)


def test_other_compression_methods_are_rejected(path):
    with ZipFile(path, "w") as archive:
        archive.writestr("a", b"1", ZIP_BZIP2)
    with pytest.raises(CheckpointError, match="compressed with an unexpected method"):
        read(path, "a")


def test_json_that_unpacks_to_too_much_is_rejected_even_in_many_parts(path):
    with ZipFile(path, "w") as archive:
        for place in range(10):
            archive.writestr(f"{place}.json", bytes(1_000_000), ZIP_DEFLATED)
    with pytest.raises(
        CheckpointError,
        match=r"its JSON parts unpack to 10000000 bytes, and a file of \d+ bytes may hold \d+",
    ):
        read(path, "0.json")


def test_large_weights_allow_a_large_graph(path):
    with ZipFile(path, "w") as archive:
        archive.writestr("a.json", b" " * 10_000_000 + b"[]", ZIP_DEFLATED)
        archive.writestr("tensors", bytes(2_000_000))
    with path.open("rb") as file, reading(file) as archive:
        assert archive.json("a.json") == []


def test_a_graph_too_large_to_be_read_again_is_not_written(path):
    refused = pytest.raises(
        UnsupportedError,
        match=r"its graphs take 9000002 bytes, and a file with so few weights may hold \d+",
    )
    with refused, path.open("wb") as file, writing(file) as archive:
        archive.json("a.json", "a" * 9_000_000)


def test_compressed_tensors_are_rejected(path):
    with ZipFile(path, "w") as archive:
        archive.writestr("tensors", bytes(10_000_000), ZIP_DEFLATED)
    with pytest.raises(
        CheckpointError, match="its part 'tensors' is compressed with an unexpected method"
    ):
        read(path, "tensors")


def test_parts_that_share_their_bytes_are_rejected(path):
    """A hundred entries point to one part: a small file that unpacks to 100 times its size."""
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


# Tensors


def write_tensors(path, *groups):
    writer = TensorWriter()
    entries = [writer.add(group) for group in groups]
    with path.open("wb") as file, writing(file) as archive:
        return entries, writer.write(archive)


def read_tensors(path, entries, records, device=None):
    with path.open("rb") as file, reading(file) as archive:
        reader = TensorReader(archive, records, device)
    return [reader.named(one) for one in entries]


def test_tied_names_share_one_tensor_after_reading(path):
    weight = nn.Parameter(torch.randn(3, 4))
    entries, records = write_tensors(
        path,
        {"a": weight, "b": weight},
        {"c": weight, "d": weight.detach(), "e": torch.randn(3, 4)},
    )
    assert len(records) == 2
    first, second = read_tensors(path, entries, records)
    assert first["a"] is first["b"]
    assert first["a"] is second["c"]
    assert second["d"].data_ptr() == first["a"].data_ptr()
    assert torch.equal(first["a"], weight)


def test_parameters_keep_their_type_and_requires_grad(path):
    tensors = {
        "trained": nn.Parameter(torch.ones(1)),
        "frozen": nn.Parameter(torch.ones(1), requires_grad=False),
        "buffer": torch.ones(1),
    }
    [loaded] = read_tensors(path, *write_tensors(path, tensors))
    assert [(type(one), one.requires_grad) for one in loaded.values()] == [
        (nn.Parameter, True),
        (nn.Parameter, False),
        (torch.Tensor, False),
    ]


def test_different_views_of_one_storage_are_written_separately(path):
    flat = torch.randn(1000)
    entries, records = write_tensors(path, {"a": flat[:3], "b": flat[997:]})
    assert path.stat().st_size < 600
    [loaded] = read_tensors(path, entries, records)
    assert torch.equal(loaded["a"], flat[:3])
    assert torch.equal(loaded["b"], flat[997:])


def test_a_lazy_conjugate_is_resolved_when_written(path):
    value = torch.tensor([1 + 2j]).conj()
    [loaded] = read_tensors(path, *write_tensors(path, {"a": value}))
    assert loaded["a"].tolist() == [1 - 2j]


def test_special_values_keep_their_bits(path):
    value = (
        torch.tensor([0x7FC12345, 0x7F800000, -0x80000000, 1], dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )
    [loaded] = read_tensors(path, *write_tensors(path, {"a": value}))
    assert torch.equal(loaded["a"].view(torch.int32), value.view(torch.int32))


def test_a_bool_is_read_as_zero_or_one_from_any_byte(path):
    entries, records = write_tensors(path, {"a": torch.tensor([0, 1, 2, 255], dtype=torch.uint8)})
    records[0]["dtype"] = "bool"
    [loaded] = read_tensors(path, entries, records)
    assert loaded["a"].view(torch.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [5]},
        {"shape": [4, 1]},
        {"stride": [2]},
        {"shape": [-4]},
        {"stride": [-1]},
        {"dtype": "float64"},
        {"shape": [2**62], "stride": [2]},
        {"shape": [4.0]},
        {"stride": [True]},
        {"shape": ["4"]},
    ],
    ids=[
        "longer",
        "dimensions",
        "stride",
        "negative",
        "backwards",
        "wider",
        "huge",
        "float",
        "bool",
        "text",
    ],
)
def test_a_description_that_does_not_match_the_bytes_is_rejected(path, change):
    entries, records = write_tensors(path, {"a": torch.ones(4)})
    records[0].update(change)
    with pytest.raises(
        CheckpointError,
        match=r"'tensors' has 16 bytes, and \d+ were expected|it has a tensor of shape",
    ):
        read_tensors(path, entries, records)


@pytest.mark.parametrize("place", [-1, 1, 2**70, 0.0, False, "0", None], ids=repr)
def test_an_invalid_tensor_index_is_rejected(path, place):
    [entries], records = write_tensors(path, {"a": torch.ones(4)})
    entries["a"]["tensor"] = place
    with pytest.raises(CheckpointError, match=r"it refers to tensor .*, and has 1 tensors"):
        read_tensors(path, [entries], records)


def test_tensors_without_elements_keep_their_shape(path):
    [loaded] = read_tensors(path, *write_tensors(path, {"a": torch.ones(0, 3), "b": torch.ones(2)}))
    assert loaded["a"].shape == (0, 3)


def test_reading_allocates_only_the_tensors_themselves(path, monkeypatch):
    entries, records = write_tensors(
        path, {"a": torch.ones(1000), "b": torch.zeros(1000, dtype=torch.bool)}
    )
    sizes, empty = [], torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda size, **kwargs: sizes.append(size) or empty(size, **kwargs)
    )
    monkeypatch.setattr(torch.Tensor, "clone", None)
    [loaded] = read_tensors(path, entries, records)
    assert sizes == [4000, 1000]
    assert loaded["a"].data_ptr() % 64 == 0


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), object(), type("Subclass", (torch.Tensor,), {})()],
    ids=["sparse", "object", "subclass"],
)
def test_sparse_tensors_objects_and_subclasses_are_rejected_by_name(tensor):
    with pytest.raises(UnsupportedError, match=r"'x' is a .*, which cannot be saved"):
        TensorWriter().add({"x": tensor})


def test_tensors_are_read_to_the_given_device(path):
    [loaded] = read_tensors(
        path,
        *write_tensors(path, {"a": torch.ones(2), "b": torch.ones(0)}),
        device=torch.device("meta"),
    )
    assert {one.device.type for one in loaded.values()} == {"meta"}
