"""Tensors that a forward pass assigns to its modules, and what a captured graph does with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.step.assigned_tensors import keep_assigned, module_state, prepare_replay


class Stateful(nn.Module):
    """Has a buffer, a tuple of tensors and a tensor of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.state = (torch.zeros(2), torch.zeros(1))
        self.last = torch.zeros(2)
        self.count = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + x.mean(0)
        self.state = (self.state[0] + 1.0, self.state[1] - 1.0)
        self.last = self.layer(x)
        return self.last


def kept(model: nn.Module):
    """Run a pass as a capture does; return the tensors before it and those that are kept."""
    before = module_state([model])
    model(torch.ones(3, 2))
    return before, keep_assigned(before)


def test_buffers_attributes_and_tuples_are_state_and_parameters_are_not():
    names = [tensors.name for tensors in module_state([nn.Sequential(Stateful())])]
    assert names == ["mean", "state", "last"]


def test_the_tensors_before_a_pass_get_what_it_has_assigned():
    model = Stateful()
    mean, state, last = model.mean, model.state, model.last
    _, assigned = kept(model)
    # Backward passes through the last, of another shape: it belongs to its call.
    assert [tensors.name for tensors in assigned] == ["mean", "state"]
    assert model.mean is mean
    assert model.state is state
    assert model.last is not last
    assert mean.tolist() == [1.0, 1.0]
    assert [value.tolist() for value in state] == [[1.0, 1.0], [-1.0]]


def test_what_eager_calls_assign_is_copied_before_a_replay():
    model = Stateful()
    mean, state = model.mean, model.state
    _, assigned = kept(model)
    model(torch.ones(3, 2))
    assert model.mean is not mean
    assert prepare_replay(assigned)
    assert model.mean is mean
    assert mean.tolist() == [1.5, 1.5]
    assert [value.tolist() for value in state] == [[2.0, 2.0], [-2.0]]


def test_state_that_was_reset_cannot_be_replayed():
    model = Stateful()
    _, assigned = kept(model)
    model.state = None
    assert not prepare_replay(assigned)
    assert model.state is None


@pytest.mark.parametrize(
    "other", [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2, requires_grad=True)]
)
def test_tensors_of_other_kinds_of_inputs_are_left_to_them(other):
    model = Stateful()
    mean = model.mean
    before, assigned = kept(model)
    model.mean = other
    assert not keep_assigned(before[:1])
    assert model.mean is other
    assert prepare_replay(assigned)
    assert model.mean is mean
    assert mean.tolist() == [1.0, 1.0]


def test_a_view_of_the_tensor_before_is_copied_whole():
    model = Stateful()
    model.mean = mean = torch.arange(4.0)
    before = module_state([model])
    model.mean = mean.flip(0)[:4]
    model.mean = mean.roll(1)
    assert keep_assigned(before)
    assert mean.tolist() == [3.0, 0.0, 1.0, 2.0]
    model.mean = mean.as_strided((4,), (0,), 1)
    assert keep_assigned(before)
    assert mean.tolist() == [0.0] * 4


def test_a_failed_capture_leaves_the_tensors_before_it():
    model = Stateful()
    values = model.mean, model.state, model.last
    before = module_state([model])
    model(torch.ones(3, 2))
    for tensors in before:
        tensors.restore()
    assert (model.mean, model.state, model.last) == values
    assert model.mean.tolist() == [0.0, 0.0]


def test_elements_of_a_list_are_state_too():
    model = Stateful()
    model.state = states = [torch.zeros(1), torch.ones(1)]
    first, second = states
    before = module_state([model])
    states[1] = second + 1.0
    assigned = keep_assigned(before)
    assert model.state is states
    assert states[0] is first
    assert states[1] is second
    assert second.item() == 2.0
    states[0] = torch.full((1,), 5.0)
    assert prepare_replay(assigned)
    assert states[0] is first
    assert first.item() == 5.0
    states.append(torch.zeros(1))
    assert prepare_replay(assigned)
    assert len(states) == 2


@pytest.mark.parametrize("names", [("last", "mean"), ("mean", "last")])
def test_tensors_that_a_pass_exchanges_are_read_before_they_are_written(names):
    model = Stateful()
    for number, name in enumerate(names):
        setattr(model, name, torch.full((2,), float(number)))
    model.state = [torch.full((1,), float(number)) for number in range(3)]
    before = module_state([model])
    model.last, model.mean = model.mean, model.last
    model.state[1:], model.state[0] = model.state[:2], torch.full((1,), 9.0)
    expected = [model.mean.tolist(), model.last.tolist(), [one.item() for one in model.state]]
    assert len(keep_assigned(before)) == 3
    assert [
        model.mean.tolist(),
        model.last.tolist(),
        [one.item() for one in model.state],
    ] == expected
    assert all(tensors.are_current for tensors in before)


def test_inference_tensors_are_written():
    model = Stateful()
    with torch.inference_mode():
        model(torch.ones(3, 2))
    mean = model.mean
    before = module_state([model])
    with torch.inference_mode():
        model(torch.ones(3, 2))
    assert keep_assigned(before)
    assert model.mean is mean
    assert mean.tolist() == [1.5, 1.5]
