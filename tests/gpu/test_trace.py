"""`trace_overflow`, `shadow` and `compare_runs` on a GPU: captured and compiled code."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Energy(nn.Module):
    def forward(self, h):
        return (h * h).mean(-1, keepdim=True).sqrt()


LINE = f"test_trace.py:{Energy.forward.__code__.co_firstlineno + 1}"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), Energy(), nn.Linear(1, 4)).cuda()


def batch(factor=1.0):
    torch.manual_seed(1)
    return (torch.randn(8, 16) * factor).cuda(), torch.randn(8, 4).cuda()


def captured_step(level="O2"):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    return mezzo.TrainStep(model, F.mse_loss, optimizer, level, dtype="float16", capture=True)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_captured_step_is_traced_and_left_as_it_was(level):
    good, bad = batch(), batch(1000.0)
    step, twin = captured_step(level), captured_step(level)
    for one in (step, twin):
        torch.cuda.manual_seed(0)
        for _ in range(8):
            one(*good)
        one(*bad)
    assert step.captured
    state = torch.cuda.get_rng_state()
    bits = [one.detach().clone() for one in step.models[0].parameters()]
    found = mezzo.trace_overflow(step, bad)
    assert (found.op, found.module, found.line) == ("mul", "2", LINE)
    assert (found.direction, found.step, found.verified) == ("forward", 9, True)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(map(torch.equal, step.models[0].parameters(), bits))
    replays = step.replays
    torch.cuda.manual_seed(1)
    loss = step(*good)
    torch.cuda.manual_seed(1)
    assert torch.equal(loss, twin(*good))
    assert step.replays == replays + 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_model_compiled_by_inductor_is_run_eagerly():
    model = torch.compile(network())
    with mezzo.autocast("cuda", dtype="float16"):
        model(batch()[0])
    found = mezzo.trace_overflow(model, batch(1000.0), F.mse_loss, dtype="float16")
    assert (found.op, found.module, found.line) == ("mul", "2", LINE)


def test_a_gradient_is_named_by_the_line_of_its_forward_op():
    def loss(outputs, y):
        return (outputs.float() - y).sub(outputs.float().detach() - y).abs().sqrt().sum()

    found = mezzo.trace_overflow(network(), batch(), loss, dtype="float16")
    assert (found.direction, found.op, found.precision) == ("backward", "sqrt", False)
    assert found.line.startswith("test_trace.py:")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_transformer_has_the_errors_of_its_dtype(level):
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).cuda()
    x = torch.randn(4, 32, 64).cuda()
    errors = mezzo.shadow(layer, (x, x), F.mse_loss, level, dtype="bfloat16")
    assert 1e-4 < max(errors.modules().values()) < 0.05
    assert not mezzo.trace_overflow(layer, (x, x), F.mse_loss, level, dtype="bfloat16")


def test_two_policies_differ_by_rounding_only_and_a_changed_op_is_named(tmp_path):
    def record(name, model, *policy, **fields):
        path = tmp_path / name
        mezzo.record_values(path, model, batch(), F.mse_loss, *policy, **fields)
        return path

    def model(eps=1e-5):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32, eps=eps), nn.Linear(32, 4)).cuda()

    one = record("a", model(), "O0")
    assert not mezzo.compare_runs(one, record("b", model(), "O2", dtype="float16"))
    found = mezzo.compare_runs(one, record("c", model(eps=0.1), "O0"))
    assert (found.op, found.module) == ("layer_norm", "1")
