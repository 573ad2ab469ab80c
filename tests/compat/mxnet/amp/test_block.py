import pytest
import torch
from torch import nn

from mezzo import Policy
from mezzo.compat.mxnet._block import Block, ConvertRequest, Loaded, file_name

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def make(**words):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    return network, Block(network, ConvertRequest(Policy("O1", "float16", preset="mxnet"), **words))


def test_a_network_is_converted_at_the_first_call_and_again_for_another_size():
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


def test_one_program_serves_batches_of_any_size():
    network, block = make()
    block(X)
    before = block.converted
    batch = torch.randn(7, 4)
    assert torch.allclose(block(batch), network.eval()(batch), atol=1e-2)
    assert block.converted is before


class Fixed(nn.Linear):
    """A network whose batch has one size."""

    def forward(self, x):
        return super().forward(x.reshape(2, 4))


class Recurrent(nn.Module):
    """A network that torch exports for any batch, and that then takes one size alone."""

    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = (
            nn.Embedding(10, 4),
            nn.LSTM(4, 4, batch_first=True),
            nn.Linear(4, 2),
        )

    def forward(self, words):
        return self.head(self.rnn(self.embedding(words))[0].mean(1))


def test_a_network_that_only_seems_to_take_any_batch_is_converted_for_each():
    torch.manual_seed(0)
    network = Recurrent().eval()
    block = Block(network, ConvertRequest(Policy("O1", "float16", preset="mxnet")))
    for shape in ((3, 5), (2, 5), (3, 5), (2, 6)):
        words = torch.randint(10, shape)
        assert torch.allclose(block(words), network(words), atol=1e-2)


def test_a_network_for_one_size_is_converted_for_that():
    block = Block(Fixed(4, 2), ConvertRequest(Policy("O1", "float16", preset="mxnet")))
    assert block(X).shape == (2, 2)


def test_the_network_itself_is_left_alone():
    network, block = make(cast_params=True)
    block(X)
    assert network.training
    assert {value.dtype for value in network.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("called", [False, True], ids=["expected", "converted"])
def test_parameters_are_stored_in_16_bits_if_they_are_to_be(called):
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


def test_nodes_can_be_excluded_and_what_is_neither_is_warned_of(caplog):
    _, block = make(cast_params=True, excluded=["linear_1", "conv0"])
    block(X)
    assert (block.params["0.weight"].dtype, block.params["3.weight"].dtype) == (
        torch.float16,
        torch.float32,
    )
    # torch's own tracing logs too.
    assert [one.getMessage() for one in caplog.records if one.name == "root"] == [
        "excluded_sym_names are not present in the network. Missing nodes: ['conv0']"
    ]


def test_a_saved_network_keeps_its_casts_unless_they_are_to_be_removed(tmp_path):
    network, block = make(cast_params=True)
    out = block(X)
    kept = Loaded(block.export(str(tmp_path / "kept"), 3))
    assert (tmp_path / "kept-0003.pt2").exists()
    assert torch.equal(kept(X), out)
    assert {value.dtype for value in kept.params.values()} == {torch.float16}
    removed = Loaded(block.save_checkpoint(str(tmp_path / "removed"), 0, remove_amp_cast=True))
    assert torch.equal(removed.forward(X), network.eval()(X))
    assert {value.dtype for value in removed.params.values()} == {torch.float32}


def test_without_an_example_there_is_nothing_to_save(tmp_path):
    with pytest.raises(
        RuntimeError, match="Call it once on inputs of its size, or pass data_example"
    ):
        make()[1].save(tmp_path / "model.pt2")


def test_a_size_that_fails_is_forgotten():
    _, block = make()
    with pytest.raises(Exception, match="shape"):
        block(torch.ones(2, 5))
    assert block(X).shape == (2, 2)


def test_files_are_named_by_prefix_and_epoch():
    assert file_name("a/model", 12) == "a/model-0012.pt2"
