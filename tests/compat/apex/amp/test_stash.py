"""The step that amp puts on an optimizer."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from mezzo.compat.apex import amp
from mezzo.compat.apex.amp._scale_loss import stash_of


def make(level="O1", before=None):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5) if before else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer, scheduler or StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("before", [True, False])
def test_a_scheduler_made_before_or_after_goes_on_without_a_warning(level, before):
    model, optimizer, scheduler = make(level, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.zero_grad()
            with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_hooks_run_once_a_step():
    model, optimizer, _ = make("O2")
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    with amp.scale_loss(model(torch.ones(1, 2)).mean() / 8, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert called == [1]


def test_a_step_runs_without_casts():
    seen = []

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)

    model = nn.Linear(2, 1)
    optimizer = Looking(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    optimizer.step()
    assert seen == [torch.float32]


def test_an_optimizer_goes_through_once():
    model, optimizer, _ = make()
    with pytest.raises(RuntimeError, match=r"goes through amp\.initialize once"):
        amp.initialize(model, optimizer, verbosity=0)


def test_whether_the_next_step_is_skipped_can_be_seen():
    model, optimizer, _ = make("O2")
    assert not stash_of(optimizer).already_patched
    with amp.scale_loss(model(torch.ones(1, 2)).sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    assert optimizer._amp_stash.already_patched
    optimizer.step()
    assert not optimizer._amp_stash.already_patched
