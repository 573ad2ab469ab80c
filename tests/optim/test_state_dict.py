"""An optimizer's own state_dict carries what lies beside its parameters, and comes back to the bit."""

import copy
import io
from contextlib import ExitStack

import pytest
import torch
from support.states import assert_equal
from torch import nn

import mezzo
from mezzo.optim.master_weights import KEYS, MASTER, MasterWeights, has_companion, without_companion
from mezzo.optim.state_dict import MASTERS, hook_state_dict

_OURS = KEYS | {"draws"}
KINDS = ("float32", "split", "kahan", "stochastic", "none")
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


def made(optimizer="AdamW", seed=0, **words):
    model, chosen = plain(optimizer, seed)
    return mezzo.decorate(model, chosen, **{"dtype": "bfloat16", **words})


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
    """Everything that a run goes on from."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return weights, copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("carried", [copy.deepcopy, through_a_file])
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_to_the_bit_in_either_order(kind, optimizer, model_first, carried):
    model, stepped = made(optimizer, master=kind)
    train(model, stepped, 4)
    weights, state = carried(model.state_dict()), carried(stepped.state_dict())
    train(model, stepped, 3, start=4)

    again, other = made(optimizer, seed=7, master=kind)
    train(again, other, 2)
    if model_first:
        again.load_state_dict(weights)
    other.load_state_dict(state)
    if not model_first:
        again.load_state_dict(weights)
    train(again, other, 3, start=4)
    assert_equal(exact(model, stepped), exact(again, other))


@pytest.mark.parametrize("kind", ["float32", "kahan", "stochastic", "none"])
@pytest.mark.parametrize("model_first", [True, False])
def test_float16_with_a_scaler_resumes_to_the_bit(kind, model_first):
    model, optimizer = made(dtype="float16", master=kind)
    scaler = mezzo.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    train(model, optimizer, 4, scaler=scaler)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scaler.state_dict()))
    train(model, optimizer, 4, start=4, scaler=scaler)

    again, other = made(dtype="float16", master=kind, seed=3)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_first", [True, False])
def test_a_run_that_was_saved_before_its_first_step_starts_to_the_bit(kind, model_first):
    model, optimizer = made(master=kind)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 2)
    again, other = made(master=kind, seed=5)
    if model_first:
        again.load_state_dict(weights)
    other.load_state_dict(state)
    if not model_first:
        again.load_state_dict(weights)
    train(again, other, 2)
    assert_equal(exact(model, optimizer), exact(again, other))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("float32", torch.float32), ("split", torch.int16), ("kahan", torch.bfloat16)],
)
def test_what_lies_beside_each_parameter_is_saved_by_its_number(kind, dtype):
    model, optimizer = made(master=kind)
    waiting = optimizer.state_dict()[MASTERS]
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    begun = {number: held for number, held in state["state"].items() if has_companion(held)}
    for companions in (waiting, begun):
        # Of two linear layers; the norm between them is float32 itself.
        assert list(companions) == [0, 1, 4, 5]
        assert {held[MASTER].dtype for held in companions.values()} == {dtype}
    assert MASTERS not in state


def test_a_parameter_that_others_wrote_is_saved_as_it_is():
    model, optimizer = made(master="split")
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    assert not optimizer.state_dict()[MASTERS][0][MASTER].any()


def test_float32_state_survives_beside_16_bit_parameters():
    model, optimizer = made()
    train(model, optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    assert state["state"][0]["exp_avg"].dtype is torch.float32
    optimizer.load_state_dict(copy.deepcopy(state))
    assert_equal(optimizer.state_dict(), state)


def test_what_is_loaded_does_not_alias_the_state_that_came():
    model, optimizer = made()
    train(model, optimizer, 2)
    came = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(came)
    optimizer.load_state_dict(came)
    train(model, optimizer, 2)
    for name in ("exp_avg", MASTER):
        assert_equal(came["state"][0][name], kept["state"][0][name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_plain_state_is_taken_exactly_and_masters_stay(kind, optimizer):
    model, stepped = plain(optimizer)
    train(model, stepped, 3)
    decorated, other = made(optimizer, seed=2, master=kind)
    before = copy.deepcopy(other.state_dict().get(MASTERS, {}))
    other.load_state_dict(copy.deepcopy(stepped.state_dict()))
    after = other.state_dict()
    own = {
        number: {name: value for name, value in held.items() if name not in _OURS}
        for number, held in after["state"].items()
    }
    assert_equal(stepped.state_dict(), {"state": own, "param_groups": after["param_groups"]})
    kept = after.get(MASTERS) or {
        number: {name: held[name] for name in KEYS & held.keys()}
        for number, held in after["state"].items()
        if number in before
    }
    assert_equal(before, kept)
    train(decorated, other, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_plain_optimizer_takes_the_state_and_trains_on(kind, optimizer, steps):
    model, stepped = made(optimizer, master=kind)
    train(model, stepped, steps)
    other_model, other = plain(optimizer, seed=3)
    other.load_state_dict(through_a_file(stepped.state_dict()))
    train(other_model, other, 3)
    assert MASTERS not in other.state_dict()


@pytest.mark.parametrize("kind", ["split", "kahan"])
def test_float32_masters_can_be_kept_in_another_way_from_then_on(kind):
    model, optimizer = made(master="float32")
    train(model, optimizer, 3)
    other_model, other = made(master=kind, seed=4)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    mezzo.undecorate(model)
    mezzo.undecorate(other_model)
    tolerance = 0 if kind == "split" else 2.0**-15
    torch.testing.assert_close(other_model[0].weight, model[0].weight, rtol=tolerance, atol=0)


def test_masters_that_cannot_be_taken_are_said():
    _, optimizer = made(master="split")
    _, other = made(master="float32", dtype="float16")
    with pytest.warns(
        UserWarning,
        match="another kind or dtype, which cannot be turned into master='float32' here",
    ) as caught:
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert caught[0].filename == __file__


def test_a_state_of_another_model_is_refused_before_anything_changes():
    model, optimizer = made(master="split")
    train(model, optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["state"][0][MASTER] = torch.zeros(2, 2, dtype=torch.int16)
    with pytest.raises(
        mezzo.PolicyError, match=r"shape \(2, 2\) where this optimizer has one of shape \(8, 6\)"
    ):
        optimizer.load_state_dict(wrong)
    wrong = copy.deepcopy(before)
    wrong["state"][0]["mezzo_split_sample"] = torch.zeros(3)
    with pytest.raises(mezzo.PolicyError, match=r"shape \(3,\)"):
        optimizer.load_state_dict(wrong)
    with pytest.raises(mezzo.CheckpointError, match="older mezzo"):
        optimizer.load_state_dict({**before, MASTERS: {"kind": "split", "beside": {}}})
    assert_equal(optimizer.state_dict(), before)


def test_nested_state_is_put_back_where_torch_rounded_it():
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
    "stranger": (
        lambda state: state["state"].update({50: {"exp_avg": torch.zeros(2)}}),
        "entry for parameter 50",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("steps", [0, 2])
def test_content_that_is_not_as_saved_is_refused_before_anything_changes(change, message, steps):
    model, optimizer = made(master="split")
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    change(state)
    model, optimizer = made(seed=3, master="split")
    train(model, optimizer, steps)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(mezzo.CheckpointError, match=message):
        optimizer.load_state_dict(state)
    assert_equal(before, optimizer.state_dict())
    train(model, optimizer, 1)


def test_state_of_an_optimizer_of_ones_own_may_have_any_shape():
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1, "clip": None})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter].setdefault("rows", torch.zeros(parameter.shape[0]))

    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = Own([weight])
    with ExitStack() as undo:
        hook_state_dict(optimizer, MasterWeights("none"), undo)
        optimizer.load_state_dict(
            {
                "state": {0: {"rows": torch.ones(2), "note": 3}, "all": 3},
                "param_groups": [{**optimizer.param_groups[0], "clip": 2.0, "params": [0]}],
            }
        )
    assert_equal(dict(optimizer.state[weight]), {"rows": torch.ones(2), "note": 3})
