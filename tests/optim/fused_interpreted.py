"""The fused step in Triton's interpreter. `test_fused_step.py` runs this in a separate process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import step_cases
from support.kernel_cases import fresh_seed
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import mezzo
from mezzo import _launch
from mezzo.optim import fused_tables
from mezzo.optim.bind_optimizer import bind_optimizer
from mezzo.optim.fused_step import FusedBinding
from mezzo.optim.fused_tables import LaunchPlan
from mezzo.optim.master_weights import MasterWeights
from mezzo.policy.types import Master
from mezzo.scaling import observed_scaler
from mezzo.scaling.gradient_counts import GradientCounts
from mezzo.scaling.mesh import local
from mezzo.scaling.step_result import FlaggedSource, ParameterNames

# The interpreter uses NumPy, which warns about overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "has_triton", lambda _: True)


PAIRS = [
    (master, dtype)
    for master in step_cases.KINDS
    for dtype in step_cases.HALVES
    if step_cases.fits(master, dtype)
]


# 9 optimizers and 9 pairs of master format and dtype: each optimizer and each pair once.
@pytest.mark.thinned(9)
@pytest.mark.parametrize(("master", "dtype"), PAIRS)
@pytest.mark.parametrize("name", step_cases.OPTIMIZERS)
def test_weights_and_states_equal_the_float64_reference(
    name: str, master: str, dtype: torch.dtype
) -> None:
    step_cases.check_against_reference(name, master, dtype, "cpu", fresh_seed() % 2**31)


@pytest.mark.parametrize(("master", "dtype"), [pair for pair in PAIRS if pair[0] != "stochastic"])
def test_parameters_are_rounded_masters(master: str, dtype: torch.dtype) -> None:
    step_cases.check_that_parameters_are_rounded_masters(
        "SGD", master, dtype, "cpu", fresh_seed() % 2**31
    )


@pytest.mark.parametrize(
    ("name", "master", "dtype"),
    [("LAMB", "stochastic", torch.bfloat16), ("SGD momentum", "stochastic", torch.float16)],
)
def test_the_fused_step_agrees_with_the_original_step(
    name: str, master: str, dtype: torch.dtype
) -> None:
    step_cases.check_against_the_optimizers_own_step(
        name, master, dtype, "cpu", fresh_seed() % 2**31
    )


def small(master: str = "float32", **options: object) -> step_cases.Training:
    options = {"seed": fresh_seed() % 2**31, "sizes": step_cases.FEW_SIZES, **options}
    return step_cases.training("AdamW", master, torch.bfloat16, "cpu", **options)


def test_masters_follow_a_write_through_data_to_a_whole_parameter() -> None:
    trained = small()
    trained.gradients()
    trained.step()
    written = next(
        parameter for parameter in trained.masters if parameter.numel() > step_cases.CHUNK
    )
    averaged = torch.randn(written.shape).bfloat16()
    written.data.copy_(averaged)
    for parameter in trained.parameters:
        parameter.grad.zero_()
    for group in trained.optimizer.param_groups:
        group["lr"] = 0.0
    trained.step()
    assert torch.equal(written, averaged)
    followed = trained.masters.read(written)
    assert torch.equal(followed.bfloat16(), averaged)
    # Values are compared: a master that rounds to what was written may stay.
    assert (followed == averaged.float()).float().mean() > 0.95


@pytest.mark.parametrize(
    ("master", "name"), [("split", "AdamW"), ("kahan", "AdamW"), ("split", "LAMB")]
)
def test_a_write_through_data_to_a_whole_parameter_drops_its_companion(
    master: str, name: str
) -> None:
    step_cases.check_a_write_through_data(name, master, torch.bfloat16, "cpu", fresh_seed() % 2**31)


def test_elements_that_are_zeroed_through_data_ignore_their_remainder() -> None:
    trained = small("split")
    trained.gradients()
    trained.step()
    masked = next(
        parameter for parameter in trained.masters if parameter.numel() > step_cases.CHUNK
    )
    mask = torch.rand(masked.shape) < 0.5
    before = trained.masters.read(masked)
    masked.data.mul_(mask)
    for group in trained.optimizer.param_groups:
        group["lr"] = 0.0
    trained.step()
    after = trained.masters.read(masked)
    assert torch.equal(after[mask], before[mask])
    assert (after[~mask].abs() < 2.0**-130).all()


@pytest.mark.parametrize("master", ["float32", "split", "kahan"])
def test_masters_follow_a_write_to_one_element(master: str) -> None:
    trained = small(master)
    for group in trained.optimizer.param_groups:
        group.update(lr=0.0)
    trained.gradients()
    trained.step()
    written = next(
        parameter for parameter in trained.masters if parameter.numel() > step_cases.CHUNK
    )
    before = trained.masters.read(written)
    with torch.no_grad():
        written[0, 5] = 42.0
    trained.step()
    after = trained.masters.read(written)
    assert after[0, 5].item() == 42.0
    before[0, 5] = 42.0
    # Split and Kahan masters see that a parameter was written, not where: all elements lose their
    # companion.
    assert torch.equal(
        after, before if master == "float32" else before.bfloat16().float()
    ) or step_cases.close(after, before.double(), 2.0**-8)


def test_a_scaler_checks_clips_and_steps() -> None:
    trained = small(clip_norm=0.5)
    scaler = mezzo.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    trained.gradients(64.0)
    values, _, norm = step_cases.wanted(trained, 1, 64.0, 0.5)
    result = scaler.step(trained.optimizer)
    scaler.update()
    assert not result.skipped
    assert abs(trained.bound.grad_norm.item() - norm) <= 1e-5 * norm
    assert all(
        step_cases.close(got, value) for got, value in zip(trained.exact(), values, strict=True)
    )


def test_a_tracked_norm_is_computed_without_clipping() -> None:
    trained = small()
    trained.bound.track_norm()
    memory = set()
    for done in range(2):
        trained.gradients(64.0)
        values, _, norm = step_cases.wanted(trained, done + 1, 64.0, None)
        trained.step(64.0, found=False)
        assert abs(trained.bound.grad_norm.item() - norm) <= 1e-5 * norm
        memory.add(trained.bound._square_sum.data_ptr())
        assert all(
            step_cases.close(got, value) for got, value in zip(trained.exact(), values, strict=True)
        )
    # Every captured step writes the sum to the same memory.
    assert len(memory) == 1


@pytest.mark.parametrize("has_scaler", [True, False])
def test_the_norm_is_computed_without_clipping(has_scaler: bool) -> None:
    trained = small()
    trained.bound.track_norm()
    scale = 64.0 if has_scaler else 1.0
    scaler = mezzo.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    trained.gradients(scale)
    values, _, norm = step_cases.wanted(trained, 1, scale, 1e9)
    if has_scaler:
        scaler.step(trained.optimizer)
    else:
        trained.optimizer.step()
    assert trained.bound.square_sum.sqrt().item() == pytest.approx(norm, rel=1e-5)
    assert trained.bound.device_rate.flatten()[0] == trained.optimizer.param_groups[0]["lr"]
    assert all(
        step_cases.close(got, value) for got, value in zip(trained.exact(), values, strict=True)
    )


def test_a_scaler_names_the_parameter_with_a_nonfinite_gradient() -> None:
    trained = small(clip_norm=0.5)
    scaler = mezzo.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    trained.gradients(64.0)
    before = trained.exact()
    trained.parameters[3].grad[-1] = torch.inf
    result = scaler.step(trained.optimizer)
    scaler.update()
    assert result.skipped
    assert result.first_nonfinite == "parameter 3"
    assert all(map(torch.equal, trained.exact(), before))


def test_the_fused_check_counts_by_parameter_and_changes_no_bit() -> None:
    weights = []
    for counted in (False, True):
        model, optimizer = counted_model()
        scaler = mezzo.GradScaler("cpu", init_scale=8.0)
        counts = GradientCounts(list(model.parameters()))
        if counted:
            observed_scaler.count_gradients(scaler, counts)
        for bad in (False, True):
            x = torch.ones(2, 4) * (torch.inf if bad else 1.0)
            scaler.scale(model(x).float().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        weights.append([one.detach().clone() for one in model.parameters()])
        found = counts.by_parameter(counts.used().tolist())
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    # The norm has float32 gradients, and takes a launch of its own.
    assert {index: one.total for index, one in found.items()} == {0: 24, 1: 6, 2: 6, 3: 6}
    assert found[0].overflowed == 12
    assert counts.first_parameter(counts.first.item()) == 0


def counted_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return mezzo.decorate(model, optimizer, "O2", dtype="float16")


def test_gradients_may_move_or_be_missing_from_step_to_step() -> None:
    trained = small()
    for missing in (None, 2, 5, None):
        trained.gradients()
        if missing is not None:
            trained.parameters[missing].grad = None
        old = trained.exact()
        steps = [
            int(trained.optimizer.state[parameter].get("step", 0))
            for parameter in trained.parameters
        ]
        trained.step()
        for index, (parameter, before, after) in enumerate(
            zip(trained.parameters, old, trained.exact(), strict=True)
        ):
            moved = index != missing
            assert int(trained.optimizer.state[parameter].get("step", 0)) == steps[index] + moved
            assert parameter.numel() == 0 or torch.equal(before, after) is not moved


def test_momentum_that_is_switched_on_later_starts_from_the_next_gradient() -> None:
    trained = step_cases.training("SGD", "float32", torch.bfloat16, "cpu", seed=3)
    trained.gradients()
    trained.step()
    for group in trained.optimizer.param_groups:
        group["momentum"] = 0.9
    for steps in (1, 2):
        trained.gradients()
        values, _, _ = step_cases.wanted(trained, steps, 1.0, None)
        trained.step()
        assert all(
            step_cases.close(got, value) for got, value in zip(trained.exact(), values, strict=True)
        )


def test_momentum_starts_from_the_first_gradient_that_is_not_skipped() -> None:
    trained = step_cases.training("SGD momentum", "float32", torch.bfloat16, "cpu", seed=3)
    trained.gradients()
    trained.step(found=True)
    trained.gradients()
    # Another list of parameters needs other tables.
    missing = trained.parameters[0].grad
    trained.parameters[0].grad = None
    trained.step(found=True)
    trained.parameters[0].grad = missing
    values, _, _ = step_cases.wanted(trained, 1, 1.0, None)
    trained.step()
    assert all(
        step_cases.close(got, value) for got, value in zip(trained.exact(), values, strict=True)
    )


def test_a_replaced_optimizer_state_is_used() -> None:
    trained = small()
    trained.gradients()
    trained.step()
    for parameter in trained.parameters:
        state = trained.optimizer.state[parameter]
        trained.optimizer.state[parameter] = {
            name: tensor.clone().zero_() for name, tensor in state.items()
        }
    values, _, _ = step_cases.wanted(trained, 1, 1.0, None)
    trained.step()
    assert all(
        step_cases.close(got, value) for got, value in zip(trained.exact(), values, strict=True)
    )


def test_gradients_with_other_strides_update_the_right_elements() -> None:
    trained = small()
    trained.gradients()
    for parameter in trained.parameters:
        if parameter.dim() == 2:
            parameter.grad = parameter.grad.mT.contiguous().mT
    values, _, _ = step_cases.wanted(trained, 1, 1.0, None)
    trained.step()
    assert all(
        step_cases.close(got, value) for got, value in zip(trained.exact(), values, strict=True)
    )


@pytest.mark.parametrize("on_device", [False, True])
def test_learning_rates_may_be_tensors_and_may_change(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launch, "needs_sync", lambda _: on_device)
    trained = small()
    # A step as large as the weight cancels it, and float32 is then less accurate than the bound:
    # with learning rates from 0.5 on in 17 of 1,000 draws.
    for steps, rate in ((1, 0.05), (2, torch.tensor(0.025)), (3, torch.tensor(0.0125)), (4, 0.01)):
        for group in trained.optimizer.param_groups:
            group["lr"] = rate
        trained.gradients()
        values, _, _ = step_cases.wanted(trained, steps, 1.0, None)
        trained.step()
        assert all(
            step_cases.close(got, value) for got, value in zip(trained.exact(), values, strict=True)
        )


def test_stochastic_rounding_repeats_with_the_seed() -> None:
    runs = []
    for _ in range(2):
        trained = step_cases.training("SGD", "stochastic", torch.bfloat16, "cpu", seed=11)
        results = []
        for _ in range(2):
            trained.gradients()
            trained.step()
            results.append(
                torch.cat(
                    [parameter.detach().flatten().float() for parameter in trained.parameters]
                )
            )
        runs.append(results)
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


def with_transposed_gradients(trained: step_cases.Training) -> None:
    trained.gradients()
    for parameter in trained.parameters:
        if parameter.dim() > 1:
            parameter.grad = parameter.grad.mT.contiguous().mT


def test_the_check_and_the_step_share_one_table_of_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = small()
    read = []
    gradients_on = LaunchPlan.gradients_on
    monkeypatch.setattr(
        LaunchPlan,
        "gradients_on",
        lambda self, device, gradients: (
            read.append(list(gradients)) or gradients_on(self, device, gradients)
        ),
    )
    with_transposed_gradients(trained)
    flags: dict[torch.device, torch.Tensor] = {}
    assert trained.bound.check(
        torch.ones(()), flags, FlaggedSource(ParameterNames(), trained.optimizer)
    )
    trained.bound.step(torch.ones(()), flags[torch.device("cpu")])
    assert len(read) == 1


def test_a_gradient_that_a_step_hook_replaces_after_the_check_is_used() -> None:
    trained = small()
    with_transposed_gradients(trained)
    flags: dict[torch.device, torch.Tensor] = {}
    trained.bound.check(torch.ones(()), flags, FlaggedSource(ParameterNames(), trained.optimizer))
    before, last = trained.exact(), trained.parameters[-1]
    last.grad = torch.full_like(last.grad, float("nan"))
    trained.bound.step(torch.ones(()), flags[torch.device("cpu")])
    assert trained.exact()[-1].isnan().all()
    assert not torch.equal(trained.exact()[2], before[2])


@pytest.mark.parametrize("master", ["float32", "split", "kahan"])
def test_weights_that_were_backed_up_and_restored_train_on_to_the_bit(master: str) -> None:
    seed, finals = fresh_seed() % 2**31, []
    for swap in (True, False):
        trained = step_cases.training("AdamW", master, torch.bfloat16, "cpu", seed=seed)
        for _ in range(3):
            trained.gradients()
            trained.step()
            restores = [trained.masters.backup(parameter) for parameter in trained.masters if swap]
            for parameter in trained.masters if swap else ():
                trained.masters.write(parameter, torch.randn(parameter.shape))
            for restore in restores:
                restore()
        finals.append([trained.masters.read(parameter) for parameter in trained.masters])
    assert all(map(torch.equal, *finals))


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum"])
def test_a_cleared_state_begins_again(name: str) -> None:
    trained = step_cases.training(name, "split", torch.bfloat16, "cpu", seed=5)
    keys = []
    for cleared in (False, False, True, False):
        if cleared:
            trained.optimizer.state.clear()
        keys.append(trained.bound.recapture_key())
        trained.gradients()
        trained.step()
        assert len(trained.optimizer.state) == len(trained.parameters)
    assert [keys.index(key) for key in keys] == [0, 0, 2, 0]
    if name == "AdamW":
        steps = {state["step"].item() for state in trained.optimizer.state.values()}
        assert steps == {2.0}


def test_a_state_that_other_code_replaces_changes_the_recapture_key_once() -> None:
    trained = step_cases.training("AdamW", "split", torch.bfloat16, "cpu", seed=5)
    keys = []
    for is_replaced in (False, False, True, False):
        if is_replaced:
            state = trained.optimizer.state[trained.parameters[0]]
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        keys.append(trained.bound.recapture_key())
        trained.gradients()
        trained.step()
    assert [keys.index(key) for key in keys] == [0, 0, 2, 0]


def test_a_parameter_appended_to_a_group_gets_a_master() -> None:
    model = torch.nn.Linear(8, 8)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD([model.bias], lr=5e-4)
    mezzo.decorate(model, optimizer, dtype="bfloat16", master="split")
    keys = []
    for count in range(9):
        if count == 1:
            optimizer.param_groups[0]["params"].extend([model.weight])
        keys.append(optimizer._bound.recapture_key())
        model.weight.grad, model.bias.grad = (
            torch.ones_like(model.weight),
            torch.ones_like(model.bias),
        )
        optimizer.step()
    assert keys[1] != keys[0]
    assert mezzo.undecorate(model).weight.mean().item() == pytest.approx(1 - 40e-4, abs=1e-5)


# -- shards ----------------------------------------------------------------------------------------


@pytest.fixture
def device_mesh() -> Iterator[DeviceMesh]:
    """Yield a mesh of two ranks, of which this process is the first; collectives do nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def shards(device_mesh: DeviceMesh, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors as a shard of five rows, a replicated tensor and a plain one."""
    matrix, vector, plain = tensors
    return [
        DTensor.from_local(matrix, device_mesh, [Shard(0)], shape=(5, 4), stride=(4, 1)),
        DTensor.from_local(vector, device_mesh, [Replicate()], run_check=False),
        plain,
    ]


@pytest.mark.parametrize("master", ["split", "kahan", "stochastic"])
def test_16_bit_shards_are_updated_like_plain_tensors(device_mesh: DeviceMesh, master: str) -> None:
    torch.manual_seed(fresh_seed() % 2**31)
    values, trained = [torch.randn(3, 4), torch.randn(7), torch.randn(9)], []
    for is_sharded in (False, True):
        here = [value.clone() for value in values]
        parameters = [
            torch.nn.Parameter(one) for one in (shards(device_mesh, here) if is_sharded else here)
        ]
        masters = MasterWeights(master, seed=3)
        for parameter in parameters:
            masters.adopt(parameter, torch.bfloat16)
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        assert isinstance(bind_optimizer(optimizer, masters), FusedBinding)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            gradients = [torch.randn(one.shape, generator=generator).bfloat16() for one in values]
            placed = shards(device_mesh, gradients) if is_sharded else gradients
            for parameter, gradient in zip(parameters, placed, strict=True):
                parameter.grad = gradient
            optimizer.step()
        trained.append([local(masters.read(one)) for one in parameters])
        assert all(one.dtype is local(one).dtype is torch.bfloat16 for one in parameters)
    assert all(map(torch.equal, *trained))


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_later_shard_is_rounded_as_its_elements_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(fresh_seed() % 2**31)
    value, gradient = torch.randn(5000), torch.randn(5000).bfloat16()
    trained = []
    for first in (0, 2500):
        monkeypatch.setattr(fused_tables, "first_element", lambda _, first=first: first)
        weight = torch.nn.Parameter(value[first:].clone())
        masters = MasterWeights("stochastic", seed=3)
        masters.adopt(weight, torch.bfloat16)
        optimizer = getattr(torch.optim, name)([weight], lr=1e-3)
        assert isinstance(bind_optimizer(optimizer, masters), FusedBinding)
        weight.grad = gradient[first:].clone()
        optimizer.step()
        trained.append(weight.detach())
    assert torch.equal(trained[0][2500:], trained[1])


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_local_shards_are_updated_like_plain_tensors(
    device_mesh: DeviceMesh, optimizer_class: type[torch.optim.Optimizer]
) -> None:
    torch.manual_seed(fresh_seed() % 2**31)
    values, trained = [torch.randn(3, 4), torch.randn(7), torch.randn(9)], []
    for is_sharded in (False, True):
        here = [value.clone() for value in values]
        parameters = [
            torch.nn.Parameter(one) for one in (shards(device_mesh, here) if is_sharded else here)
        ]
        optimizer = optimizer_class(parameters, lr=0.1)
        bound = bind_optimizer(optimizer, MasterWeights(Master.NONE), clip_norm=1e9)
        assert isinstance(bound, FusedBinding)
        scaler = mezzo.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.ones((), requires_grad=True)).backward()
        generator = torch.Generator().manual_seed(1)
        for number in range(4):
            gradients = [64.0 * torch.randn(one.shape, generator=generator) for one in values]
            if number == 2:
                gradients[0][1, 2] = torch.inf
            # The rows in another order in memory, as a gradient of tensor parallelism may be.
            gradients[0] = gradients[0].mT.contiguous().mT
            placed = shards(device_mesh, gradients) if is_sharded else gradients
            for parameter, gradient in zip(parameters, placed, strict=True):
                parameter.grad = gradient
            before = [one.clone() for one in here]
            assert scaler.step(optimizer).skipped is (number == 2)
            assert all(map(torch.equal, here, before)) is (number == 2)
            scaler.update()
        # Each element counts once in the sum over both ranks: those of the shard are here only, the
        # others on both. The collectives of this mesh add up nothing.
        weights = (1.0, 0.5, 0.5) if is_sharded else (1.0, 1.0, 1.0)
        squares = sum(
            weight * float((gradient / 32).double().square().sum())
            for weight, gradient in zip(weights, gradients, strict=True)
        )
        assert float(mezzo.grad_norm(optimizer)) == pytest.approx(squares**0.5, rel=1e-5)
        state = optimizer.state[parameters[0]]
        if optimizer_class is torch.optim.AdamW:
            assert isinstance(state["exp_avg"], DTensor) is is_sharded
        trained.append(here)
    assert all(map(torch.equal, *trained))
