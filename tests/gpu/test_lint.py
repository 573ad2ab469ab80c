"""`mezzo.lint` on a GPU: measured gains of sizes and memory formats, and loops on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo.advising import measurements

pytestmark = pytest.mark.gpu


def rules_of(findings):
    return [one.rule for one in findings]


def test_a_product_with_an_odd_inner_size_is_found_with_its_measured_gain():
    model, x = nn.Linear(4095, 4095, bias=False).cuda(), torch.ones(4096, 4095).cuda()
    found = mezzo.lint(model, policy="O2", dtype="bfloat16", sample=x)
    (one,) = found.of("matrix-multiple")
    assert "4095 → 4096" in one.instead
    assert one.gain > 1.02


def test_sizes_that_are_multiples_are_not_found():
    model, x = nn.Linear(4096, 4096).cuda(), torch.ones(4096, 4096).cuda()
    found = mezzo.lint(model, policy="O2", dtype="bfloat16", sample=x)
    assert rules_of(found) == []
    assert {"matrix-multiple", "little-gain"} <= set(found.checked)


def test_channels_first_convolutions_are_found_only_if_measured_slower():
    layers = [nn.Conv2d(256, 256, 3, padding=1) for _ in range(4)]
    model, x = nn.Sequential(*layers).cuda(), torch.ones(32, 256, 56, 56).cuda()
    found = mezzo.lint(model, policy="O2", dtype="float16", sample=x)
    for one in found.of("channels-first"):
        assert one.gain >= 1.02
    last = mezzo.lint(
        mezzo.channels_last(model), policy="O2", dtype="float16", sample=mezzo.channels_last(x)
    )
    assert "channels-first" not in rules_of(last)


def test_a_model_bound_by_launches_gains_little(monkeypatch):
    # The share of products and the use of the GPU are measured. The gain is not: other processes
    # may slow either run.
    monkeypatch.setattr(measurements, "interleaved_medians", lambda *_: (1.0, 1.0))
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(20)]
    found = mezzo.lint(nn.Sequential(*layers).cuda(), policy="O1", sample=torch.ones(8, 64).cuda())
    (one,) = found.of("little-gain")
    assert "Switch it off" in one.instead
    assert "of the time" in one.what
    assert "of its memory" in one.what


def make_loop(*, clip_first: bool, backward_inside: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    x, y = torch.randn(32, 64).cuda(), torch.randint(16, (32,)).cuda()

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            scaled = scaler.scale(loss_32() if backward_inside else loss_16())
            if backward_inside:
                scaled.backward()
        if not backward_inside:
            scaled.backward()
        if not clip_first:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    def loss_16():
        return F.cross_entropy(model(x), y)

    def loss_32():
        hidden = model[:2](x)
        with torch.autocast("cuda", enabled=False):
            return F.cross_entropy(model[2](hidden.float()), y)

    return model, optimizer, scaler, step


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"clip_first": False, "backward_inside": False}, []),
        ({"clip_first": True, "backward_inside": False}, ["clip-before-unscale"]),
        ({"clip_first": False, "backward_inside": True}, ["backward-in-autocast"]),
    ],
)
def test_loops_are_observed_and_restored(kwargs, expected):
    model, optimizer, scaler, step = make_loop(**kwargs)
    before = [one.detach().clone() for one in model.parameters()]
    assert rules_of(mezzo.lint(model, optimizer, scaler, step=step)) == expected
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    step()


def test_a_captured_train_step_has_no_findings():
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    step = mezzo.TrainStep(model, F.cross_entropy, optimizer, "O2", dtype="float16")
    batch = torch.randn(64, 256).cuda(), torch.randint(64, (64,)).cuda()
    for _ in range(6):
        step(*batch)
    assert rules_of(mezzo.lint(step, sample=batch, ignore={"little-gain"})) == []
    assert torch.isfinite(step(*batch))
