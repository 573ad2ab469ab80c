"""Steps on the device through torch's capturable forms.

torch refuses these forms on a CPU, although they compute there: `on_cpu` lets both run them.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support.fake_graphs import fake_captures, use_capture
from support.kernel_cases import fresh_seed
from support.patterns import same_bits
from support.step_models import Made, batches, boosted, same, weights
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo import _launch
from mezzo.optim import capturable_step, flat_values
from mezzo.optim.bind_optimizer import bind_optimizer
from mezzo.optim.capturable_step import CapturableBinding
from mezzo.optim.master_weights import MasterWeights
from mezzo.optim.state_dict import hook_state_dict
from mezzo.scaling.loss_scales import binding_of

Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "RMSprop": lambda p, **k: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, **k),
    "NAdam": lambda p, **k: torch.optim.NAdam(
        p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, **k
    ),
    "RAdam": lambda p, **k: torch.optim.RAdam(p, lr=0.01, weight_decay=0.1, **k),
    "Adamax": lambda p, **k: torch.optim.Adamax(p, lr=0.01, maximize=True, **k),
    "Adadelta": lambda p, **k: torch.optim.Adadelta(p, lr=0.5, **k),
    "ASGD": lambda p, **k: torch.optim.ASGD(p, lr=0.01, **k),
    "Rprop": lambda p, **k: torch.optim.Rprop(p, lr=0.01, **k),
}
SHAPES = [(4, 5), (7,), (), (0,), (2, 3, 2, 2)]
MASTERS = {
    "float32": ("float32", torch.float16),
    "split": ("split", torch.bfloat16),
    "kahan": ("kahan", torch.bfloat16),
    "no masters": ("none", torch.float32),
}

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
every_master = pytest.mark.parametrize("masters", MASTERS)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OPTIMIZERS:
        module = importlib.import_module(f"torch.optim.{name.lower()}")
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    monkeypatch.setattr(CapturableBinding, "device_types", ("cpu",))


class Twins:
    """The same weights with a bound optimizer, and in float32 with torch's capturable one."""

    def __init__(self, name: str, masters: str = "float32", **settings: Any) -> None:
        master, self.dtype = MASTERS[masters]
        self.seed = fresh_seed()
        self.generator = torch.Generator().manual_seed(self.seed)
        values = [torch.randn(shape, generator=self.generator) for shape in SHAPES]
        values[-1] = values[-1].to(memory_format=torch.channels_last)
        self.parameters, self.full = (
            [nn.Parameter(value.clone()) for value in values] for _ in range(2)
        )
        self.masters = MasterWeights(master)
        if self.dtype is not torch.float32:
            for parameter in self.parameters:
                self.masters.adopt(parameter, self.dtype)
        self.optimizer = OPTIMIZERS[name](self.parameters)
        self.capturable = OPTIMIZERS[name](self.full, capturable=True, foreach=True)
        for group in self.capturable.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        self.binding = bind_optimizer(self.optimizer, self.masters, **settings)

    def set_gradients(self, scale: float = 1.0) -> None:
        for parameter, full in zip(self.parameters, self.full, strict=True):
            gradient = torch.randn(full.shape, generator=self.generator).to(self.dtype)
            full.grad = gradient.float()
            parameter.grad = (gradient * scale).to(self.dtype)

    def step(self, scale: float | None = None) -> None:
        step(self.optimizer, scale)
        self.capturable.step()

    def values(self) -> list[torch.Tensor]:
        return [
            self.masters.read(parameter) if parameter in self.masters else parameter.detach()
            for parameter in self.parameters
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor that a step changes, parameters and masters included."""
        companions = [
            tensor
            for parameter in self.parameters
            if parameter in self.masters
            for tensor in (self.masters.companion_tensor(parameter), self.masters.sample(parameter))
            if tensor is not None
        ]
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [one.detach().clone() for one in (*self.parameters, *companions, *states)]


def step(
    optimizer: torch.optim.Optimizer, scale: float | None = None, *, found_inf: bool | None = False
) -> None:
    """Step as a scaler does."""
    optimizer.grad_scale = None if scale is None else torch.tensor(scale)
    optimizer.found_inf = None if found_inf is None else torch.tensor(float(found_inf))
    optimizer.step()


def all_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(same_bits, one, other))


# -- arithmetic ------------------------------------------------------------------------------------


@every_optimizer
@every_master
def test_a_step_is_torchs_capturable_step_over_float32_values(name: str, masters: str) -> None:
    twins = Twins(name, masters)
    for _ in range(4):
        twins.set_gradients(8.0)
        twins.step(8.0)
        if masters == "kahan":
            pairs = zip(twins.values(), twins.full, strict=True)
            assert all(torch.allclose(*pair, 1e-3, 1e-4) for pair in pairs), twins.seed
        else:
            assert all_same(twins.values(), [one.detach() for one in twins.full]), twins.seed
    states = zip(twins.optimizer.state.values(), twins.capturable.state.values(), strict=True)
    for ours, theirs in states if masters != "kahan" else ():
        assert all(same_bits(ours[key], value) for key, value in theirs.items()), twins.seed


@every_optimizer
def test_a_step_agrees_with_the_form_that_is_not_capturable(name: str) -> None:
    twins = Twins(name, "no masters")
    plain = OPTIMIZERS[name](twins.full)
    for _ in range(4):
        twins.set_gradients()
        step(twins.optimizer)
        plain.step()
    pairs = zip(twins.parameters, twins.full, strict=True)
    assert all(torch.allclose(*pair, 1e-4, 1e-5) for pair in pairs), twins.seed


@pytest.mark.parametrize("found_inf", [False, None], ids=["checked", "without a scaler"])
def test_small_batches_give_the_same_result(
    monkeypatch: pytest.MonkeyPatch, found_inf: bool | None
) -> None:
    monkeypatch.setattr(capturable_step, "BATCH", 8)
    twins = Twins("NAdam")
    for _ in range(3):
        twins.set_gradients()
        step(twins.optimizer, found_inf=found_inf)
        twins.capturable.step()
    assert all_same(twins.values(), [one.detach() for one in twins.full]), twins.seed


@pytest.mark.parametrize("clip_norm", [0.5, 1e6])
def test_gradients_are_unscaled_and_clipped_to_the_norm(clip_norm: float) -> None:
    twins = Twins("RMSprop", "split", clip_norm=clip_norm)
    for _ in range(3):
        twins.set_gradients(1024.0)
        norm = nn.utils.clip_grad_norm_(twins.full, clip_norm)
        twins.step(1024.0)
        assert torch.allclose(mezzo.grad_norm(twins.optimizer), norm)
        pairs = zip(twins.values(), twins.full, strict=True)
        assert all(torch.allclose(*pair, 1e-4, 1e-5) for pair in pairs), twins.seed


def test_a_tracked_norm_is_computed_without_clipping() -> None:
    twins = Twins("Adamax")
    twins.binding.track_norm()
    kept = []
    for _ in range(2):
        twins.set_gradients(16.0)
        twins.step(16.0)
        wanted = nn.utils.get_total_norm([one.grad for one in twins.full])
        kept.append((mezzo.grad_norm(twins.optimizer), wanted))
    assert all(torch.allclose(*pair) for pair in kept)
    assert all_same(twins.values(), [one.detach() for one in twins.full]), twins.seed


class Labelled(torch.Tensor):
    """A tensor of another class, as a distributed one."""


@pytest.mark.parametrize("reason", ["sparse", "subclass", "strides"])
def test_gradients_that_cannot_be_flattened_take_the_original_step(reason: str) -> None:
    value = torch.ones(4, 8)[:, ::2] if reason == "strides" else torch.ones(4, 4)
    parameter = nn.Parameter(value)
    optimizer = torch.optim.Adadelta([parameter], lr=0.5)
    binding = bind_optimizer(optimizer, MasterWeights("none"))
    gradient = torch.ones(4, 4)
    if reason == "sparse":
        parameter.grad = gradient.to_sparse()
        assert not binding._batches(optimizer.param_groups)
        return
    parameter.grad = gradient.as_subclass(Labelled) if reason == "subclass" else gradient
    assert not binding._batches(optimizer.param_groups)
    step(optimizer, 2.0)
    reference = nn.Parameter(torch.ones(4, 4))
    reference.grad = gradient / 2.0
    torch.optim.Adadelta([reference], lr=0.5).step()
    assert torch.equal(parameter, reference)
    step(optimizer, 2.0, found_inf=True)
    assert torch.equal(parameter, reference)


def test_parameters_without_a_gradient_are_left_out_until_they_get_one() -> None:
    twins = Twins("RAdam")
    for count in range(3):
        twins.set_gradients()
        if count == 0:
            twins.parameters[0].grad = twins.full[0].grad = None
        twins.step()
        assert (twins.parameters[0] in twins.optimizer.state) == (count > 0)
        assert all_same(twins.values(), [one.detach() for one in twins.full]), twins.seed


# -- skipped steps ---------------------------------------------------------------------------------


@every_optimizer
@every_master
@pytest.mark.parametrize("small", [1, 2**16], ids=["one by one", "together"])
def test_a_skipped_step_leaves_every_bit(
    monkeypatch: pytest.MonkeyPatch, name: str, masters: str, small: int
) -> None:
    monkeypatch.setattr(flat_values, "_SMALL", small)
    twins = Twins(name, masters, clip_norm=1.0)
    for _ in range(2):
        twins.set_gradients()
        step(twins.optimizer, 4.0)
    before = twins.tensors()
    for value in (torch.inf, torch.nan):
        for parameter in twins.parameters:
            parameter.grad.fill_(value)
        step(twins.optimizer, 4.0, found_inf=True)
        assert all_same(twins.tensors(), before), twins.seed


def test_nan_in_a_skipped_parameter_keeps_its_bits() -> None:
    twins = Twins("RMSprop", "no masters")
    twins.set_gradients()
    step(twins.optimizer)
    payload = torch.tensor([0x7FC01234], dtype=torch.int32).view(torch.float32)
    with torch.no_grad():
        twins.parameters[0][0, 0] = payload[0]
    before = twins.tensors()
    step(twins.optimizer, found_inf=True)
    assert twins.parameters[0].detach().view(torch.int32)[0, 0] == 0x7FC01234
    assert all_same(twins.tensors(), before)


def test_a_first_step_that_is_skipped_creates_no_state() -> None:
    twins = Twins("NAdam")
    before = twins.tensors()
    twins.set_gradients()
    step(twins.optimizer, found_inf=True)
    assert not twins.optimizer.state
    assert all_same(twins.tensors(), before)


# -- with a scaler ---------------------------------------------------------------------------------


class HostReads(TorchDispatchMode):
    """Count reads of a tensor's value by the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def train(optimizers: dict[str, Make], name: str, level: str, *, reads: int | None) -> list[Any]:
    """Train with a schedule and an overflow; count host reads after the first step."""
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    optimizer = optimizers[name](model.parameters())
    mezzo.decorate(model, optimizer, level, dtype="float16", clip_norm=1.0)
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    scaler = mezzo.GradScaler("cpu", init_scale=64.0)
    inputs = [torch.randn(4, 6) for _ in range(6)]
    for index, x in enumerate(inputs):
        loss = model(x).float().square().mean() * (torch.inf if index == 3 else 1.0)
        scaler.scale(loss).backward()
        with HostReads() as mode:
            result = scaler.step(optimizer, scheduler=scheduler)
            scaler.update()
        assert reads is None or index == 0 or mode.count == reads
        assert result.skipped == (index == 3)
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(scheduler.base_lrs[0] * 0.25)
    return [mezzo.master_params(model), copy.deepcopy(optimizer.state_dict()["state"])]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "Muon"])
def test_a_scaler_steps_skips_and_schedules_without_a_host_read(
    monkeypatch: pytest.MonkeyPatch, name: str, level: str
) -> None:
    def matrices_only(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([one for one in parameters if one.dim() == 2], lr=0.05)

    optimizers = {**OPTIMIZERS, "Muon": matrices_only}
    on_host = train(optimizers, name, level, reads=None)
    monkeypatch.setattr(_launch, "needs_sync", lambda _: True)
    assert same(train(optimizers, name, level, reads=0), on_host)


# -- groups and state dicts ------------------------------------------------------------------------


def test_groups_read_as_before_after_a_step() -> None:
    twins = Twins("NAdam")
    before = copy.copy(twins.optimizer.param_groups[0])
    twins.set_gradients()
    step(twins.optimizer)
    assert twins.optimizer.param_groups[0] == before
    saved = twins.optimizer.state_dict()["param_groups"][0]
    assert (saved["capturable"], saved["foreach"], saved["lr"]) == (False, None, 0.01)
    assert set(twins.optimizer.state) == set(twins.parameters)


@every_optimizer
def test_a_state_dict_continues_in_plain_torch_and_back(name: str) -> None:
    twins = Twins(name, "no masters")
    for _ in range(2):
        twins.set_gradients()
        step(twins.optimizer)
    (plain_weights, bound_weights) = (
        [nn.Parameter(value.clone()) for value in twins.values()] for _ in range(2)
    )
    plain, bound = OPTIMIZERS[name](plain_weights), OPTIMIZERS[name](bound_weights)
    plain.load_state_dict(copy.deepcopy(twins.optimizer.state_dict()))
    bind_optimizer(bound, MasterWeights("none"))
    bound.load_state_dict(copy.deepcopy(plain.state_dict()))
    for one, two, three in zip(twins.parameters, plain_weights, bound_weights, strict=True):
        two.grad, three.grad = one.grad.clone(), one.grad.clone()
    for optimizer in (twins.optimizer, plain, bound):
        step(optimizer)
    assert all_same(twins.values(), [one.detach() for one in bound_weights])
    pairs = zip(twins.values(), plain_weights, strict=True)
    assert all(torch.allclose(*pair, 1e-4, 1e-5) for pair in pairs), twins.seed


def test_loading_a_state_dict_keeps_float32_states_of_16_bit_parameters() -> None:
    twins, other = Twins("NAdam"), Twins("NAdam")
    for one in (twins, other):
        hook_state_dict(one.optimizer, one.masters, ExitStack())
        one.set_gradients()
        step(one.optimizer)
    other.optimizer.load_state_dict(twins.optimizer.state_dict())
    for one, two in zip(twins.parameters, other.parameters, strict=True):
        ours, loaded = twins.optimizer.state[one], other.optimizer.state[two]
        assert all(same_bits(ours[key], loaded[key]) for key in ("mu_product", "exp_avg", "step"))


def test_unbinding_restores_the_plain_step_with_its_states() -> None:
    twins = Twins("NAdam", "no masters")
    twins.set_gradients()
    step(twins.optimizer)
    del twins.optimizer.found_inf, twins.optimizer.grad_scale
    twins.binding.unbind()
    assert binding_of(twins.optimizer) is None
    states = list(twins.optimizer.state.values())
    assert {(one["step"].device.type, one["step"].item()) for one in states} == {("cpu", 1.0)}
    twins.optimizer.step()
    assert {one["step"].item() for one in states} == {2.0}


# -- capture ---------------------------------------------------------------------------------------


def test_the_recapture_key_has_every_number_except_the_learning_rate() -> None:
    twins = Twins("NAdam")
    (group,) = twins.optimizer.param_groups
    twins.set_gradients()
    step(twins.optimizer)
    key = twins.binding.recapture_key()
    group["lr"] = 0.5
    group["initial_lr"] = 0.5
    assert twins.binding.recapture_key() == key
    for name, value in (("betas", (0.5, 0.9)), ("eps", 1e-3), ("weight_decay", 0.5)):
        before, group[name] = group[name], value
        assert twins.binding.recapture_key() != key
        group[name] = before
    assert twins.binding.recapture_key() == key
    twins.optimizer.load_state_dict(twins.optimizer.state_dict())
    assert twins.binding.recapture_key() != key
    key = twins.binding.recapture_key()
    twins.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert twins.binding.recapture_key() != key
    key = twins.binding.recapture_key()
    twins.optimizer.param_groups.reverse()
    assert twins.binding.recapture_key() != key


def test_a_state_that_other_code_replaces_changes_the_recapture_key_once() -> None:
    twins = Twins("RAdam")
    keys = []
    for is_replaced in (False, False, True, False):
        if is_replaced:
            state = twins.optimizer.state[twins.parameters[0]]
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        keys.append(twins.binding.recapture_key())
        twins.set_gradients()
        step(twins.optimizer)
    assert keys[1] != keys[2]
    assert keys[3] == keys[1]


def test_learning_rates_are_copied_before_a_replay_to_the_memory_of_the_capture() -> None:
    twins = Twins("RAdam")
    twins.set_gradients()
    step(twins.optimizer)
    plan, (rates, _, _) = twins.binding.captured()
    twins.optimizer.param_groups[0]["lr"] = 0.25
    twins.binding.before_replay(plan)
    assert rates.tolist() == [0.25]


def test_a_parameter_that_other_code_wrote_is_resynced_before_a_replay() -> None:
    twins = Twins("RAdam", "split")
    twins.set_gradients()
    step(twins.optimizer)
    plan, _ = twins.binding.captured()
    with torch.no_grad():
        twins.parameters[0].fill_(2.0)
    twins.binding.before_replay(plan)
    assert not twins.masters.companion_tensor(twins.parameters[0]).any()


def test_states_are_not_created_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins("RAdam")
    twins.set_gradients()
    monkeypatch.setattr(capturable_step._launch, "is_capturing", lambda _: True)
    with pytest.raises(mezzo.UnsupportedError, match="RAdam has not stepped every parameter yet"):
        step(twins.optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
@every_optimizer
def test_a_captured_training_step_follows_learning_rates(
    monkeypatch: pytest.MonkeyPatch, name: str, level: str
) -> None:
    capturer = fake_captures(monkeypatch)
    runs = []
    for captured in (True, False):
        made = Made("mlp")
        made.optimizer = OPTIMIZERS[name](made.model.parameters())
        training = mezzo.TrainStep(
            made.model, boosted, made.optimizer, level, dtype="bfloat16", capture=False
        )
        if level == "O1":
            bind_optimizer(made.optimizer, MasterWeights("none"))
        if captured:
            use_capture(training)
        losses = []
        for index, batch in enumerate(batches("mlp", 8)):
            if index == 6:
                made.optimizer.param_groups[0]["lr"] *= 0.5
            losses.append(float(training(*batch)))
        runs.append((losses, weights(made.model)))
    assert [graph.replays for graph in capturer.graphs] == [5]
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


def test_parameters_that_the_last_step_did_not_update_are_resynced_before_a_capture() -> None:
    twins = Twins("RAdam", "split")
    twins.set_gradients()
    step(twins.optimizer)
    frozen = twins.parameters[0]
    twins.set_gradients()
    frozen.grad = None
    step(twins.optimizer)
    with torch.no_grad():
        frozen.fill_(2.0)
    twins.binding.before_capture()
    assert not twins.masters.companion_tensor(frozen).any()


def test_states_that_other_code_clears_stay_alive_and_change_the_recapture_key() -> None:
    twins = Twins("RAdam")
    twins.set_gradients()
    step(twins.optimizer)
    key, (_, (_, _, states)) = twins.binding.recapture_key(), twins.binding.captured()
    mean = twins.optimizer.state[twins.parameters[0]]["exp_avg"]
    assert any(one is mean for one in states[0])
    twins.optimizer.state.clear()
    assert twins.binding.recapture_key() != key
    twins.set_gradients()
    step(twins.optimizer)
    assert twins.optimizer.state[twins.parameters[0]]["step"].item() == 1.0
    assert twins.binding.recapture_key() == key
