"""The one place where a tensor changes dtype."""

from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

from mezzo._casting import CASTS, cast, cast_all, device_test, is_castable, map_tensors
from mezzo._dtypes import CASTABLE_DTYPES

Pair = namedtuple("Pair", ["x", "n"])  # noqa: PYI024 - the kind without types, as models return it


class Output(OrderedDict):
    """What some libraries' models return: a dictionary with attributes beside."""

    extra = None


def half(tensor):
    return tensor.to(torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_cast_changes_the_dtype_and_lets_the_gradient_through(dtype):
    x = torch.ones(2, requires_grad=True)
    y = cast(x, dtype)
    y.sum().backward()
    assert y.dtype is dtype
    assert torch.equal(x.grad, torch.ones(2))


def test_a_cast_to_the_dtype_it_has_is_the_tensor_itself():
    x = torch.ones(2)
    assert cast(x, torch.float32) is x


def test_there_is_a_fast_cast_to_every_dtype_that_a_policy_casts_to():
    assert CASTS.keys() == CASTABLE_DTYPES
    for dtype, fast in CASTS.items():
        assert torch.equal(fast(torch.tensor([1.1])), cast(torch.tensor([1.1]), dtype))


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta", "xpu", "privateuseone"])
def test_a_tensor_is_asked_for_its_device(device):
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
def test_only_float32_and_the_half_types_on_the_device_are_castable(value, castable):
    assert is_castable(value, "cpu") is castable


def test_every_tensor_of_a_nest_is_changed_and_every_container_keeps_its_kind():
    x = torch.ones(1)
    nest = {
        "list": [x, 1],
        "tuple": (x, "a"),
        "named": Pair(x, 2),
        "deep": [{"x": (x,)}],
        "none": None,
    }
    changed = map_tensors(nest, half)
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
    assert nest["list"][0] is x


def test_what_torch_returns_as_a_named_tuple_keeps_its_kind():
    result = torch.max(torch.ones(2, 2), dim=0)
    changed = map_tensors(result, lambda tensor: tensor.double())
    assert type(changed) is type(result)
    assert changed.values.dtype is torch.float64


def test_a_dictionary_of_another_kind_keeps_it_and_what_else_it_carries():
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
def test_what_holds_no_tensor_comes_back_as_the_same_object(value):
    assert map_tensors(value, half) is value


def test_what_holds_only_unchanged_tensors_comes_back_as_the_same_object():
    value = {"a": [torch.ones(1), (torch.ones(1),)], "b": Pair(torch.ones(1), 2)}
    assert map_tensors(value, lambda tensor: tensor) is value


def test_cast_all_leaves_alone_what_a_policy_may_not_cast():
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
