"""`mezzo.advise` on a GPU: advice on three models, checked against a separate timing."""

from __future__ import annotations

from statistics import median

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo

pytestmark = pytest.mark.gpu


def wide():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).cuda(), (2048, 4096)


def convolutional():
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((8, 64), (64, 256), (256, 256)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).cuda(), (64, 8, 56, 56)


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).cuda(), (16, 32)


MODELS = {"wide": wide, "convolutional": convolutional, "tiny": tiny}


def milliseconds(model, batch, level, *, captured, **dtype):
    """Time a training step by events of CUDA, without the code of `advise`."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)
    step = mezzo.TrainStep(model, F.mse_loss, optimizer, level, capture=captured, **dtype)
    for _ in range(10):
        step(*batch)
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        step(*batch)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


@pytest.mark.parametrize("name", MODELS)
def test_the_gain_of_the_advised_setting_is_that_of_a_separate_timing(name):
    model, shape = MODELS[name]()
    x = torch.randn(shape).cuda()
    with torch.no_grad():
        batch = x, torch.zeros_like(model(x))
    advice = mezzo.advise(model, batch, F.mse_loss)
    print(f"\n{advice}")  # noqa: T201 - shown with -s, for the documentation
    chosen = advice.chosen.setting
    assert chosen.captured, "a captured step is never slower by a margin"
    dtype = {} if chosen.level == "O0" else {"dtype": chosen.precision.value}
    if chosen.precision.value == "TF32":
        torch.set_float32_matmul_precision("high")
    try:
        fast = milliseconds(MODELS[name]()[0], batch, chosen.level, captured=True, **dtype)
    finally:
        torch.set_float32_matmul_precision("highest")
    slow = milliseconds(MODELS[name]()[0], batch, "O0", captured=False)
    assert advice.chosen.gain == pytest.approx(slow / fast, rel=0.25)
    best = max(one.gain for one in advice.times if one.gain)
    assert advice.chosen.gain >= 0.9 * best
    if name == "wide":
        assert not advice.switch_off
        assert advice.chosen.gain > 2.0


def test_peak_memory_and_ops_are_measured():
    model, shape = wide()
    x = torch.randn(shape).cuda()
    advice = mezzo.advise(model, (x, torch.zeros_like(x)), F.mse_loss, levels="O2", rounds=3)
    times = {str(one.setting): one for one in advice.times}
    parameters = sum(one.numel() for one in model.parameters())
    assert times["float32"].memory > 16 * parameters
    assert {"mm", "addmm"} & {one.op for one in advice.ops[:3]}
    products = next(one for one in advice.ops if one.op in {"mm", "addmm"})
    assert products.before > 1.5 * products.after


def test_inference_is_timed_eagerly_and_captured():
    model, shape = wide()
    advice = mezzo.advise(model, torch.randn(shape).cuda(), rounds=3)
    assert advice.chosen.setting.level == "O2"
    assert "EvalStep" in advice.line
    assert all(one.seconds for one in advice.times), str(advice)


def test_a_setting_that_does_not_fit_is_reported():
    model, shape = wide()
    x = torch.randn(shape).cuda()
    free, total = torch.cuda.mem_get_info()
    # Room for the copies of one setting in 16 bits, but not for float32 beside it.
    torch.cuda.set_per_process_memory_fraction(min(1.0, (total - free + 6e8) / total))
    try:
        advice = mezzo.advise(model, (x, torch.zeros_like(x)), F.mse_loss, rounds=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any(one.problem == "out of memory" for one in advice.times), str(advice)


def test_the_generator_of_the_device_is_restored():
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)).cuda()
    x = torch.randn(16, 32).cuda()
    before = torch.cuda.get_rng_state()
    mezzo.advise(model, (x, x), F.mse_loss, levels="O1", rounds=1)
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_the_computed_gain_is_of_the_order_of_the_measured_one():
    name = torch.cuda.get_device_name()
    try:
        mezzo.advise(nn.Linear(8, 8), torch.ones(8, 8), gpu=name)
    except mezzo.PolicyError:
        pytest.skip(f"no data sheet of {name}")
    model, shape = wide()
    x = torch.randn(shape).cuda()
    measured = mezzo.advise(model, (x, torch.zeros_like(x)), F.mse_loss, levels="O2", rounds=5)
    computed = mezzo.advise(model, (x, torch.zeros_like(x)), F.mse_loss, levels="O2", gpu=name)
    gains = [
        {str(one.setting): one.gain for one in advice.times}["O2 bfloat16"]
        for advice in (measured, computed)
    ]
    assert 0.3 < gains[0] / gains[1] < 3.0
