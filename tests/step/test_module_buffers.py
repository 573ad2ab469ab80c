"""Buffers that a forward pass writes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.step.module_buffers import ModuleBuffers, module_modes

NAN = float("nan")


def norm():
    model = nn.Sequential(nn.BatchNorm1d(3))
    model.register_buffer("constant", torch.ones(5))
    return model


def learned(model):
    buffers = ModuleBuffers([model])
    buffers.save("mode")
    model(torch.randn(4, 3))
    buffers.find_written()
    return buffers


def test_only_what_is_written_is_kept():
    buffers = learned(norm())
    assert buffers.knows("mode")
    assert not buffers.knows("another mode")
    assert sum(len(kept._buffers) for kept in buffers._written["mode"]) == 3


@pytest.mark.parametrize("bad", [True, torch.tensor(1.0)], ids=["known", "flag"])
def test_a_bad_step_puts_them_back_even_over_nan(bad):
    model = norm()
    buffers = learned(model)
    before = [buffer.clone() for buffer in model.buffers()]
    buffers.save("mode")
    model(torch.full((4, 3), NAN))
    buffers.restore(bad)
    assert all(map(torch.equal, model.buffers(), before))


@pytest.mark.parametrize("bad", [False, torch.tensor(0.0)], ids=["known", "flag"])
def test_a_good_step_leaves_them(bad):
    model = norm()
    buffers = learned(model)
    buffers.save("mode")
    model(torch.randn(4, 3))
    after = [buffer.clone() for buffer in model.buffers()]
    buffers.restore(bad)
    assert all(map(torch.equal, model.buffers(), after))


def test_the_first_step_of_a_mode_can_be_put_back_too():
    model = norm()
    before = [buffer.clone() for buffer in model.buffers()]
    learned(model).restore(True)
    assert all(map(torch.equal, model.buffers(), before))


def test_a_mode_is_what_modules_and_parameters_are_set_to():
    model = norm()
    modules, parameters = list(model.modules()), list(model.parameters())
    modes = [module_modes(modules, parameters)]
    model.eval()
    modes.append(module_modes(modules, parameters))
    parameters[0].requires_grad_(requires_grad=False)
    modes.append(module_modes(modules, parameters))
    assert len(set(modes)) == 3
