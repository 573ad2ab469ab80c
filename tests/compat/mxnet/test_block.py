"""Converted networks: conversion on call, stored dtypes, excluded names, files."""

import pytest
import torch
from torch import nn

from mezzo import Policy
from mezzo.compat.mxnet import amp
from mezzo.compat.mxnet._block import Block, ConvertRequest, LoadedBlock, file_name
from mezzo.compat.mxnet._ndarray import NDArray, as_ndarray, as_tensor
from mezzo.compat.mxnet._params import read_params

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def make(**kwargs):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    return network, Block(
        network, ConvertRequest(Policy("O1", "float16", preset="mxnet"), **kwargs)
    )


def test_a_network_is_converted_on_the_first_call_and_for_each_new_shape():
    network, block = make()
    assert block.converted is None
    assert torch.allclose(block(X), network.eval()(X), atol=1e-2)
    before = block.converted
    block.forward(X + 1)
    assert block.converted is before
    sequences = torch.randn(2, 3, 4)
    assert torch.allclose(block(sequences), network(sequences), atol=1e-2)
    assert len(block.converted._converted.programs) == 2
    assert torch.equal(block(X), before(X))


def test_one_program_runs_any_batch_size():
    network, block = make()
    block(X)
    before = block.converted
    batch = torch.randn(7, 4)
    assert torch.allclose(block(batch), network.eval()(batch), atol=1e-2)
    assert block.converted is before


class Fixed(nn.Linear):
    """A network with a fixed batch size."""

    def forward(self, x):
        return super().forward(x.reshape(2, 4))


class Recurrent(nn.Module):
    """A network that torch exports with a dynamic batch but that runs for one size only."""

    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = (
            nn.Embedding(10, 4),
            nn.LSTM(4, 4, batch_first=True),
            nn.Linear(4, 2),
        )

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0].mean(1))


def test_a_network_whose_dynamic_batch_fails_is_converted_for_each_size():
    torch.manual_seed(0)
    network = Recurrent().eval()
    block = Block(network, ConvertRequest(Policy("O1", "float16", preset="mxnet")))
    for shape in ((3, 5), (2, 5), (3, 5), (2, 6)):
        tokens = torch.randint(10, shape)
        assert torch.allclose(block(tokens), network(tokens), atol=1e-2)


def test_a_network_with_a_fixed_batch_is_converted_for_that_size():
    block = Block(Fixed(4, 2), ConvertRequest(Policy("O1", "float16", preset="mxnet")))
    assert block(X).shape == (2, 2)


def test_the_original_network_is_not_changed():
    network, block = make(cast_params=True)
    block(X)
    assert network.training
    assert {value.dtype for value in network.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("called", [False, True], ids=["expected", "converted"])
def test_cast_params_stores_parameters_in_16_bits(called):
    for cast, dtype in ((False, torch.float32), (True, torch.float16)):
        _, block = make(cast_params=cast)
        if called:
            block(X)
        assert {value.dtype for value in block.collect_params().values()} == {dtype}


@pytest.mark.parametrize("called", [False, True], ids=["expected", "converted"])
def test_excluded_modules_stay_float32(called):
    _, block = make(cast_params=True, excluded=["3"])
    if called:
        block(X)
    assert (block.params["0.weight"].dtype, block.params["3.weight"].dtype) == (
        torch.float16,
        torch.float32,
    )


def test_nodes_can_be_excluded_and_unknown_names_warn(caplog):
    _, block = make(cast_params=True, excluded=["linear_1", "conv0"])
    block(X)
    assert (block.params["0.weight"].dtype, block.params["3.weight"].dtype) == (
        torch.float16,
        torch.float32,
    )
    # torch's tracing logs too.
    assert [record.getMessage() for record in caplog.records if record.name == "root"] == [
        "excluded_sym_names are not present in the network. Missing nodes: ['conv0']"
    ]


def test_a_saved_network_keeps_its_casts_unless_remove_amp_cast(tmp_path):
    network, block = make(cast_params=True)
    out = block(X)
    with_casts = LoadedBlock(block.export(str(tmp_path / "kept"), 3))
    assert (tmp_path / "kept-0003.pt2").exists()
    assert torch.equal(with_casts(X), out)
    assert {value.dtype for value in with_casts.params.values()} == {torch.float16}
    removed = LoadedBlock(block.save_checkpoint(str(tmp_path / "removed"), 0, remove_amp_cast=True))
    assert torch.equal(removed.forward(X), network.eval()(X))
    assert {value.dtype for value in removed.params.values()} == {torch.float32}


def test_saving_before_conversion_raises(tmp_path):
    with pytest.raises(
        RuntimeError, match="Call it once on inputs of its size, or pass data_example"
    ):
        make()[1].save(tmp_path / "model.pt2")


def test_a_failed_shape_is_not_kept_as_an_example():
    _, block = make()
    with pytest.raises(Exception, match="shape"):
        block(torch.ones(2, 5))
    assert block(X).shape == (2, 2)


def test_files_are_named_by_prefix_and_epoch():
    assert file_name("a/model", 12) == "a/model-0012.pt2"


# -- a block is a module ---------------------------------------------------------------------------


def test_a_block_is_a_module_that_stays_in_evaluation_mode():
    network, block = make()
    whole = nn.Sequential(block, nn.ReLU()).train()
    assert not block.network[2].training
    assert torch.equal(whole(X), block(X).relu())
    assert list(block.state_dict()) == [f"network.{name}" for name in network.state_dict()]
    assert block.to("cpu") is block
    assert block.eval() is block


def test_loaded_and_moved_parameters_are_converted_again():
    network, block = make()
    before = block(X)
    zeros = {name: torch.zeros_like(value) for name, value in block.state_dict().items()}
    nn.Sequential(block).load_state_dict({f"0.{name}": value for name, value in zeros.items()})
    assert block.converted is None
    assert not block(X).any()
    assert before.any()
    block.to(torch.float64)
    assert block.converted is None
    assert block(X.double()).dtype is torch.float64
    assert network[0].weight.any()


def test_a_block_takes_arrays_and_writes_mxnets_parameters(tmp_path):
    _, block = make(cast_params=True)
    array = as_ndarray(X)
    assert isinstance(block.forward(array), NDArray)
    assert torch.equal(as_tensor(block(array)), block(X))
    assert type(block(X)) is torch.Tensor
    block.save_parameters(tmp_path / "net.params")
    stored = read_params(tmp_path / "net.params")
    assert {name: value.dtype for name, value in stored.items()} == dict.fromkeys(
        block.params, torch.float16
    )
    block.save(tmp_path / "net.pt2")
    assert isinstance(LoadedBlock(tmp_path / "net.pt2")(array), NDArray)


def test_an_unknown_device_is_named():
    with pytest.raises(ValueError, match=r"ctx='gpuu' is no device. Pass mx.cpu"):
        amp.convert_hybrid_block(nn.Linear(2, 2), ctx="gpuu")
