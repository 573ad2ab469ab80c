import torch
from torch import nn

from mezzo.conversion.export import export
from mezzo.conversion.signature import InputSignature, TensorInput, input_signature

X = torch.randn(2, 4)


def test_sizes_are_read_and_dynamic_ones_are_open():
    exported = export(nn.Linear(4, 4), (X,), {}, {"input": {0: torch.export.Dim("batch")}})
    assert input_signature(exported) == InputSignature((TensorInput((None, 4), torch.float32),))
    assert str(input_signature(exported)) == "float32[any, 4]"


def test_inputs_that_fit_are_taken_as_they_are():
    one = InputSignature((TensorInput((2, 4), torch.float32), None))
    args = (X, "word")
    assert one.take(args, {}) == (args, {})
    assert one.take((X[:1], "word"), {}) is None
    assert one.take((X,), {}) is None
    assert one.take((3, "word"), {}) is None


def test_inputs_of_another_float_dtype_are_cast():
    (found, count), named = InputSignature(
        (
            TensorInput((2, 4), torch.bfloat16),
            TensorInput((1,), torch.int64),
            TensorInput((), torch.float32),
        )
    ).take((X, torch.ones(1)), {"z": torch.tensor(1.0)})
    assert found.dtype is torch.bfloat16
    assert count.dtype is torch.float32
    assert named["z"].dtype is torch.float32


def test_what_was_passed_is_told():
    assert InputSignature(()).describe((X, 3), {"a": "b"}) == "float32[2, 4], 3, 'b'"
    assert InputSignature(()).describe((), {}) == "nothing"


def test_keywords_may_come_in_any_order():
    class Two(nn.Module):
        def forward(self, *, first, second):
            return first.sum() - second.sum()

    exported = export(Two(), (), {"first": X, "second": X[0]}, None)
    one = input_signature(exported)
    assert one.keywords == ("first", "second")
    _, kwargs = one.take((), {"second": X[0], "first": X})
    assert list(kwargs) == ["first", "second"]
    assert one.take((), {"second": X, "first": X[0]}) is None
