import torch
from torch import nn

from mezzo.graph.exporting import export
from mezzo.graph.fitting import Fit, Taken, fit

X = torch.randn(2, 4)


def test_sizes_are_read_and_dynamic_ones_are_open():
    exported = export(nn.Linear(4, 4), (X,), {}, {"input": {0: torch.export.Dim("batch")}})
    assert fit(exported) == Fit((Taken((None, 4), torch.float32),))
    assert str(fit(exported)) == "float32[any, 4]"


def test_inputs_that_fit_are_taken_as_they_are():
    one = Fit((Taken((2, 4), torch.float32), None))
    args = (X, "word")
    assert one.take(args, {}) == (args, {})
    assert one.take((X[:1], "word"), {}) is None
    assert one.take((X,), {}) is None
    assert one.take((3, "word"), {}) is None


def test_inputs_of_another_float_dtype_are_cast():
    (found, count), named = Fit((Taken((2, 4), torch.bfloat16), Taken((1,), torch.int64), Taken((), torch.float32))).take(
        (X, torch.ones(1)), {"z": torch.tensor(1.0)}
    )
    assert found.dtype is torch.bfloat16
    assert count.dtype is torch.float32
    assert named["z"].dtype is torch.float32


def test_what_was_passed_is_told():
    assert Fit(()).told((X, 3), {"a": "b"}) == "float32[2, 4], 3, 'b'"
    assert Fit(()).told((), {}) == "nothing"


def test_keywords_may_come_in_any_order():
    class Two(nn.Module):
        def forward(self, *, first, second):
            return first.sum() - second.sum()

    exported = export(Two(), (), {"first": X, "second": X[0]}, None)
    one = fit(exported)
    assert one.keywords == ("first", "second")
    _, kwargs = one.take((), {"second": X[0], "first": X})
    assert list(kwargs) == ["first", "second"]
    assert one.take((), {"second": X, "first": X[0]}) is None
