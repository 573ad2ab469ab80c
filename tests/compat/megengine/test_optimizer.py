"""`megengine.optimizer` against torch's optimizers."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat.megengine import distributed, optimizer

PAIRS = {
    "SGD": (
        lambda p: optimizer.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    ),
    "Adam": (lambda p: optimizer.Adam(p, lr=0.1), lambda p: torch.optim.Adam(p, 0.1)),
    "AdamW": (lambda p: optimizer.AdamW(p, lr=0.1), lambda p: torch.optim.AdamW(p, 0.1)),
    "Adagrad": (lambda p: optimizer.Adagrad(p), lambda p: torch.optim.Adagrad(p)),
    "Adadelta": (lambda p: optimizer.Adadelta(p), lambda p: torch.optim.Adadelta(p)),
    "LAMB": (
        lambda p: optimizer.LAMB(p, lr=0.1),
        lambda p: mezzo.LAMB(p, 0.1, eps=1e-8, weight_decay=0.0),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_steps_chain_and_equal_those_of_the_plain_optimizer(name):
    weights = [nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2)]
    chained, plain = (make([weight]) for make, weight in zip(PAIRS[name], weights, strict=True))
    for factor in (0.5, 2.0):
        for weight in weights:
            weight.grad = weight.detach() * factor
        assert chained.step().clear_grad() is chained
        plain.step()
    assert torch.equal(*weights)
    assert weights[0].grad is None


def test_step_hooks_run_once_after_another_optimizer_was_created():
    weight, calls = nn.Parameter(torch.ones(1)), []
    torch.optim.SGD([weight], lr=0.1)
    chained = optimizer.SGD([weight], lr=0.1)
    chained.register_step_post_hook(lambda *_: calls.append("step"))
    chained.step()
    assert calls == ["step"]


def test_parameters_without_gradients_are_not_updated():
    weight = nn.Parameter(torch.ones(1))
    optimizer.Adam([weight], lr=0.1).step().clear_grad()
    assert weight.item() == 1.0


def test_groups_keep_their_learning_rates():
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    chained = optimizer.SGD([{"params": [first], "lr": 1.0}, {"params": [second]}], lr=0.5)
    first.grad = second.grad = torch.ones(1)
    chained.step()
    assert (first.item(), second.item()) == (0.0, 0.5)


def test_an_empty_parameter_list_raises_as_in_megengine():
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        optimizer.SGD([], lr=0.1)


def test_gradients_are_clipped_by_norm_and_by_value():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, -4.0])
    assert optimizer.clip_grad_norm([weight], max_norm=1.0).item() == 5.0
    assert torch.allclose(weight.grad, torch.tensor([0.6, -0.8]))
    optimizer.clip_grad_value([weight, nn.Parameter(torch.zeros(1))], lower=-0.5, upper=1.0)
    assert torch.allclose(weight.grad, torch.tensor([0.6, -0.5]))


def test_a_multi_step_schedule_multiplies_at_each_milestone():
    weight = torch.nn.Parameter(torch.ones(1))
    sgd = optimizer.SGD([{"params": [weight], "lr": 0.5}], lr=1.0)
    scheduler = optimizer.MultiStepLR(sgd, [1, 3], gamma=0.1)
    found = []
    for _ in range(4):
        found.append(sgd.param_groups[0]["lr"])
        scheduler.step()
    assert found == pytest.approx([0.5, 0.05, 0.05, 0.005])
    loaded = optimizer.MultiStepLR(sgd, [7])
    loaded.load_state_dict(scheduler.state_dict())
    assert (loaded.milestones, loaded.gamma, loaded.current_epoch) == ([1, 3], 0.1, 4)
    scheduler.step(0)
    assert scheduler.get_lr() == [0.5]


def test_a_schedule_of_ones_own_defines_get_lr():
    weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(NotImplementedError, match="Define get_lr"):
        optimizer.LRScheduler(optimizer.SGD([weight], lr=1.0))
    with pytest.raises(TypeError, match="should be Optimizer"):
        optimizer.MultiStepLR([weight], [1])
    with pytest.raises(ValueError, match="list of increasing integers"):
        optimizer.MultiStepLR(optimizer.SGD([weight], lr=1.0), [2, 1])
    with pytest.raises(KeyError, match="'initial_lr' is not specified in param_groups"):
        optimizer.MultiStepLR(optimizer.SGD([weight], lr=1.0), [1], current_epoch=3)


def test_a_single_process_is_rank_0_of_1():
    assert (distributed.get_rank(), distributed.get_world_size()) == (0, 1)
    assert not distributed.is_distributed()
