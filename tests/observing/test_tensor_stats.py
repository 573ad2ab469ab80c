"""Statistics of tensors, and the table of a sampled step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo._torch import TorchDispatchMode
from mezzo.observing.numerics import NumericsCollector
from mezzo.observing.tensor_stats import SAMPLE, compute_stats, places_of, sample


def stats_of(tensor):
    return compute_stats([("x", sample(tensor))]).read()["x"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_statistics_of_a_small_tensor_are_exact(dtype):
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    values = [0.0, 1.0, -3.0, tiny, tiny / 2, math.nan, math.inf, -math.inf]
    stats = stats_of(torch.tensor(values, dtype=dtype))
    assert (stats.count, stats.sampled, stats.nan, stats.inf, stats.zero) == (8, 8, 1, 2, 1)
    assert (stats.min, stats.max, stats.headroom) == (-3.0, 1.0, 0.0)
    # The bins do not reach the subnormal numbers of float64.
    assert stats.underflow == (0.0 if dtype is torch.float64 else 1 / 8)
    assert stats.rms == pytest.approx((10 / 5) ** 0.5)
    assert dict(stats.histogram)[0] == dict(stats.histogram)[1] == 1
    if dtype is not torch.float64:
        assert {int(math.log2(tiny)), int(math.log2(tiny)) - 1} < set(dict(stats.histogram))


def test_headroom_is_the_bits_before_the_largest_value_overflows():
    largest = torch.finfo(torch.float16).max
    assert stats_of(torch.tensor([largest]).half()).headroom == 0.0
    assert stats_of(torch.tensor([-largest / 8]).half()).headroom == pytest.approx(3.0)
    assert stats_of(torch.zeros(3).half()).headroom is None


def test_a_large_tensor_is_sampled_but_its_largest_value_is_seen():
    tensor = torch.ones(512, 512)
    tensor[3, 7] = 2.0**100
    stats = stats_of(tensor)
    assert stats.sampled <= SAMPLE < stats.count
    assert stats.headroom == pytest.approx(28.0, abs=0.01)
    tensor[3, 7] = math.nan
    assert stats_of(tensor).nan == 1
    tensor[3, 7] = -math.inf
    assert (stats_of(tensor).inf, stats_of(tensor).headroom) == (1, 0.0)


def test_every_column_of_a_square_matrix_is_sampled():
    columns = torch.arange(1024.0).expand(1024, 1024).contiguous()
    assert places_of(columns).unique().numel() == 1024


@pytest.mark.parametrize("like", [torch.zeros(2, 3, 4, 4), None])
def test_samples_are_taken_at_the_same_places_in_any_memory_format(like):
    tensor = torch.arange(96.0).view(2, 3, 4, 4).to(memory_format=torch.channels_last)
    expected = tensor.contiguous().flatten() if like is not None else tensor.permute(0, 2, 3, 1)
    assert torch.equal(places_of(tensor, like), expected.reshape(-1))
    strided = torch.arange(24.0).view(4, 6)[:, ::2]
    assert torch.equal(places_of(strided), strided.reshape(-1))


def test_many_tensors_and_empty_ones_are_computed_together():
    tensors = [(str(size), sample(torch.full((size,), 2.0))) for size in range(300)]
    stats = compute_stats(tensors).read()
    assert (stats["0"].count, stats["0"].rms) == (0, None)
    assert all(stats[str(size)].histogram == ((1, size),) for size in range(1, 300))


# -- sampled steps ---------------------------------------------------------------------------------


def sampled(model, optimizer, x, *, backward=True):
    collector = NumericsCollector([model])
    collector.start(1)
    loss = model(x).float().sum()
    if backward:
        loss.backward()
        optimizer.step()
    collector.stop()
    collector.take(0.0)
    return collector.latest


def test_updates_lost_to_rounding_are_counted():
    model = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    x = torch.tensor([[0.0, 1e-4, 1.0, 1.0]], dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stats = sampled(model, optimizer, x)["updates"]["weight"]
    # Of three values with a gradient one is too small to change a 1 in bfloat16.
    assert stats.lost == pytest.approx(1 / 3)
    assert stats.zero == 2


def test_updates_lost_in_the_16_bit_weight_are_separate_from_those_lost_in_its_master():
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = mezzo.decorate(model, optimizer, "O2", dtype="bfloat16")
    stats = sampled(model, optimizer, torch.ones(1, 4))["updates"]["weight"]
    assert (stats.lost, stats.lost_half) == (0.0, 1.0)


@pytest.mark.parametrize("master", ["float32", "split", "kahan", "none"])
def test_updates_are_those_of_the_master_weights(master):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 600), nn.LayerNorm(600), nn.Linear(600, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer = mezzo.decorate(model, optimizer, "O2", dtype="bfloat16", master=master)
    before = {name: one.clone() for name, one in mezzo.master_params(model).items()}
    stats = sampled(model, optimizer, torch.randn(8, 64))["updates"]
    assert list(stats) == list(before)
    for name, now in mezzo.master_params(model).items():
        change = places_of(now - before[name])
        assert (stats[name].min, stats[name].max) == (change.min(), change.max()), name


class Weights(nn.Module):
    """Many parameters, of two dtypes, in one module."""

    def __init__(self, count):
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16)
        self.all = nn.ParameterList(torch.ones(4, dtype=dtypes[i % 2]) for i in range(count))

    def forward(self, x):
        return torch.stack([(x * one.float()).sum() for one in self.all])


VIEWS = {"detach", "as_strided", "slice", "view", "unsqueeze", "split_with_sizes", "t", "alias"}


class Launches(TorchDispatchMode):
    """Counts ops that are not views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__.split(".")[0] not in VIEWS
        return func(*args, **(kwargs or {}))


def test_a_sample_takes_as_many_launches_for_any_number_of_parameters():
    launches = []
    for count in (6, 60):
        model = Weights(count)
        collector = NumericsCollector([model])
        loss = model(torch.ones(4)).sum()
        with Launches() as counter:
            collector.start(1)
        loss.backward()
        with counter:
            collector.stop()
        collector.take(0.0)
        assert set(collector.latest["gradients"]) == set(dict(model.named_parameters()))
        launches.append(counter.count)
    assert launches[0] == launches[1] < 150


def test_gradients_are_sampled_scaled_as_the_loss_was():
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = mezzo.GradScaler("cpu", init_scale=1024.0)
    with mezzo.observe(model, optimizer, scaler) as run:
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert run.numerics["gradients"]["weight"].max == 1024.0
    assert run.numerics["updates"]["weight"].max == pytest.approx(-0.1)


def test_a_backward_pass_that_raised_leaves_nothing_for_the_next_sample():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def fail(_):
        raise RuntimeError("planted")

    with mezzo.observe(model, every=1) as run:
        hook = model[0].weight.register_post_accumulate_grad_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            model(torch.ones(1, 4)).sum().backward()
        hook.remove()
        model(torch.ones(1, 4)).sum().backward()
    assert set(run.numerics["gradients"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_call_that_does_not_update_has_no_updates():
    model = nn.Linear(4, 1)
    found = sampled(model, None, torch.ones(1, 4), backward=False)
    assert set(found) == {"parameters", "activations"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.activation = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        return {"out": self.activation(self.linear(self.activation(x + 1))), "count": 3}


def test_outputs_of_modules_are_sampled_once_and_calls_are_numbered():
    collector = NumericsCollector([Block()])
    collector.start(1)
    collector._models[0](torch.ones(2, 4))
    collector.stop()
    collector.take(0.0)
    # The block returns what its last activation returned.
    assert list(collector.latest["activations"]) == ["activation", "linear", "activation (call 2)"]


def test_the_policy_of_the_region_does_not_change_the_statistics():
    model = nn.Identity()
    with mezzo.observe(model) as run, mezzo.autocast("cpu", dtype="float16", half={"neg"}):
        model(torch.tensor([-1e6]))
    assert run.numerics["activations"]["Identity"].headroom == pytest.approx(108.07, abs=0.01)


def test_the_table_lists_the_tensors_with_the_least_headroom_first():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.fill_(1e30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mezzo.observe(model, optimizer) as run:
        F.mse_loss(model(torch.ones(2, 4)), torch.ones(2, 4)).backward()
        optimizer.step()
    header, first, *_ = repr(run.numerics).splitlines()
    assert header.split()[:4] == ["parameters", "dtype", "values", "rms"]
    assert first.startswith("1.weight")


def test_without_a_sample_the_table_is_a_sentence():
    with mezzo.observe(nn.Linear(1, 1)) as run:
        assert repr(run.numerics) == "No step was sampled yet."
