"""MXNet's `.params` files: dtypes, versions, and files that are damaged."""

import random
import struct
from contextlib import suppress

import numpy as np
import pytest
import torch

from mezzo import CheckpointError, UnsupportedError
from mezzo.compat.mxnet._params import DTYPE_FLAGS, read_arrays, read_params, write_params

V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
VALUES = np.arange(6, dtype="<f4").reshape(2, 3)


def array(values=VALUES, version=V2, *, flag=0, storage=0, context=(1, 0)):
    """The bytes of an array, by MXNet's own layout."""
    head = struct.pack("<Ii", version, storage) if version != V1 else struct.pack("<I", version)
    shape = struct.pack(f"<i{values.ndim}q", values.ndim, *values.shape)
    return head + shape + struct.pack("<iii", *context, flag) + values.tobytes()


def listed(arrays, names, *, magic=0x112, count=None):
    data = struct.pack("<QQQ", magic, 0, len(arrays) if count is None else count)
    data += b"".join(arrays) + struct.pack("<Q", len(names))
    return data + b"".join(struct.pack("<Q", len(name)) + name for name in names)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "net-0000.params"


def test_arrays_are_read_by_name_and_written_back_byte_for_byte(path):
    data = listed([array(), array(VALUES[0])], [b"arg:fc1_weight", b"aux:bn_moving_mean"])
    path.write_bytes(data)
    params = read_params(path)
    assert list(params) == ["arg:fc1_weight", "aux:bn_moving_mean"]
    assert np.array_equal(params["arg:fc1_weight"].numpy(), VALUES)
    params["arg:fc1_weight"] += 0  # The memory may be written to.
    write_params(path, params)
    assert path.read_bytes() == data


@pytest.mark.parametrize("dtype", DTYPE_FLAGS, ids=str)
def test_every_dtype_is_kept(path, dtype):
    tensors = {"a": torch.tensor([[0, 1], [1, 0]]).to(dtype), "empty": torch.empty(0, 3).to(dtype)}
    write_params(path, tensors)
    for name, tensor in read_params(path).items():
        assert (tensor.dtype, tensor.shape) == (dtype, tensors[name].shape)
        assert torch.equal(tensor.double(), tensors[name].double())


def test_the_numbers_of_dtypes_are_mxnets(path):
    for flag, code in enumerate(("f4", "f8", "f2", "u1", "i4", "i1", "i8", "?", "i2")):
        path.write_bytes(listed([array(VALUES.astype(code), flag=flag)], [b"a"]))
        assert np.array_equal(read_params(path)["a"].numpy(), VALUES.astype(code))
    path.write_bytes(listed([array(np.array([0x3F80], "<u2"), flag=12)], [b"a"]))
    assert torch.equal(read_params(path)["a"], torch.ones(1, dtype=torch.bfloat16))


def test_tensors_of_any_strides_are_written(path):
    write_params(path, {"a": torch.arange(12).reshape(3, 4).T[1:3], "b": torch.ones(1).expand(2)})
    assert read_params(path)["a"].tolist() == [[1, 5, 9], [2, 6, 10]]
    assert read_params(path)["b"].tolist() == [1.0, 1.0]


def test_older_and_newer_versions_are_read(path):
    legacy = struct.pack("<III", 2, 2, 3) + struct.pack("<iii", 2, 1, 0) + VALUES.tobytes()
    path.write_bytes(listed([array(version=V1), array(version=V3), legacy], [b"a", b"b", b"c"]))
    assert all(np.array_equal(value.numpy(), VALUES) for value in read_params(path).values())


def test_an_array_without_dimensions_is_written_in_the_version_that_has_them(path):
    write_params(path, {"a": torch.tensor(3.0), "b": torch.ones(2)})
    assert path.read_bytes().count(struct.pack("<I", V3)) == 2
    assert read_params(path)["a"].item() == 3.0


def test_a_list_without_names_is_read_as_arrays_only(path):
    path.write_bytes(listed([array()], []))
    assert [len(part) for part in read_arrays(path)] == [1, 0]
    with pytest.raises(CheckpointError, match="1 arrays without names"):
        read_params(path)


@pytest.mark.parametrize(("storage", "name"), [(1, "row_sparse"), (2, "csr")])
def test_sparse_arrays_are_not_supported_and_named(path, storage, name):
    path.write_bytes(listed([array(storage=storage)], [b"a"]))
    with pytest.raises(UnsupportedError, match=rf"has a {name} array at byte 28"):
        read_params(path)


def shaped(*shape, ndim=None):
    return struct.pack("<Iii", V2, 0, len(shape) if ndim is None else ndim) + struct.pack(
        f"<{len(shape)}q", *shape
    )


CONTEXT = struct.pack("<iii", 1, 0, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"net-0000.params.*at byte 0 of 0 expected 8 bytes of the list header, found 0"),
        (listed([], [], magic=0x113), r"at byte 0 of 32 expected the list header 0x112"),
        (b"PK\x03\x04" + bytes(40), r"at byte 0 of 44 expected the list header 0x112"),
        (listed([array()], [b"a"], count=2**60), r"at byte 16 .* at most .* arrays in"),
        (listed([array()], [b"a"])[:70], r"24 bytes of \(2, 3\) values of torch.float32, found"),
        (listed([shaped(2**40) + CONTEXT], [b"a"]), r"4398046511104 bytes of \(1099511627776,\)"),
        (listed([shaped(2**40, 2**40) + CONTEXT], [b"a"]), r"at byte 36 .* expected a shape"),
        (listed([shaped(0, 2**62, 2**62) + CONTEXT], [b"a"]), r"expected a shape"),
        (listed([shaped(-1) + CONTEXT], [b"a"]), r"expected a shape, found \(-1,\)"),
        (listed([shaped(ndim=0)], [b"a"]), r"at byte 24 .* with 1 to 32 dimensions, found 0"),
        (listed([shaped(ndim=-1)], [b"a"]), r"dimensions, found -1"),
        (listed([shaped(ndim=2**30)], [b"a"]), r"dimensions, found 1073741824"),
        (listed([struct.pack("<I", 0xDEADBEEF)], [b"a"]), r"an array of version 1, 2 or 3"),
        (listed([array(storage=7)], [b"a"]), r"at byte 28 .* a storage type .*, found 7"),
        (listed([array(context=(9, 0))], [b"a"]), r"expected a context"),
        (listed([array(flag=13)], [b"a"]), r"the number of a dtype, 0 to 12, found 13"),
        (listed([array(), array()], [b"a"]), r"expected 2 names for as many arrays, found 1"),
        (listed([array(), array()], [b"a", b"a"]), r"names that differ, found 'a' twice"),
        (listed([array()], [b"\xff"]), r"expected a name in UTF-8"),
        (listed([array()], [b"a"]) + b"x", r"expected the end of the file, found 1 more bytes"),
    ],
    ids=range(20),
)
def test_a_damaged_file_is_rejected_with_the_place(path, data, message):
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_params(path)


def test_random_damage_gives_the_error_or_arrays(path):
    choose = random.Random(0)
    legacy = struct.pack("<III", 2, 2, 3) + struct.pack("<iii", 2, 1, 0) + VALUES.tobytes()
    arrays = [array(), array(VALUES.astype("?"), V1, flag=7), array(version=V3), legacy]
    valid = listed(arrays, [b"arg:a", b"arg:b", b"aux:c", b"d"])
    for _ in range(400):
        data = bytearray(valid)
        for _ in range(choose.randint(0, 3)):
            data[choose.randrange(len(data))] = choose.choice((0, 1, 0x7F, 0x80, 0xFF))
        if choose.random() < 0.5:
            del data[choose.randrange(len(data)) :]
        path.write_bytes(data)
        with suppress(CheckpointError, UnsupportedError):
            assert len(read_params(path)) == 4


def test_a_dtype_that_mxnet_lacks_is_rejected_and_nothing_is_written(path):
    with pytest.raises(UnsupportedError, match=r"no arrays of torch.complex64, the dtype of 'a'"):
        write_params(path, {"a": torch.ones(1, dtype=torch.complex64)})
    assert not path.exists()
