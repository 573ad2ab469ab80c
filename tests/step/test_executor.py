"""One call, whole."""

from __future__ import annotations

import pytest
import torch
from support.step_models import Made

from mezzo.step.components import PrecisionArgs, Reduction, prepare_components
from mezzo.step.executor import AccumulationPhase, StepExecutor, StepOptions
from mezzo.step.inputs import Call


def engine_of(body, dtype="bfloat16", **rules):
    made = Made("mlp")
    parts = prepare_components(
        made.model, made.optimizer, PrecisionArgs("O1", None, {"dtype": dtype}), None, None
    )
    words = {"accumulate": 1, "reduction": Reduction.MEAN, **rules}
    return StepExecutor(parts, lambda x: body(made.model, x), StepOptions(**words)), made


CALL = Call((torch.ones(2, 8),), {})


def mean(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize(
    ("reduction", "factor"), [(Reduction.MEAN, 0.25), (Reduction.SUM, 1.0)], ids=["mean", "sum"]
)
def test_a_loss_counts_for_its_part(reduction, factor):
    assert StepOptions(4, reduction).loss_factor == factor


def test_the_body_runs_in_the_region_and_with_gradients():
    seen = []

    def body(model, x):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return mean(model, x)

    engine, _ = engine_of(body)
    with torch.no_grad():
        engine.run(CALL, AccumulationPhase(first=True, last=True), None)
    assert seen == [(True, True)]
    assert not torch.is_autocast_enabled("cpu")


def test_gradients_wait_for_the_last_call():
    engine, made = engine_of(mean, accumulate=2)
    before = made.model.layers[0].weight.clone()
    engine.run(CALL, AccumulationPhase(first=True, last=False), None)
    assert torch.equal(made.model.layers[0].weight, before)
    assert made.model.layers[0].weight.grad is not None
    engine.run(CALL, AccumulationPhase(first=False, last=True), None)
    assert not torch.equal(made.model.layers[0].weight, before)
    assert made.model.layers[0].weight.grad is None


def test_static_gradients_are_zeroed_and_keep_their_addresses():
    executor, made = engine_of(mean, accumulate=2)
    first, last = (AccumulationPhase(first, not first) for first in (True, False))
    executor.record_gradients()
    assert not executor.make_gradients_static()
    for phase in (first, last):
        executor.run(CALL, phase, None)
    assert executor.make_gradients_static()
    gradients = [parameter.grad for parameter in made.model.parameters()]
    executor.run(CALL, first, None)
    assert any(bool(gradient.any()) for gradient in gradients)
    executor.run(CALL, last, None)
    assert all(
        parameter.grad is gradient
        for parameter, gradient in zip(made.model.parameters(), gradients, strict=True)
    )
    assert not any(bool(gradient.any()) for gradient in gradients)


def test_a_body_that_raises_leaves_the_precision_as_it_was():
    def body(model, x):
        raise KeyError("mine")

    engine, _ = engine_of(body)
    with pytest.raises(KeyError, match="mine"):
        engine.run(CALL, AccumulationPhase(first=True, last=True), None)
    assert not torch.is_autocast_enabled("cpu")
