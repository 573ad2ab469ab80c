import logging
import warnings

import pytest
import torch
from support.graphs import Calls, names
from torch import nn

import mezzo
from mezzo.conversion.export import export, unwrapped

X = torch.randn(2, 4)


def _branches(_, x):
    if x.sum() > 0:
        return x
    return -x


def test_an_untraceable_model_is_refused_with_its_line_and_what_to_do():
    with pytest.raises(
        mezzo.ConversionError,
        match=(
            r"cannot trace Calls at test_export.py:\d+ in _branches: `if x.sum\(\) > 0:`.*use"
            r" torch.cond"
        ),
    ) as raised:
        export(Calls(_branches), (X,), {}, None)
    assert raised.value.__cause__ is not None


def test_example_inputs_that_the_model_does_not_take_are_refused():
    with pytest.raises(
        mezzo.ConversionError, match=r"Linear does not run on these example inputs.*mat1 and mat2"
    ):
        export(nn.Linear(3, 4), (X,), {}, None)
    with pytest.raises(
        mezzo.ConversionError, match=r"do not fit Linear.forward\(input.*too many positional"
    ):
        export(nn.Linear(4, 4), (X, X), {}, None)
    with pytest.raises(mezzo.ConversionError, match=r"got Tensor. Write convert\(model, \(x,\)\)"):
        export(nn.Linear(4, 4), X, {}, None)
    with pytest.raises(mezzo.ConversionError, match=r"got list. .* each of them a tuple"):
        export(nn.Linear(4, 4), [X], {}, None)
    with pytest.raises(mezzo.ConversionError, match=r"kwargs= is a mapping .* got int"):
        export(nn.Linear(4, 4), (X,), 3, None)


def test_what_went_wrong_is_said_in_the_error_alone(caplog):
    with pytest.raises(mezzo.ConversionError):
        export(nn.Linear(3, 4), (X,), {}, None)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_wrong_dynamic_shapes_are_said_to_be():
    with pytest.raises(mezzo.ConversionError, match="Correct dynamic_shapes="):
        export(nn.Linear(4, 4), (X,), {}, {"y": {0: torch.export.Dim("batch")}})
    with pytest.raises(
        mezzo.ConversionError, match=r"2 not in range \[5, 9\]. Correct dynamic_shapes="
    ):
        export(nn.Linear(4, 4), (X,), {}, ({0: torch.export.Dim("batch", min=5, max=9)},))
    with pytest.raises(
        mezzo.ConversionError,
        match=(
            r"You marked length as dynamic but your code specialized it to be a constant \(5\)\."
            r" Correct .* a list of example"
        ),
    ):
        export(
            nn.LSTM(4, 4, batch_first=True),
            (torch.randn(2, 5, 4),),
            {},
            {"input": {1: torch.export.Dim("length")}},
        )


def test_what_wraps_a_model_is_taken_off():
    model = nn.Linear(4, 4)
    with warnings.catch_warnings():
        # torch's own: it scripts functions when the compiler is first imported, and says that
        # scripting is deprecated.
        warnings.simplefilter("ignore")
        compiled, scripted = torch.compile(model), torch.jit.script(model)
    assert unwrapped(nn.DataParallel(model)) is model
    assert unwrapped(compiled) is model
    with pytest.raises(mezzo.ConversionError, match="got function"):
        unwrapped(_branches)
    with pytest.raises(mezzo.ConversionError, match="TorchScript"):
        unwrapped(scripted)


def test_a_region_around_the_export_is_not_heard():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exported = export(nn.Linear(4, 4), (X,), {}, None)
    assert names(exported.graph_module) == ["aten.linear.default"]


def test_attention_is_traced_into_its_ops_without_gradients_too():
    with torch.no_grad():
        exported = export(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(), (X[None],), {}, None
        )
    assert "aten.scaled_dot_product_attention.default" in names(exported.graph_module)


@pytest.mark.filterwarnings("error")
def test_a_recurrent_layer_is_exported_without_a_warning():
    export(nn.LSTM(4, 4), (X[None],), {}, None)


def test_a_decorated_float32_model_is_exported_without_its_region_and_keeps_it():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mezzo.decorate(model, optimizer, "O1", dtype="bfloat16")
    door = model.__dict__["forward"]
    exported = export(model, (X,), {}, None)
    assert names(exported.graph_module) == ["aten.linear.default"]
    assert model.__dict__["forward"] is door
    assert model(X).dtype is torch.bfloat16


def test_an_output_that_is_no_container_of_tensors_is_refused_with_what_to_do():
    class Box:
        def __init__(self, value):
            self.value = value

    with pytest.raises(mezzo.ConversionError, match="leave other objects out"):
        export(Calls(lambda _, x: Box(x)), (X,), {}, None)
