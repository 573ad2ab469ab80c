"""Master weights are kept by torch's distributed checkpoint and all other ways to load a state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import assert_equal
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import mezzo
from mezzo.optim.companion import KEYS

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
}
FORMATS = ("float32", "split", "kahan", "stochastic")
Pair = tuple[nn.Module, torch.optim.Optimizer]


def plain(optimizer: str = "AdamW", seed: int = 0) -> Pair:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 40), nn.LayerNorm(40), nn.Linear(40, 3))
    return model, OPTIMIZERS[optimizer](model.parameters())


def decorated(optimizer: str = "AdamW", seed: int = 0, **options: Any) -> Pair:
    return mezzo.decorate(*plain(optimizer, seed), **{"dtype": "bfloat16", **options})


def train(pair: Pair, steps: int, start: int = 0) -> None:
    model, optimizer = pair
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def exact(pair: Pair) -> list[torch.Tensor]:
    mezzo.undecorate(pair[0])
    return [parameter.detach().clone() for parameter in pair[0].parameters()]


def assert_resumes(first: Pair, second: Pair, start: int = 3) -> None:
    train(first, 2, start)
    train(second, 2, start)
    assert_equal(exact(first), exact(second))


def test_an_update_below_16_bit_steps_is_kept_by_distributed_checkpoint():
    weights = []
    for _ in range(2):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        weights.append(
            mezzo.decorate(model, torch.optim.SGD(model.parameters(), lr=1.0), dtype="bfloat16")
        )
    (model, optimizer), (other, second) = weights
    model.weight.grad = torch.full((1, 1), 0.0011, dtype=torch.bfloat16)
    optimizer.step()
    states = get_state_dict(model, optimizer)
    set_state_dict(other, second, model_state_dict=states[0], optim_state_dict=states[1])
    assert mezzo.undecorate(other).weight.item() == mezzo.undecorate(model).weight.item() != 1.0


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("master", FORMATS)
@pytest.mark.parametrize("steps", [0, 3])
def test_distributed_checkpoint_keeps_master_weights(
    master: str, optimizer: str, flat: bool, steps: int
):
    first, second = decorated(optimizer, master=master), decorated(optimizer, seed=1, master=master)
    train(first, steps)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, state = copy.deepcopy(get_state_dict(*first, options=options))
    set_state_dict(*second, model_state_dict=model, optim_state_dict=state, options=options)
    assert_resumes(first, second, steps)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("master", ["float32", "split", "kahan"])
def test_model_and_optimizer_states_are_set_in_either_order(
    master: str, model_first: bool, flat: bool
):
    first, second = decorated(master=master), decorated(seed=1, master=master)
    train(first, 3)
    train(second, 1)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, state = copy.deepcopy(get_state_dict(*first, options=options))
    assert_equal(get_optimizer_state_dict(*first, options=options), state)
    if model_first:
        set_model_state_dict(second[0], model)
    set_optimizer_state_dict(*second, optim_state_dict=state, options=options)
    # Reading the loaded state has no side effect.
    second[1].state_dict()
    if not model_first:
        set_model_state_dict(second[0], model)
    assert_resumes(first, second)


@pytest.mark.parametrize("master", ["float32", "split", "kahan"])
def test_a_full_state_dict_on_the_cpu_keeps_master_weights(master: str):
    first, second = decorated(master=master), decorated(seed=1, master=master)
    train(first, 3)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, state = copy.deepcopy(get_state_dict(*first, options=options))
    set_state_dict(*second, model_state_dict=model, optim_state_dict=state, options=options)
    assert_resumes(first, second)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_files_of_distributed_checkpoint_keep_master_weights(tmp_path):
    first, second = decorated(master="split"), decorated(seed=1, master="split")
    train(first, 3)
    dcp.save(
        dict(zip(("model", "optimizer"), get_state_dict(*first), strict=True)),
        checkpoint_id=tmp_path,
    )
    states = dict(zip(("model", "optimizer"), get_state_dict(*second), strict=True))
    dcp.load(states, checkpoint_id=tmp_path)
    set_state_dict(*second, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert_resumes(first, second)


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("float32", "split"),
        ("split", "float32"),
        ("kahan", "float32"),
        ("float32", "kahan"),
        ("kahan", "split"),
    ],
)
def test_masters_are_converted_to_another_format_in_either_order(
    saved: str, loaded: str, model_first: bool
):
    first, second = decorated(master=saved), decorated(seed=1, master=loaded)
    train(first, 3)
    train(second, 1)
    model, state = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
    # A tie: half-way between two bfloat16 numbers, which the formats round to different sides.
    if saved == "float32":
        state["state"][0]["mezzo_master"][0, 0], model["0.weight"][0, 0] = 1.0 + 2.0**-8, 1.0
        first[0].load_state_dict(model)
        first[1].load_state_dict(copy.deepcopy(state))
    if model_first:
        second[0].load_state_dict(model)
    second[1].load_state_dict(state)
    assert_equal(
        second[1].state_dict()["state"][0]["mezzo_master"], state["state"][0]["mezzo_master"]
    )
    if not model_first:
        second[0].load_state_dict(model)
    train(second, 1, 3)
    train(first, 1, 3)
    tolerance = 2.0**-15 if "kahan" in (saved, loaded) else 0
    for actual, expected in zip(exact(second), exact(first), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_a_flattened_state_of_another_format_is_converted_or_warned_about():
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    first, second, third = (
        decorated(master="float32"),
        decorated(seed=1, master="split"),
        decorated(seed=2, master="float32"),
    )
    train(first, 3)
    model, state = copy.deepcopy(get_state_dict(*first, options=options))
    set_state_dict(*second, model_state_dict=model, optim_state_dict=state, options=options)
    assert_equal(
        get_state_dict(*second)[1]["state"]["0.weight"]["mezzo_master"],
        first[1].state_dict()["state"][0]["mezzo_master"],
    )
    for pair in (first, second):
        train(pair, 1, 3)
    model, state = copy.deepcopy(get_state_dict(*second, options=options))
    with pytest.warns(UserWarning, match="start from the model's 16-bit weights"):
        set_state_dict(*third, model_state_dict=model, optim_state_dict=state, options=options)
    assert_resumes(first, second)


# -- a plain pair that is decorated later ----------------------------------------------------------


@pytest.mark.parametrize("way", ["load_state_dict", "distributed checkpoint"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("master", ["float32", "split", "kahan"])
def test_a_plain_pair_that_loads_and_is_then_decorated_continues_exactly(
    master: str, optimizer: str, way: str
):
    first, second = decorated(optimizer, master=master), plain(optimizer, seed=1)
    train(first, 3)
    if way == "load_state_dict":
        model, state = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
        second[0].load_state_dict(model)
        second[1].load_state_dict(state)
    else:
        model, state = copy.deepcopy(get_state_dict(*first))
        set_state_dict(*second, model_state_dict=model, optim_state_dict=state)
    assert_resumes(first, mezzo.decorate(*second, dtype="bfloat16", master=master))


def test_a_plain_pair_that_was_trained_after_loading_keeps_its_values():
    first, second = decorated(master="split"), plain(seed=1)
    train(first, 3)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    with torch.no_grad():
        # Below the rounding of bfloat16, so that the sample still matches.
        second[0][0].weight.add_(2.0**-20)
    wanted = [parameter.detach().clone() for parameter in second[0].parameters()]
    assert_equal(exact(mezzo.decorate(*second, dtype="bfloat16", master="split"))[0], wanted[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("master", FORMATS)
def test_undecorating_removes_our_keys_from_the_state(master: str, optimizer: str):
    pair = decorated(optimizer, master=master)
    train(pair, 2)
    mezzo.undecorate(*pair)
    assert not any(KEYS & state.keys() for state in pair[1].state.values())
    train(pair, 1)
    mezzo.decorate(*pair, dtype="bfloat16", master=master)
    train(pair, 1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("master", ["float32", "split", "kahan"])
def test_the_masters_in_a_state_are_live(master: str, optimizer: str):
    pair = decorated(optimizer, master=master)
    train(pair, 1)
    masters = {
        parameter: state["mezzo_master"]
        for parameter, state in pair[1].state.items()
        if "mezzo_master" in state
    }
    assert len(masters) == 4
    before = copy.deepcopy(list(masters.values()))
    train(pair, 1, 1)
    assert all(
        pair[1].state[parameter]["mezzo_master"] is tensor for parameter, tensor in masters.items()
    )
    assert not any(map(torch.equal, before, masters.values()))


# -- stale companions ------------------------------------------------------------------------------


@pytest.mark.parametrize("master", ["float32", "split", "kahan"])
@pytest.mark.parametrize(
    "write",
    [
        nn.init.ones_,
        lambda weight: nn.init.ones_(weight.data),
        lambda weight: weight.data.fill_(1.0),
    ],
    ids=["init", "init of data", "data"],
)
def test_weights_initialized_after_loading_an_optimizer_keep_their_values(master: str, write: Any):
    first, second = decorated(master=master), decorated(seed=1, master=master)
    train(first, 3)
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    for parameter in second[0].parameters():
        write(parameter)
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in exact(second))


@pytest.mark.parametrize("master", ["float32", "split", "kahan"])
def test_a_weight_filled_through_data_is_updated_from_its_new_value(master: str):
    model = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    mezzo.decorate(model, optimizer, dtype="bfloat16", master=master)
    model.weight.data.fill_(2.0)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    value = mezzo.undecorate(model).weight
    torch.testing.assert_close(
        value, torch.full_like(value, 1.999), rtol=1e-6 if master != "kahan" else 2.0**-15, atol=0
    )
