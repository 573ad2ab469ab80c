"""Tensors are written once, and come back with their dtype, strides and ties."""

import pytest
import torch
from torch import nn

from mezzo import CheckpointError, UnsupportedError
from mezzo.conversion.archive import TensorReader, TensorWriter, reading, writing


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tensors"


def written(path, *groups):
    writer = TensorWriter()
    entries = [writer.add(group) for group in groups]
    with path.open("wb") as file, writing(file) as archive:
        return entries, writer.write(archive)


def read(path, entries, records, device=None):
    with path.open("rb") as file, reading(file) as archive:
        reader = TensorReader(archive, records, device)
    return [reader.named(one) for one in entries]


def test_names_of_one_tensor_are_one_tensor_again_across_groups(path):
    weight = nn.Parameter(torch.randn(3, 4))
    entries, records = written(
        path,
        {"a": weight, "b": weight},
        {"c": weight, "d": weight.detach(), "e": torch.randn(3, 4)},
    )
    assert len(records) == 2
    first, second = read(path, entries, records)
    assert first["a"] is first["b"]
    assert first["a"] is second["c"]
    assert second["d"].data_ptr() == first["a"].data_ptr()
    assert torch.equal(first["a"], weight)


def test_parameters_stay_parameters_with_their_need_of_gradients(path):
    tensors = {
        "trained": nn.Parameter(torch.ones(1)),
        "frozen": nn.Parameter(torch.ones(1), requires_grad=False),
        "buffer": torch.ones(1),
    }
    [loaded] = read(path, *written(path, tensors))
    assert [(type(one), one.requires_grad) for one in loaded.values()] == [
        (nn.Parameter, True),
        (nn.Parameter, False),
        (torch.Tensor, False),
    ]


def test_different_views_of_one_memory_are_written_for_themselves(path):
    flat = torch.randn(1000)
    entries, records = written(path, {"a": flat[:3], "b": flat[997:]})
    assert path.stat().st_size < 600
    [loaded] = read(path, entries, records)
    assert torch.equal(loaded["a"], flat[:3])
    assert torch.equal(loaded["b"], flat[997:])


def test_a_lazy_conjugate_is_written_as_what_it_means(path):
    value = torch.tensor([1 + 2j]).conj()
    [loaded] = read(path, *written(path, {"a": value}))
    assert loaded["a"].tolist() == [1 - 2j]


def test_special_values_keep_their_bits(path):
    value = (
        torch.tensor([0x7FC12345, 0x7F800000, -0x80000000, 1], dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )
    [loaded] = read(path, *written(path, {"a": value}))
    assert torch.equal(loaded["a"].view(torch.int32), value.view(torch.int32))


def test_a_bool_is_zero_or_one_whatever_the_file_says(path):
    entries, records = written(path, {"a": torch.tensor([0, 1, 2, 255], dtype=torch.uint8)})
    records[0]["dtype"] = "bool"
    [loaded] = read(path, entries, records)
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
def test_a_description_that_does_not_fit_the_bytes_is_refused(path, change):
    entries, records = written(path, {"a": torch.ones(4)})
    records[0].update(change)
    with pytest.raises(
        CheckpointError,
        match=r"'tensors' has 16 bytes, and \d+ were expected|it has a tensor of shape",
    ):
        read(path, entries, records)


@pytest.mark.parametrize("place", [-1, 1, 2**70, 0.0, False, "0", None], ids=repr)
def test_a_name_of_a_tensor_that_is_not_there_is_refused(path, place):
    [entries], records = written(path, {"a": torch.ones(4)})
    entries["a"]["tensor"] = place
    with pytest.raises(CheckpointError, match=r"it names the tensor .*, and has 1"):
        read(path, [entries], records)


def test_tensors_without_elements_keep_their_shape(path):
    [loaded] = read(path, *written(path, {"a": torch.ones(0, 3), "b": torch.ones(2)}))
    assert loaded["a"].shape == (0, 3)


def test_reading_takes_no_more_memory_than_the_tensors_themselves(path, monkeypatch):
    entries, records = written(
        path, {"a": torch.ones(1000), "b": torch.zeros(1000, dtype=torch.bool)}
    )
    sizes, empty = [], torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda size, **words: sizes.append(size) or empty(size, **words)
    )
    monkeypatch.setattr(torch.Tensor, "clone", None)
    [loaded] = read(path, entries, records)
    assert sizes == [4000, 1000]
    assert loaded["a"].data_ptr() % 64 == 0


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), object(), type("Odd", (torch.Tensor,), {})()],
    ids=["sparse", "object", "subclass"],
)
def test_what_is_no_plain_tensor_is_refused_by_name(tensor):
    with pytest.raises(UnsupportedError, match=r"'odd' is a .*, which cannot be saved"):
        TensorWriter().add({"odd": tensor})


def test_tensors_go_to_the_device_that_is_asked_for(path):
    [loaded] = read(
        path, *written(path, {"a": torch.ones(2), "b": torch.ones(0)}), device=torch.device("meta")
    )
    assert {one.device.type for one in loaded.values()} == {"meta"}
