"""The names with an underscore that torch's suite and its users' tricks touch."""

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState


@pytest.fixture
def scaled():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    return scaler, optimizer, weight


def test_stages_are_torchs(scaled):
    scaler, optimizer, _ = scaled
    states = scaler._per_optimizer_states
    assert len(states) == 0
    assert states[id(optimizer)]["stage"] is OptState.READY
    scaler.unscale_(optimizer)
    assert states[id(optimizer)]["stage"] is OptState.UNSCALED
    scaler.step(optimizer)
    assert states[id(optimizer)]["stage"] is OptState.STEPPED
    scaler.update()
    assert len(scaler._per_optimizer_states) == 0


def test_a_stage_that_is_set_counts(scaled):
    scaler, optimizer, weight = scaled
    scaler.unscale_(optimizer)
    weight.grad.mul_(4.0)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [1.0, 1.0]


def test_flags_that_are_set_count(scaled):
    scaler, optimizer, weight = scaled
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {
        torch.device("cpu"): torch.ones(())
    }
    scaler.step(optimizer)
    assert weight.tolist() == [1.0, 1.0]
    scaler.update()
    assert scaler.get_scale() == 2.0


def test_states_may_be_forgotten(scaled):
    scaler, optimizer, _ = scaled
    scaler.step(optimizer)
    scaler._per_optimizer_states.clear()
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    scaler._per_optimizer_states = {7: {"stage": OptState.STEPPED, "found_inf_per_device": {}}}
    assert list(scaler._per_optimizer_states) == [7]
    del scaler._per_optimizer_states[7]
    assert len(scaler._per_optimizer_states) == 0


def test_gradients_are_checked_without_being_changed(scaled):
    scaler, optimizer, weight = scaled
    before = weight.grad.clone()
    found = scaler._check_inf_per_device(optimizer)
    assert [flag.item() for flag in found.values()] == [0.0]
    weight.grad[0] = float("inf")
    assert sum(flag.item() for flag in scaler._check_inf_per_device(optimizer).values()) == 1
    assert scaler._found_inf_per_device(optimizer).keys() == found.keys()
    assert weight.grad[1] == before[1]


# Torch 2.11, though they are enabled.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_gradients_are_unscaled_and_checked():
    scaler = torch.amp.GradScaler("cpu")
    inverse, cpu = torch.full((1,), 0.25), torch.device("cpu")
    places = torch.tensor([[0, 1, 1], [2, 0, 2]])

    def sparse(values, dtype=torch.float32, where=places):
        return torch.sparse_coo_tensor(
            where, torch.tensor(values, dtype=dtype), (2, 3), check_invariants=True
        )

    def unscale(weight, gradient, *, fp16):
        weight.grad = gradient
        return scaler._unscale_grads_(
            torch.optim.SGD([weight], lr=1.0), inverse, torch.zeros(1), fp16
        )[cpu]

    weight = sparse([16.0, 32.0, 64.0]).clone()
    assert unscale(weight, sparse([16.0, 32.0, 64.0]), fp16=False) == 0.0
    assert torch.equal(weight.grad.to_dense(), sparse([4.0, 8.0, 16.0]).to_dense())
    for bad in ("inf", "nan"):
        assert unscale(weight, sparse([16.0, 32.0, float(bad)]), fp16=False) == 1.0
    half = sparse([16.0, 32.0, 64.0], torch.float16)
    assert unscale(half, half.clone(), fp16=True) == 0.0
    assert torch.equal(half.grad.to_dense(), sparse([4.0, 8.0, 16.0], torch.float16).to_dense())
    # Each value fits into float16, the sum of the two at one place does not.
    twice = torch.tensor([[0, 1, 0], [2, 0, 2]])
    assert unscale(half, sparse([64000.0, 32.0, 64000.0], torch.float16, twice), fp16=True) == 1.0


def test_the_scale_and_its_tracker_are_made_when_they_are_needed():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert scaler._scale is None
    assert scaler._growth_tracker is None
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert (
        scaler._scale.item(),
        scaler._scale.dtype,
        scaler._growth_tracker.item(),
        scaler._growth_tracker.dtype,
    ) == (8.0, torch.float32, 0, torch.int32)


def test_a_scale_that_is_set_counts(scaled):
    scaler, _, _ = scaled
    scaler._scale = torch.tensor(16.0)
    scaler._growth_tracker = torch.tensor(3, dtype=torch.int32)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (16.0, 3)
    scaler._scale.fill_(32.0)
    assert scaler.scale(torch.tensor(1.0)) == 32.0


def test_what_the_rule_says_may_be_set(scaled):
    scaler, optimizer, _ = scaled
    scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval = 3.0, 0.25, 1
    assert (
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    ) == (3.0, 0.25, 1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 12.0


def test_an_initial_scale_that_is_set_counts():
    scaler = torch.amp.GradScaler("cpu")
    scaler._init_scale = 2.0
    assert scaler.scale(torch.tensor(1.0)) == 2.0
