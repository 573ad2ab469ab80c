"""Steps whose body is a user's function."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo


def pair(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


DATA = [torch.randn(6, 4, generator=torch.Generator().manual_seed(index)) for index in range(20)]


def train(make_body, dtype="float16", **kwargs):
    model, optimizer = pair()
    step = mezzo.train_step(models=model, optimizers=optimizer, dtype=dtype, **kwargs)(
        make_body(model)
    )
    return [step(x) for x in DATA], step, model


def returning(model):
    def body(x):
        return model(x).square().mean()

    return body


def calling_backward(model):
    def body(x):
        loss = model(x).square().mean()
        loss.backward()
        return {"loss": loss, "note": "mine"}

    return body


def test_a_returned_loss_is_trained_on_as_by_train_step():
    model, optimizer = pair()
    step = mezzo.TrainStep(model, lambda output: output.square().mean(), optimizer, dtype="float16")
    expected = [float(step(x)) for x in DATA]
    assert [float(loss) for loss in train(returning)[0]] == expected


def test_a_body_may_call_backward_itself_and_return_anything():
    returned, step, _ = train(calling_backward)
    assert [float(one["loss"]) for one in returned] == [float(loss) for loss in train(returning)[0]]
    assert returned[0]["note"] == "mine"
    assert step.loss == float(returned[-1]["loss"])
    assert not returned[0]["loss"].requires_grad


def test_gradients_of_several_losses_add_up():
    def twice(model):
        def body(x):
            outputs = model(x)
            (outputs.square().mean() / 2).backward(retain_graph=True)
            (outputs.square().mean() / 2).backward()

        return body

    _, _, model = train(twice, dtype="bfloat16")
    _, _, other = train(returning, dtype="bfloat16")
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=2e-2, atol=1e-3)


def test_a_body_that_calls_backward_can_accumulate():
    _, _, model = train(returning, accumulate=2)
    _, _, other = train(calling_backward, accumulate=2)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_tensor_backward_is_not_patched():
    before = torch.Tensor.backward
    train(calling_backward)

    def fails(_):
        def body(_):
            raise KeyError("mine")

        return body

    with pytest.raises(KeyError, match="mine"):
        train(fails)
    assert torch.Tensor.backward is before


GAN_SCALE = 1024.0
"""A loss scale that fits, so that the first update does not lower it."""


def gan(dtype, infinite=()):
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    of_generator, of_critic = (
        torch.optim.Adam(model.parameters(), lr=0.01) for model in (generator, critic)
    )

    @mezzo.train_step(
        models=[generator, critic],
        optimizers=[of_generator, of_critic],
        dtype=dtype,
        scaler=mezzo.GradScaler("cpu", GAN_SCALE) if dtype == "float16" else None,
    )
    def step(update, real, noise, boost):
        fake = generator(noise)
        loss_critic = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
        update(loss_critic, of_critic)
        loss = F.softplus(-critic(fake)).mean() * boost
        update(loss, of_generator)
        return loss, loss_critic

    for index in range(20):
        step(
            torch.randn(6, 8),
            torch.randn(6, 4),
            torch.tensor(float("inf") if index in infinite else 1.0),
        )
    return step, generator, critic


def gan_by_hand(dtype, infinite=()):
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    of_generator, of_critic = (
        torch.optim.Adam(model.parameters(), lr=0.01) for model in (generator, critic)
    )
    scaler, region = (
        mezzo.GradScaler("cpu", GAN_SCALE, enabled=dtype == "float16"),
        mezzo.autocast("O1", device_type="cpu", dtype=dtype),
    )
    for index in range(20):
        real, noise = torch.randn(6, 8), torch.randn(6, 4)
        with region:
            fake = generator(noise)
            loss_critic = (
                F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
            )
        scaler.scale(loss_critic).backward()
        scaler.step(of_critic)
        with region:
            loss = F.softplus(-critic(fake)).mean() * (float("inf") if index in infinite else 1.0)
        of_critic.zero_grad()
        scaler.scale(loss).backward(inputs=list(generator.parameters()))
        scaler.step(of_generator)
        of_generator.zero_grad()
        scaler.update()
    return generator, critic


@pytest.mark.parametrize(
    ("dtype", "infinite"), [("bfloat16", ()), ("float16", ()), ("float16", (0, 7, 8))], ids=str
)
def test_a_gan_trains_as_the_loop_by_hand(dtype, infinite):
    step, *models = gan(dtype, infinite)
    for model, other in zip(models, gan_by_hand(dtype, infinite), strict=True):
        assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert step.metrics.skipped_steps >= len(infinite)


def test_the_step_has_name_and_docstring_of_the_function():
    model, optimizer = pair()

    @mezzo.train_step(models=model, optimizers=optimizer, dtype="bfloat16")
    def step(x):
        """Mine."""
        return model(x).sum()

    assert step.__name__ == "step"
    assert step.__doc__ == "Mine."


class TestErrors:
    def make(self, make_body, **kwargs):
        model, optimizer = pair()
        return mezzo.train_step(models=model, optimizers=optimizer, dtype="bfloat16", **kwargs)(
            make_body(model, optimizer)
        )

    def test_a_body_that_steps_an_optimizer(self):
        def body(model, optimizer):
            def step(x):
                model(x).sum().backward()
                optimizer.step()

            return step

        with pytest.raises(mezzo.ScalerError, match="steps its optimizers itself"):
            self.make(body)(DATA[0])

    def test_a_body_without_a_loss(self):
        with pytest.raises(mezzo.ScalerError, match="returned NoneType"):
            self.make(lambda model, _: lambda x: None)(DATA[0])

    def test_an_update_of_another_optimizer(self):
        other = pair()[1]
        with pytest.raises(mezzo.ScalerError, match="not an optimizer of the step"):
            self.make(lambda model, _: lambda update, x: update(model(x).sum(), other))(DATA[0])

    def test_two_updates_of_one_optimizer(self):
        def body(model, optimizer):
            def step(update, x):
                update(model(x).sum(), optimizer)
                update(model(x).sum(), optimizer)

            return step

        with pytest.raises(mezzo.ScalerError, match="already stepped"):
            self.make(body)(DATA[0])

    def test_update_with_accumulation(self):
        with pytest.raises(mezzo.PolicyError, match="return the loss instead"):
            self.make(
                lambda model, optimizer: lambda update, x: update(model(x).sum(), optimizer),
                accumulate=2,
            )

    def test_a_generator_function(self):
        def body(model, _):
            def step(x):
                yield model(x)

            return step

        with pytest.raises(mezzo.PolicyError, match="plain function"):
            self.make(body)

    def test_an_object_that_is_not_a_function(self):
        with pytest.raises(mezzo.PolicyError, match="decorates a function"):
            self.make(lambda *_: 3)

    def test_no_optimizer(self):
        model, _ = pair()
        with pytest.raises(mezzo.PolicyError, match="needs an optimizer"):
            mezzo.train_step(models=model, optimizers=[])(returning(model))


class BadDataError(Exception):
    pass


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_body_that_raises_after_a_backward_pass_leaves_no_gradients(dtype):
    def failing_once(model):
        is_bad = iter([True])

        def body(x):
            model(x).square().mean().backward()
            if next(is_bad, False):
                raise BadDataError

        return body

    expected = weights_after(calling_backward, dtype)
    model, optimizer = pair()
    step = mezzo.train_step(models=model, optimizers=optimizer, dtype=dtype)(failing_once(model))
    with pytest.raises(BadDataError):
        step(DATA[1])
    for x in DATA:
        step(x)
    assert all(map(torch.equal, model.parameters(), expected))


def weights_after(make_body, dtype):
    return list(train(make_body, dtype)[2].parameters())


def test_a_body_that_raises_between_two_updates_can_be_called_again():
    (first, of_first), (second, of_second) = pair(), pair(1)
    is_bad = iter([True])

    @mezzo.train_step(models=[first, second], optimizers=[of_first, of_second], dtype="float16")
    def step(update, x):
        update(first(x).square().mean(), of_first)
        if next(is_bad, False):
            raise BadDataError
        update(second(x).square().mean(), of_second)

    with pytest.raises(BadDataError):
        step(DATA[0])
    before = [one.detach().clone() for one in second.parameters()]
    step(DATA[0])
    assert not any(map(torch.equal, second.parameters(), before))
    assert step.updates == 1
