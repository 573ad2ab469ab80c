"""State of `torch.amp.GradScaler`: private names, state dicts, copies, error types."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from mezzo._errors import PolicyError, ScalerError
from mezzo.compat.torch._grad_scaler import TorchScalerError, TorchValueError, as_torch_error

# -- private names of torch's scaler ---------------------------------------------------------------


@pytest.fixture
def scaled():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    return scaler, optimizer, weight


def test_stages_equal_those_of_torch(scaled):
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


def test_a_stage_can_be_set(scaled):
    scaler, optimizer, weight = scaled
    scaler.unscale_(optimizer)
    weight.grad.mul_(4.0)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [1.0, 1.0]


def test_found_inf_flags_can_be_set(scaled):
    scaler, optimizer, weight = scaled
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {
        torch.device("cpu"): torch.ones(())
    }
    scaler.step(optimizer)
    assert weight.tolist() == [1.0, 1.0]
    scaler.update()
    assert scaler.get_scale() == 2.0


def test_states_can_be_cleared_and_replaced(scaled):
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
    flags = scaler._check_inf_per_device(optimizer)
    assert [flag.item() for flag in flags.values()] == [0.0]
    weight.grad[0] = float("inf")
    assert sum(flag.item() for flag in scaler._check_inf_per_device(optimizer).values()) == 1
    assert scaler._found_inf_per_device(optimizer).keys() == flags.keys()
    assert weight.grad[1] == before[1]


# torch 2.11 warns although the checks are enabled.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_gradients_are_unscaled_and_checked():
    scaler = torch.amp.GradScaler("cpu")
    inverse, cpu = torch.full((1,), 0.25), torch.device("cpu")
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]])

    def sparse(values, dtype=torch.float32, indices=indices):
        return torch.sparse_coo_tensor(
            indices, torch.tensor(values, dtype=dtype), (2, 3), check_invariants=True
        )

    def unscale(weight, gradient, *, fp16):
        weight.grad = gradient
        return scaler._unscale_grads_(
            torch.optim.SGD([weight], lr=1.0), inverse, torch.zeros(1), fp16
        )[cpu]

    weight = sparse([16.0, 32.0, 64.0]).clone()
    assert unscale(weight, sparse([16.0, 32.0, 64.0]), fp16=False) == 0.0
    assert torch.equal(weight.grad.to_dense(), sparse([4.0, 8.0, 16.0]).to_dense())
    for value in ("inf", "nan"):
        assert unscale(weight, sparse([16.0, 32.0, float(value)]), fp16=False) == 1.0
    half = sparse([16.0, 32.0, 64.0], torch.float16)
    assert unscale(half, half.clone(), fp16=True) == 0.0
    assert torch.equal(half.grad.to_dense(), sparse([4.0, 8.0, 16.0], torch.float16).to_dense())
    # Each value fits into float16, the sum of the two at the same index does not.
    duplicates = torch.tensor([[0, 1, 0], [2, 0, 2]])
    assert (
        unscale(half, sparse([64000.0, 32.0, 64000.0], torch.float16, duplicates), fp16=True) == 1.0
    )


def test_scale_and_growth_tracker_are_created_lazily():
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


def test_scale_and_growth_tracker_can_be_set(scaled):
    scaler, _, _ = scaled
    scaler._scale = torch.tensor(16.0)
    scaler._growth_tracker = torch.tensor(3, dtype=torch.int32)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (16.0, 3)
    scaler._scale.fill_(32.0)
    assert scaler.scale(torch.tensor(1.0)) == 32.0


def test_factors_and_interval_can_be_set(scaled):
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


def test_the_initial_scale_can_be_set():
    scaler = torch.amp.GradScaler("cpu")
    scaler._init_scale = 2.0
    assert scaler.scale(torch.tensor(1.0)) == 2.0


# -- saving and copying ----------------------------------------------------------------------------


@pytest.mark.parametrize("initialized", [True, False])
def test_load_state_dict_restores_scale_and_rule(initialized):
    source = torch.amp.GradScaler(
        "cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2
    )
    other = torch.amp.GradScaler(
        "cpu", init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1
    )
    other._init_growth_tracker = 7
    if initialized:
        other.scale(torch.full((1,), 4.0))
        assert isinstance(other._scale, torch.FloatTensor)
    other.load_state_dict(source.state_dict())
    assert (
        other.get_scale(),
        other.get_growth_factor(),
        other.get_backoff_factor(),
        other.get_growth_interval(),
    ) == (3.0, 4.0, 0.5, 2)
    assert other._init_growth_tracker == 0


def test_a_state_can_be_exchanged_with_torchs_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=5)
    torch_scaler = torch.amp.grad_scaler.GradScaler("cpu")
    torch_scaler.load_state_dict(scaler.state_dict())
    assert torch_scaler.state_dict() == scaler.state_dict()
    restored = torch.amp.GradScaler("cpu")
    restored.load_state_dict(torch_scaler.state_dict())
    assert restored.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("initialized", [True, False])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_has_the_same_state(initialized, copied):
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2
    )
    scaler.note = "mine"
    if initialized:
        scaler.scale(torch.tensor([4.0]))
    restored = copied(scaler)
    assert type(restored) is torch.amp.GradScaler
    assert restored.is_enabled()
    assert (
        restored.get_scale(),
        restored.get_growth_factor(),
        restored.get_backoff_factor(),
        restored.get_growth_interval(),
    ) == (3.0, 4.0, 0.5, 2)
    assert (restored._init_growth_tracker, restored.note) == (0, "mine")
    assert (
        restored._per_optimizer_states["fdsa"]
        == torch.amp.grad_scaler._refresh_per_optimizer_state()
    )


def test_a_disabled_scaler_is_pickled():
    restored = pickle.loads(pickle.dumps(torch.amp.GradScaler("cpu", enabled=False)))
    assert (restored.is_enabled(), restored.get_scale(), restored.state_dict()) == (False, 1.0, {})


# -- error types -----------------------------------------------------------------------------------


def test_errors_are_of_torchs_and_of_mezzos_type():
    assert issubclass(TorchScalerError, ScalerError)
    assert issubclass(TorchScalerError, AssertionError)
    assert issubclass(TorchValueError, PolicyError)
    assert issubclass(TorchValueError, AssertionError)


def test_torchs_message_comes_before_mezzos():
    with (
        pytest.raises(AssertionError, match=r"^torch failed\. Do this\.$"),
        as_torch_error("torch failed."),
    ):
        raise ScalerError("Do this.")


def test_other_errors_are_not_changed():
    with pytest.raises(KeyError), as_torch_error("torch failed."):
        raise KeyError
