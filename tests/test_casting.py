"""Casts of tensors and of nested containers."""

from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from support.containers import Encoding, Frozen

from mezzo._casting import CASTS, cast, cast_all, device_test, is_castable, map_tensors
from mezzo._dtypes import CASTABLE_DTYPES

Pair = namedtuple("Pair", ["x", "n"])  # noqa: PYI024 - without types, as models return it


class Output(OrderedDict):
    """A dictionary with attributes, as models of some libraries return it."""

    extra = None


def half(tensor):
    return tensor.to(torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_cast_changes_the_dtype_and_passes_the_gradient(dtype):
    x = torch.ones(2, requires_grad=True)
    y = cast(x, dtype)
    y.sum().backward()
    assert y.dtype is dtype
    assert torch.equal(x.grad, torch.ones(2))


def test_a_cast_to_the_same_dtype_returns_the_tensor_itself():
    x = torch.ones(2)
    assert cast(x, torch.float32) is x


def test_there_is_a_fast_cast_to_every_castable_dtype():
    assert CASTS.keys() == CASTABLE_DTYPES
    for dtype, fast in CASTS.items():
        assert torch.equal(fast(torch.tensor([1.1])), cast(torch.tensor([1.1]), dtype))


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta", "xpu", "privateuseone"])
def test_the_device_test_returns_whether_a_tensor_is_on_the_device(device):
    assert device_test(device)(torch.ones(1)) is (device == "cpu")
    assert device_test(device)(torch.ones(1, device="meta")) is (device == "meta")


@pytest.mark.parametrize(
    ("value", "castable"),
    [
        (torch.ones(1), True),
        (torch.ones(1, dtype=torch.float16), True),
        (torch.ones(1, dtype=torch.bfloat16), True),
        (torch.nn.Parameter(torch.ones(1)), True),
        (torch.ones(1, dtype=torch.float64), False),
        (torch.ones(1, dtype=torch.complex64), False),
        (torch.ones(1, dtype=torch.float8_e5m2), False),
        (torch.ones(1, dtype=torch.int64), False),
        (torch.ones(1, device="meta"), False),
        (1.0, False),
        (None, False),
    ],
)
def test_only_float32_and_16_bit_tensors_on_the_device_are_castable(value, castable):
    assert is_castable(value, "cpu") is castable


def test_every_tensor_in_nested_containers_is_changed_and_containers_keep_their_type():
    x = torch.ones(1)
    nested = {
        "list": [x, 1],
        "tuple": (x, "a"),
        "named": Pair(x, 2),
        "deep": [{"x": (x,)}],
        "none": None,
    }
    changed = map_tensors(nested, half)
    assert (
        changed["list"][0].dtype
        is changed["tuple"][0].dtype
        is changed["named"].x.dtype
        is changed["deep"][0]["x"][0].dtype
        is torch.float16
    )
    assert (
        type(changed["list"]),
        type(changed["tuple"]),
        type(changed["named"]),
        changed["none"],
    ) == (list, tuple, Pair, None)
    assert (changed["list"][1], changed["tuple"][1], changed["named"].n) == (1, "a", 2)
    assert nested["list"][0] is x


def test_named_tuples_of_torch_keep_their_type():
    result = torch.max(torch.ones(2, 2), dim=0)
    changed = map_tensors(result, lambda tensor: tensor.double())
    assert type(changed) is type(result)
    assert changed.values.dtype is torch.float64


def test_a_subclass_of_dict_keeps_its_type_and_attributes():
    output = Output(x=torch.ones(1), n=1)
    output.extra = "kept"
    changed = map_tensors(output, half)
    assert (type(changed), changed.extra, changed["x"].dtype, changed["n"]) == (
        Output,
        "kept",
        torch.float16,
        1,
    )
    assert output["x"].dtype is torch.float32
    assert map_tensors(defaultdict(list, x=torch.ones(1)), half)["absent"] == []


@pytest.mark.parametrize(
    "value",
    [
        [1],
        (1, 2),
        {"a": [1]},
        Pair(1, 2),
        OrderedDict(a=1),
        "text",
        None,
        3.5,
        {1},
        object(),
        [],
        {},
        torch.Size([1]),
    ],
)
def test_a_value_without_tensors_is_returned_as_the_same_object(value):
    assert map_tensors(value, half) is value


def test_a_container_of_unchanged_tensors_is_returned_as_the_same_object():
    value = {"a": [torch.ones(1), (torch.ones(1),)], "b": Pair(torch.ones(1), 2)}
    assert map_tensors(value, lambda tensor: tensor) is value


def test_cast_all_does_not_change_tensors_that_are_not_castable():
    x, integers, double, elsewhere = (
        torch.ones(1),
        torch.ones(1, dtype=torch.int64),
        torch.ones(1, dtype=torch.float64),
        torch.ones(1, device="meta"),
    )
    cast_x, *others = cast_all((x, integers, double, elsewhere), torch.bfloat16, "cpu")
    assert cast_x.dtype is torch.bfloat16
    assert all(
        one is other for one, other in zip(others, (integers, double, elsewhere), strict=True)
    )


def test_mappings_that_are_no_dicts_keep_their_type_and_attributes():
    value = Encoding({"x": torch.ones(1), "frozen": Frozen({"y": torch.ones(1)})}, note="mine")
    changed = map_tensors(value, half)
    assert (type(changed), changed.note) == (Encoding, "mine")
    assert changed["x"].dtype is changed["frozen"]["y"].dtype is torch.float16
    assert type(changed["frozen"]) is Frozen
    assert value["x"].dtype is value["frozen"]["y"].dtype is torch.float32
