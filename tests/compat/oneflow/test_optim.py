"""`oneflow.optim` and `oneflow.env`: what torch has under other names or not at all."""

import pytest
import torch

import mezzo.compat.oneflow as flow

LR = flow.optim.lr_scheduler


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


def rates(scheduler, steps=8):
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def test_the_cosine_decay_stays_at_its_end(optimizer):
    assert rates(LR.CosineDecayLR(optimizer, 2, alpha=0.5), 4) == pytest.approx([1, 0.75, 0.5, 0.5])
    with pytest.raises(AssertionError, match="decay_steps must greater than zero, but got 0"):
        LR.CosineDecayLR(optimizer, 0)


def test_a_warm_up_ends_at_the_rate_of_the_scheduler_inside(optimizer):
    # The numbers of OneFlow's documentation, times 1000.
    inner = LR.CosineDecayLR(optimizer, decay_steps=5, alpha=0.1)
    found = rates(LR.WarmUpLR(inner, warmup_factor=0.5, warmup_iters=2), 4)
    assert found == pytest.approx([0.5, 0.5945, 0.689, 0.410], abs=1e-3)


@pytest.mark.parametrize(
    ("method", "expected"),
    [("linear", [0.5, 0.75, 1.0, 0.1, 0.1]), ("constant", [0.5, 0.5, 1.0, 0.1, 0.1])],
)
def test_a_warm_up_with_a_prefix_starts_the_scheduler_after_it(method, expected, optimizer):
    inner = LR.MultiStepLR(optimizer, [1])
    scheduler = LR.WarmupLR(inner, 0.5, 2, method, warmup_prefix=True)
    assert rates(scheduler, 5) == pytest.approx(expected)


def test_a_warm_up_of_an_optimizer_continues_from_its_state(optimizer):
    scheduler = LR.WarmUpLR(optimizer, 0.5, 4)
    assert rates(scheduler, 3) == pytest.approx([0.5, 0.625, 0.75])
    state = scheduler.state_dict()
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    loaded = LR.WarmUpLR(LR.LambdaLR(other, lambda step: 1.0), 0.5, 4)
    loaded.load_state_dict(state)
    assert rates(loaded, 3) == pytest.approx([0.875, 1.0, 1.0])
    with pytest.raises(ValueError, match="must be a LRScheduler or an Optimizer, but got"):
        LR.WarmUpLR(None)
    with pytest.raises(TypeError, match="WarmUpLR cannot wrap CyclicLR, whose rates depend"):
        LR.WarmUpLR(LR.CyclicLR(optimizer, 0.1, 1.0, cycle_momentum=False))
    with pytest.raises(ValueError, match="'warmup_method' must be 'linear' or 'constant'"):
        LR.WarmUpLR(optimizer, warmup_method="cosine")


def test_a_graph_follows_a_warm_up():
    model = flow.nn.Linear(2, 1)
    optimizer = flow.optim.AdamW(
        [{"params": model.parameters(), "weight_decay": 0.01}], lr=1.0, do_bias_correction=True
    )
    scheduler = LR.WarmUpLR(LR.CosineDecayLR(optimizer, 10), warmup_iters=4)

    class Graph(flow.nn.Graph):
        def __init__(self):
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer, lr_sch=scheduler)
            self.config.enable_amp(True)
            self.set_grad_scaler(flow.amp.GradScaler())

        def build(self, x):
            loss = self.model(x).sum()
            loss.backward()
            return loss

    graph = Graph()
    for _ in range(2):
        graph(flow.ones(1, 2))
    assert scheduler.last_epoch == 2
    assert scheduler.get_last_lr()[0] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "LAMB"])
def test_optimizers_take_oneflows_arguments(name):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = getattr(flow.optim, name)([weight], lr=0.5, do_bias_correction=True)
    assert optimizer.param_groups[0]["weight_decay"] == 0
    weight.sum().backward()
    optimizer.step()
    assert weight.item() == pytest.approx(0.5)
    with pytest.raises(ValueError, match="do_bias_correction=False is not supported"):
        getattr(flow.optim, name)([weight], do_bias_correction=False)


def test_a_single_process_is_rank_0_of_1():
    assert (flow.env.get_rank(), flow.env.get_local_rank(), flow.env.get_world_size()) == (0, 0, 1)
