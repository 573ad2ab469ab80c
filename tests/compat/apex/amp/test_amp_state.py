"""The state of amp, and masters."""

import torch
from torch import nn

from mezzo.compat.apex import amp


def make(level):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer


def step(model, optimizer):
    with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_masters_are_the_parameters_where_those_are_float32():
    for level in ("O0", "O1"):
        model, optimizer = make(level)
        assert [
            one is other
            for one, other in zip(amp.master_params(optimizer), model.parameters(), strict=True)
        ] == [True, True]


def test_masters_at_o2_round_to_the_parameters():
    model, optimizer = make("O2")
    step(model, optimizer)
    for master, parameter in zip(amp.master_params(optimizer), model.parameters(), strict=True):
        assert master.dtype is torch.float32
        assert master.requires_grad
        assert torch.equal(master.half(), parameter)
        assert not torch.equal(master, parameter.float())


def test_masters_share_memory_with_the_exact_weights():
    model, optimizer = make("O2")
    first = [master.data_ptr() for master in amp.master_params(optimizer)]
    step(model, optimizer)
    assert [master.data_ptr() for master in amp.master_params(optimizer)] == first


def test_a_parameter_that_was_written_is_its_own_master():
    model, optimizer = make("O2")
    with torch.no_grad():
        model.weight.fill_(0.5)
    assert torch.equal(next(amp.master_params(optimizer)), torch.full((2, 3), 0.5))


def test_the_state_is_found_where_apex_has_it():
    make("O2")
    from mezzo.compat.apex.amp._amp_state import _amp_state, maybe_print

    assert amp._amp_state is _amp_state
    assert _amp_state.opt_properties.loss_scale == "dynamic"
    assert _amp_state.loss_scalers[0].loss_scale() == 65536.0
    maybe_print("silent")
