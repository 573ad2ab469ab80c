"""`mezzo.GradScaler` as people train with it."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections import namedtuple

import pytest
import torch
from support.scaler_traces import Trace, traces
from torch import nn
from torch.optim.lr_scheduler import StepLR

import mezzo
from mezzo import GradScaler, ScalerError
from mezzo.scaling.scaler import DisabledGradScaler

TRACES = traces()
X = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.1, -1.0]])
INF = X * math.inf
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
}
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def loss_of(model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    return model(x).square().mean()


def train(
    scaler: GradScaler, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor = X
):
    optimizer.zero_grad()
    scaler.scale(loss_of(model, x)).backward()
    result = scaler.step(optimizer)
    scaler.update()
    return result


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def one_parameter(size: int = 3) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.zeros(size))
    return parameter, torch.optim.SGD([parameter], lr=0.5)


# -- the traces ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*steps in a row|.*at its floor")
@pytest.mark.parametrize("trace", TRACES, ids=range(len(TRACES)))
def test_training_through_the_scaler_reproduces_paddles_trace(trace: Trace):
    scaler, (parameter, optimizer) = GradScaler("cpu", **trace.settings), one_parameter(1)
    for step, (kind, (scale, _, _)) in enumerate(zip(trace.kinds, trace.after, strict=True)):
        if step == trace.reload_at:
            reloaded = GradScaler("cpu", **(trace.settings | {"init_scale": 1.0}))
            reloaded.load_state_dict(scaler.state_dict())
            scaler = reloaded
        before = parameter.item()
        scaler.scale((parameter * 0).sum())
        # The gradient itself, for a scale near the largest float32 overflows what it multiplies.
        parameter.grad = torch.tensor(
            [{".": scaler.get_scale(), "N": math.nan, "I": math.inf, "J": -math.inf}[kind]]
        )
        if trace.mode.startswith("unscale"):
            scaler.unscale_(optimizer)
        result = scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale, step
        assert result.skipped == (kind != ".")
        assert parameter.item() == (before if result.skipped else pytest.approx(before - 0.5))


# -- torch's call shape ----------------------------------------------------------------------------


def test_torchs_positional_arguments_mean_the_same():
    scaler = GradScaler("cpu", 8.0, 3.0, 0.25, 7, True)
    assert (
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    ) == (8.0, 3.0, 0.25, 7)
    assert scaler.is_enabled()


def test_the_setters_set_and_refuse_what_the_constructor_refuses():
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


def test_the_scale_is_made_where_the_first_loss_is():
    scaler = GradScaler()
    assert scaler._scale is None
    assert scaler.scale(torch.tensor(2.0)).item() == 2.0**17
    assert scaler._scale.device == torch.device("cpu")


def test_nested_iterables_are_scaled_in_their_own_shape():
    pair = namedtuple("pair", "first second")  # noqa: PYI024
    scaler, one = GradScaler(init_scale=4.0), torch.ones(2)
    scaled = scaler.scale([one, (one, [one]), pair(one, one)])
    assert isinstance(scaled, list)
    assert isinstance(scaled[1], tuple)
    assert isinstance(scaled[2], pair)
    assert torch.equal(scaled[1][1][0], torch.full((2,), 4.0))
    assert torch.equal(scaled[2].second, torch.full((2,), 4.0))
    assert torch.equal(next(scaler.scale(one for _ in range(1))), torch.full((2,), 4.0))


@pytest.mark.parametrize("wrong", [3.0, "loss", {"loss": torch.ones(1)}, None])
def test_what_is_no_loss_is_refused_by_its_type(wrong: object):
    with pytest.raises(ValueError, match=type(wrong).__name__):
        GradScaler().scale(wrong)


def test_a_cuda_scaler_without_cuda_warns_and_is_disabled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="no CUDA device"):
        assert not GradScaler("cuda").is_enabled()
    assert not GradScaler("cuda", enabled=False).is_enabled()


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_losses": 0},
        {"num_losses": True},
        {"init_scale": 0.0},
        {"init_scale": math.nan},
        {"on_collapse": "die"},
        {"collapse_patience": 0},
    ],
)
def test_arguments_that_make_no_sense_are_refused(wrong: dict[str, object]):
    with pytest.raises(mezzo.PolicyError):
        GradScaler(**wrong)


# -- a scaler that is not enabled ------------------------------------------------------------------


@pytest.mark.parametrize(
    "scaler", [GradScaler(enabled=False), GradScaler("cpu", 2.0**16, 2.0, 0.5, 2000, False)]
)
def test_a_disabled_scaler_trains_as_if_it_were_not_there(scaler: GradScaler, net, make_net):
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


def test_disabled_scalers_are_scalers_and_survive_a_pickle():
    scaler = pickle.loads(pickle.dumps(GradScaler(enabled=False)))
    assert isinstance(scaler, GradScaler)
    assert isinstance(scaler, DisabledGradScaler)
    assert not scaler.is_enabled()


def test_a_subclass_that_hides_enabled_is_told_to_pass_it():
    class Mine(GradScaler):
        def __init__(self) -> None:
            super().__init__(enabled=False)

    with pytest.raises(ScalerError, match="enabled"):
        Mine()


# -- misuse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["unscale_", "step", "update"])
def test_a_scaler_that_scaled_nothing_says_to_scale_a_loss(call: str, net):
    scaler = GradScaler()
    with pytest.raises(
        ScalerError, match=r"before any loss was scaled. Call scaler\.scale\(loss\)\.backward\(\)"
    ):
        getattr(scaler, call)(*([] if call == "update" else [sgd(net)]))


def test_a_step_without_gradients_says_where_they_come_from(net):
    scaler = GradScaler()
    scaler.scale(loss_of(net))
    with pytest.raises(ScalerError, match="no gradients"):
        scaler.step(sgd(net))


def test_update_with_neither_step_nor_unscale_says_to_call_one(net):
    scaler = GradScaler()
    scaler.scale(loss_of(net)).backward()
    with pytest.raises(
        ScalerError, match=r"scaler\.step\(optimizer\) or scaler\.unscale_\(optimizer\)"
    ):
        scaler.update()


def test_unscaling_or_stepping_twice_is_refused_with_the_remedy(net):
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
def test_closures_are_refused_however_they_are_passed(args, kwargs, net):
    scaler, optimizer = GradScaler(), sgd(net)
    scaler.scale(loss_of(net)).backward()
    with pytest.raises(ScalerError, match="closure"):
        scaler.step(optimizer, *args, **kwargs)
    assert scaler.step(optimizer, closure=None).skipped is False


@pytest.mark.parametrize(
    "wrong",
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
def test_a_new_scale_that_is_none_is_refused_and_changes_nothing(wrong):
    scaler = GradScaler(init_scale=4.0)
    scaler.scale(torch.ones(1))
    with pytest.raises(ScalerError, match="new_scale"):
        scaler.update(wrong)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("new", [2.0, torch.tensor(2.0), torch.tensor([2.0])])
def test_a_new_scale_is_set_within_the_bounds(new):
    scaler = GradScaler(init_scale=64.0, min_scale=1.0)
    scaler.scale(torch.ones(1))
    scaler.update(new)
    assert scaler.get_scale() == 2.0
    scaler.update(0.001)
    assert scaler.get_scale() == 1.0


def test_unscale_then_update_then_the_users_own_step_is_a_legal_order(net, make_net):
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


# -- parity with unscaled training -----------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("unscale_first", [False, True])
def test_training_with_a_skipped_step_equals_unscaled_training_without_it(
    name: str, way: str, unscale_first: bool, net, make_net
):
    kind, settings = OPTIMIZERS[name]
    plain = make_net()
    plain_optimizer = kind(plain.parameters(), **settings, **WAYS[way])
    optimizer, scaler = (
        kind(net.parameters(), **settings, **WAYS[way]),
        GradScaler(init_scale=128.0, growth_interval=1),
    )
    for x in (X, INF, X * 0.5, X * 2):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, x)).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        assert scaler.step(optimizer).skipped == (x is INF)
        scaler.update()
        if x is not INF:
            plain_optimizer.zero_grad()
            loss_of(plain, x).backward()
            plain_optimizer.step()
    assert same(values(net), values(plain))
    assert scaler.get_scale() == 128.0 * 2 * 0.5 * 2 * 2


@pytest.mark.parametrize(
    "clip",
    [
        lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1),
        lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
    ],
)
def test_clipping_acts_on_unscaled_gradients(clip, net, make_net):
    plain = make_net()
    optimizer, plain_optimizer, scaler = sgd(net), sgd(plain), GradScaler()
    scaler.scale(loss_of(net)).backward()
    scaler.unscale_(optimizer)
    clip(net.parameters())
    scaler.step(optimizer)
    loss_of(plain).backward()
    clip(plain.parameters())
    plain_optimizer.step()
    assert same(values(net), values(plain))


def test_clipping_does_not_change_who_is_blamed(net):
    scaler, optimizer = GradScaler(), sgd(net)
    scaler.register_parameter_names(net)
    scaler.scale(loss_of(net)).backward()
    net.second.weight.grad[0, 1] = math.nan
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    assert scaler.step(optimizer).first_nonfinite == "second.weight"


def test_gradients_are_not_checked_again_after_unscale(net):
    scaler, optimizer = GradScaler(), sgd(net)
    scaler.scale(loss_of(net)).backward()
    scaler.unscale_(optimizer)
    net.first.bias.grad.fill_(math.inf)
    assert scaler.step(optimizer).skipped is False


def test_accumulated_gradients_are_unscaled_once(net, make_net):
    plain = make_net()
    optimizer, plain_optimizer, scaler = sgd(net), sgd(plain), GradScaler()
    for x in (X, X * 2):
        scaler.scale(loss_of(net, x) / 2).backward()
        (loss_of(plain, x) / 2).backward()
    scaler.step(optimizer)
    scaler.update()
    plain_optimizer.step()
    assert same(values(net), values(plain))


def test_a_gradient_penalty_is_computed_on_unscaled_gradients(net, make_net):
    plain = make_net()
    optimizer, plain_optimizer, scaler = sgd(net), sgd(plain), GradScaler(init_scale=2.0**10)
    scaled = torch.autograd.grad(scaler.scale(loss_of(net)), net.parameters(), create_graph=True)
    penalty = sum((gradient / scaler.get_scale()).square().sum() for gradient in scaled)
    scaler.scale(loss_of(net) + penalty).backward()
    scaler.step(optimizer)
    scaler.update()
    gradients = torch.autograd.grad(loss_of(plain), plain.parameters(), create_graph=True)
    (loss_of(plain) + sum(gradient.square().sum() for gradient in gradients)).backward()
    plain_optimizer.step()
    for ours, theirs in zip(values(net), values(plain), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_of_several_optimizers_only_the_one_with_bad_gradients_is_skipped(make_net):
    good, bad = make_net(), make_net()
    good_optimizer, bad_optimizer, scaler = sgd(good), sgd(bad), GradScaler(init_scale=8.0)
    before_good, before_bad = values(good), values(bad)
    scaler.scale(loss_of(good) + loss_of(bad)).backward()
    bad.first.weight.grad[0, 0] = math.inf
    results = [scaler.step(bad_optimizer), scaler.step(good_optimizer)]
    scaler.update()
    assert [result.skipped for result in results] == [True, False]
    assert same(values(bad), before_bad)
    assert not same(values(good), before_good)
    assert scaler.get_scale() == 4.0
    assert scaler.state().skipped_steps == 1


def test_the_scale_does_not_overflow(net):
    scaler = GradScaler(growth_interval=1, growth_factor=2**4, init_scale=1e38)
    scaler.scale(torch.zeros((), requires_grad=True))
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    scaler.step(sgd(net))
    scaler.update()
    assert math.isfinite(scaler.get_scale())


def test_three_hundred_bad_steps_end_at_the_floor_and_lose_no_parameter(net):
    scaler, optimizer = GradScaler(growth_interval=5), torch.optim.Adam(net.parameters(), lr=0.1)
    train(scaler, net, optimizer)
    before = values(net)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(300):
            train(scaler, net, optimizer, INF)
    assert ["floor" in str(warning.message) for warning in told] == [True]
    assert same(values(net), before)
    assert scaler.get_scale() == 2.0**-24
    for _ in range(5 * 40):
        assert not train(scaler, net, optimizer).skipped
    assert scaler.get_scale() == 2.0**16
    assert all(parameter.isfinite().all() for parameter in net.parameters())


# -- several losses --------------------------------------------------------------------------------


def test_each_loss_has_a_scale_and_one_bad_loss_backs_off_alone(net):
    scaler, optimizer = GradScaler(init_scale=16.0, growth_interval=1, num_losses=2), sgd(net)
    before = values(net)
    scaler.backward(loss_of(net), loss_id=0, optimizers=optimizer)
    scaler.backward(loss_of(net, INF), loss_id=1, optimizers=optimizer)
    assert scaler.step(optimizer).skipped
    scaler.update()
    assert (scaler.state(0).scale, scaler.state(1).scale) == (32.0, 8.0)
    assert same(values(net), before)


def test_losses_of_different_scales_add_up_to_the_plain_sum(net, make_net):
    plain = make_net()
    scaler, optimizer, plain_optimizer = (
        GradScaler(init_scale=16.0, growth_interval=1, num_losses=2),
        sgd(net),
        sgd(plain),
    )
    scaler.load_state_dict(
        {**scaler.state_dict(), "mezzo_states": [{"scale": 2.0}, {"scale": 2.0**12}]}
    )
    for _ in range(2):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        scaler.backward(loss_of(net), loss_id=0, optimizers=optimizer)
        scaler.backward(loss_of(net, X * 2), loss_id=1, optimizers=[optimizer])
        scaler.backward(loss_of(net, X * 3), loss_id=1, optimizers=[optimizer])
        for factor in (1, 2, 3):
            loss_of(plain, X * factor).backward()
        assert not scaler.step(optimizer).skipped
        scaler.update()
        plain_optimizer.step()
    assert same(values(net), values(plain))


def test_a_loss_that_reaches_only_one_of_two_optimizers_leaves_the_other_to_its_own(net):
    first, second = (
        torch.optim.SGD(net.first.parameters(), lr=0.1),
        torch.optim.SGD(net.second.parameters(), lr=0.1),
    )
    scaler = GradScaler(num_losses=2)
    scaler.backward(loss_of(net), loss_id=0, optimizers=[first, second])
    scaler.backward(net.first(INF).sum(), loss_id=1, optimizers=[first, second])
    assert scaler.step(first).skipped
    assert not scaler.step(second).skipped
    scaler.update()


def test_gradients_with_several_scales_are_not_unscaled_by_guess(net):
    scaler, optimizer = GradScaler(num_losses=2), sgd(net)
    scaler.scale(loss_of(net), loss_id=1).backward()
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(ScalerError, match=r"scaler\.backward\(loss, loss_id="):
            call(optimizer)


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_without_a_loss_is_refused(index: int):
    with pytest.raises(ScalerError, match=rf"loss_id={index}: this scaler has 2 losses"):
        GradScaler(num_losses=2).scale(torch.ones(1), index)


# -- results, names, schedulers --------------------------------------------------------------------


def test_a_result_tells_what_the_optimizer_returned_and_who_was_bad(net):
    scaler, optimizer = GradScaler(), sgd(net)
    good = train(scaler, net, optimizer)
    assert (good.skipped, good.value, good.first_nonfinite) == (False, None, None)
    scaler.scale(loss_of(net)).backward()
    net.first.bias.grad[0] = math.nan
    bad = scaler.step(optimizer)
    optimizer.zero_grad()
    assert (bad.skipped, bad.first_nonfinite) == (True, "parameter 1")
    scaler.update()
    assert scaler.state() == mezzo.ScaleState(2.0**15, 0, 0, 1, 1, 1)


def test_a_scheduler_advances_with_good_steps_only_and_the_rate_stays_a_float(net):
    scaler, optimizer = GradScaler(), sgd(net)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    for x, rate in [(X, 0.05), (INF, 0.05), (X, 0.025)]:
        optimizer.zero_grad()
        scaler.scale(loss_of(net, x)).backward()
        scaler.step(optimizer, scheduler=scheduler)
        scaler.update()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        assert type(optimizer.param_groups[0]["lr"]) is float


def test_a_process_group_can_raise_the_flag_of_a_good_step(net):
    def somebody_else_overflowed(flag: torch.Tensor) -> None:
        flag.add_(2.0)

    scaler, optimizer = (
        GradScaler(init_scale=8.0, reduce_found_inf=somebody_else_overflowed),
        sgd(net),
    )
    result = train(scaler, net, optimizer)
    assert (result.skipped, result.first_nonfinite) == (True, None)
    assert scaler.get_scale() == 4.0


def test_the_flag_is_reduced_once_a_check_even_without_gradients(net):
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


def test_bfloat16_works_and_is_said_once_to_need_no_scaler(net):
    scaler, optimizer = GradScaler(), sgd(net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(net)
    with pytest.warns(UserWarning, match="bfloat16, which needs no gradient scaling") as told:
        scaler.scale(loss).backward()
    assert told[0].filename == __file__
    assert not scaler.step(optimizer).skipped
    scaler.update()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        GradScaler().scale(loss_of(net))


@pytest.mark.parametrize("dtype", [torch.float16, None])
def test_float16_and_float32_losses_are_scaled_without_a_word(dtype: torch.dtype | None, net):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = loss_of(net)
        GradScaler().scale(loss).backward()


# -- saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [False, True])
def test_a_state_goes_to_torchs_scaler_and_back(used: bool, net):
    ours = GradScaler(init_scale=3.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    if used:
        train(ours, net, sgd(net))
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == {
        name: value for name, value in ours.state_dict().items() if not name.startswith("mezzo")
    }
    back = GradScaler(backoff_interval=3)
    if used:
        back.scale(torch.ones(1))
    back.load_state_dict(theirs.state_dict())
    assert (
        back.get_scale(),
        back.get_growth_factor(),
        back.get_backoff_factor(),
        back.get_growth_interval(),
    ) == (3.0, 4.0, 0.25, 2)
    assert back._init_growth_tracker == back._get_growth_tracker() == int(used)


def test_a_pickled_or_copied_scaler_goes_on_where_it_was(net):
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


def test_a_scaler_in_the_middle_of_an_iteration_is_not_pickled(net):
    scaler, optimizer = GradScaler(), sgd(net)
    scaler.scale(loss_of(net)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerError, match=r"update\(\)"):
        pickle.dumps(scaler)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_saved_scale_that_no_gradient_survives_is_refused_and_nothing_changes(scale: float):
    scaler = GradScaler(init_scale=8.0)
    broken = torch.amp.GradScaler("cpu", init_scale=scale).state_dict()
    with pytest.raises(ScalerError, match="saved scale"):
        scaler.load_state_dict({**broken, "growth_interval": 5})
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (8.0, 2000)


def test_a_subclass_whose_scale_takes_outputs_alone_scales_nested_ones():
    class Mine(GradScaler):
        def scale(self, outputs):
            return super().scale(outputs)

    assert Mine(init_scale=2.0).scale([torch.ones(()), (torch.ones(()),)]) == [2.0, (2.0,)]


def test_a_scaler_that_gives_no_advice_says_nothing_of_bfloat16(monkeypatch):
    class Silent(GradScaler):
        _advises = False

    monkeypatch.setattr("mezzo.scaling.diagnostics._said", False)
    Silent().scale(torch.ones(2, requires_grad=True).bfloat16().sum())
