import logging
import warnings
from pathlib import Path

import pytest
import torch
from support.graphs import Calls, names
from support.saved_programs import everything
from torch import nn
from torch.fx import Graph

import mezzo
from mezzo.conversion.export import export, quiet_loggers, source_line, unwrap_module, user_frame

X = torch.randn(2, 4)


def _branches(_, x):
    if x.sum() > 0:
        return x
    return -x


def test_an_untraceable_model_raises_with_its_line_and_a_remedy():
    with pytest.raises(
        mezzo.ConversionError,
        match=(
            r"cannot trace Calls at test_export.py:\d+ in _branches: `if x.sum\(\) > 0:`.*use"
            r" torch.cond"
        ),
    ) as raised:
        export(Calls(_branches), (X,), {}, None)
    assert raised.value.__cause__ is not None


def test_example_inputs_that_the_model_does_not_take_raise():
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
    with pytest.raises(mezzo.ConversionError, match=r"got list. .* make each of them a tuple"):
        export(nn.Linear(4, 4), [X], {}, None)
    with pytest.raises(mezzo.ConversionError, match=r"kwargs= must be a mapping .* got int"):
        export(nn.Linear(4, 4), (X,), 3, None)


def test_a_failed_export_logs_no_warnings(caplog):
    with pytest.raises(mezzo.ConversionError):
        export(nn.Linear(3, 4), (X,), {}, None)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_wrong_dynamic_shapes_raise_with_a_remedy():
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


def test_wrappers_of_a_model_are_removed():
    model = nn.Linear(4, 4)
    with warnings.catch_warnings():
        # torch scripts functions when the compiler is first imported, and warns that scripting is
        # deprecated.
        warnings.simplefilter("ignore")
        compiled, scripted = torch.compile(model), torch.jit.script(model)
    assert unwrap_module(nn.DataParallel(model)) is model
    assert unwrap_module(compiled) is model
    with pytest.raises(mezzo.ConversionError, match="got function"):
        unwrap_module(_branches)
    with pytest.raises(mezzo.ConversionError, match="TorchScript"):
        unwrap_module(scripted)


def test_an_autocast_region_around_the_export_has_no_effect():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exported = export(nn.Linear(4, 4), (X,), {}, None)
    assert names(exported.graph_module) == ["aten.linear.default"]


def test_attention_is_traced_into_its_ops_also_without_gradients():
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
    wrapper = model.__dict__["forward"]
    exported = export(model, (X,), {}, None)
    assert names(exported.graph_module) == ["aten.linear.default"]
    assert model.__dict__["forward"] is wrapper
    assert model(X).dtype is torch.bfloat16


def test_an_output_of_an_unknown_type_raises_with_a_remedy():
    class Box:
        def __init__(self, value):
            self.value = value

    with pytest.raises(mezzo.ConversionError, match="leave other objects out"):
        export(Calls(lambda _, x: Box(x)), (X,), {}, None)


# Source lines of nodes


TORCH = Path(torch.__file__).parent / "nn" / "linear.py"


def test_the_user_frame_is_the_last_that_is_not_torchs():
    trace = (
        'File "/home/me/model.py", line 3, in forward\n    x = self.a(x)\n  File'
        f' "/home/me/layer.py", line 7, in forward\n    y\n  File "{TORCH}", line 134, in forward\n'
        "    z"
    )
    assert user_frame(trace)[0] == 'File "/home/me/layer.py", line 7, in forward'


def test_torchs_last_frame_is_used_if_there_is_no_other():
    assert user_frame(f'File "{TORCH}", line 134, in forward')[2] == "134"


def test_generated_code_is_not_a_user_frame():
    assert user_frame('File "<eval_with_key>.5", line 9, in forward') is None
    assert user_frame(None) is None


def test_source_line_returns_file_and_line():
    node = next(node for node in everything().graph.nodes if node.name == "embedding")
    name, line = source_line(node).split(":")
    assert name == "saved_programs.py"
    assert (
        "self.embed(ids)"
        in (Path(__file__).parents[1] / "support" / name).read_text().splitlines()[int(line) - 1]
    )
    assert source_line(Graph().placeholder("x")) == ""


# Loggers


ONE, OTHER = logging.getLogger("mezzo_tests.one"), logging.getLogger("mezzo_tests.other")


def _fail():
    with quiet_loggers(ONE.name, OTHER.name, below=logging.CRITICAL):
        raise KeyError(ONE.level, OTHER.level)


def test_logger_levels_are_restored_when_the_body_raises():
    ONE.setLevel(logging.INFO)
    with pytest.raises(KeyError) as raised:
        _fail()
    assert raised.value.args == (logging.CRITICAL, logging.CRITICAL)
    assert (ONE.level, OTHER.level) == (logging.INFO, logging.NOTSET)
