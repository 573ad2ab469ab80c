"""Weights of recurrent layers, described to cuDNN as torch's own modules describe theirs."""

import pytest
import torch
from support.graphs import Calls
from torch import nn

import mezzo
from mezzo.conversion import program_runner

LAYERS = {
    "lstm": lambda: nn.LSTM(6, 4, 2, batch_first=True),
    "lstm-projected": lambda: nn.LSTM(6, 4, 2, proj_size=3, bidirectional=True),
    "gru": lambda: nn.GRU(6, 4, 1, bias=False, bidirectional=True),
    "rnn-tanh": lambda: nn.RNN(6, 4, 3),
    "rnn-relu": lambda: nn.RNN(6, 4, 1, nonlinearity="relu"),
}


@pytest.fixture
def told(monkeypatch):
    """What torch is told to lay out, where cuDNN is said to be there."""
    found = []
    monkeypatch.setattr(program_runner, "_is_taken", lambda weights: True)
    monkeypatch.setattr(
        program_runner, "flatten_cudnn_weights", lambda *arguments: found.append(arguments)
    )
    monkeypatch.setattr(torch.backends.cudnn.rnn, "get_cudnn_mode", lambda mode: mode)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_described_as_torch_s_own_module_describes_it(name, told):
    layer = LAYERS[name]()
    # Said, for on a CPU a GRU would read its weights in float32.
    half = ["gru"] if isinstance(layer, nn.GRU) else ()
    converted = mezzo.convert(
        Calls(lambda self, x: self.layer(x)[0], layer=layer),
        (torch.randn(3, 5, 6),),
        dtype="bfloat16",
        half=half,
    )
    [(weights, each, inputs, mode, hidden, projection, layers, batch_first, bidirectional)] = told
    assert [one.shape for one in weights] == [one.shape for one in layer._flat_weights]
    assert {id(one) for one in weights} <= {
        id(one) for one in converted._converted.programs[0].exported.state_dict.values()
    }
    assert (each, inputs, hidden, projection) == (
        2 * (1 + layer.bias) + (layer.proj_size > 0),
        6,
        4,
        layer.proj_size,
    )
    assert (mode, layers, batch_first, bidirectional) == (
        layer.mode,
        layer.num_layers,
        layer.batch_first,
        layer.bidirectional,
    )


def test_it_is_done_again_for_a_program_that_is_moved_or_loaded(told, tmp_path):
    converted = mezzo.convert(
        Calls(lambda self, x: self.layer(x)[0], layer=LAYERS["lstm"]()),
        (torch.randn(3, 5, 6),),
        dtype="bfloat16",
    )
    converted.to("cpu")
    converted.save(tmp_path / "model")
    mezzo.Converted.load(tmp_path / "model")
    assert len(told) == 3


def test_nothing_is_laid_out_on_a_cpu(monkeypatch):
    monkeypatch.setattr(
        program_runner,
        "flatten_cudnn_weights",
        lambda *arguments: pytest.fail("there is no cuDNN here"),
    )
    mezzo.convert(
        Calls(lambda self, x: self.layer(x)[0], layer=LAYERS["lstm"]()),
        (torch.randn(3, 5, 6),),
        dtype="bfloat16",
    )
