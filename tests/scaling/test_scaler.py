"""`mezzo.GradScaler`: arguments, calls out of order, results, state dict."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections import namedtuple

import pytest
import torch
from support.scaler_cases import INF, X, loss_of, same, sgd, train, values
from torch.optim.lr_scheduler import StepLR

import mezzo
from mezzo import GradScaler, ScalerError
from mezzo.scaling.scaler import DisabledGradScaler

# -- arguments -------------------------------------------------------------------------------------


def test_positional_arguments_are_those_of_torch():
    scaler = GradScaler("cpu", 8.0, 3.0, 0.25, 7, True)
    assert (
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    ) == (8.0, 3.0, 0.25, 7)
    assert scaler.is_enabled()


def test_setters_check_values_as_the_constructor_does():
    scaler = GradScaler()
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.1)
    scaler.set_growth_interval(9)
    assert (
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    ) == (4.0, 0.1, 9)
    with pytest.raises(mezzo.PolicyError, match=r"growth_factor=1\.0"):
        scaler.set_growth_factor(1.0)


def test_the_scale_is_created_on_the_device_of_the_first_loss():
    scaler = GradScaler()
    assert scaler._scale is None
    assert scaler.scale(torch.tensor(2.0)).item() == 2.0**17
    assert scaler._scale.device == torch.device("cpu")


def test_nested_containers_keep_their_types():
    pair = namedtuple("pair", "first second")  # noqa: PYI024
    scaler, one = GradScaler(init_scale=4.0), torch.ones(2)
    scaled = scaler.scale([one, (one, [one]), pair(one, one)])
    assert isinstance(scaled, list)
    assert isinstance(scaled[1], tuple)
    assert isinstance(scaled[2], pair)
    assert torch.equal(scaled[1][1][0], torch.full((2,), 4.0))
    assert torch.equal(scaled[2].second, torch.full((2,), 4.0))
    assert torch.equal(next(scaler.scale(one for _ in range(1))), torch.full((2,), 4.0))


@pytest.mark.parametrize("invalid", [3.0, "loss", {"loss": torch.ones(1)}, None])
def test_scaling_another_type_raises_with_its_name(invalid: object):
    with pytest.raises(ValueError, match=type(invalid).__name__):
        GradScaler().scale(invalid)


def test_a_cuda_scaler_without_cuda_warns_and_is_disabled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="no CUDA device"):
        assert not GradScaler("cuda").is_enabled()
    assert not GradScaler("cuda", enabled=False).is_enabled()


@pytest.mark.parametrize(
    "invalid",
    [
        {"num_losses": 0},
        {"num_losses": True},
        {"init_scale": 0.0},
        {"init_scale": math.nan},
        {"on_collapse": "die"},
        {"collapse_patience": 0},
    ],
)
def test_invalid_arguments_raise(invalid: dict[str, object]):
    with pytest.raises(mezzo.PolicyError):
        GradScaler(**invalid)


# -- disabled scalers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scaler", [GradScaler(enabled=False), GradScaler("cpu", 2.0**16, 2.0, 0.5, 2000, False)]
)
def test_training_with_a_disabled_scaler_equals_training_without_one(
    scaler: GradScaler, net, make_net
):
    plain = make_net()
    plain_optimizer = sgd(plain)
    loss_of(plain).backward()
    plain_optimizer.step()
    optimizer = sgd(net)
    loss = loss_of(net)
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    assert not scaler.step(optimizer).skipped
    scaler.update()
    assert same(values(net), values(plain))
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    scaler.load_state_dict({})
    scaler.backward(loss_of(net), optimizers=optimizer)


def test_a_disabled_scaler_takes_closures_and_schedulers(net):
    optimizer = sgd(net)
    result = GradScaler(enabled=False).step(optimizer, lambda: 7.0, scheduler=StepLR(optimizer, 1))
    assert result.value == 7.0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_disabled_scaler_gives_gradients_to_the_parameters_of_the_passed_optimizers_only():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    scaler = GradScaler(num_losses=2, enabled=False)
    loss = second(first(torch.ones(1, 2))).sum()
    scaler.backward(loss, loss_id=1, optimizers=torch.optim.SGD(second.parameters(), lr=0.1))
    assert first.weight.grad is None
    assert second.weight.grad is not None
    scaler.backward(second(first(torch.ones(1, 2))).sum())
    assert first.weight.grad is not None


def test_disabled_scalers_are_scalers_and_can_be_pickled():
    scaler = pickle.loads(pickle.dumps(GradScaler(enabled=False)))
    assert isinstance(scaler, GradScaler)
    assert isinstance(scaler, DisabledGradScaler)
    assert not scaler.is_enabled()


def test_a_subclass_without_an_enabled_argument_cannot_pass_enabled_false():
    class Mine(GradScaler):
        def __init__(self) -> None:
            super().__init__(enabled=False)

    with pytest.raises(ScalerError, match="keyword argument `enabled`"):
        Mine()


# -- calls out of order ----------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["unscale_", "step", "update"])
def test_a_call_before_any_loss_was_scaled_raises(call: str, net):
    scaler = GradScaler()
    with pytest.raises(
        ScalerError, match=r"before any loss was scaled. Call scaler\.scale\(loss\)\.backward\(\)"
    ):
        getattr(scaler, call)(*([] if call == "update" else [sgd(net)]))


def test_a_step_without_gradients_raises(net):
    scaler = GradScaler()
    scaler.scale(loss_of(net))
    with pytest.raises(ScalerError, match="no gradients"):
        scaler.step(sgd(net))


def test_update_without_step_or_unscale_raises(net):
    scaler = GradScaler()
    scaler.scale(loss_of(net)).backward()
    with pytest.raises(
        ScalerError, match=r"scaler\.step\(optimizer\) or scaler\.unscale_\(optimizer\)"
    ):
        scaler.update()


def test_unscaling_or_stepping_twice_raises_with_the_remedy(net):
    scaler, optimizer = GradScaler(), sgd(net)
    scaler.scale(loss_of(net)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(
        ScalerError, match=r"unscale_\(\) .* already been called .* once, before step"
    ):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(ScalerError, match=r"step\(\) .* already been called .*update\(\)"):
        scaler.step(optimizer)
    with pytest.raises(ScalerError, match=r"unscale_\(\) .* but step\(\) has already"):
        scaler.unscale_(optimizer)
    with pytest.raises(ScalerError, match=r"backward\(\) .* but step\(\) has already"):
        scaler.backward(loss_of(net), optimizers=optimizer)
    scaler.update()
    assert train(scaler, net, optimizer).skipped is False


def test_scaler_errors_are_runtime_errors_as_torchs_are():
    assert issubclass(ScalerError, RuntimeError)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((lambda: 1.0,), {}), ((), {"closure": lambda: 1.0})],
    ids=["positional", "keyword"],
)
def test_a_closure_raises_by_position_or_by_keyword(args, kwargs, net):
    scaler, optimizer = GradScaler(), sgd(net)
    scaler.scale(loss_of(net)).backward()
    with pytest.raises(ScalerError, match="closure"):
        scaler.step(optimizer, *args, **kwargs)
    assert scaler.step(optimizer, closure=None).skipped is False


@pytest.mark.parametrize(
    "invalid",
    [
        0.0,
        -2.0,
        math.inf,
        math.nan,
        torch.tensor(math.nan),
        torch.tensor([1.0, 2.0]),
        torch.tensor(1.0, requires_grad=True),
    ],
)
def test_an_invalid_new_scale_raises_and_changes_nothing(invalid):
    scaler = GradScaler(init_scale=4.0)
    scaler.scale(torch.ones(1))
    with pytest.raises(ScalerError, match="new_scale"):
        scaler.update(invalid)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("new", [2.0, torch.tensor(2.0), torch.tensor([2.0])])
def test_a_new_scale_is_clamped(new):
    scaler = GradScaler(init_scale=64.0, min_scale=1.0)
    scaler.scale(torch.ones(1))
    scaler.update(new)
    assert scaler.get_scale() == 2.0
    scaler.update(0.001)
    assert scaler.get_scale() == 1.0


def test_unscale_then_update_then_optimizer_step_is_allowed(net, make_net):
    plain = make_net()
    optimizer, plain_optimizer, scaler = (
        sgd(net),
        sgd(plain),
        GradScaler(init_scale=8.0, growth_interval=1),
    )
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(net)).backward()
        scaler.unscale_(optimizer)
        scaler.update()
        optimizer.step()
        plain_optimizer.zero_grad()
        loss_of(plain).backward()
        plain_optimizer.step()
    assert same(values(net), values(plain))
    assert scaler.get_scale() == 64.0


# -- results, names, schedulers --------------------------------------------------------------------


def test_a_result_has_the_optimizers_value_and_the_nonfinite_parameter(net):
    scaler, optimizer = GradScaler(), sgd(net)
    successful = train(scaler, net, optimizer)
    assert (successful.skipped, successful.value, successful.first_nonfinite) == (False, None, None)
    scaler.scale(loss_of(net)).backward()
    net.first.bias.grad[0] = math.nan
    skipped = scaler.step(optimizer)
    optimizer.zero_grad()
    assert (skipped.skipped, skipped.first_nonfinite) == (True, "parameter 1")
    scaler.update()
    assert scaler.state() == mezzo.ScaleState(2.0**15, 0, 0, 1, 1, 1)


def test_a_scheduler_advances_with_successful_steps_only_and_rates_stay_floats(net):
    scaler, optimizer = GradScaler(), sgd(net)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    for x, rate in [(X, 0.05), (INF, 0.05), (X, 0.025)]:
        optimizer.zero_grad()
        scaler.scale(loss_of(net, x)).backward()
        scaler.step(optimizer, scheduler=scheduler)
        scaler.update()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        assert type(optimizer.param_groups[0]["lr"]) is float


def test_another_process_can_make_a_finite_step_skipped(net):
    def other_process_overflowed(flag: torch.Tensor) -> None:
        flag.add_(2.0)

    scaler, optimizer = (
        GradScaler(init_scale=8.0, reduce_found_inf=other_process_overflowed),
        sgd(net),
    )
    result = train(scaler, net, optimizer)
    assert (result.skipped, result.first_nonfinite) == (True, None)
    assert scaler.get_scale() == 4.0


def test_the_flag_is_reduced_once_per_check_even_without_gradients(net):
    calls: list[float] = []
    scaler, optimizer = (
        GradScaler(reduce_found_inf=lambda flag: calls.append(flag.item())),
        sgd(net),
    )
    train(scaler, net, optimizer)
    optimizer.zero_grad()
    scaler.scale(loss_of(net))
    assert scaler.step(optimizer).skipped is False
    assert calls == [0.0, 0.0]


def test_a_bfloat16_loss_is_scaled_with_one_warning(net):
    scaler, optimizer = GradScaler(), sgd(net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(net)
    with pytest.warns(UserWarning, match="bfloat16, which needs no loss scaling") as caught:
        scaler.scale(loss).backward()
    assert caught[0].filename == __file__
    assert not scaler.step(optimizer).skipped
    scaler.update()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        GradScaler().scale(loss_of(net))


@pytest.mark.parametrize("dtype", [torch.float16, None])
def test_float16_and_float32_losses_are_scaled_without_a_warning(dtype: torch.dtype | None, net):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = loss_of(net)
        GradScaler().scale(loss).backward()


# -- saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [False, True])
def test_a_state_dict_goes_to_torchs_scaler_and_back(used: bool, net):
    scaler = GradScaler(init_scale=3.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    if used:
        train(scaler, net, sgd(net))
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(scaler.state_dict())
    assert torchs.state_dict() == {
        name: value for name, value in scaler.state_dict().items() if not name.startswith("mezzo")
    }
    back = GradScaler(backoff_interval=3)
    if used:
        back.scale(torch.ones(1))
    back.load_state_dict(torchs.state_dict())
    assert (
        back.get_scale(),
        back.get_growth_factor(),
        back.get_backoff_factor(),
        back.get_growth_interval(),
    ) == (3.0, 4.0, 0.25, 2)
    assert back._init_growth_tracker == back._get_growth_tracker() == int(used)


def test_a_pickled_or_copied_scaler_continues_with_the_same_state(net):
    scaler, optimizer = (
        GradScaler(
            init_scale=3.0,
            backoff_interval=2,
            num_losses=1,
            collapse_patience=7,
            on_collapse="raise",
        ),
        sgd(net),
    )
    train(scaler, net, optimizer)
    train(scaler, net, optimizer, INF)
    for again in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert again._scale is None
        assert again.state() == scaler.state()
        assert again.state_dict() == scaler.state_dict()
        assert again._settings == scaler._settings
        train(again, net, optimizer, INF)
        assert again.get_scale() == 1.5


def test_pickling_a_scaler_in_the_middle_of_an_iteration_raises(net):
    scaler, optimizer = GradScaler(), sgd(net)
    scaler.scale(loss_of(net)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerError, match=r"update\(\)"):
        pickle.dumps(scaler)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_an_invalid_saved_scale_raises_and_changes_nothing(scale: float):
    scaler = GradScaler(init_scale=8.0)
    broken = torch.amp.GradScaler("cpu", init_scale=scale).state_dict()
    with pytest.raises(ScalerError, match="saved scale"):
        scaler.load_state_dict({**broken, "growth_interval": 5})
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (8.0, 2000)


def test_a_subclass_may_override_scale_without_loss_id():
    class Mine(GradScaler):
        def scale(self, outputs):
            return super().scale(outputs)

    assert Mine(init_scale=2.0).scale([torch.ones(()), (torch.ones(()),)]) == [2.0, (2.0,)]


def test_a_subclass_may_turn_off_the_bfloat16_warning():
    class Silent(GradScaler):
        _warns_if_not_needed = False

    Silent().scale(torch.ones(2, requires_grad=True).bfloat16().sum())
