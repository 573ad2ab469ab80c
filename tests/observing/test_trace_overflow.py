"""`trace_overflow`: what is named for steps and models of all kinds, and that nothing changes."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo

# ruff: noqa: NPY002 - the generator whose state is kept
FLOAT16 = {"dtype": "float16"}


class Energy(nn.Module):
    def forward(self, h):
        return (h * h).sum(-1, keepdim=True) * 1e-6


LINE = f"test_trace_overflow.py:{Energy.forward.__code__.co_firstlineno + 1}"


def energetic():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), Energy())
    nn.init.constant_(model[2].bias, 1000.0)
    return model


def batch():
    torch.manual_seed(1)
    return torch.randn(4, 8), torch.randn(4, 1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train_step(model, **kwargs):
    return mezzo.TrainStep(model, F.mse_loss, sgd(model), **(FLOAT16 | kwargs))


def function_step(model):
    @mezzo.train_step(models=model, optimizers=sgd(model), **FLOAT16)
    def step(x, y):
        return F.mse_loss(model(x), y)

    return step


def backward_in_body(model):
    @mezzo.train_step(models=model, optimizers=sgd(model), **FLOAT16)
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return {"seen": 1}

    return step


def update_in_body(model):
    optimizer = sgd(model)

    @mezzo.train_step(models=model, optimizers=optimizer, **FLOAT16)
    def step(update, x, y):
        loss = F.mse_loss(model(x), y)
        update(loss, optimizer)
        return loss

    return step


def decorated(model):
    mezzo.decorate(model, sgd(model), "O2", **FLOAT16)
    return model


TARGETS = {
    "TrainStep at O1": train_step,
    "TrainStep at O2": lambda model: train_step(model, policy="O2"),
    "train_step": function_step,
    "train_step that calls backward": backward_in_body,
    "train_step with update": update_in_body,
    "decorated model": decorated,
    "compiled model": lambda model: torch.compile(model, backend="eager"),
    "plain model": lambda model: model,
}
MODELS = {"decorated model", "compiled model", "plain model"}


def trace(kind, target):
    arguments = (F.mse_loss,) if kind in MODELS else ()
    return mezzo.trace_overflow(target, batch(), *arguments, **(FLOAT16 if kind in MODELS else {}))


@pytest.mark.parametrize("kind", TARGETS)
def test_the_op_its_module_line_and_cure_are_named_for(kind):
    found = trace(kind, TARGETS[kind](energetic()))
    assert found
    assert (found.op, found.module, found.line) == ("mul", "3", LINE)
    assert (found.direction, found.precision, found.verified) == ("forward", True, True)
    assert found.cure == "full={'mul'}"
    assert [(one.dtype, one.shape) for one in found.inputs] == [("float16", (4, 16))] * 2
    assert found.inputs[0].largest == pytest.approx(1000, rel=0.01)


def test_the_cure_can_be_passed_to_a_step_which_then_trains():
    found = trace("TrainStep at O1", train_step(energetic()))
    step = train_step(energetic(), policy=found.policy)
    assert torch.isfinite(step(*batch()))
    assert not step.skipped
    assert not mezzo.trace_overflow(step, batch())


def test_the_paragraph_says_what_where_and_what_to_pass():
    text = str(trace("TrainStep at O1", train_step(energetic())))
    assert text.startswith(f"mul ({LINE}, in 3) left the range of float16: 1.0e+06. Its inputs: ")
    assert "float16 [4, 16] from" in text
    assert text.endswith("Pass full={'mul'} (verified: run with it, the batch does not fail).")


def test_a_batch_without_a_fault_is_reported_as_such():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    found = mezzo.trace_overflow(model, batch(), F.mse_loss, **FLOAT16)
    assert not found
    assert found.direction == "none"
    assert str(found).startswith("No op of this batch made a non-finite value or lost its digits")


# -- nothing changes -------------------------------------------------------------------------------


def snapshot(step):
    models, scaler = step.models, step.scaler
    tensors = [one for model in models for one in (*model.parameters(), *model.buffers())]
    states = [
        value
        for optimizer in step.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    gradients = [one.grad for one in tensors]
    return {
        "bits": [one.detach().clone() for one in (*tensors, *states)],
        "addresses": [one.data_ptr() for one in (*tensors, *states)],
        "gradients": [one if one is None else one.clone() for one in gradients],
        "scaler": None if scaler is None else scaler.state_dict(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "dicts": [dict(vars(one)) for model in models for one in model.modules()],
        "hooks": [len(one._forward_hooks) for model in models for one in model.modules()],
    }


def assert_same(before, after):
    for name in ("bits", "gradients"):
        for one, other in zip(before[name], after[name], strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
    assert torch.equal(before["torch"], after["torch"])
    for name in ("addresses", "scaler", "python", "numpy", "hooks"):
        assert before[name] == after[name], name
    for one, other in zip(before["dicts"], after["dicts"], strict=True):
        assert one.keys() == other.keys()
        assert all(one[key] is other[key] for key in one)


class Noisy(nn.Module):
    def forward(self, h):
        if not torch.is_grad_enabled():
            return h
        return F.dropout(h + random.random() + float(np.random.rand()), 0.1)


def noisy():
    model = energetic()
    return nn.Sequential(*model[:3], Noisy(), nn.Linear(16, 1))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_model_optimizer_scaler_and_random_states_are_as_before(level):
    step = train_step(noisy(), policy=level)
    for _ in range(2):
        step(*batch())
    x, y = batch()
    before = snapshot(step)
    mezzo.trace_overflow(step, (x, y))
    assert_same(before, snapshot(step))
    twin = train_step(noisy(), policy=level)
    for _ in range(2):
        twin(*batch())
    torch.manual_seed(2), random.seed(2), np.random.seed(2)
    expected = twin(*batch())
    torch.manual_seed(2), random.seed(2), np.random.seed(2)
    assert torch.equal(step(*batch()), expected)


def test_all_states_are_as_before_when_the_model_raises():
    model = noisy()
    step = train_step(model)
    step(*batch())
    calls = []

    def fail(module, args):
        calls.append(torch.rand(1) + random.random())
        raise ValueError("broken")

    handle = model[3].register_forward_pre_hook(fail)
    x, y = batch()
    before = snapshot(step)
    with pytest.raises(ValueError, match="broken"):
        mezzo.trace_overflow(step, (x, y))
    assert calls
    assert_same(before, snapshot(step))
    handle.remove()


class Checked(nn.Module):
    """A model that checks its values, as `torch.distributions` and detection losses do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        rates = F.softplus(self.layer(x))
        if not rates.isfinite().all():
            raise ValueError("rates must be finite")
        return rates


def test_what_makes_a_model_raise_that_checks_its_values_is_named():
    torch.manual_seed(0)
    model, (x, y) = Checked(), batch()
    found = mezzo.trace_overflow(model, (1e6 * x, y), F.mse_loss, **FLOAT16)
    assert (found.op, found.module) == ("linear", "layer")
    nn.init.constant_(model.layer.weight, float("inf"))
    found = mezzo.trace_overflow(model, (x, y), F.mse_loss, **FLOAT16)
    assert (found.op, found.direction, found.precision) == ("layer.weight", "parameters", False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_gradient_that_cancels_to_zero_is_no_underflow(dtype):
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    # The gradient of the bias is their sum: small, exactly, and zero if each is rounded.
    weights = torch.tensor([[1.0], [-1.00003]])
    x = torch.ones(2, 4)
    found = mezzo.trace_overflow(model, (x, weights), lambda y, w: (y * w).sum(), dtype=dtype)
    assert not found


def test_the_batch_is_not_changed_by_a_model_that_works_in_place():
    class InPlace(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2.0))

    x = torch.randn(4, 8)
    before = x.clone()
    mezzo.trace_overflow(InPlace(8, 1), (x, torch.zeros(4, 1)), F.mse_loss, **FLOAT16)
    assert torch.equal(x, before)


# -- where it fails --------------------------------------------------------------------------------


def test_a_weight_beyond_float16_is_named_as_the_parameter():
    model = nn.Linear(8, 1)
    nn.init.constant_(model.weight, 1e5)
    found = mezzo.trace_overflow(train_step(model, policy="O2"), batch())
    assert (found.direction, found.op, found.precision) == ("parameters", "weight", True)
    assert (found.cure, found.verified) == ("dtype='bfloat16'", True)


def test_nested_inputs_are_named_by_their_path():
    class Two(nn.Linear):
        def forward(self, image, extra):
            return super().forward(image) + extra["bias"]

    x, y = batch()
    bias = torch.zeros(4, 1)
    bias[2, 0] = float("nan")
    inputs = {"image": x, "extra": {"bias": bias}}
    found = mezzo.trace_overflow(Two(8, 1), (inputs, y), F.mse_loss, **FLOAT16)
    assert (found.direction, found.op) == ("data", "argument 0['extra']['bias']")
    assert str(found).startswith("argument 0['extra']['bias'] has NaN at index [2, 0]")
    assert str(found).endswith("float32 fails too: precision is not the cause.")


def test_a_mask_of_infinities_is_no_fault():
    def loss(outputs, y, mask):
        return (outputs.softmax(-1) * (outputs + mask).softmax(-1)).sum() + y.mean()

    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    x, y = batch()
    model = nn.Linear(8, 4)
    assert not mezzo.trace_overflow(model, (x, (y, mask)), loss, **FLOAT16)


def test_a_loss_scale_that_is_too_high_is_reported_as_such():
    step = train_step(nn.Linear(8, 1), scaler=mezzo.GradScaler(init_scale=2.0**15))
    step(*batch())
    x, y = batch()
    found = mezzo.trace_overflow(step, (x, y * 300))
    assert found.direction == "backward"
    assert f"at the loss scale {step.scale:g}, and not at " in found.reason
    assert "a dynamic scaler skips such a step and lowers the scale" in str(found)
    assert found.cure.startswith("scaler=mezzo.GradScaler(init_scale=")


def test_the_calls_of_the_step_are_counted():
    step = train_step(energetic(), accumulate=2)
    for _ in range(3):
        step(*batch())
    assert mezzo.trace_overflow(step, batch()).step == 3
    model = energetic()
    assert mezzo.trace_overflow(model, batch(), F.mse_loss, step=7, **FLOAT16).step == 7


def adversaries(factor=1.0):
    """Two models of one class, each with an optimizer; the second loss is that of the first."""
    torch.manual_seed(0)
    generator, critic = (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in "ab")
    models, optimizers = (generator, critic), (sgd(generator), sgd(critic))

    @mezzo.train_step(models=models, optimizers=optimizers, policy="O2", **FLOAT16)
    def step(update, x):
        fake = generator(x)
        update(F.softplus(critic(fake.detach()).float()).mean(), optimizers[1])
        loss = (critic(fake).float() * factor).sum()
        update(loss, optimizers[0])
        return loss

    return step


def test_several_models_are_named_as_in_the_records_of_a_run():
    step = adversaries()
    with torch.no_grad():
        step.models[0][2].bias.fill_(torch.inf)
    with mezzo.observe(step) as run:
        step(batch()[0])
    found = mezzo.trace_overflow(step, batch()[0])
    assert run.skips[0].parameter == "models[1].0.weight"
    assert (found.op, found.module) == ("models[0].2.bias", "models[0].2")
    assert found.inputs[0].shape == (8,)


def test_the_backward_pass_of_a_second_optimizer_is_traced():
    step = adversaries(factor=1e9)
    step(batch()[0])
    assert step.skipped
    found = mezzo.trace_overflow(step, batch()[0])
    assert (found.op, found.direction) == ("float", "backward")
    assert found.line.startswith("test_trace_overflow.py:")


def test_a_scale_is_searched_with_which_all_losses_have_finite_gradients():
    step = adversaries(factor=30.0)
    at_65536 = mezzo.trace_overflow(step, batch()[0], scaler=65536.0)
    assert (at_65536.direction, at_65536.verified) == ("backward", True)
    assert at_65536.cure.startswith("scaler=mezzo.GradScaler(init_scale=")
    assert not mezzo.trace_overflow(step, batch()[0])


def test_a_model_without_a_loss_is_run_forward():
    found = mezzo.trace_overflow(energetic(), batch()[0], **FLOAT16)
    assert (found.op, found.module) == ("mul", "3")


def test_a_mapping_is_passed_by_keywords():
    model = energetic()

    @mezzo.train_step(models=model, optimizers=sgd(model), **FLOAT16)
    def step(inputs, target):
        return F.mse_loss(model(inputs), target)

    x, y = batch()
    assert mezzo.trace_overflow(step, {"inputs": x, "target": y}).op == "mul"


def test_the_region_of_the_caller_does_not_matter():
    with mezzo.autocast("cpu", dtype="float16", full={"add"}):
        found = trace("plain model", energetic())
    assert (found.op, found.precision, found.verified) == ("mul", True, True)


def test_activations_that_a_model_keeps_are_no_obstacle():
    class Keeps(nn.Linear):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    model = Keeps(8, 1)
    model(batch()[0])
    assert not mezzo.trace_overflow(model, batch(), F.mse_loss, **FLOAT16)


def test_the_record_can_be_written_as_json():
    found = trace("plain model", energetic())
    read = json.loads(json.dumps(found.to_dict()))
    assert read["direction"] == "forward"
    assert read["policy"]["full"] == ["mul"]


@pytest.mark.parametrize(
    ("target", "batch_", "loss_fn", "message"),
    [
        ("model", None, None, "Got str. Pass a mezzo.TrainStep"),
        (nn.Linear(8, 1), (1, 2, 3), F.mse_loss, r"the batch is \(inputs, target\), got 3 values"),
    ],
)
def test_what_cannot_be_traced_raises(target, batch_, loss_fn, message):
    with pytest.raises(mezzo.PolicyError, match=message):
        mezzo.trace_overflow(target, batch_, loss_fn)


def test_a_step_has_its_own_loss_function():
    with pytest.raises(mezzo.PolicyError, match="Leave loss_fn out"):
        mezzo.trace_overflow(train_step(energetic()), batch(), F.mse_loss)


def test_sparse_gradients_are_no_obstacle():
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Flatten(), nn.Linear(16, 1))
    data = torch.randint(10, (4, 2)), torch.randn(4, 1)
    assert not mezzo.trace_overflow(model, data, F.mse_loss, **FLOAT16)


def test_a_model_without_trained_parameters_is_run_forward():
    model = energetic().requires_grad_(False)
    assert mezzo.trace_overflow(model, batch(), F.mse_loss, **FLOAT16).op == "mul"


def test_an_infinity_from_rounded_inputs_names_what_rounded_and_no_cure_that_fails():
    class Logarithms(nn.Module):
        def forward(self, h):
            return h[0] * (torch.tensor([1.0, 1e-9]) + 0.0 * h[0, :2]).half().log()[1]

    model = nn.Sequential(nn.Linear(4, 4), Logarithms())
    found = mezzo.trace_overflow(model, torch.ones(2, 4), dtype="float16")
    assert found.op == "log"
    assert found.reason.endswith("exact result is 2.1e+01, because half rounded to 16 bits")
    assert "Pass " not in str(found)
    assert f"With {found.cure} the batch still fails." in str(found)
