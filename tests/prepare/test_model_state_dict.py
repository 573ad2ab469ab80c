"""`state_dict` of a decorated model can hold exact weights, and loading sets the masters."""

import copy

import pytest
import torch
from torch import nn

import mezzo

EXACT = ("float32", "split")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.rand(4) + 1 / 3)
        self.register_buffer("shift", torch.rand(4) + 1 / 3)
        self.register_buffer("hidden", torch.rand(4), persistent=False)

    def forward(self, x):
        return self.head(self.body(x)) * self.scale + self.shift + self.hidden


def decorated(seed=0, **options):
    torch.manual_seed(seed)
    model = Net()
    original = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mezzo.decorate(model, optimizer, **{"dtype": "bfloat16", **options})
    return model, optimizer, original


def exact(model):
    """Return the weights of a model after `undecorate`."""
    mezzo.undecorate(model)
    return copy.deepcopy(model.state_dict())


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype is other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_without_save_dtype_the_state_holds_16_bit_weights():
    model, *_ = decorated()
    state = model.state_dict()
    assert state["head.weight"].dtype is torch.bfloat16
    assert state["shift"].dtype is torch.float32
    assert state["head.weight"].data_ptr() == model.head.weight.data_ptr()


@pytest.mark.parametrize("master", EXACT)
def test_exact_weights_are_saved_for_the_model_its_submodules_and_with_a_prefix(master):
    model, _, original = decorated(master=master, save_dtype="float32")
    assert same(model.state_dict(), original)
    assert same(
        model.body.state_dict(),
        {
            name.removeprefix("body."): value
            for name, value in original.items()
            if name.startswith("body.")
        },
    )
    assert same(
        model.state_dict(prefix="net."), {f"net.{name}": value for name, value in original.items()}
    )
    assert same(
        nn.Sequential(model).state_dict(), {f"0.{name}": value for name, value in original.items()}
    )


def test_saved_exact_weights_are_copies():
    model, optimizer, original = decorated(save_dtype="float32")
    state = model.state_dict()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert torch.equal(state["head.weight"], original["head.weight"])
    assert not torch.equal(model.state_dict()["head.weight"], original["head.weight"])


def test_keep_vars_returns_the_parameters():
    model, *_ = decorated(save_dtype="float32")
    assert model.state_dict(keep_vars=True)["head.weight"] is model.head.weight


@pytest.mark.parametrize("master", EXACT)
@pytest.mark.parametrize("assign", [False, True])
def test_loading_float32_weights_sets_the_masters_to_the_bit(master, assign):
    model, optimizer, _ = decorated(master=master)
    parameters = dict(model.named_parameters())
    _, _, other = decorated(seed=1)
    model.load_state_dict(copy.deepcopy(other), assign=assign)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert torch.equal(model.head.weight, other["head.weight"].bfloat16()) or master == "split"
    assert optimizer.param_groups[0]["params"] == list(parameters.values())
    assert same(exact(model), other)


@pytest.mark.parametrize("master", [*EXACT, "kahan"])
def test_loading_float32_weights_of_a_submodule_sets_its_masters(master):
    model, _, original = decorated(master=master)
    value = torch.full((4, 8), 1 / 3)
    model.head.load_state_dict({"weight": value, "bias": torch.zeros(4)})
    tolerance = 2.0**-15 if master == "kahan" else 0.0
    loaded = exact(model)
    torch.testing.assert_close(loaded["head.weight"], value, rtol=tolerance, atol=0)
    torch.testing.assert_close(
        loaded["body.0.weight"],
        original["body.0.weight"],
        rtol=0,
        atol=0 if master != "kahan" else 2.0**-15,
    )


@pytest.mark.parametrize("master", EXACT)
def test_loading_16_bit_weights_sets_the_masters(master):
    model, *_ = decorated(master=master)
    other, *_ = decorated(seed=1)
    state = copy.deepcopy(other.state_dict())
    model.load_state_dict(state)
    assert same(exact(model), {name: value.float() for name, value in state.items()})


def test_weights_of_the_other_16_bit_dtype_are_not_rounded_twice():
    model, *_ = decorated()
    _, _, other = decorated(seed=1)
    halves = {name: value.half() for name, value in other.items()}
    model.load_state_dict(halves)
    loaded = exact(model)
    assert torch.equal(loaded["head.weight"], halves["head.weight"].float())


@pytest.mark.parametrize("master", EXACT)
def test_weights_with_other_strides_are_loaded(master):
    model, *_ = decorated(master=master)
    value = torch.rand(8, 4).t() + 1 / 3
    state = {**model.state_dict(), "head.weight": value}
    model.load_state_dict(state)
    assert torch.equal(exact(model)["head.weight"], value)


def test_a_failed_load_does_not_affect_the_next_one():
    model, _, original = decorated()
    wrong = {**decorated(seed=1)[2], "head.weight": torch.zeros(3, 3)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(wrong)
    model.load_state_dict({name: value.bfloat16() for name, value in original.items()})
    assert torch.equal(exact(model)["scale"], original["scale"].bfloat16().float())


def test_frozen_weights_are_saved_as_16_bit_values():
    torch.manual_seed(0)
    model = Net()
    model.head.requires_grad_(requires_grad=False)
    original = copy.deepcopy(model.state_dict())
    mezzo.decorate(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bfloat16", save_dtype="float32"
    )
    state = model.state_dict()
    assert torch.equal(state["head.weight"], original["head.weight"].bfloat16().float())
    assert torch.equal(state["body.0.weight"], original["body.0.weight"])


def test_tied_weights_are_saved_and_loaded_under_both_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    original = copy.deepcopy(model.state_dict())
    mezzo.decorate(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dtype="bfloat16",
        master="split",
        save_dtype="float32",
    )
    assert same(model.state_dict(), original)
    model.load_state_dict({name: value + 1 / 3 for name, value in original.items()})
    assert torch.equal(model.state_dict()["1.weight"], original["0.weight"] + 1 / 3)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.twice = nn.Sequential(shared := nn.Linear(4, 4), shared)

    def forward(self, x):
        return self.head(self.twice(self.embed(x)))


@pytest.mark.parametrize("master", EXACT)
def test_tied_weights_are_one_tensor_in_a_state_and_in_safetensors(tmp_path, master):
    safetensors = pytest.importorskip("safetensors.torch")
    model = Tied()
    original = copy.deepcopy(model.state_dict())
    mezzo.decorate(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dtype="bfloat16",
        master=master,
        save_dtype="float32",
    )
    for again in range(2):
        state = model.state_dict()
        assert state["embed.weight"] is state["head.weight"]
        assert state["twice.0.weight"] is state["twice.1.weight"]
        assert state["embed.weight"] is not state["twice.0.weight"]
        assert same(state, original), again
    safetensors.save_model(model, tmp_path / "model.safetensors")
    plain = Tied()
    safetensors.load_model(plain, tmp_path / "model.safetensors")
    assert same(plain.state_dict(), original)


def test_each_state_holds_the_current_weights():
    model, optimizer, _ = decorated(save_dtype="float32")
    first = model.state_dict()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["head.weight"], first["head.weight"])
