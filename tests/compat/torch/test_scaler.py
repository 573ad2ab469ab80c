"""What torch's own suite asks of GradScaler, asked of `torch.amp.GradScaler` while mezzo is installed."""

import copy
import inspect
import pickle
from itertools import chain

import pytest
import torch
from torch import nn

import mezzo

# -- making one ------------------------------------------------------------------------------------


def test_an_instance_is_one_of_both_classes():
    scaler = torch.amp.GradScaler("cpu")
    assert isinstance(scaler, mezzo.GradScaler)
    assert isinstance(scaler, torch.amp.grad_scaler.GradScaler)
    assert torch.GradScaler is torch.amp.GradScaler


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_default_device_is_cuda_and_without_one_it_warns_and_is_off():
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = torch.amp.GradScaler()
    assert not scaler.is_enabled()
    assert isinstance(scaler, torch.amp.GradScaler)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_old_names_warn_that_they_are_old(device):
    with pytest.warns(
        FutureWarning,
        match=(
            rf"`torch.{device}.amp.GradScaler\(args...\)` is deprecated. Please use"
            rf" `torch.amp.GradScaler\('{device}', args...\)` instead."
        ),
    ):
        getattr(torch, device).amp.GradScaler(enabled=False)


def test_old_arguments_come_in_the_old_order():
    with pytest.warns(FutureWarning):
        scaler = torch.cpu.amp.GradScaler(4.0, 3.0, 0.25, 7, True)
    assert (
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    ) == (4.0, 3.0, 0.25, 7)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"growth_factor": 1.0}, "growth factor must be > 1.0"),
        ({"backoff_factor": 1.0}, "backoff factor must be < 1.0"),
    ],
)
def test_factors_that_make_no_sense_are_assertion_errors(words, said):
    with pytest.raises(AssertionError, match=said):
        torch.amp.GradScaler("cpu", **words)


def test_a_disabled_one_takes_them_as_torch_does():
    assert not torch.amp.GradScaler("cpu", growth_factor=1.0, enabled=False).is_enabled()


def test_a_subclass_may_be_disabled_and_sees_its_own_methods():
    class Mine(torch.amp.GradScaler):
        def __init__(self, on):
            super().__init__("cpu", enabled=on)
            self.steps = 0

        def step(self, optimizer, *args, **kwargs):
            self.steps += 1
            return super().step(optimizer, *args, **kwargs)

    for on in (True, False):
        scaler, weight = Mine(on), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.steps, weight.tolist()) == (1, [0.0, 0.0])


# -- scaling ---------------------------------------------------------------------------------------


def test_nested_outputs_keep_their_shape():
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


def test_what_is_no_tensor_is_a_value_error():
    with pytest.raises(ValueError, match="tensor"):
        torch.amp.GradScaler("cpu").scale(3.0)


def test_bfloat16_is_not_commented_on():
    # mezzo's own scaler says once that it is needless; code that was not written for it hears
    # nothing new.
    loss = torch.ones(2, requires_grad=True).bfloat16().sum()
    torch.amp.GradScaler("cpu").scale(loss)


# -- whole iterations, against the same without scaling --------------------------------------------


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


def spoil(model):
    with torch.no_grad():
        model[1].weight.grad.fill_(float("inf"))


def check_against_control(run, *, good, bad, atol=1e-7, optimizer=torch.optim.SGD, **kwargs):
    for enabled in (True, False):
        control, scaling, of_control, of_scaling = make_models(optimizer, **kwargs)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=128.0, growth_factor=2.0, enabled=enabled, growth_interval=1
        )
        run(control, of_control, scaler, scaled=False)
        scaler = run(scaling, of_scaling, scaler, scaled=True) or scaler
        assert scaler.get_scale() == (128.0 * 2.0**good * 0.5**bad if enabled else 1.0)
        for one, other in zip(control.parameters(), scaling.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, atol=atol, rtol=1e-5, equal_nan=True)
            torch.testing.assert_close(one, other, atol=atol, rtol=1e-5)
            state, scaled_state = of_control.state[one], of_scaling.state[other]
            for name in state:
                torch.testing.assert_close(state[name], scaled_state[name], atol=atol, rtol=1e-5)


def plain(model, optimizer, scaler, place):
    if not scaler.is_enabled() or place != SKIPPED:
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
def test_scaling_with_autocast(optimizer, kwargs, pickled):
    def run(model, optimizer, scaler, *, scaled):
        for place, (x, y) in enumerate(make_data()):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                loss = loss_of(model(x), y)
            if not scaled:
                loss.backward()
                plain(model, optimizer, scaler, place)
                continue
            scaler.scale(loss).backward()
            if place == SKIPPED and scaler.is_enabled():
                spoil(model)
            scaler.step(optimizer)
            scaler.update()
            if pickled:
                scaler = pickle.loads(pickle.dumps(scaler))
        return scaler

    check_against_control(run, good=3, bad=1, atol=2e-2, optimizer=optimizer, **kwargs)


@pytest.mark.parametrize("separately", [False, True])
def test_clipping(separately):
    def run(model, optimizer, scaler, *, scaled):
        for place, (x, y) in enumerate(make_data()):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            (scaler.scale(loss) if scaled else loss).backward()
            if scaled and place == SKIPPED and scaler.is_enabled() and separately:
                spoil(model)
            if scaled and separately:
                scaler.unscale_(optimizer)
            factor = 1.0 if separately or not scaled else scaler.get_scale()
            torch.nn.utils.clip_grad_norm_(
                model.parameters(), 0.2 * factor, error_if_nonfinite=False
            )
            if not scaled:
                plain(model, optimizer, scaler, place)
                continue
            if place == SKIPPED and scaler.is_enabled() and not separately:
                spoil(model)
            scaler.step(optimizer)
            scaler.update()

    check_against_control(run, good=3, bad=1, atol=1e-5)


def test_a_penalty_on_gradients():
    def run(model, optimizer, scaler, *, scaled):
        for place, (x, y) in enumerate(make_data()):
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
                plain(model, optimizer, scaler, place)
                continue
            scaler.scale(loss).backward()
            if place == SKIPPED and scaler.is_enabled():
                spoil(model)
            scaler.step(optimizer)
            scaler.update()

    check_against_control(run, good=3, bad=1)


def test_accumulation():
    def run(model, optimizer, scaler, *, scaled):
        for place, (x, y) in enumerate(make_data()):
            loss = loss_of(model(x), y) / 2
            (scaler.scale(loss) if scaled else loss).backward()
            if place % 2 == 0:
                continue
            if scaled:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            if place < 3:
                optimizer.zero_grad()

    check_against_control(run, good=2, bad=0)


@pytest.mark.parametrize("enabled", [True, False])
def test_two_models_two_losses_two_optimizers(enabled):
    one = make_models()
    two = make_models()
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, enabled=enabled, growth_interval=1)

    def run(models, optimizers, *, scaled):
        for place, (x, y) in enumerate(make_data()):
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
                plain(models[1], optimizers[1], scaler, place)
                continue
            scaler.scale(losses[0]).backward(retain_graph=True)
            scaler.scale(losses[1]).backward()
            if place == SKIPPED and scaler.is_enabled():
                spoil(models[1])
            scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()

    run((one[0], two[0]), (one[2], two[2]), scaled=False)
    run((one[1], two[1]), (one[3], two[3]), scaled=True)
    assert scaler.get_scale() == (128.0 * 2.0**3 * 0.5 if enabled else 1.0)
    for control, scaling in zip(
        chain(one[0].parameters(), two[0].parameters()),
        chain(one[1].parameters(), two[1].parameters()),
        strict=True,
    ):
        torch.testing.assert_close(control, scaling, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "kwargs", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str
)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_gradients_spoiled_after_the_check_spoil_the_parameters(kind, kwargs):
    model, _, optimizer, _ = make_models(kind, **kwargs)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for x, y in make_data():
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x), y)).backward()
        scaler.unscale_(optimizer)
        for place, parameter in enumerate(model.parameters()):
            parameter.grad.copy_(torch.tensor(torch.inf if place % 2 else torch.nan))
        scaler.step(optimizer)
        scaler.update()
    assert all(not parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("separately", [False, True])
@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.1}),
    ],
    ids=str,
)
def test_a_fused_step_does_what_the_plain_one_does(kind, kwargs, separately):
    control, scaling, _, _ = make_models()
    plainly, fused = (
        kind(control.parameters(), lr=0.1, **kwargs),
        kind(scaling.parameters(), lr=0.1, fused=True, **kwargs),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for x, y in make_data():
        for model, optimizer in ((control, plainly), (scaling, fused)):
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


def test_the_scale_does_not_collapse_as_torchs_does():
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


# -- what comes back, and what is refused ----------------------------------------------------------


def ready(**kwargs):
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    return torch.amp.GradScaler("cpu", **kwargs), optimizer, weight


def test_a_step_gives_what_the_optimizer_gives():
    scaler, _, weight = ready()

    class Saying(torch.optim.SGD):
        def step(self, closure=None):
            return "stepped"

    optimizer = Saying([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()
    assert scaler.step(optimizer) == "stepped"
    scaler.update()
    weight.grad.fill_(float("nan"))
    assert scaler.step(optimizer) is None


def test_a_closure_by_position_which_torch_lets_through_is_refused():
    scaler, optimizer, weight = ready()
    scaler.scale(weight.sum()).backward()
    with pytest.raises(RuntimeError, match="takes no closure"):
        scaler.step(optimizer, lambda: None)


def test_a_closure_is_a_runtime_error():
    scaler, optimizer, weight = ready()
    scaler.scale(weight.sum()).backward()
    with pytest.raises(
        RuntimeError, match="Closure use is not currently supported if GradScaler is enabled"
    ):
        scaler.step(optimizer, closure=lambda: None)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("unscale_", "Attempted unscale_"),
        ("step", "Attempted step"),
        ("update", "Attempted update"),
    ],
)
def test_before_a_loss_was_scaled_it_is_an_assertion(call, said):
    scaler, optimizer, _ = ready()
    with pytest.raises(AssertionError, match=f"{said} but _scale is None"):
        getattr(scaler, call)(*(() if call == "update" else (optimizer,)))


def test_unscaling_twice_and_after_a_step_and_stepping_twice_are_runtime_errors():
    scaler, optimizer, weight = ready()
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


def test_a_step_without_gradients_is_an_assertion():
    scaler, optimizer, weight = ready()
    scaler.scale(weight.sum())
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)


def test_an_update_without_a_step_is_an_assertion():
    scaler, _, weight = ready()
    scaler.scale(weight.sum())
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()


@pytest.mark.parametrize(
    "new", [torch.ones(2), torch.ones(1, requires_grad=True)], ids=["two", "with-gradient"]
)
def test_a_new_scale_that_is_no_number_is_an_assertion(new):
    scaler, _, weight = ready()
    scaler.scale(weight.sum())
    with pytest.raises(AssertionError, match="new_scale should be a float"):
        scaler.update(new)


@pytest.mark.parametrize("new", [8.0, torch.tensor([8.0])], ids=["float", "tensor"])
def test_a_new_scale(new):
    scaler, _, weight = ready()
    scaler.scale(weight.sum())
    scaler.update(new)
    assert scaler.get_scale() == 8.0


def test_a_scaler_in_the_middle_of_an_iteration_is_not_pickled():
    scaler, optimizer, weight = ready()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(
        AssertionError, match="may only be pickled at the beginning of an iteration"
    ):
        pickle.dumps(scaler)


def test_the_empty_state_of_a_disabled_scaler_is_refused():
    with pytest.raises(
        RuntimeError,
        match=(
            "The source state dict is empty, possibly because it was saved from a disabled instance"
        ),
    ):
        torch.amp.GradScaler("cpu").load_state_dict(
            torch.amp.GradScaler("cpu", enabled=False).state_dict()
        )


# -- saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [True, False])
def test_a_state_is_taken_over(made):
    one = torch.amp.GradScaler(
        "cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2
    )
    other = torch.amp.GradScaler(
        "cpu", init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1
    )
    other._init_growth_tracker = 7
    if made:
        other.scale(torch.full((1,), 4.0))
        assert isinstance(other._scale, torch.FloatTensor)
    other.load_state_dict(one.state_dict())
    assert (
        other.get_scale(),
        other.get_growth_factor(),
        other.get_backoff_factor(),
        other.get_growth_interval(),
    ) == (3.0, 4.0, 0.5, 2)
    assert other._init_growth_tracker == 0


def test_a_state_goes_to_torchs_own_scaler_and_back():
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=5)
    own = torch.amp.grad_scaler.GradScaler("cpu")
    own.load_state_dict(scaler.state_dict())
    assert own.state_dict() == scaler.state_dict()
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(own.state_dict())
    assert again.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_is_as_it_was(made, copied):
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2
    )
    scaler.note = "mine"
    if made:
        scaler.scale(torch.tensor([4.0]))
    again = copied(scaler)
    assert type(again) is torch.amp.GradScaler
    assert again.is_enabled()
    assert (
        again.get_scale(),
        again.get_growth_factor(),
        again.get_backoff_factor(),
        again.get_growth_interval(),
    ) == (3.0, 4.0, 0.5, 2)
    assert (again._init_growth_tracker, again.note) == (0, "mine")
    assert (
        again._per_optimizer_states["fdsa"] == torch.amp.grad_scaler._refresh_per_optimizer_state()
    )


def test_a_disabled_scaler_is_pickled():
    again = pickle.loads(pickle.dumps(torch.amp.GradScaler("cpu", enabled=False)))
    assert (again.is_enabled(), again.get_scale(), again.state_dict()) == (False, 1.0, {})


# -- optimizers that know of scaling ---------------------------------------------------------------


class Knowing(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        self._step_supports_amp_scaling = True


class TakesTheScaler(Knowing):
    def step(self, closure=None, *, grad_scaler=None):
        assert isinstance(grad_scaler, torch.amp.GradScaler)
        assert not hasattr(self, "grad_scale")
        assert not hasattr(self, "found_inf")


class TakesTensors(Knowing):
    def step(self, closure=None):
        assert isinstance(self.grad_scale, torch.Tensor)
        assert isinstance(self.found_inf, torch.Tensor)


def test_optimizers_are_told_as_torch_tells_them():
    model = nn.Linear(4, 1)
    one, two = TakesTheScaler(model.parameters()), TakesTensors(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(4, 4)).mean()
    scaler.scale(loss).backward()
    with pytest.warns(FutureWarning):
        scaler.step(one)
    scaler.step(two)
    scaler.update()
    assert not hasattr(two, "grad_scale")


def test_signatures_are_torchs():
    for ours, theirs in (
        (torch.amp.GradScaler, torch.amp.grad_scaler.GradScaler),
        (torch.autocast, torch.amp.autocast_mode.autocast),
    ):
        found, expected = inspect.signature(ours), inspect.signature(theirs)
        assert [(one.name, one.default, one.kind) for one in found.parameters.values()] == [
            (one.name, one.default, one.kind) for one in expected.parameters.values()
        ]


def test_a_scaler_that_torch_derived_from_its_own_is_one():
    class Sharded(torch.amp.grad_scaler.GradScaler):
        pass

    class Own(torch.amp.GradScaler):
        pass

    assert isinstance(Sharded("cpu"), torch.amp.GradScaler)
    assert issubclass(Sharded, torch.amp.GradScaler)
    assert not isinstance(Sharded("cpu"), torch.cpu.amp.GradScaler)
    assert not isinstance(Sharded("cpu"), Own)
    assert isinstance(Own("cpu"), torch.amp.GradScaler)
    assert not isinstance(3, torch.amp.GradScaler)
