"""`scale_loss`: several losses and optimizers, accumulation, what is delayed, and misuse. Every case against the same in float32."""

import pytest
import torch
from torch import nn

from mezzo.compat.apex import amp

LEVELS = ("O0", "O1", "O2", "O3")
INF = float("inf")


class Net(nn.Module):
    """Numbers small enough for float16 to hold them exactly."""

    def __init__(self, start):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([start, start + 1.0]))

    def forward(self, x):
        return (x * self.weight).sum()


X = torch.ones(2)


def make(*starts, level="O2", **words):
    models = [Net(start) for start in starts]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.125) for model in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level=level, verbosity=0, **words)
    for scaler in amp._amp_state.loss_scalers:
        scaler._loss_scale = 4.0
    return models, optimizers


def backward(loss, optimizers, **words):
    with amp.scale_loss(loss, optimizers, **words) as scaled:
        scaled.backward()


def clear(optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()


def scales():
    return [entry["loss_scale"] for entry in amp.state_dict().values()]


def test_the_scaled_loss_is_float32_and_so_many_times_as_large():
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


def test_where_nothing_is_scaled_the_loss_is_only_made_float32():
    (model,), (optimizer,) = make(1.0, level="O0")
    loss = model(X)
    amp._amp_state.loss_scalers[0]._loss_scale = 1.0
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss


# -- several ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("bad", [None, 0, 1])
def test_two_models_two_losses_two_optimizers(level, losses, bad):
    models, optimizers = make(1.0, 2.0, level=level, num_losses=losses, loss_scale="dynamic")
    expected = [model.weight.detach().clone().float() for model in models]
    momenta = [torch.zeros(2), torch.zeros(2)]
    for iteration in range(3):
        clear(optimizers)
        spoiled = iteration == 1
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x = X * INF if spoiled and bad == index else X
            backward(model(x), optimizer, loss_id=index if losses == 2 else 0)
        for index, optimizer in enumerate(optimizers):
            optimizer.step()
            if not (spoiled and bad == index):
                momenta[index] = momenta[index] * 0.125 + 1.0
                expected[index] -= 0.25 * momenta[index]
    for model, value in zip(models, expected, strict=True):
        torch.testing.assert_close(
            model.weight.float(), value, rtol=0, atol=2e-3 if level in ("O2", "O3") else 0
        )
    if bad is None:
        assert scales() == [4.0] * losses
    else:
        assert scales() == (
            [2.0] if losses == 1 else [2.0 if index == bad else 4.0 for index in range(2)]
        )


@pytest.mark.parametrize("level", LEVELS)
def test_one_loss_for_two_optimizers_skips_both(level):
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


def test_a_bad_loss_among_several_spoils_the_step_and_only_its_own_scale():
    (model,), (optimizer,) = make(1.0, num_losses=3)
    before = model.weight.detach().clone()
    for index in range(3):
        backward(model(X * (INF if index == 1 else 1.0)), optimizer, loss_id=index)
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert scales() == [4.0, 2.0, 4.0]
    assert [entry["unskipped"] for entry in amp.state_dict().values()] == [1, 0, 1]


def test_scales_fall_as_often_as_their_losses_were_bad():
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


# -- accumulation and what is delayed --------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_accumulate(level, delayed):
    (model,), (optimizer,) = make(1.0, level=level, loss_scale="dynamic")
    for place, factor in enumerate((1.0, 2.0, 4.0)):
        backward(model(X * factor), optimizer, delay_unscale=delayed and place < 2)
    (master,) = amp.master_params(optimizer)
    assert master.grad.tolist() == [7.0, 7.0]
    optimizer.step()
    torch.testing.assert_close(model.weight.float(), torch.tensor([1.0, 2.0]) - 1.75)


@pytest.mark.parametrize("level", LEVELS)
def test_a_delayed_loss_after_one_that_was_not(level):
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
def test_a_delayed_check_is_made_by_the_step(level):
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


def test_a_delayed_check_of_two_optimizers_adapts_the_scale_once():
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


def test_gradients_that_were_there_are_kept_when_backward_fails():
    (model,), (optimizer,) = make(1.0)
    backward(model(X), optimizer)
    with pytest.raises(KeyError), amp.scale_loss(model(X), optimizer):
        raise KeyError
    (master,) = amp.master_params(optimizer)
    assert master.grad.tolist() == [1.0, 1.0]


def test_a_group_that_is_added_later_has_masters():
    one, two = Net(1.0), Net(2.0)
    optimizer = torch.optim.SGD(one.parameters(), lr=2.0**-14)
    [one, two], optimizer = amp.initialize([one, two], optimizer, opt_level="O2", verbosity=0)
    optimizer.add_param_group({"params": two.parameters()})
    for _ in range(16):
        optimizer.zero_grad()
        backward(one(X) + two(X), optimizer)
        optimizer.step()
    # Sixteen updates, each too small for float16 at 2.
    assert two.weight[0].item() == 2.0 - 2.0**-10
    assert one.weight[0].item() == 1.0 - 2.0**-10


# -- misuse ----------------------------------------------------------------------------------------


def test_before_initialize_it_is_a_runtime_error():
    model = Net(1.0)
    with pytest.raises(
        RuntimeError, match=r"amp.scale_loss.*has not been initialized.*amp.initialize"
    ):
        backward(model(X), torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_optimizer_that_amp_does_not_know_is_a_runtime_error():
    make(1.0)
    model = Net(1.0)
    with pytest.raises(RuntimeError, match=r"did not go through amp\.initialize"):
        backward(model(X), torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("index", [1, -1])
def test_a_loss_that_was_not_announced_is_an_index_error(index):
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


def test_writes_that_torch_does_not_count_are_seen_after_a_backward_pass():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    backward(model(torch.ones(1, 2)).sum(), optimizer)
    model.weight.data.fill_(2.0)
    assert model(torch.ones(1, 2)).item() == 4.0


def test_products_accumulate_at_o1():
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
