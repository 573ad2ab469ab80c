"""The state_dict of an optimizer holds companion tensors, and is loaded to the bit."""

import copy
import io
from contextlib import ExitStack

import pytest
import torch
from support.states import assert_equal
from torch import nn

import mezzo
from mezzo.optim.companion import KEYS, MASTER, MASTERS, has_companion, without_companion
from mezzo.optim.master_weights import MasterWeights
from mezzo.optim.state_dict import hook_state_dict
from mezzo.optim.state_dict_checks import OUR_KEYS

FORMATS = ("float32", "split", "kahan", "stochastic", "none")
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
}


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def plain(optimizer="AdamW", seed=0):
    torch.manual_seed(seed)
    model = net()
    return model, OPTIMIZERS[optimizer](model.parameters())


def decorated(optimizer="AdamW", seed=0, **options):
    model, chosen = plain(optimizer, seed)
    return mezzo.decorate(model, chosen, **{"dtype": "bfloat16", **options})


def train(model, optimizer, steps, start=0, scaler=None):
    for step in range(start, start + steps):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        loss = model(x).float().square().mean()
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def exact(model, optimizer):
    """Return copies of all that a run continues from."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return weights, copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("master", FORMATS)
def test_a_run_resumes_to_the_bit_in_either_order(master, optimizer, model_first, copied):
    model, stepped = decorated(optimizer, master=master)
    train(model, stepped, 4)
    weights, state = copied(model.state_dict()), copied(stepped.state_dict())
    train(model, stepped, 3, start=4)

    again, other = decorated(optimizer, seed=7, master=master)
    train(again, other, 2)
    if model_first:
        again.load_state_dict(weights)
    other.load_state_dict(state)
    if not model_first:
        again.load_state_dict(weights)
    train(again, other, 3, start=4)
    assert_equal(exact(model, stepped), exact(again, other))


@pytest.mark.parametrize("master", ["float32", "kahan", "stochastic", "none"])
@pytest.mark.parametrize("model_first", [True, False])
def test_float16_with_a_scaler_resumes_to_the_bit(master, model_first):
    model, optimizer = decorated(dtype="float16", master=master)
    scaler = mezzo.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    train(model, optimizer, 4, scaler=scaler)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scaler.state_dict()))
    train(model, optimizer, 4, start=4, scaler=scaler)

    again, other = decorated(dtype="float16", master=master, seed=3)
    second = mezzo.GradScaler("cpu")
    second.load_state_dict(saved[2])
    if model_first:
        again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    if not model_first:
        again.load_state_dict(saved[0])
    train(again, other, 4, start=4, scaler=second)
    assert_equal(exact(model, optimizer), exact(again, other))
    assert second.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("master", FORMATS)
@pytest.mark.parametrize("model_first", [True, False])
def test_a_run_saved_before_its_first_step_resumes_to_the_bit(master, model_first):
    model, optimizer = decorated(master=master)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 2)
    again, other = decorated(master=master, seed=5)
    if model_first:
        again.load_state_dict(weights)
    other.load_state_dict(state)
    if not model_first:
        again.load_state_dict(weights)
    train(again, other, 2)
    assert_equal(exact(model, optimizer), exact(again, other))


@pytest.mark.parametrize(
    ("master", "dtype"),
    [("float32", torch.float32), ("split", torch.int16), ("kahan", torch.bfloat16)],
)
def test_companions_are_saved_by_the_number_of_their_parameter(master, dtype):
    model, optimizer = decorated(master=master)
    not_stepped = optimizer.state_dict()[MASTERS]
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    stepped = {key: entries for key, entries in state["state"].items() if has_companion(entries)}
    for companions in (not_stepped, stepped):
        # Of two linear layers; the LayerNorm between them stays float32.
        assert list(companions) == [0, 1, 4, 5]
        assert {entries[MASTER].dtype for entries in companions.values()} == {dtype}
    assert MASTERS not in state


def test_the_companion_of_an_overwritten_parameter_is_saved_as_zeros():
    model, optimizer = decorated(master="split")
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    assert not optimizer.state_dict()[MASTERS][0][MASTER].any()


def test_float32_state_of_16_bit_parameters_is_not_rounded():
    model, optimizer = decorated()
    train(model, optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    assert state["state"][0]["exp_avg"].dtype is torch.float32
    optimizer.load_state_dict(copy.deepcopy(state))
    assert_equal(optimizer.state_dict(), state)


def test_loading_copies_the_tensors_of_the_state():
    model, optimizer = decorated()
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(state)
    optimizer.load_state_dict(state)
    train(model, optimizer, 2)
    for name in ("exp_avg", MASTER):
        assert_equal(state["state"][0][name], before["state"][0][name])


@pytest.mark.parametrize("master", FORMATS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_plain_state_is_loaded_exactly_and_masters_stay(master, optimizer):
    model, stepped = plain(optimizer)
    train(model, stepped, 3)
    other_model, other = decorated(optimizer, seed=2, master=master)
    before = copy.deepcopy(other.state_dict().get(MASTERS, {}))
    other.load_state_dict(copy.deepcopy(stepped.state_dict()))
    after = other.state_dict()
    own = {
        key: {name: value for name, value in entries.items() if name not in OUR_KEYS}
        for key, entries in after["state"].items()
    }
    assert_equal(stepped.state_dict(), {"state": own, "param_groups": after["param_groups"]})
    masters = after.get(MASTERS) or {
        key: {name: entries[name] for name in KEYS & entries.keys()}
        for key, entries in after["state"].items()
        if key in before
    }
    assert_equal(before, masters)
    train(other_model, other, 2)


@pytest.mark.parametrize("master", FORMATS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_plain_optimizer_loads_the_state_and_trains_on(master, optimizer, steps):
    model, stepped = decorated(optimizer, master=master)
    train(model, stepped, steps)
    other_model, other = plain(optimizer, seed=3)
    other.load_state_dict(through_a_file(stepped.state_dict()))
    train(other_model, other, 3)
    assert MASTERS not in other.state_dict()


@pytest.mark.parametrize("master", ["split", "kahan"])
def test_float32_masters_are_converted_to_another_format(master):
    model, optimizer = decorated(master="float32")
    train(model, optimizer, 3)
    other_model, other = decorated(master=master, seed=4)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    mezzo.undecorate(model)
    mezzo.undecorate(other_model)
    tolerance = 0 if master == "split" else 2.0**-15
    torch.testing.assert_close(other_model[0].weight, model[0].weight, rtol=tolerance, atol=0)


def test_masters_that_cannot_be_converted_give_a_warning():
    _, optimizer = decorated(master="split")
    _, other = decorated(master="float32", dtype="float16")
    with pytest.warns(
        UserWarning,
        match="another format or dtype, which cannot be converted to master='float32'",
    ) as caught:
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert caught[0].filename == __file__


def test_a_state_of_another_model_is_refused_before_anything_changes():
    model, optimizer = decorated(master="split")
    train(model, optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["state"][0][MASTER] = torch.zeros(2, 2, dtype=torch.int16)
    with pytest.raises(
        mezzo.PolicyError,
        match=r"shape \(2, 2\) where this optimizer has a parameter of shape \(8, 6\)",
    ):
        optimizer.load_state_dict(wrong)
    wrong = copy.deepcopy(before)
    wrong["state"][0]["mezzo_split_sample"] = torch.zeros(3)
    with pytest.raises(mezzo.PolicyError, match=r"shape \(3,\)"):
        optimizer.load_state_dict(wrong)
    with pytest.raises(mezzo.CheckpointError, match="older version of mezzo"):
        optimizer.load_state_dict({**before, MASTERS: {"kind": "split", "beside": {}}})
    assert_equal(optimizer.state_dict(), before)


def test_nested_state_is_restored_where_torch_rounded_it():
    weight = nn.Parameter(torch.ones(2))
    masters = MasterWeights("float32")
    masters.adopt(weight, torch.bfloat16)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    third = torch.full((2,), 1 / 3)
    optimizer.state[weight] = {"deep": {"list": [third, (third, 3)]}, "step": torch.tensor(3.0)}
    with ExitStack() as undo:
        hook_state_dict(optimizer, masters, undo)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert_equal(
            without_companion(optimizer.state[weight]),
            {"deep": {"list": [third, (third, 3)]}, "step": torch.tensor(3.0)},
        )
        assert has_companion(optimizer.state[weight])
    assert not has_companion(optimizer.state[weight])


CHANGES = {
    "state": (lambda state: state.pop("state"), "no dictionary 'state'"),
    "groups": (lambda state: state.update(param_groups=3), "no list 'param_groups'"),
    "lr": (
        lambda state: state["param_groups"][0].update(lr="fast"),
        "'fast', and this optimizer has",
    ),
    "eps": (lambda state: state["param_groups"][0].update(eps=-1.0), "Invalid epsilon"),
    "moment": (lambda state: state["state"][0].pop("exp_avg_sq"), "has no 'exp_avg_sq'"),
    "shape": (lambda state: state["state"][0].update(exp_avg=torch.zeros(2)), r"has shape \(2,\)"),
    "number": (lambda state: state["state"][0].update(exp_avg=3.0), "is 3.0, not a tensor"),
    "step": (lambda state: state["state"][0].update(step="two"), "not a number of steps"),
    "companion": (lambda state: state["state"][0].update({MASTER: "text"}), "'text', not a tensor"),
    "unknown parameter": (
        lambda state: state["state"].update({50: {"exp_avg": torch.zeros(2)}}),
        "entry for parameter 50",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("steps", [0, 2])
def test_an_invalid_state_is_refused_before_anything_changes(change, message, steps):
    model, optimizer = decorated(master="split")
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    change(state)
    model, optimizer = decorated(seed=3, master="split")
    train(model, optimizer, steps)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(mezzo.CheckpointError, match=message):
        optimizer.load_state_dict(state)
    assert_equal(before, optimizer.state_dict())
    train(model, optimizer, 1)


def test_state_of_a_custom_optimizer_may_have_any_shape():
    class Custom(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1, "clip": None})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter].setdefault("rows", torch.zeros(parameter.shape[0]))

    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = Custom([weight])
    with ExitStack() as undo:
        hook_state_dict(optimizer, MasterWeights("none"), undo)
        optimizer.load_state_dict(
            {
                "state": {0: {"rows": torch.ones(2), "note": 3}, "all": 3},
                "param_groups": [{**optimizer.param_groups[0], "clip": 2.0, "params": [0]}],
            }
        )
    assert_equal(dict(optimizer.state[weight]), {"rows": torch.ones(2), "note": 3})
