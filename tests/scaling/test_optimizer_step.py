"""Step optimizers: torch's protocol, its deprecated form, wrapped optimizers."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from support.wrappers import Lookahead, Several
from torch import nn

import mezzo
from mezzo.scaling.optimizer_step import (
    bindings_of,
    inner_optimizers,
    refuse_closures,
    skips_on_device,
)
from mezzo.scaling.scale_tensors import DeviceLossScale

X = torch.tensor([[1.0, -2.0, 0.5]])
INF = X * math.inf


class Fused(torch.optim.Optimizer):
    """SGD that skips on the device, as torch's fused optimizers do."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._step_supports_amp_scaling = True
        self.received = []

    @torch.no_grad()
    def step(self, closure=None):
        self.received.append((self.grad_scale, self.found_inf))
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = (
                    parameter.grad if self.grad_scale is None else parameter.grad / self.grad_scale
                )
                torch.where(
                    self.found_inf != 0,
                    parameter,
                    parameter - group["lr"] * gradient,
                    out=parameter,
                )
        return 42


def iterate(scaler, model, optimizer, x=X, **kwargs):
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    result = scaler.step(optimizer, **kwargs)
    scaler.update()
    return result


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        Fused,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
    ],
)
def test_a_fused_optimizer_on_a_device_steps_and_skips_without_a_host_read(
    make, net, far_cpu, host_reads
):
    scaler, optimizer = (
        mezzo.GradScaler(init_scale=16.0, growth_interval=2, collapse_patience=2),
        make(net.parameters()),
    )
    iterate(scaler, net, optimizer)
    before = values(net)
    with host_reads() as reads:
        skipped = iterate(scaler, net, optimizer, INF)
        after = values(net)
        successful = iterate(scaler, net, optimizer)
    if not isinstance(optimizer, Fused):
        # torch's fused kernels on a CPU read the flag; the scaler does not.
        assert reads.count <= 4
    else:
        assert reads.count == 0
    assert isinstance(scaler._scales.of(0), DeviceLossScale)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert (skipped.skipped, successful.skipped) == (True, False)
    assert scaler.state() == mezzo.ScaleState(8.0, 1, 0, 2, 1, 0)


def test_any_other_optimizer_on_a_device_costs_one_host_read_per_step(net, far_cpu, host_reads):
    scaler, optimizer = mezzo.GradScaler(), torch.optim.SGD(net.parameters(), lr=0.1)
    iterate(scaler, net, optimizer)
    for _ in range(2):
        with host_reads() as reads:
            iterate(scaler, net, optimizer)
        assert reads.count == 1


def test_host_reads_are_counted(host_reads):
    with host_reads() as reads:
        bool(torch.ones(1))
        torch.ones(1).item()
        float(torch.ones(1))
    assert reads.count == 3


def test_on_a_cpu_torchs_fused_optimizers_do_not_use_the_protocol(net):
    assert not skips_on_device(torch.optim.SGD(net.parameters(), lr=0.1, fused=True))
    assert not skips_on_device(torch.optim.SGD(net.parameters(), lr=0.1))
    assert skips_on_device(Fused(net.parameters()))


def test_an_optimizer_has_the_scale_and_the_flag_while_it_steps(net):
    scaler, optimizer = mezzo.GradScaler(init_scale=16.0), Fused(net.parameters())
    assert iterate(scaler, net, optimizer).value == 42
    scale, found = optimizer.received[0]
    assert (scale.item(), found.item()) == (16.0, 0.0)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_the_nonfinite_parameter_of_a_fused_optimizer_is_named(net, far_cpu):
    scaler, optimizer = mezzo.GradScaler(), Fused(net.parameters())
    scaler.register_parameter_names(net)
    scaler.scale(net(X).mean()).backward()
    net.second.weight.grad[0, 2] = math.nan
    result = scaler.step(optimizer)
    optimizer.zero_grad()
    scaler.update()
    assert result.first_nonfinite == "second.weight"
    assert iterate(scaler, net, optimizer).first_nonfinite is None


def test_after_unscale_the_optimizer_gets_no_scale(net):
    scaler, optimizer = mezzo.GradScaler(), Fused(net.parameters())
    scaler.scale(net(X).mean()).backward()
    scaler.unscale_(optimizer)
    net.first.bias.grad.fill_(math.inf)
    assert not scaler.step(optimizer).skipped
    assert optimizer.received[0][0] is None


def test_a_grad_scale_that_the_user_set_is_multiplied(net):
    scaler, optimizer = mezzo.GradScaler(init_scale=16.0), Fused(net.parameters())
    optimizer.grad_scale = torch.tensor(2.0)
    iterate(scaler, net, optimizer)
    assert optimizer.received[0][0].item() == 32.0


def test_the_attributes_are_removed_when_the_step_raises(net):
    class Broken(Fused):
        def step(self, closure=None):
            raise OSError("broken")

    optimizer = Broken(net.parameters())
    with pytest.raises(OSError, match="broken"):
        iterate(mezzo.GradScaler(), net, optimizer)
    assert not hasattr(optimizer, "found_inf")


def test_an_optimizer_that_takes_the_scaler_gets_it_with_a_warning(net):
    class Old(torch.optim.Optimizer):
        def __init__(self, parameters) -> None:
            super().__init__(parameters, {})
            self._step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            assert isinstance(grad_scaler, mezzo.GradScaler)
            assert (
                sum(flag.item() for flag in grad_scaler._check_inf_per_device(self).values()) == 0
            )

    with pytest.warns(FutureWarning, match="grad_scaler") as caught:
        result = iterate(mezzo.GradScaler(), net, Old(net.parameters()))
    assert caught[0].filename == __file__
    assert not result.skipped


def test_an_optimizer_that_takes_the_scaler_need_not_check_its_gradients():
    class Careless(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            return "stepped"

    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = Careless([weight], lr=0.1), mezzo.GradScaler()
    scaler.scale(weight.sum()).backward()
    with pytest.warns(FutureWarning, match="grad_scaler"):
        result = scaler.step(optimizer)
    assert (result.value, result.skipped) == ("stepped", False)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((print,), {}), ((), {"closure": print}), ((1, print), {})]
)
def test_a_closure_is_found_however_it_is_passed(args, kwargs):
    with pytest.raises(mezzo.ScalerError, match="closure"):
        refuse_closures(args, kwargs)


def test_a_refused_closure_is_named_without_the_batch_that_it_holds():
    def training_step(batch):
        return batch.sum()

    with pytest.raises(mezzo.ScalerError, match=r"takes no closure, got .*training_step: it would"):
        refuse_closures((partial(training_step, torch.zeros(100)),), {})


def test_other_arguments_are_not_taken_for_closures():
    refuse_closures((1, None), {"closure": None, "callback": print})


# -- optimizers that wrap others -------------------------------------------------------------------


def sgd(*, dtype=torch.float32):
    return torch.optim.SGD([nn.Parameter(torch.ones(1, dtype=dtype))], lr=0.1)


def test_inner_optimizers_are_found_in_attributes_and_containers():
    one, other = sgd(), sgd()
    assert inner_optimizers(one) == {}
    assert inner_optimizers(Lookahead(one)) == {".optimizer": one}
    assert inner_optimizers(Several([one, other])) == {
        "._parts['all'][0]": one,
        "._parts['all'][1]": other,
    }
    wrapped = Lookahead(Lookahead(one))
    assert inner_optimizers(wrapped) == {
        ".optimizer": wrapped.optimizer,
        ".optimizer.optimizer": one,
    }


def test_an_optimizer_that_holds_itself_has_no_inner_optimizer():
    one = sgd()
    one.itself, one.ring = one, []
    one.ring.append(one.ring)
    assert inner_optimizers(one) == {}


def test_a_path_uses_the_public_name_of_an_attribute():
    class Delegating(torch.optim.SGD):
        optimizer = property(lambda self: self._optimizer)

    outer = Delegating([torch.zeros(1)], lr=0.1)
    outer._optimizer = outer._other = inner = sgd()
    assert inner_optimizers(outer) == {".optimizer": inner}


def test_bindings_are_found_through_wrappers():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert bindings_of(Lookahead(optimizer)) == []
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    assert bindings_of(optimizer) == bindings_of(Lookahead(optimizer)) == [optimizer._bound]


@pytest.mark.parametrize("unscales", [False, True])
def test_gradients_of_a_wrapped_decorated_optimizer_are_unscaled_in_float32(unscales):
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mezzo.decorate(model, optimizer, dtype="float16", save_dtype="float32")
    wrapped, scaler = Several([optimizer]), mezzo.GradScaler("cpu", init_scale=2.0**16)
    nn.init.zeros_(model.weight)
    scaler.scale(torch.ones(()))
    # Unscaled in float16 this would be zero.
    model.weight.grad = torch.full_like(model.weight, 2.0**-12)
    if unscales:
        scaler.unscale_(wrapped)
    assert not scaler.step(wrapped).skipped
    assert model.state_dict()["weight"].item() == -(2.0**-28)
    scaler.update()
    model.weight.grad = torch.full_like(model.weight, torch.inf)
    assert scaler.step(wrapped).skipped


def test_a_wrapper_that_forwards_attributes_of_its_optimizer_gets_unscaled_gradients():
    class Delegating(Several):
        def __getattr__(self, name):
            return getattr(self._parts["all"][0], name)

    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    inner._step_supports_amp_scaling = True
    wrapped, scaler = Delegating([inner]), mezzo.GradScaler("cpu", init_scale=4.0)
    (weight,) = inner.param_groups[0]["params"]
    scaler.scale(weight * 0.125).backward()
    scaler.step(wrapped)
    assert weight.item() == 0.875
