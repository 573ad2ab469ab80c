"""Captured steps of two processes: both capture, replay or run eagerly in each call.

Captured graphs are fakes that run the captured function at replays; `tests/gpu/test_ddp.py`
captures. All scenarios run in one pair of processes; a test reads the outcome of one of them.
"""

import time
import traceback
import warnings

import pytest
import torch
from support.fake_graphs import fake_captures, use_capture
from support.processes import run_ranks
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo._torch import communication_hooks, group_timeout, renew_reducer, reset_fsdp
from mezzo.parallel.ddp import DDPWrappers
from mezzo.parallel.process_groups import HostGroup
from mezzo.prepare.sharding import sharding_obstacle
from mezzo.step import warm_up
from mezzo.step.capture_runner import CaptureRunner
from mezzo.step.options import Capture
from mezzo.step.replay_timing import ReplayTiming
from mezzo.step.runners import EagerRunner

SCENARIOS = {}
WARM_UP = 4


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def run_scenarios(rank):
    """Run every scenario; return the traceback of each that fails."""
    outcomes = {}
    for name, function in SCENARIOS.items():
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            capturer = fake_captures(patch)
            capturer.defers = True
            patch.setattr(warm_up, "_WRAPPED_CALLS", WARM_UP)
            try:
                function(rank, capturer, patch)
                outcomes[name] = ""
            except Exception:  # noqa: BLE001
                outcomes[name] = traceback.format_exc()
    return outcomes


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(2, run_scenarios)


# -- parts of scenarios ----------------------------------------------------------------------------


def make_step(*, captured=True, wrap=None, mode="auto", **args):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ddp = DistributedDataParallel(model, **(wrap or {}))
    step = mezzo.TrainStep(
        ddp, mse, optimizer, "O1", dtype="bfloat16", channels_last=False, capture=False, **args
    )
    if captured:
        step._capture = Capture.parse(mode)
        use_capture(step, mode)
    return step


def mse(output, target, *_):
    return nn.functional.mse_loss(output.float(), target)


def batch(rank, index, rows=8):
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(2 * index + rank))
    return x, x[:, :4].clone()


def train(step, rank, sizes, start=0):
    """Train on batches of these sizes; return losses, and what was replayed, with the weights."""
    losses, replayed = [], []
    for index, rows in enumerate(sizes, start):
        before = step.replays
        losses.append(float(step(*batch(rank, index, rows))))
        replayed.append(step.replays > before)
    return losses, replayed


def weights(step):
    return [one.detach().clone() for one in step.models[0].parameters()]


def gathered(value):
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def assert_same_on_all_ranks(*values):
    first, second = gathered(values)
    assert first == second


def assert_trains_like_eager(step, rank, sizes, losses, **args):
    other = make_step(captured=False, **args)
    assert train(other, rank, sizes)[0] == losses
    assert all(map(torch.equal, weights(step), weights(other)))


def count_exchanges(patch):
    counts = []
    gather = HostGroup.gather
    patch.setattr(
        HostGroup, "gather", lambda self, numbers: (counts.append(1), gather(self, numbers))[1]
    )
    return counts


# -- scenarios -------------------------------------------------------------------------------------


@scenario
def equal_shapes_are_captured_after_the_warm_up_and_replayed(rank, capturer, patch):
    step, sizes = make_step(), [8] * 9
    losses, replayed = train(step, rank, sizes)
    assert replayed == [False] * WARM_UP + [True] * (9 - WARM_UP)
    assert step.eager_reason is None
    assert_trains_like_eager(step, rank, sizes, losses)


@scenario
def ranks_with_different_shapes_capture_and_replay_in_the_same_calls(rank, capturer, patch):
    # Rank 1 has other sizes, and they change in other calls.
    sizes = [8] * 6 + [4, 4, 4, 8, 8, 8, 4] if rank == 0 else [6] * 7 + [8, 8, 6, 6, 3, 8]
    step = make_step()
    losses, replayed = train(step, rank, sizes)
    assert_same_on_all_ranks(replayed, step.replays, step._runner.graph_count)
    assert replayed[4:6] == [True, True]
    # Rank 0 knows these sizes, but not together with those of rank 1.
    assert not any(replayed[6:8])
    assert replayed[12]
    assert_trains_like_eager(step, rank, sizes, losses)


@scenario
def a_capture_that_fails_on_one_rank_makes_all_run_eagerly(rank, capturer, patch):
    capturer.fails, capturer.failure = rank == 1, "the host reads from the device in model.py:7"
    step, sizes = make_step(), [8] * 20
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, replayed = train(step, rank, sizes)
    assert not any(replayed)
    reason = "model.py:7" if rank == 1 else "cannot be captured on rank 1"
    assert reason in step.eager_reason
    assert [reason in str(one.message) for one in caught] == [True]
    # Each rank has tried twice, in the same calls: hidden from the model, and not hidden.
    assert_same_on_all_ranks(capturer.reports)
    assert capturer.reports[:2] == [True, False]
    assert_trains_like_eager(step, rank, sizes, losses)


@scenario
def a_model_that_reads_the_host_on_one_rank_is_not_tried_to_be_captured(rank, capturer, patch):
    capturer.reads = ("/somewhere/model.py:7: if x.sum() > 0:",) if rank == 1 else ()
    step, sizes = make_step(), [8] * 7
    where = "model.py:7" if rank == 1 else "this one nowhere"
    with pytest.warns(UserWarning, match=f"different lines, .*{where}"):
        losses, replayed = train(step, rank, sizes)
    assert not any(replayed)
    # One rank in the middle of a capture might wait for the other one in NCCL.
    assert capturer.reports == []
    assert_trains_like_eager(step, rank, sizes, losses)


@scenario
def a_model_that_reads_the_same_on_all_ranks_is_captured_if_that_succeeds(rank, capturer, patch):
    capturer.reads = (f"/machine_{rank}/model.py:7: if x.sum() > 0:",) * (rank + 1)
    step = make_step()
    assert train(step, rank, [8] * 8)[1][-1]


@scenario
def a_failed_capture_is_tried_again_after_another_warm_up(rank, capturer, patch):
    capturer.fails_as_eager = rank == 1
    step, sizes = make_step(), [8] * 12
    losses, replayed = train(step, rank, sizes)
    assert capturer.reports == [True, False]
    # The call of the failed attempt runs eagerly, and the warm-up of the new reducers follows.
    assert replayed == [False] * (2 * WARM_UP + 1) + [True] * (11 - 2 * WARM_UP)
    assert_trains_like_eager(step, rank, sizes, losses)


@scenario
def host_draws_on_one_rank_are_recorded_on_all(rank, capturer, patch):
    capturer.draws = rank == 0
    step, sizes = make_step(), [8] * 12
    _, replayed = train(step, rank, sizes)
    assert replayed[-1]
    assert step._runner._attempt.records_draws


@scenario
def a_kind_that_fails_on_one_rank_leaves_the_others_captured(rank, capturer, patch):
    step, sizes = make_step(), [8] * 6 + [4] * 12 + [8] * 8
    losses, replayed = train(step, rank, sizes[:6])
    capturer.fails = rank == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        more, none = train(step, rank, sizes[6:18], 6)
    capturer.fails = False
    last, again = train(step, rank, sizes[18:], 18)
    assert replayed[-1]
    assert not any(none)
    assert step.eager_reason is None
    assert again[-1]
    assert_trains_like_eager(step, rank, sizes, losses + more + last)


@scenario
def an_input_that_cannot_be_captured_on_one_rank_makes_all_run_eagerly(rank, capturer, patch):
    step = make_step()
    losses = train(step, rank, [8] * 6)[0]

    class Unhashable:
        __hash__ = None

    x, y = batch(rank, 6)
    extra = Unhashable() if rank == 1 else 1
    expected = "Unhashable" if rank == 1 else "cannot be captured on rank 1"
    with pytest.warns(UserWarning, match=expected):
        losses.append(float(step(x, (y, extra))))
    more = train(step, rank, [8] * 3, 7)
    assert more[1] == [False] * 3
    assert_trains_like_eager(step, rank, [8] * 10, losses + more[0])


@scenario
def graphs_that_one_rank_drops_are_dropped_by_all(rank, capturer, patch):
    step = make_step()
    train(step, rank, [8] * 6)
    assert step.captured
    if rank == 1:
        step._runner.drop_graphs()
    _, replayed = train(step, rank, [8] * 6, 6)
    assert replayed == [False] * WARM_UP + [True] * (6 - WARM_UP)


@scenario
def graphs_are_dropped_before_a_process_group_shuts_down(rank, capturer, patch):
    # NCCL would wait for them.
    step = make_step()
    train(step, rank, [8] * 6)
    assert step.captured
    group = distributed.new_group([0, 1])
    distributed.destroy_process_group(group)
    assert not step.captured
    assert train(step, rank, [8] * 6, 6)[1][-1]


@scenario
def an_exchange_ends_with_the_time_out_of_the_training_group(rank, capturer, patch):
    hosts = HostGroup(None, torch.device("cpu"))
    assert hosts.gather([rank, 7]) == [(0, 7), (1, 7)]
    cpu = torch.device("cpu")
    assert group_timeout(hosts._group, cpu) == group_timeout(distributed.group.WORLD, cpu)
    assert group_timeout(hosts._group, cpu).total_seconds() == 30.0
    begin = time.perf_counter()
    for _ in range(200):
        hosts.gather([rank, 7, 0, 1])
    assert time.perf_counter() - begin < 200 * 0.01


@scenario
def modes_that_change_on_one_rank_only_do_not_separate_the_ranks(rank, capturer, patch):
    step = make_step()
    replayed = []
    for index in range(16):
        step.models[0].train(rank == 0 or index not in (7, 8, 9))
        replayed += train(step, rank, [8], index)[1]
    assert_same_on_all_ranks(replayed)
    assert replayed[6]
    assert not any(replayed[7:9])
    assert replayed[15]


@scenario
def accumulated_calls_are_captured_with_one_reduction(rank, capturer, patch):
    sizes = [8] * 18
    step = make_step(accumulate=3)
    losses, replayed = train(step, rank, sizes)
    assert all(replayed[15:])
    assert_trains_like_eager(step, rank, sizes, losses, accumulate=3)


@scenario
def a_static_graph_is_captured(rank, capturer, patch):
    sizes, args = [8] * 8, {"wrap": {"static_graph": True}}
    step = make_step(**args)
    losses, replayed = train(step, rank, sizes)
    assert replayed[-1]
    assert_trains_like_eager(step, rank, sizes, losses, **args)


@scenario
def each_call_exchanges_once_until_the_step_is_eager(rank, capturer, patch):
    step = make_step()
    counts = count_exchanges(patch)
    train(step, rank, [8] * 4)
    assert len(counts) == 4
    # Agreed as well: host reads, the capture, and whether three replays were slower.
    train(step, rank, [8] * 4, 4)
    assert len(counts) == 4 + 4 + 3
    train(step, rank, [8] * 4, 8)
    assert len(counts) == 11 + 4


@scenario
def same_shapes_exchange_nothing_before_calls(rank, capturer, patch):
    step = make_step(same_shapes=True)
    counts = count_exchanges(patch)
    losses, replayed = train(step, rank, [8] * 8)
    assert replayed[-1]
    assert len(counts) == 3
    assert_trains_like_eager(step, rank, [8] * 8, losses)


@scenario
def replays_are_dropped_if_they_are_slower_on_all_ranks(rank, capturer, patch):
    for slower_ranks, is_captured in (((1,), True), ((0, 1), False)):
        patch.setattr(
            ReplayTiming,
            "judges_slower",
            lambda self, ranks=slower_ranks: bool(
                (setattr(self, "_judged", True), rank in ranks)[1]
            ),
        )
        step = make_step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(step, rank, [8] * 10)
        assert step.captured is is_captured
        assert (step.eager_reason is None) is is_captured


@scenario
def a_rank_that_cannot_capture_its_step_makes_all_run_eagerly(rank, capturer, patch):
    step = make_step()
    if rank == 1:
        step._runner = EagerRunner(step._executor, "Triton is not installed")
        losses, _ = train(step, rank, [8] * 8)
    else:
        with pytest.warns(UserWarning, match="another rank cannot capture its step"):
            losses, _ = train(step, rank, [8] * 8)
        assert "another rank" in step.eager_reason
    assert_trains_like_eager(step, rank, [8] * 8, losses)


@scenario
def ranks_with_different_capture_arguments_raise(rank, capturer, patch):
    step = make_step(mode="auto" if rank else True)
    with pytest.raises(mezzo.PolicyError, match="capture: True on rank 0; auto on rank 1"):
        step(*batch(rank, 0))


@scenario
def capture_true_raises_on_all_ranks_if_one_cannot_capture(rank, capturer, patch):
    capturer.fails = rank == 1
    step = make_step(mode=True)
    with pytest.raises(mezzo.UnsupportedError, match="rank 1" if rank == 0 else "the root cause"):
        train(step, rank, [8] * 20)


@scenario
def a_new_reducer_trains_on_after_an_error_in_backward(rank, capturer, patch):
    step = make_step(captured=False, reduce_dtype="float32")
    losses = train(step, rank, [8] * 3)[0]
    ddp = step._components.ddp.wrappers[0]
    hooks = list(communication_hooks(ddp))
    output = ddp(batch(rank, 0)[0])
    hook = ddp.module[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    hook.remove()
    step.optimizer.zero_grad()
    renew_reducer(ddp)
    assert communication_hooks(ddp) == hooks
    losses += train(step, rank, [8] * 3, 3)[0]
    assert_trains_like_eager(step, rank, [8] * 6, losses, reduce_dtype="float32")


# -- FSDP2 -----------------------------------------------------------------------------------------


def make_sharded(*, captured=True, **args):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), Failing(), nn.Linear(16, 4))
    options = args.pop("shard", {})
    for part in (model[0], model[3], model):
        fully_shard(part, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = mezzo.TrainStep(
        model, mse, optimizer, "O1", dtype="bfloat16", channels_last=False, capture=False, **args
    )
    if captured:
        step._capture = Capture.AUTO
        use_capture(step, "auto")
    return step


class Failing(nn.Module):
    """Raises on request, in forward or in backward."""

    raises_in = None

    def forward(self, x):
        if self.raises_in == "forward":
            raise ZeroDivisionError
        if self.raises_in == "backward":
            x.register_hook(lambda _: 1 / 0)
        return x.tanh()


def shard_values(step):
    return [one.to_local().detach().clone() for one in step.models[0].parameters()]


@scenario
def sharded_models_are_captured_and_replayed_in_the_same_calls(rank, capturer, patch):
    sizes = [8] * 6 + [8, 8, 4, 4, 4, 8] if rank == 0 else [6] * 6 + [5, 5, 5, 6, 6, 6]
    for args in ({}, {"accumulate": 2}, {"shard": {"reshard_after_forward": False}}):
        step, other = make_sharded(**args), make_sharded(captured=False, **args)
        losses, replayed = train(step, rank, sizes * 2)
        assert_same_on_all_ranks(replayed)
        assert any(replayed)
        assert losses == train(other, rank, sizes * 2)[0]
        assert all(map(torch.equal, shard_values(step), shard_values(other)))


@scenario
def a_sharded_step_whose_capture_fails_on_one_rank_runs_eagerly(rank, capturer, patch):
    capturer.fails = rank == 0
    step, other = make_sharded(), make_sharded(captured=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = train(step, rank, [8] * 12)[0]
    assert ("rank 0" in step.eager_reason) is (rank == 1)
    # The update of shards has a collective: no rank captures it by itself.
    assert step._runner._update is None
    assert losses == train(other, rank, [8] * 12)[0]


@scenario
def a_sharded_model_trains_on_after_an_error_in_a_pass(rank, capturer, patch):
    for where in ("forward", "backward"):
        step, other = make_sharded(captured=False), make_sharded(captured=False)
        losses = train(step, rank, [8] * 3)[0]
        model = step.models[0]
        model[2].raises_in = where
        with pytest.raises(ZeroDivisionError):
            step(*batch(rank, 0))
        model[2].raises_in = None
        step.optimizer.zero_grad()
        reset_fsdp(model)
        losses += train(step, rank, [8] * 3, 3)[0]
        assert losses == train(other, rank, [8] * 6)[0]


@scenario
def what_of_sharded_models_is_not_captured_has_a_reason(rank, capturer, patch):
    model = make_sharded(captured=False).models[0]
    assert "cpu:gloo" in sharding_obstacle((model,))
    patch.setattr(distributed, "get_backend_config", lambda _: "cuda:nccl")
    assert sharding_obstacle((model,)) is None
    mesh = init_device_mesh("cpu", (2,))
    parallel = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()})
    assert "tensor parallelism" in sharding_obstacle((parallel,))
    patch.setattr(distributed, "is_gloo_available", lambda: False)
    assert "gloo" in sharding_obstacle((model,))


@scenario
def what_of_wrappers_is_not_captured_has_a_reason(rank, capturer, patch):
    def reason(accumulates=False, hook=None, **wrap):
        ddp = DistributedDataParallel(nn.Linear(2, 2), **wrap)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        return DDPWrappers((ddp,)).capture_refusal(accumulates=accumulates)

    assert "cpu:gloo" in reason()
    patch.setattr(distributed, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
    assert reason() is None
    assert reason(gradient_as_bucket_view=True) is None
    assert "change their addresses" in reason(accumulates=True, gradient_as_bucket_view=True)
    assert "find_unused_parameters=True" in reason(find_unused_parameters=True)
    warnings.simplefilter("ignore")
    assert reason(find_unused_parameters=True, static_graph=True) is None
    assert reason(hook=fp16_compress_hook) is None
    assert "'noop_hook' may keep state" in reason(hook=noop_hook)
    wrapper = DistributedDataParallel(nn.Linear(2, 2))
    wrapper._register_builtin_comm_hook(distributed.BuiltinCommHookType.FP16_COMPRESS)
    assert "not known in Python" in DDPWrappers((wrapper,)).capture_refusal(accumulates=False)
    other = DistributedDataParallel(nn.Linear(2, 2), process_group=distributed.new_group([0, 1]))
    both = DDPWrappers((DistributedDataParallel(nn.Linear(2, 2)), other))
    assert "different process groups" in both.capture_refusal(accumulates=False)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(name, outcomes):
    failures = [f"rank {rank}: {one[name]}" for rank, one in enumerate(outcomes) if one[name]]
    assert not failures, "\n".join(failures)


def test_a_runner_of_one_process_exchanges_nothing():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mezzo.TrainStep(model, mse, optimizer, "O1", dtype="bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        fake_captures(patch)
        assert CaptureRunner(step._executor, Capture.AUTO)._shared is None
