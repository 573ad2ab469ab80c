"""`scale_loss`: several losses and optimizers, accumulation, delays, errors; `LossScaler`."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from mezzo.compat.apex import amp
from mezzo.compat.apex.amp._scale_loss import LossScaler, amp_stash

LEVELS = ("O0", "O1", "O2", "O3")
INF = float("inf")


class Net(nn.Module):
    """Weights that float16 holds exactly."""

    def __init__(self, start):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([start, start + 1.0]))

    def forward(self, x):
        return (x * self.weight).sum()


X = torch.ones(2)


def make(*starts, level="O2", **kwargs):
    models = [Net(start) for start in starts]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.125) for model in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level=level, verbosity=0, **kwargs)
    for scaler in amp._amp_state.loss_scalers:
        scaler._loss_scale = 4.0
    return models, optimizers


def backward(loss, optimizers, **kwargs):
    with amp.scale_loss(loss, optimizers, **kwargs) as scaled:
        scaled.backward()


def clear(optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()


def scales():
    return [entry["loss_scale"] for entry in amp.state_dict().values()]


def test_the_scaled_loss_is_float32_times_the_scale():
    (model,), (optimizer,) = make(1.0)
    with amp.scale_loss(model(X).half(), optimizer) as scaled:
        assert scaled.dtype is torch.float32
        assert scaled.item() == 12.0
        scaled.backward()


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_unscaled_and_float32_afterwards(level):
    (model,), (optimizer,) = make(
        1.0, level=level, **({} if level in ("O1", "O2") else {"loss_scale": "dynamic"})
    )
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    backward(model(X * 3), optimizer)
    (master,) = amp.master_params(optimizer)
    assert (master.grad.dtype, master.grad.tolist()) == (torch.float32, [3.0, 3.0])


def test_without_scaling_a_float32_loss_is_yielded_unchanged():
    (model,), (optimizer,) = make(1.0, level="O0")
    loss = model(X)
    amp._amp_state.loss_scalers[0]._loss_scale = 1.0
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss


# -- several losses and optimizers -----------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("overflowing", [None, 0, 1])
def test_two_models_two_losses_two_optimizers(level, losses, overflowing):
    models, optimizers = make(1.0, 2.0, level=level, num_losses=losses, loss_scale="dynamic")
    expected = [model.weight.detach().clone().float() for model in models]
    momenta = [torch.zeros(2), torch.zeros(2)]
    for iteration in range(3):
        clear(optimizers)
        overflows = iteration == 1
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x = X * INF if overflows and overflowing == index else X
            backward(model(x), optimizer, loss_id=index if losses == 2 else 0)
        for index, optimizer in enumerate(optimizers):
            optimizer.step()
            if not (overflows and overflowing == index):
                momenta[index] = momenta[index] * 0.125 + 1.0
                expected[index] -= 0.25 * momenta[index]
    for model, value in zip(models, expected, strict=True):
        torch.testing.assert_close(
            model.weight.float(), value, rtol=0, atol=2e-3 if level in ("O2", "O3") else 0
        )
    if overflowing is None:
        assert scales() == [4.0] * losses
    else:
        assert scales() == (
            [2.0] if losses == 1 else [2.0 if index == overflowing else 4.0 for index in range(2)]
        )


@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_of_a_shared_loss_skips_both_optimizers(level):
    models, optimizers = make(1.0, 2.0, level=level, loss_scale="dynamic")
    before = [model.weight.detach().clone() for model in models]
    backward(models[0](X * INF) + models[1](X), optimizers)
    for optimizer in optimizers:
        optimizer.step()
    assert all(
        torch.equal(model.weight, value) for model, value in zip(models, before, strict=True)
    )
    clear(optimizers)
    backward(models[0](X) + models[1](X), optimizers)
    for optimizer in optimizers:
        optimizer.step()
    assert not any(
        torch.equal(model.weight, value) for model, value in zip(models, before, strict=True)
    )


def test_an_overflowing_loss_skips_the_step_and_lowers_only_its_scale():
    (model,), (optimizer,) = make(1.0, num_losses=3)
    before = model.weight.detach().clone()
    for index in range(3):
        backward(model(X * (INF if index == 1 else 1.0)), optimizer, loss_id=index)
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert scales() == [4.0, 2.0, 4.0]
    assert [entry["unskipped"] for entry in amp.state_dict().values()] == [1, 0, 1]


def test_scales_back_off_once_per_overflow_of_their_loss():
    (model,), (optimizer,) = make(1.0, num_losses=3)
    for round_ in range(2):
        optimizer.zero_grad()
        for index, times in enumerate((0, 1, 2)):
            backward(model(X * (INF if round_ < times else 1.0)), optimizer, loss_id=index)
        optimizer.step()
    assert amp.state_dict() == {
        "loss_scaler0": {"loss_scale": 4.0, "unskipped": 2},
        "loss_scaler1": {"loss_scale": 2.0, "unskipped": 1},
        "loss_scaler2": {"loss_scale": 1.0, "unskipped": 0},
    }


# -- accumulation and delays -----------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_accumulate(level, delayed):
    (model,), (optimizer,) = make(1.0, level=level, loss_scale="dynamic")
    for position, factor in enumerate((1.0, 2.0, 4.0)):
        backward(model(X * factor), optimizer, delay_unscale=delayed and position < 2)
    (master,) = amp.master_params(optimizer)
    assert master.grad.tolist() == [7.0, 7.0]
    optimizer.step()
    torch.testing.assert_close(model.weight.float(), torch.tensor([1.0, 2.0]) - 1.75)


@pytest.mark.parametrize("level", LEVELS)
def test_a_delayed_unscale_after_an_immediate_one(level):
    (model,), (optimizer,) = make(1.0, level=level, loss_scale="dynamic")
    backward(model(X), optimizer)
    backward(model(X * 2), optimizer, delay_unscale=True)
    backward(model(X * 4), optimizer)
    (master,) = amp.master_params(optimizer)
    assert master.grad.tolist() == [7.0, 7.0]


def test_an_overflow_while_accumulating_skips_the_step():
    (model,), (optimizer,) = make(1.0)
    before = model.weight.detach().clone()
    backward(model(X * INF), optimizer)
    backward(model(X), optimizer)
    optimizer.step()
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    backward(model(X), optimizer)
    optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("level", LEVELS)
def test_a_delayed_check_is_evaluated_by_the_step(level):
    (model,), (optimizer,) = make(1.0, level=level, loss_scale="dynamic")
    before = model.weight.detach().clone()
    backward(model(X * INF), optimizer, delay_overflow_check=True)
    assert scales() == [4.0]
    optimizer.step()
    assert scales() == [2.0]
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    backward(model(X), optimizer, delay_overflow_check=True)
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_a_delayed_check_of_two_optimizers_updates_the_scale_once():
    models, optimizers = make(1.0, 2.0)
    before = [model.weight.detach().clone() for model in models]
    backward(models[0](X * INF) + models[1](X), optimizers, delay_overflow_check=True)
    for optimizer in optimizers:
        optimizer.step()
    assert scales() == [2.0]
    assert all(
        torch.equal(model.weight, value) for model, value in zip(models, before, strict=True)
    )


def test_clipping_acts_on_masters():
    (model,), (optimizer,) = make(1.0)
    backward(model(X * torch.tensor([3.0, 4.0])), optimizer)
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    assert norm.item() == 5.0
    torch.testing.assert_close(
        model.weight.float(), torch.tensor([1.0 - 0.25 * 0.6, 2.0 - 0.25 * 0.8]), rtol=1e-3, atol=0
    )


def test_a_static_scale_skips_too_and_keeps_its_value(capsys):
    (model,), (optimizer,) = make(1.0, loss_scale=128.0)
    amp._amp_state.verbosity = 1
    before = model.weight.detach().clone()
    backward(model(X * INF), optimizer)
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert (
        capsys.readouterr().out
        == "Gradient overflow.  Skipping step, loss scaler 0 keeping its loss scale of 4.0\n"
    )


def test_existing_gradients_are_kept_when_the_body_raises():
    (model,), (optimizer,) = make(1.0)
    backward(model(X), optimizer)
    with pytest.raises(KeyError), amp.scale_loss(model(X), optimizer):
        raise KeyError
    (master,) = amp.master_params(optimizer)
    assert master.grad.tolist() == [1.0, 1.0]


def test_a_group_added_later_has_masters():
    first, second = Net(1.0), Net(2.0)
    optimizer = torch.optim.SGD(first.parameters(), lr=2.0**-14)
    [first, second], optimizer = amp.initialize(
        [first, second], optimizer, opt_level="O2", verbosity=0
    )
    optimizer.add_param_group({"params": second.parameters()})
    for _ in range(16):
        optimizer.zero_grad()
        backward(first(X) + second(X), optimizer)
        optimizer.step()
    # Sixteen updates, each too small for float16 at 2.
    assert second.weight[0].item() == 2.0 - 2.0**-10
    assert first.weight[0].item() == 1.0 - 2.0**-10


# -- errors ----------------------------------------------------------------------------------------


def test_scale_loss_before_initialize_is_a_runtime_error():
    model = Net(1.0)
    with pytest.raises(
        RuntimeError, match=r"amp.scale_loss.*has not been initialized.*amp.initialize"
    ):
        backward(model(X), torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_uninitialized_optimizer_is_a_runtime_error():
    make(1.0)
    model = Net(1.0)
    with pytest.raises(RuntimeError, match=r"was not passed to amp\.initialize"):
        backward(model(X), torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("index", [1, -1])
def test_an_out_of_range_loss_id_is_an_index_error(index):
    (model,), (optimizer,) = make(1.0)
    with pytest.raises(IndexError, match="num_losses=1"):
        backward(model(X), optimizer, loss_id=index)


def test_a_closure_with_masters_is_a_runtime_error():
    (model,), (optimizer,) = make(1.0)
    with pytest.raises(RuntimeError, match="does not support closures"):
        optimizer.step(lambda: model(X))


def test_a_closure_on_a_skipped_step_is_a_runtime_error():
    (model,), (optimizer,) = make(1.0, level="O1")
    backward(model(X * INF), optimizer)
    with pytest.raises(RuntimeError, match="does not support closures"):
        optimizer.step(lambda: model(X))


def test_a_closure_at_o1_is_called():
    (model,), (optimizer,) = make(1.0, level="O1")

    def closure():
        optimizer.zero_grad()
        loss = model(X)
        backward(loss, optimizer)
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert model.weight.tolist() == [0.75, 1.75]


def test_writes_to_data_are_used_after_a_backward_pass():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    backward(model(torch.ones(1, 2)).sum(), optimizer)
    model.weight.data.fill_(2.0)
    assert model(torch.ones(1, 2)).item() == 4.0


def test_gradients_of_a_network_accumulate_at_o1():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    plain = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=16.0)
    for factor in (1.0, 2.0, 3.0):
        backward(model(torch.ones(1, 2) * factor).float().sum(), optimizer)
    with amp.disable_casts():
        total = sum(
            torch.func.functional_call(
                model,
                dict(zip(dict(model.named_parameters()), plain, strict=True)),
                torch.ones(1, 2) * factor,
            ).sum()
            for factor in (1.0, 2.0, 3.0)
        )
        expected = torch.autograd.grad(total, plain)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=5e-3, atol=5e-3)


# -- LossScaler ------------------------------------------------------------------------------------


FINITE, OVERFLOW = [torch.zeros(())], [torch.ones(())]


def test_a_dynamic_scale_halves_and_doubles():
    scaler = LossScaler("dynamic", init_scale=8.0, scale_window=2)
    states = []
    for flags in (OVERFLOW, FINITE, FINITE, FINITE, OVERFLOW, FINITE, FINITE):
        assert scaler.update_scale(flags) is (flags is OVERFLOW)
        states.append((scaler.loss_scale(), scaler._unskipped))
    assert states == [(4.0, 0), (4.0, 1), (8.0, 0), (8.0, 1), (4.0, 0), (4.0, 1), (8.0, 0)]


@pytest.mark.parametrize("updates_before", [0, 1])
def test_the_rule_changes_when_a_script_sets_the_attributes_of_apex(updates_before):
    scaler = LossScaler("dynamic", init_scale=8.0)
    for _ in range(updates_before):
        scaler.update_scale(FINITE)
    scaler._scale_seq_len, scaler._max_loss_scale, scaler._min_loss_scale = 2, 16.0, 4.0
    assert (scaler._scale_seq_len, scaler._max_loss_scale, scaler._min_loss_scale) == (2, 16, 4)
    for _ in range(6):
        scaler.update_scale(FINITE)
    assert scaler.loss_scale() == 16.0
    scaler._loss_scale = 4.0
    with pytest.warns(UserWarning, match="floor of 4"):
        scaler.update_scale(OVERFLOW)
    assert scaler.loss_scale() == 4.0


def test_a_dynamic_scale_stays_at_most_max_loss_scale():
    scaler = LossScaler("dynamic", max_loss_scale=16.0, scale_window=1)
    assert scaler.loss_scale() == 16.0
    scaler.update_scale(FINITE)
    assert scaler.loss_scale() == 16.0


def test_without_min_loss_scale_it_still_does_not_reach_zero():
    scaler = LossScaler("dynamic")

    def back_off():
        for _ in range(200):
            scaler.update_scale(OVERFLOW)

    with pytest.warns(UserWarning, match="floor"):
        back_off()
    assert scaler.loss_scale() == 2.0**-24


def test_a_static_scale_is_constant():
    scaler = LossScaler(128.0)
    assert scaler.update_scale(OVERFLOW)
    assert scaler.loss_scale() == 128.0


def test_a_pass_without_gradients_changes_nothing():
    scaler = LossScaler("dynamic")
    assert not scaler.update_scale([])
    assert scaler._unskipped == 0


def test_scale_and_growth_tracker_can_be_set():
    scaler = LossScaler("dynamic")
    scaler._loss_scale, scaler._unskipped = 4.0, 7
    assert scaler.scale(torch.tensor(2.0)) == 8.0
    scaler._loss_scale = 2.0
    assert (scaler.scale(torch.tensor(2.0)).item(), scaler._unskipped) == (4.0, 7)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf")])
def test_an_invalid_scale_is_rejected(scale):
    with pytest.raises(ValueError, match="scale"):
        LossScaler(scale)


def test_only_a_static_scale_of_one_is_a_noop():
    assert LossScaler(1.0).is_noop
    assert not LossScaler(2.0).is_noop
    assert not LossScaler("dynamic", init_scale=1.0).is_noop
    scaler = LossScaler(2.0)
    scaler._loss_scale = 1.0
    assert scaler.is_noop


# -- the step attached to an optimizer -------------------------------------------------------------


def make_with_scheduler(level="O1", scheduler_first=None):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5) if scheduler_first else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer, scheduler or StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_scheduler_created_before_or_after_does_not_warn(level, scheduler_first):
    model, optimizer, scheduler = make_with_scheduler(level, scheduler_first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.zero_grad()
            with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_step_hooks_run_once():
    model, optimizer, _ = make_with_scheduler("O2")
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    with amp.scale_loss(model(torch.ones(1, 2)).mean() / 8, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert called == [1]


def test_the_step_runs_without_casts():
    dtypes = []

    class RecordingSGD(torch.optim.SGD):
        def step(self, closure=None):
            dtypes.append(torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)

    model = nn.Linear(2, 1)
    optimizer = RecordingSGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    optimizer.step()
    assert dtypes == [torch.float32]


def test_an_optimizer_is_accepted_once():
    model, optimizer, _ = make_with_scheduler()
    with pytest.raises(RuntimeError, match=r"already passed to amp\.initialize"):
        amp.initialize(model, optimizer, verbosity=0)


def test_already_patched_reports_whether_the_next_step_is_skipped():
    model, optimizer, _ = make_with_scheduler("O2")
    assert not amp_stash(optimizer).already_patched
    with amp.scale_loss(model(torch.ones(1, 2)).sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    assert optimizer._amp_stash.already_patched
    optimizer.step()
    assert not optimizer._amp_stash.already_patched
