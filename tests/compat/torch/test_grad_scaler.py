"""Checks of torch's GradScaler tests, run on `torch.amp.GradScaler` with mezzo installed."""

import copy
import inspect
import pickle
from itertools import chain

import pytest
import torch
from torch import nn

import mezzo

# -- construction ----------------------------------------------------------------------------------


def test_an_instance_belongs_to_both_classes():
    scaler = torch.amp.GradScaler("cpu")
    assert isinstance(scaler, mezzo.GradScaler)
    assert isinstance(scaler, torch.amp.grad_scaler.GradScaler)
    assert torch.GradScaler is torch.amp.GradScaler


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_the_default_warns_and_is_disabled():
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = torch.amp.GradScaler()
    assert not scaler.is_enabled()
    assert isinstance(scaler, torch.amp.GradScaler)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deprecated_names_warn(device):
    with pytest.warns(
        FutureWarning,
        match=(
            rf"`torch.{device}.amp.GradScaler\(args...\)` is deprecated. Please use"
            rf" `torch.amp.GradScaler\('{device}', args...\)` instead."
        ),
    ):
        getattr(torch, device).amp.GradScaler(enabled=False)


def test_deprecated_names_keep_their_argument_order():
    with pytest.warns(FutureWarning):
        scaler = torch.cpu.amp.GradScaler(4.0, 3.0, 0.25, 7, True)
    assert (
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    ) == (4.0, 3.0, 0.25, 7)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"growth_factor": 1.0}, "growth factor must be > 1.0"),
        ({"backoff_factor": 1.0}, "backoff factor must be < 1.0"),
    ],
)
def test_invalid_factors_are_assertion_errors(kwargs, message):
    with pytest.raises(AssertionError, match=message):
        torch.amp.GradScaler("cpu", **kwargs)


def test_a_disabled_scaler_accepts_invalid_factors_as_torch_does():
    assert not torch.amp.GradScaler("cpu", growth_factor=1.0, enabled=False).is_enabled()


def test_a_subclass_may_be_disabled_and_override_methods():
    class Mine(torch.amp.GradScaler):
        def __init__(self, enabled):
            super().__init__("cpu", enabled=enabled)
            self.steps = 0

        def step(self, optimizer, *args, **kwargs):
            self.steps += 1
            return super().step(optimizer, *args, **kwargs)

    for enabled in (True, False):
        scaler, weight = Mine(enabled), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.steps, weight.tolist()) == (1, [0.0, 0.0])


# -- scaling ---------------------------------------------------------------------------------------


def test_nested_outputs_keep_their_structure():
    scaler, four = torch.amp.GradScaler("cpu", init_scale=2.0), torch.tensor(4.0)
    outputs = (
        four.clone(),
        (four.clone(), four.clone()),
        [four.clone(), (four.clone(), four.clone())],
    )
    scaled = scaler.scale(outputs)
    assert scaled[0] == 8.0
    assert scaled[1][0] == 8.0
    assert scaled[2][1][1] == 8.0
    assert type(scaled[2]) is list
    assert scaler._scale.device == four.device


def test_scaling_a_number_is_a_value_error():
    with pytest.raises(ValueError, match="tensor"):
        torch.amp.GradScaler("cpu").scale(3.0)


def test_bfloat16_does_not_warn():
    # mezzo.GradScaler warns once that bfloat16 needs no scaling; torch's does not.
    loss = torch.ones(2, requires_grad=True).bfloat16().sum()
    torch.amp.GradScaler("cpu").scale(loss)


# -- iterations, compared with unscaled training ---------------------------------------------------


def make_models(optimizer=torch.optim.SGD, **kwargs):
    torch.manual_seed(0)
    control = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    scaling = copy.deepcopy(control)
    return (
        control,
        scaling,
        optimizer(control.parameters(), lr=1.0, **kwargs),
        optimizer(scaling.parameters(), lr=1.0, **kwargs),
    )


def make_data():
    torch.manual_seed(1)
    return [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(4)]


SKIPPED = 2
loss_of = nn.MSELoss()


def make_gradient_infinite(model):
    with torch.no_grad():
        model[1].weight.grad.fill_(float("inf"))


def check_against_control(
    run, *, grown, backed_off, atol=1e-7, optimizer=torch.optim.SGD, **kwargs
):
    for enabled in (True, False):
        control, scaling, control_optimizer, scaling_optimizer = make_models(optimizer, **kwargs)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=128.0, growth_factor=2.0, enabled=enabled, growth_interval=1
        )
        run(control, control_optimizer, scaler, scaled=False)
        scaler = run(scaling, scaling_optimizer, scaler, scaled=True) or scaler
        assert scaler.get_scale() == (128.0 * 2.0**grown * 0.5**backed_off if enabled else 1.0)
        for one, other in zip(control.parameters(), scaling.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, atol=atol, rtol=1e-5, equal_nan=True)
            torch.testing.assert_close(one, other, atol=atol, rtol=1e-5)
            state, scaled_state = control_optimizer.state[one], scaling_optimizer.state[other]
            for name in state:
                torch.testing.assert_close(state[name], scaled_state[name], atol=atol, rtol=1e-5)


def step_unless_skipped(optimizer, scaler, index):
    if not scaler.is_enabled() or index != SKIPPED:
        optimizer.step()


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "kwargs"),
    [
        (torch.optim.SGD, {"momentum": 0.1}),
        (torch.optim.SGD, {"foreach": True}),
        (torch.optim.SGD, {"fused": True}),
    ],
    ids=["sgd", "foreach", "fused"],
)
def test_scaled_training_with_autocast_equals_unscaled(optimizer, kwargs, pickled):
    def run(model, optimizer, scaler, *, scaled):
        for index, (x, y) in enumerate(make_data()):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                loss = loss_of(model(x), y)
            if not scaled:
                loss.backward()
                step_unless_skipped(optimizer, scaler, index)
                continue
            scaler.scale(loss).backward()
            if index == SKIPPED and scaler.is_enabled():
                make_gradient_infinite(model)
            scaler.step(optimizer)
            scaler.update()
            if pickled:
                scaler = pickle.loads(pickle.dumps(scaler))
        return scaler

    check_against_control(run, grown=3, backed_off=1, atol=2e-2, optimizer=optimizer, **kwargs)


@pytest.mark.parametrize("separately", [False, True])
def test_clipped_training_equals_unscaled(separately):
    def run(model, optimizer, scaler, *, scaled):
        for index, (x, y) in enumerate(make_data()):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            (scaler.scale(loss) if scaled else loss).backward()
            if scaled and index == SKIPPED and scaler.is_enabled() and separately:
                make_gradient_infinite(model)
            if scaled and separately:
                scaler.unscale_(optimizer)
            factor = 1.0 if separately or not scaled else scaler.get_scale()
            torch.nn.utils.clip_grad_norm_(
                model.parameters(), 0.2 * factor, error_if_nonfinite=False
            )
            if not scaled:
                step_unless_skipped(optimizer, scaler, index)
                continue
            if index == SKIPPED and scaler.is_enabled() and not separately:
                make_gradient_infinite(model)
            scaler.step(optimizer)
            scaler.update()

    check_against_control(run, grown=3, backed_off=1, atol=1e-5)


def test_a_gradient_penalty_equals_unscaled():
    def run(model, optimizer, scaler, *, scaled):
        for index, (x, y) in enumerate(make_data()):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            gradients = torch.autograd.grad(
                scaler.scale(loss) if scaled else loss, model.parameters(), create_graph=True
            )
            inverse = 1.0 / scaler.get_scale() if scaled else 1.0
            norm = sum((gradient * inverse).pow(2).sum() for gradient in gradients).sqrt()
            loss = loss + norm
            if not scaled:
                loss.backward()
                step_unless_skipped(optimizer, scaler, index)
                continue
            scaler.scale(loss).backward()
            if index == SKIPPED and scaler.is_enabled():
                make_gradient_infinite(model)
            scaler.step(optimizer)
            scaler.update()

    check_against_control(run, grown=3, backed_off=1)


def test_gradient_accumulation_equals_unscaled():
    def run(model, optimizer, scaler, *, scaled):
        for index, (x, y) in enumerate(make_data()):
            loss = loss_of(model(x), y) / 2
            (scaler.scale(loss) if scaled else loss).backward()
            if index % 2 == 0:
                continue
            if scaled:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            if index < 3:
                optimizer.zero_grad()

    check_against_control(run, grown=2, backed_off=0)


@pytest.mark.parametrize("enabled", [True, False])
def test_two_models_losses_and_optimizers_equal_unscaled(enabled):
    first = make_models()
    second = make_models()
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, enabled=enabled, growth_interval=1)

    def run(models, optimizers, *, scaled):
        for index, (x, y) in enumerate(make_data()):
            for optimizer in optimizers:
                optimizer.zero_grad()
            outputs = [model(x) for model in models]
            losses = [
                loss_of(0.3 * outputs[0] + 0.7 * outputs[1], y),
                loss_of(0.6 * outputs[0] - 0.4 * outputs[1], y),
            ]
            if not scaled:
                losses[0].backward(retain_graph=True)
                losses[1].backward()
                optimizers[0].step()
                step_unless_skipped(optimizers[1], scaler, index)
                continue
            scaler.scale(losses[0]).backward(retain_graph=True)
            scaler.scale(losses[1]).backward()
            if index == SKIPPED and scaler.is_enabled():
                make_gradient_infinite(models[1])
            scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()

    run((first[0], second[0]), (first[2], second[2]), scaled=False)
    run((first[1], second[1]), (first[3], second[3]), scaled=True)
    assert scaler.get_scale() == (128.0 * 2.0**3 * 0.5 if enabled else 1.0)
    for control, scaling in zip(
        chain(first[0].parameters(), second[0].parameters()),
        chain(first[1].parameters(), second[1].parameters()),
        strict=True,
    ):
        torch.testing.assert_close(control, scaling, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "kwargs", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str
)
@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_gradients_made_non_finite_after_the_check_are_applied(optimizer_class, kwargs):
    model, _, optimizer, _ = make_models(optimizer_class, **kwargs)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for x, y in make_data():
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x), y)).backward()
        scaler.unscale_(optimizer)
        for index, parameter in enumerate(model.parameters()):
            parameter.grad.copy_(torch.tensor(torch.inf if index % 2 else torch.nan))
        scaler.step(optimizer)
        scaler.update()
    assert all(not parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("separately", [False, True])
@pytest.mark.parametrize(
    ("optimizer_class", "kwargs"),
    [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.1}),
    ],
    ids=str,
)
def test_a_fused_step_equals_the_plain_one(optimizer_class, kwargs, separately):
    control, scaling, _, _ = make_models()
    plain, fused = (
        optimizer_class(control.parameters(), lr=0.1, **kwargs),
        optimizer_class(scaling.parameters(), lr=0.1, fused=True, **kwargs),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for x, y in make_data():
        for model, optimizer in ((control, plain), (scaling, fused)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(x), y)).backward()
            if separately:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    for one, other in zip(control.parameters(), scaling.parameters(), strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one.grad, other.grad)


def test_the_scale_does_not_overflow():
    model = nn.Linear(5, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", growth_interval=1, growth_factor=2.0**4, init_scale=1e38)
    loss = ((model(torch.randn(1, 5)) - 1e-30 * torch.randn(1, 1)) ** 2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler._scale.isfinite()


def test_the_scale_has_a_floor_unlike_torchs():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")

    def train():
        for _ in range(200):
            scaler.scale(weight.sum() * float("inf")).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="loss scale is at its floor"):
        train()
    assert scaler.get_scale() == 2.0**-24


# -- return values and errors ----------------------------------------------------------------------


def make_scaler(**kwargs):
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    return torch.amp.GradScaler("cpu", **kwargs), optimizer, weight


def test_step_returns_the_result_of_the_optimizer():
    scaler, _, weight = make_scaler()

    class ReturningSGD(torch.optim.SGD):
        def step(self, closure=None):
            return "stepped"

    optimizer = ReturningSGD([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()
    assert scaler.step(optimizer) == "stepped"
    scaler.update()
    weight.grad.fill_(float("nan"))
    assert scaler.step(optimizer) is None


def test_a_positional_closure_raises_unlike_in_torch():
    scaler, optimizer, weight = make_scaler()
    scaler.scale(weight.sum()).backward()
    with pytest.raises(RuntimeError, match="takes no closure"):
        scaler.step(optimizer, lambda: None)


def test_a_closure_is_a_runtime_error():
    scaler, optimizer, weight = make_scaler()
    scaler.scale(weight.sum()).backward()
    with pytest.raises(
        RuntimeError, match="Closure use is not currently supported if GradScaler is enabled"
    ):
        scaler.step(optimizer, closure=lambda: None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("unscale_", "Attempted unscale_"),
        ("step", "Attempted step"),
        ("update", "Attempted update"),
    ],
)
def test_calls_before_scale_are_assertion_errors(call, message):
    scaler, optimizer, _ = make_scaler()
    with pytest.raises(AssertionError, match=f"{message} but _scale is None"):
        getattr(scaler, call)(*(() if call == "update" else (optimizer,)))


def test_repeated_unscale_and_step_are_runtime_errors():
    scaler, optimizer, weight = make_scaler()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(
        RuntimeError,
        match=r"unscale_\(\) has already been called on this optimizer since the last update\(\)",
    ):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(
        RuntimeError, match=r"step\(\) has already been called since the last update\(\)"
    ):
        scaler.step(optimizer)


def test_a_step_without_gradients_is_an_assertion_error():
    scaler, optimizer, weight = make_scaler()
    scaler.scale(weight.sum())
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)


def test_an_update_without_a_step_is_an_assertion_error():
    scaler, _, weight = make_scaler()
    scaler.scale(weight.sum())
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()


@pytest.mark.parametrize(
    "new", [torch.ones(2), torch.ones(1, requires_grad=True)], ids=["two", "with-gradient"]
)
def test_an_invalid_new_scale_is_an_assertion_error(new):
    scaler, _, weight = make_scaler()
    scaler.scale(weight.sum())
    with pytest.raises(AssertionError, match="new_scale should be a float"):
        scaler.update(new)


@pytest.mark.parametrize("new", [8.0, torch.tensor([8.0])], ids=["float", "tensor"])
def test_update_sets_a_new_scale(new):
    scaler, _, weight = make_scaler()
    scaler.scale(weight.sum())
    scaler.update(new)
    assert scaler.get_scale() == 8.0


def test_pickling_within_an_iteration_is_an_assertion_error():
    scaler, optimizer, weight = make_scaler()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(
        AssertionError, match="may only be pickled at the beginning of an iteration"
    ):
        pickle.dumps(scaler)


def test_the_empty_state_of_a_disabled_scaler_is_rejected():
    with pytest.raises(
        RuntimeError,
        match=(
            "The source state dict is empty, possibly because it was saved from a disabled instance"
        ),
    ):
        torch.amp.GradScaler("cpu").load_state_dict(
            torch.amp.GradScaler("cpu", enabled=False).state_dict()
        )


# -- optimizers that support scaling ---------------------------------------------------------------


class SupportsScaling(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        self._step_supports_amp_scaling = True


class TakesTheScaler(SupportsScaling):
    def step(self, closure=None, *, grad_scaler=None):
        assert isinstance(grad_scaler, torch.amp.GradScaler)
        assert not hasattr(self, "grad_scale")
        assert not hasattr(self, "found_inf")


class TakesTensors(SupportsScaling):
    def step(self, closure=None):
        assert isinstance(self.grad_scale, torch.Tensor)
        assert isinstance(self.found_inf, torch.Tensor)


def test_optimizers_receive_scaler_or_tensors_as_from_torch():
    model = nn.Linear(4, 1)
    with_scaler, with_tensors = TakesTheScaler(model.parameters()), TakesTensors(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(4, 4)).mean()
    scaler.scale(loss).backward()
    with pytest.warns(FutureWarning):
        scaler.step(with_scaler)
    scaler.step(with_tensors)
    scaler.update()
    assert not hasattr(with_tensors, "grad_scale")


def test_signatures_equal_those_of_torch():
    for cls, torch_class in (
        (torch.amp.GradScaler, torch.amp.grad_scaler.GradScaler),
        (torch.autocast, torch.amp.autocast_mode.autocast),
    ):
        actual, expected = inspect.signature(cls), inspect.signature(torch_class)
        assert [(p.name, p.default, p.kind) for p in actual.parameters.values()] == [
            (p.name, p.default, p.kind) for p in expected.parameters.values()
        ]


def test_subclasses_of_torchs_scaler_are_instances():
    class Sharded(torch.amp.grad_scaler.GradScaler):
        pass

    class Subclass(torch.amp.GradScaler):
        pass

    assert isinstance(Sharded("cpu"), torch.amp.GradScaler)
    assert issubclass(Sharded, torch.amp.GradScaler)
    assert not isinstance(Sharded("cpu"), torch.cpu.amp.GradScaler)
    assert not isinstance(Sharded("cpu"), Subclass)
    assert isinstance(Subclass("cpu"), torch.amp.GradScaler)
    assert not isinstance(3, torch.amp.GradScaler)
