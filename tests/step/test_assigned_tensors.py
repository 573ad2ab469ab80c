"""Tensors that a forward pass assigns to its modules, and what a captured graph does with them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.recorded_graphs import capture_passes, record_graphs
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo.step.assigned_tensors import Assignments, keep_assigned, module_state, prepare_replay


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


def test_parameters_buffers_attributes_and_tuples_are_state():
    names = [tensors.name for tensors in module_state([nn.Sequential(Stateful())])]
    assert names == ["mean", "state", "last", "weight", "bias"]


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
    "other",
    [
        torch.ones(3),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, requires_grad=True),
        torch.ones(2).to_sparse(),
    ],
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


# -- tensors that a graph owns ---------------------------------------------------------------------


def test_places_that_a_pass_assigns_get_copies_for_the_graph():
    model, assignments = Stateful(), Assignments()
    with assignments.noting([model]):
        model(torch.ones(3, 2))
    values = model.mean, *model.state
    owned = assignments.own(module_state([model]), [model])
    # Backward passes through the other one.
    assert [kept.name for kept in owned] == ["mean", "state"]
    for own, value in zip((model.mean, *model.state), values, strict=True):
        assert own is not value
        assert torch.equal(own, value)


def test_a_tensor_in_several_places_is_copied_once():
    model, assignments, shared = nn.Linear(2, 2), Assignments(), torch.ones(2)
    model.pair, model.unassigned = [shared, torch.zeros(1)], shared
    elements = model.pair
    with assignments.noting([model]):
        model.last, model.pair[1] = shared, torch.ones(1)
    assert len(assignments.own(module_state([model]), [model])) == 2
    assert model.last is model.pair[0] is not shared
    assert model.pair is elements
    assert model.unassigned is shared


def test_the_memory_of_a_parameter_is_not_copied():
    model, assignments = nn.Linear(2, 2), Assignments()
    model.table = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
    with assignments.noting([model]):
        model.last = model.weight.detach()
    last = model.last
    assert not assignments.own(module_state([model]), [model])
    assert model.last is last


# -- graphs that record the ops of a pass ----------------------------------------------------------


@pytest.fixture
def _recorded_graphs(monkeypatch):
    record_graphs(monkeypatch)


class Differences(nn.Module):
    """Reads the batch before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.state = torch.zeros(5, 4)

    def forward(self, x):
        before, self.state = self.state, x
        return self.layer(x - before)


class Recurrent(Differences):
    """Goes on from the state that it has."""

    def forward(self, x):
        self.state = torch.tanh(self.state + x)
        return self.layer(self.state)


class Rows(Differences):
    """Keeps another row of a table than it had, and an alias of its weight."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(3, 4))
        self.state = self.table[0]
        self.weight = self.layer.weight.detach()

    def forward(self, x):
        before, self.state = self.state, self.table[1]
        y = self.layer(x + before + self.weight.diagonal())
        self.weight = self.layer.weight.detach()
        return y


class Expanded(Differences):
    """Keeps a tensor whose elements are one in memory."""

    def forward(self, x):
        before, self.state = self.state, x.mean().expand(5, 4)
        return self.layer(x + before)


def train(model, batches, *, capture, reset_every=100):
    """Train on batches; the state is set to the same tensor every few calls."""
    step = mezzo.TrainStep(
        model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), "O1", capture=False
    )
    if capture:
        capture_passes(step)
    initial, losses = torch.zeros(5, 4), []
    for number, x in enumerate(batches):
        if number % reset_every == 0 and type(model) is not Rows:
            model.state = initial
        losses.append(step(x, torch.ones(5, 4)))
    assert step.captured is capture
    assert not initial.any()
    return torch.stack(losses)


@pytest.mark.parametrize("reset_every", [1, 3, 100])
@pytest.mark.parametrize("model_class", [Differences, Recurrent, Rows, Expanded])
@pytest.mark.usefixtures("_recorded_graphs")
def test_replays_equal_eager_calls_and_write_to_no_tensor_of_others(model_class, reset_every):
    models = captured, eager = model_class(), model_class()
    batches = torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(0))
    before = batches.clone()
    losses = [
        train(model, batches, capture=model is captured, reset_every=reset_every)
        for model in models
    ]
    assert torch.equal(*losses)
    assert torch.equal(batches, before)
    assert torch.equal(captured.state, eager.state)
    for name, value in eager.state_dict().items():
        assert torch.equal(captured.state_dict()[name], value), name


class Resettable(Differences):
    """Starts anew if it has no state."""

    def forward(self, x):
        state = torch.zeros_like(x) if getattr(self, "state", None) is None else self.state
        self.state = torch.tanh(state + x)
        return self.layer(self.state)


@pytest.mark.parametrize("is_removed", [False, True])
@pytest.mark.parametrize("reset_every", [1, 2, 3, 4, 7])
@pytest.mark.usefixtures("_recorded_graphs")
def test_a_state_that_is_reset_starts_anew(reset_every, is_removed):
    captured, eager = Resettable(), Resettable()
    batches = torch.randn(30, 5, 4, generator=torch.Generator().manual_seed(0))
    losses = []
    for model in (captured, eager):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mezzo.TrainStep(model, F.mse_loss, optimizer, "O1", capture=False)
        if model is captured:
            capture_passes(step)
        for number, x in enumerate(batches):
            if number % reset_every == 0:
                model.state = None
                if is_removed:
                    del model.state
            losses.append(step(x, torch.ones(5, 4)))
        assert (step.replays > 15) is (model is captured)
    assert torch.equal(torch.stack(losses[:30]), torch.stack(losses[30:]))
    assert torch.equal(captured.state, eager.state)


class ReplacesWeight(Differences):
    """Replaces a parameter, as codebooks do that follow a running average."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        y = self.layer(x)
        self.mean = nn.Parameter(0.9 * self.mean.detach() + 0.1 * y.detach().mean(0))
        return y + self.mean.detach()


@pytest.mark.usefixtures("_recorded_graphs")
def test_a_model_that_replaces_a_parameter_is_not_captured():
    batches = torch.randn(9, 5, 4, generator=torch.Generator().manual_seed(0))
    losses = []
    for capture in (True, False):
        model = ReplacesWeight()
        optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
        step = mezzo.TrainStep(model, F.mse_loss, optimizer, "O1", capture=False)
        if capture:
            capture_passes(step)
        warns = pytest.warns(UserWarning, match="replaces the parameter 'mean'")
        with warns if capture else nullcontext():
            losses.append(torch.stack([step(x, torch.ones(5, 4)) for x in batches]))
        assert model.mean.isfinite().all()
    assert torch.equal(*losses)


@pytest.mark.usefixtures("_recorded_graphs")
def test_replays_of_inference_go_on_from_the_state_before():
    batches = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(0))
    outputs = []
    for capture in (True, False):
        evaluate = mezzo.EvalStep(Recurrent(), capture=False)
        if capture:
            capture_passes(evaluate)
        outputs.append([evaluate(x) for x in batches])
        assert evaluate.captured is capture
    for captured, eager in zip(*outputs, strict=True):
        assert torch.equal(captured, eager)


class RunningMean(Differences):
    """Assigns a running mean in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.layer(x - self.mean)


@pytest.mark.usefixtures("_recorded_graphs")
def test_inference_reads_the_buffers_that_training_assigns():
    model, x = RunningMean(), torch.ones(5, 4)
    # It has no address.
    model.register_buffer("adjacency", torch.eye(4).to_sparse())
    evaluate, reference = (mezzo.EvalStep(model, capture=False) for _ in range(2))
    capture_passes(evaluate)
    for _ in range(3):
        for _ in range(4):
            assert torch.equal(evaluate(x), reference(x))
        assert evaluate.captured
        with torch.no_grad():
            model(x)


@pytest.mark.usefixtures("_recorded_graphs")
def test_calls_that_do_not_assign_read_what_others_assign():
    losses = []
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(4 + number % 2, 4, generator=generator) for number in range(30)]
    for capture in (True, False):
        model = RunningMean()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mezzo.TrainStep(model, F.mse_loss, optimizer, "O1", capture=False)
        if capture:
            capture_passes(step)
        for number, x in enumerate(batches):
            model.train(number > 6 and number % 5 != 0)
            losses.append(step(x, torch.ones_like(x)))
        assert (step.replays > 8) is capture
    assert torch.equal(torch.stack(losses[:30]), torch.stack(losses[30:]))
