from collections import OrderedDict

import pytest
import torch
from support.saved_programs import everything
from support.saved_programs import export as export_program
from torch import nn

import mezzo
from mezzo.conversion.export import export
from mezzo.conversion.signature import (
    InputSignature,
    TensorInput,
    available_device,
    available_devices,
    input_signature,
    named_leaves,
    zero_inputs,
)

X = torch.randn(2, 4)


def test_static_and_dynamic_sizes_are_read():
    exported = export(nn.Linear(4, 4), (X,), {}, {"input": {0: torch.export.Dim("batch")}})
    assert input_signature(exported) == InputSignature((TensorInput((None, 4), torch.float32),))
    assert str(input_signature(exported)) == "float32[any, 4]"


def test_inputs_that_fit_are_returned_unchanged():
    one = InputSignature((TensorInput((2, 4), torch.float32), None))
    args = (X, "word")
    assert one.cast_inputs(args, {}) == (args, {})
    assert one.cast_inputs((X[:1], "word"), {}) is None
    assert one.cast_inputs((X,), {}) is None
    assert one.cast_inputs((3, "word"), {}) is None


def test_inputs_of_another_float_dtype_are_cast():
    (found, count), named = InputSignature(
        (
            TensorInput((2, 4), torch.bfloat16),
            TensorInput((1,), torch.int64),
            TensorInput((), torch.float32),
        )
    ).cast_inputs((X, torch.ones(1)), {"z": torch.tensor(1.0)})
    assert found.dtype is torch.bfloat16
    assert count.dtype is torch.float32
    assert named["z"].dtype is torch.float32


def test_describe_returns_sizes_and_dtypes():
    assert InputSignature(()).describe((X, 3), {"a": "b"}) == "float32[2, 4], 3, 'b'"
    assert InputSignature(()).describe((), {}) == "nothing"


def test_keyword_arguments_may_come_in_any_order():
    class Two(nn.Module):
        def forward(self, *, first, second):
            return first.sum() - second.sum()

    exported = export(Two(), (), {"first": X, "second": X[0]}, None)
    one = input_signature(exported)
    assert one.keywords == ("first", "second")
    _, kwargs = one.cast_inputs((), {"second": X[0], "first": X})
    assert list(kwargs) == ["first", "second"]
    assert one.cast_inputs((), {"second": X, "first": X[0]}) is None


# Zeros in place of example inputs


def test_zeros_have_the_sizes_and_structure_of_the_examples():
    (ids,), keywords = zero_inputs(everything())
    assert (ids.shape, ids.dtype) == ((6,), torch.int64)
    assert keywords.keys() == {"extra", "gain"}
    assert keywords["extra"]["bias"].shape == (1, 4)
    assert keywords["gain"] == 3


def test_zeros_of_large_inputs_take_no_memory():
    class Large(nn.Module):
        def forward(self, x):
            return x[0, 0] + 1

    exported = export_program(Large(), (torch.zeros(1, 1).expand(2**20, 2**20),))
    [[zeros], _] = zero_inputs(exported)
    assert (zeros.shape, zeros.untyped_storage().nbytes()) == ((2**20, 2**20), 4)


def test_a_program_without_inputs_has_no_zeros():
    class Constant(nn.Module):
        def forward(self):
            return torch.ones(2)

    assert zero_inputs(export_program(Constant(), ())) == ((), {})


def test_unknown_sizes_have_no_zeros():
    class Sparse(nn.Module):
        def forward(self, x):
            return x.nonzero() + 1

    exported = export_program(Sparse(), (torch.ones(3),))
    nodes = {node.name: node for node in exported.graph.nodes}
    nodes["x"].meta["val"] = nodes["nonzero"].meta["val"]
    assert zero_inputs(exported) is None


# Names of outputs


@pytest.mark.parametrize(
    ("nested", "names"),
    [
        (1, ["output"]),
        ((1,), ["output_0"]),
        ([1, (2, 3)], ["output_0", "output_1_0", "output_1_1"]),
        ({"logits": 1, "a b": {"c-d": 2}}, ["logits", "a_b_c_d"]),
        (OrderedDict(x=None), ["x"]),
        ({3: 1}, ["output_3"]),
        ((), []),
    ],
    ids=["alone", "tuple", "nested", "names", "none", "number", "nothing"],
)
def test_outputs_are_named_by_their_paths(nested, names):
    assert [name for name, _ in named_leaves(nested)] == names


# Devices


ABSENT = "xpu" if torch.cuda.is_available() else "cuda:1"


def test_a_device_is_returned_from_its_name():
    assert available_device("cpu") == available_device(torch.device("cpu")) == torch.device("cpu")
    assert available_device("meta").type == "meta"


@pytest.mark.parametrize("device", [ABSENT, "gpu"])
def test_an_unavailable_device_raises_with_the_available_ones(device):
    with pytest.raises(
        mezzo.UnsupportedError,
        match=f"There is no device '{device}' here. Choose one of: .*{min(available_devices())}",
    ):
        available_device(device)


def test_a_program_is_not_moved_to_an_unavailable_device():
    converted = mezzo.convert(nn.Linear(4, 2), (torch.ones(1, 4),), dtype="bfloat16")
    with pytest.raises(mezzo.UnsupportedError, match="There is no device"):
        converted.to(ABSENT)
