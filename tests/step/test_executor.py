"""One call of a step: forward, scaled backward, update."""

from __future__ import annotations

import threading

import pytest
import torch
from support.step_models import Made

import mezzo
from mezzo.autocasting.regions import enter_regions
from mezzo.step.components import PrecisionArgs, prepare_components
from mezzo.step.executor import StepContext, StepExecutor
from mezzo.step.inputs import Call
from mezzo.step.options import AccumulationPhase, Reduction, StepOptions
from mezzo.step.user_body import ScaledBackward, refuse_manual_step

CALL = Call((torch.ones(2, 8),), {})
ONLY = AccumulationPhase(first=True, last=True)
FIRST, LAST = AccumulationPhase(first=True, last=False), AccumulationPhase(first=False, last=True)


def prepared(dtype, **overrides):
    made = Made("mlp")
    precision = PrecisionArgs("O1", None, {"dtype": dtype} | overrides)
    return prepare_components(made.model, made.optimizer, precision, None, None), made


def mean_square(model, x):
    return model(x).square().mean()


class TestExecutor:
    def executor(self, body, accumulate=1):
        components, made = prepared("bfloat16")
        options = StepOptions(accumulate, Reduction.MEAN)
        return StepExecutor(components, lambda x: body(made.model, x), options), made

    @pytest.mark.parametrize(
        ("reduction", "factor"), [(Reduction.MEAN, 0.25), (Reduction.SUM, 1.0)], ids=["mean", "sum"]
    )
    def test_the_reduction_sets_the_factor_of_each_loss(self, reduction, factor):
        assert StepOptions(4, reduction).loss_factor == factor

    def test_the_body_runs_in_the_autocast_region_and_with_gradients(self):
        seen = []

        def body(model, x):
            seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            return mean_square(model, x)

        executor, _ = self.executor(body)
        with torch.no_grad():
            executor.run(CALL, ONLY, None)
        assert seen == [(True, True)]
        assert not torch.is_autocast_enabled("cpu")

    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
    def test_the_last_call_of_an_accumulation_updates(self, mode):
        executor, made = self.executor(mean_square, accumulate=2)
        weight = made.model.layers[0].weight
        before = weight.detach().clone()
        with mode():
            executor.run(CALL, FIRST, None)
        assert torch.equal(weight, before)
        assert weight.grad is not None
        with mode():
            executor.run(CALL, LAST, None)
        assert not torch.equal(weight, before)
        assert weight.grad is None

    def test_static_gradients_are_zeroed_and_keep_their_addresses(self):
        executor, made = self.executor(mean_square, accumulate=2)
        executor.static_gradients.release(records=True)
        assert not executor.static_gradients.allocate()
        for phase in (FIRST, LAST):
            executor.run(CALL, phase, None)
        assert executor.static_gradients.allocate()
        gradients = [parameter.grad for parameter in made.model.parameters()]
        executor.run(CALL, FIRST, None)
        assert any(bool(gradient.any()) for gradient in gradients)
        executor.run(CALL, LAST, None)
        assert all(
            parameter.grad is gradient
            for parameter, gradient in zip(made.model.parameters(), gradients, strict=True)
        )
        assert not any(bool(gradient.any()) for gradient in gradients)

    def test_autocast_is_off_again_after_a_body_that_raises(self):
        def body(model, x):
            raise KeyError("mine")

        executor, _ = self.executor(body)
        with pytest.raises(KeyError, match="mine"):
            executor.run(CALL, ONLY, None)
        assert not torch.is_autocast_enabled("cpu")


class TestContext:
    def context(self, dtype="float16", loss_factor=1.0, **overrides):
        components, made = prepared(dtype, **overrides)
        return StepContext(components, loss_factor=loss_factor, can_update=True), made

    def test_gradients_are_scaled_and_multiplied_by_the_loss_factor(self):
        context, made = self.context(loss_factor=0.5)
        context.backward(made.model.layers[2].bias.sum())
        assert torch.equal(made.model.layers[2].bias.grad, torch.full((4,), 2.0**15))

    def test_backward_runs_with_autocast_off(self):
        context, made = self.context("bfloat16")
        bias, seen = made.model.layers[2].bias, []
        bias.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
        with mezzo.autocast("O1", device_type="cpu", dtype="bfloat16"):
            context.backward(bias.sum())
        assert seen == [False]

    @pytest.mark.parametrize("takes_update", [False, True], ids=["loss.backward()", "update"])
    def test_a_loss_is_scaled_once_in_a_region_with_a_function_mode(self, takes_update):
        context, made = self.context(preset="oneflow")
        bias, seen = made.model.layers[2].bias, []
        bias.register_hook(lambda gradient: seen.append(gradient[0].item()))
        with enter_regions(context._components.region), ScaledBackward(context.backward):
            loss = bias.sum()
            if takes_update:
                context(loss, made.optimizer)
            else:
                loss.backward()
        assert seen == [2.0**16]

    def test_an_update_without_gradients_is_refused(self):
        context, _ = self.context()
        with pytest.raises(mezzo.ScalerError, match="has a gradient"):
            context.step_remaining()

    def test_on_a_cpu_found_nonfinite_is_a_bool(self):
        context, made = self.context()
        context.backward(made.model.layers[2].bias.sum() * float("nan"))
        context.step_remaining()
        assert context.found_nonfinite() is True

    def test_losses_of_other_threads_are_not_scaled(self):
        context, made = self.context()
        bias = made.model.layers[2].bias
        with ScaledBackward(context.backward):
            thread = threading.Thread(target=lambda: bias.sum().backward())
            thread.start()
            thread.join()
        assert torch.equal(bias.grad, torch.ones(4))
        assert context.loss is None

    def test_only_a_manual_step_is_refused(self):
        context, made = self.context()
        handle = made.optimizer.register_step_pre_hook(refuse_manual_step)
        context.backward(made.model.layers[2].bias.sum())
        context.step_remaining()
        with pytest.raises(mezzo.ScalerError, match=r"SGD\.step\(\) was called"):
            made.optimizer.step()
        handle.remove()
