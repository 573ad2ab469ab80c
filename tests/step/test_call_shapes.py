"""Call shapes of `TrainStep` and `EvalStep`: keywords, mappings, dataclasses, tuples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from support.containers import CONTAINERS, Encoding, Fields
from torch import nn
from torch.nn import functional as F

import mezzo

ONE, TWO = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
TARGET = torch.zeros(3, 2)


class Two(nn.Module):
    """Takes two inputs by name or position."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, one, two, scale=1.0):
        return self.linear(one - two) * scale


class Whole(nn.Module):
    """Takes a container whole."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.taken = None

    def forward(self, batch):
        self.taken = batch
        first = batch["one"] if isinstance(batch, dict) else batch[0]
        return self.linear(first)


class WithLoss(Two):
    """Returns its output and loss as `make` arranges them."""

    def __init__(self, make=lambda loss, output: {"loss": loss, "output": output}):
        super().__init__()
        self.make = make

    def forward(self, one, two, scale=1.0):
        output = super().forward(one, two, scale)
        return self.make(output.square().mean(), output)


def make_step(model_class=Two, loss_fn=F.mse_loss, *args, **options):
    torch.manual_seed(0)
    model = model_class(*args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mezzo.TrainStep(model, loss_fn, optimizer, **{"dtype": "bfloat16"} | options)


def trained(*args, model_class=Two, loss_fn=F.mse_loss, **kwargs):
    """Return the losses of three calls with the same arguments."""
    step = make_step(model_class, loss_fn)
    return [float(step(*args, **kwargs)) for _ in range(3)]


EXPECTED = trained((ONE, TWO), TARGET)


# -- inputs of the model ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_container_is_unpacked_into_the_model(kind):
    assert trained(CONTAINERS[kind](one=ONE, two=TWO), TARGET) == EXPECTED


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_model_that_computes_its_loss_takes_every_container_alone(kind):
    losses = trained(CONTAINERS[kind](one=ONE, two=TWO), model_class=WithLoss, loss_fn=None)
    assert losses == trained(ONE, TWO, model_class=WithLoss, loss_fn=None)
    assert losses[2] < losses[0]


class Renamed(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class TwoBefore(NamedTuple):
    two: torch.Tensor
    one: torch.Tensor


def test_the_names_of_a_named_tuple_count_if_they_are_those_of_the_model():
    assert trained(Renamed(ONE, TWO), TARGET) == EXPECTED
    assert trained(TwoBefore(one=ONE, two=TWO), TARGET) == EXPECTED
    step = make_step()
    by_name = mezzo.EvalStep(step.model)(TwoBefore(one=ONE, two=TWO))
    assert torch.equal(by_name, mezzo.EvalStep(step.model)(ONE, TWO))


def test_keywords_go_to_the_model():
    by_keyword = trained(one=ONE, two=TWO, scale=2.0, loss_fn=lambda output: output.square().mean())
    assert by_keyword == trained((ONE, TWO, 2.0), loss_fn=lambda output: output.square().mean())


def test_keywords_may_follow_positional_inputs_and_a_target():
    assert trained(ONE, TARGET, two=TWO) == EXPECTED
    assert trained((ONE,), TARGET, two=TWO) == EXPECTED


def test_a_batch_may_be_nested():
    class Nested(Two):
        def forward(self, pair):
            return super().forward(pair.one["x"], pair.two[0])

    batch = {"pair": Fields(Encoding({"x": ONE}), [TWO])}
    assert trained(batch, TARGET, model_class=Nested) == EXPECTED


@pytest.mark.parametrize("batch", [{"one": ONE, "two": TWO}, (ONE, TWO)], ids=["dict", "tuple"])
def test_a_model_that_can_only_take_a_container_whole_gets_it(batch):
    step = make_step(Whole)
    step(batch, TARGET)
    assert type(step.model.taken) is type(batch)
    assert mezzo.EvalStep(step.model)(batch).shape == (3, 2)


def test_a_name_that_the_model_does_not_have_is_refused():
    class One(Two):
        def forward(self, one, two=TWO):
            return super().forward(one, two)

    batch = {"one": ONE, "index": torch.arange(3)}
    step = make_step(One)
    with pytest.raises(mezzo.PolicyError, match=r"One.forward\(\) has no parameter 'index'"):
        step(batch, TARGET)
    with pytest.raises(mezzo.PolicyError, match="Leave it out of the batch"):
        mezzo.EvalStep(step.model)(batch)
    assert step.updates == 0


def test_a_batch_in_a_tuple_is_passed_whole_whatever_its_names_are():
    class Named(Two):
        def forward(self, one):
            return super().forward(one["one"], one["two"])

    assert trained(({"one": ONE, "two": TWO},), TARGET, model_class=Named) == EXPECTED


def test_a_list_is_one_input():
    assert make_step(Whole)([ONE, TWO], TARGET).shape == ()


# -- the loss of a model ---------------------------------------------------------------------------


@dataclass
class Output:
    output: torch.Tensor
    loss: torch.Tensor


OUTPUTS = {
    "attribute": lambda loss, output: Output(output, loss),
    "dict": lambda loss, output: {"output": output, "loss": loss, "other": loss * 0},
    "mapping": lambda loss, output: Encoding({"output": output, "loss": loss}),
    "tensor": lambda loss, output: loss,
    "one element": lambda loss, output: loss.reshape(1),
    "only tensor": lambda loss, output: {"error": [loss], "note": "mine"},
    "loss first": lambda loss, output: (loss, output),
    "loss last": lambda loss, output: (output, loss),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_without_a_loss_function_the_loss_is_in_the_output_of_the_model(case):
    step = make_step(WithLoss, None, OUTPUTS[case])
    expected = make_step(Two, lambda output: output.square().mean())
    for _ in range(3):
        assert float(step(ONE, TWO)) == float(expected((ONE, TWO)))


NO_LOSS = {
    "logits": (lambda loss, output: {"logits": output, "loss": None}, "a dict with logits, loss"),
    "output": (lambda loss, output: output, r"a Tensor: \(3, 2\) bfloat16"),
    "several": (lambda loss, output: [loss, loss], r"a list: \(\) bfloat16, \(\) bfloat16"),
    "nothing": (lambda loss, output: None, "a NoneType: no tensors"),
}


@pytest.mark.parametrize("case", NO_LOSS)
def test_an_output_without_a_loss_is_described(case):
    make, described = NO_LOSS[case]
    with pytest.raises(mezzo.PolicyError, match=described) as raised:
        make_step(WithLoss, None, make)(ONE, TWO)
    assert "output.loss, output['loss'] or the only tensor with one element" in str(raised.value)
    assert "pass loss_fn=" in str(raised.value)


# -- wrong calls -----------------------------------------------------------------------------------

WRONG = {
    "nothing": ((), {}, "without inputs"),
    "no target": ((ONE,), {}, "mse_loss needs a target"),
    "keywords without a target": ((), {"one": ONE, "two": TWO}, "mse_loss needs a target"),
    "three positional": ((ONE, TWO, TARGET), {}, r"step\(\(a, b\), y\)"),
    "batch and keywords": (
        ({"one": ONE, "two": TWO}, TARGET),
        {"scale": 2.0},
        "a dict with 'one', 'two' and the keywords 'scale'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_raises_one_clear_error_and_trains_nothing(case):
    args, kwargs, message = WRONG[case]
    step = make_step()
    with pytest.raises(mezzo.PolicyError, match=message):
        step(*args, **kwargs)
    assert step.position == 0
    assert step.state_dict()["updates"] == 0


def test_a_target_without_a_loss_function_is_explained():
    with pytest.raises(mezzo.PolicyError, match="pass TrainStep"):
        make_step(nn.Linear, None, 4, 2)(ONE, TARGET)


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), F.mse_loss, lambda output, target: output.sum()])
def test_a_loss_function_that_needs_a_target_is_recognized(loss_fn):
    with pytest.raises(mezzo.PolicyError, match="needs a target"):
        make_step(loss_fn=loss_fn)((ONE, TWO))


@pytest.mark.parametrize(
    "loss_fn", [lambda output, target=None: output.sum(), lambda *outputs: outputs[0].sum()]
)
def test_a_target_may_be_optional(loss_fn):
    assert make_step(loss_fn=loss_fn)((ONE, TWO)).shape == ()


def test_a_missing_optimizer_is_refused_and_the_model_stays_plain():
    model = Two()
    with pytest.raises(mezzo.PolicyError, match="needs an optimizer"):
        mezzo.TrainStep(model, F.mse_loss, dtype="bfloat16")
    assert model(ONE, TWO).dtype is torch.float32


def test_an_optimizer_in_the_place_of_the_loss_function_is_refused():
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(mezzo.PolicyError, match=r"loss_fn=SGD .* TrainStep\(model, optimizer="):
        mezzo.TrainStep(model, optimizer)


# -- EvalStep --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONTAINERS)
def test_evaluation_takes_the_same_containers(kind):
    evaluate = mezzo.EvalStep(make_step().model)
    assert torch.equal(evaluate(CONTAINERS[kind](one=ONE, two=TWO)), evaluate(ONE, TWO))


def test_evaluation_takes_keywords():
    evaluate = mezzo.EvalStep(make_step().model)
    expected = evaluate(ONE, TWO) * 2
    assert torch.equal(evaluate(one=ONE, two=TWO, scale=2.0), expected)
    assert torch.equal(evaluate(ONE, two=TWO, scale=2.0), expected)
    with pytest.raises(mezzo.PolicyError, match="keywords 'scale'"):
        evaluate({"one": ONE, "two": TWO}, scale=2.0)


# -- repr ------------------------------------------------------------------------------------------


def test_the_repr_of_a_step_describes_it():
    step = make_step(dtype="float16")
    for x in (ONE, torch.full_like(ONE, float("inf")), ONE):
        step((x, TWO), TARGET)
    assert repr(step).splitlines() == [
        "TrainStep(Two, SGD):",
        "  precision: O1, float16",
        "  eager: the model is on cpu, which has no CUDA graphs",
        "  updates: 3, skipped: 1",
        f"  loss: {step.loss:.4g}, loss scale: {step.scale:g}, rate: 0.1",
    ]


def test_the_repr_of_an_eager_float32_step_describes_it():
    step = make_step(policy="O0", dtype="auto", capture=False)
    assert "  precision: O0, float32\n  eager: capture=False\n" in repr(step)


def test_the_repr_of_a_function_step_has_its_name():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @mezzo.train_step(models=model, optimizers=optimizer, policy="O2", dtype="bfloat16")
    def squares(x):
        return model(x).square().mean()

    squares(ONE)
    assert repr(squares).startswith("@train_step squares:\n  precision: O2, bfloat16\n  eager:")
    assert "updates: 1, skipped: 0" in repr(squares)


def test_the_repr_of_an_evaluation_describes_it():
    assert repr(mezzo.EvalStep(Two(), "O1", dtype="bfloat16")) == (
        "EvalStep(Two, O1, eager: the model is on cpu, which has no CUDA graphs)"
    )
    assert repr(mezzo.EvalStep(Two(), "O1", dtype="bfloat16", capture=False)) == (
        "EvalStep(Two, O1, eager: capture=False)"
    )
