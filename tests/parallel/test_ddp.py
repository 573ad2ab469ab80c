"""Training steps over DistributedDataParallel, in two processes.

All scenarios run in one pair of processes; a test reads the outcome of one of them.
"""

import copy
import gc
import os
import time
import traceback
from pathlib import Path

import pytest
import torch
from support.processes import run_ranks
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo.parallel.process_groups import check_agreement, disagreement

SCENARIOS = {}
ROWS = 8
"""Rows of a batch on each rank."""
CPU = torch.device("cpu")


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def run_scenarios(rank):
    """Run every scenario; return the traceback of each that fails."""
    # The search for wrappers is faster without the objects of imported modules.
    gc.freeze()
    outcomes = {}
    for name, function in SCENARIOS.items():
        try:
            function(rank)
            outcomes[name] = ""
        except Exception:  # noqa: BLE001
            outcomes[name] = traceback.format_exc()
    return outcomes


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(2, run_scenarios)


# -- parts of scenarios ----------------------------------------------------------------------------


def make_pair(*, norm=nn.LayerNorm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), norm(32), nn.Tanh(), nn.Linear(32, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_step(level="O2", dtype="float16", *, wrap=None, clip_norm=None, norm=nn.LayerNorm, **args):
    """Return a step over the wrapped model, and the model; at O1 the wrapper comes first."""
    model, optimizer = make_pair(norm=norm)
    policy = {"policy": level, "dtype": dtype, "clip_norm": clip_norm}
    if level == "O2":
        mezzo.decorate(model, optimizer, **policy)
        policy = {}
    ddp = DistributedDataParallel(model, **(wrap or {}))
    if dtype == "float16" and "scaler" not in args:
        args["scaler"] = mezzo.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    return mezzo.TrainStep(ddp, mse, optimizer, **policy, **args), model


def mse(output, target):
    return nn.functional.mse_loss(output.float(), target)


def batch(index, rank=None):
    """Return inputs and targets of a rank; without a rank those of both."""
    x = torch.randn(2 * ROWS, 16, generator=torch.Generator().manual_seed(index))
    rows = slice(None) if rank is None else slice(ROWS * rank, ROWS * rank + ROWS)
    return x[rows], x[rows, :4]


def train(step, rank, calls=6, overflow=()):
    """Train; on rank 1 the calls of `overflow` have gradients that are not finite."""
    losses = []
    for index in range(calls):
        x, y = batch(index, rank)
        losses.append(step(x, y * float("inf") if rank == 1 and index in overflow else y))
    return torch.stack(losses)


def gathered(value):
    """Return a value of all ranks."""
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def state(step, model):
    """Return everything that must never differ between ranks."""
    optimizer = step.optimizer.state_dict()
    return {
        "model": dict(model.state_dict()),
        "masters": dict(mezzo.master_params(model)),
        "momentum": {key: value["momentum_buffer"] for key, value in optimizer["state"].items()},
        "scaler": None if step.scaler is None else step.scaler.state_dict(),
        "skipped": step.metrics.skipped_steps,
    }


def assert_equal_on_all_ranks(step, model):
    first, second = gathered(state(step, model))
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


def distance(one, other):
    """Return how far weights are apart, relative to how far training moved them."""
    start = dict(make_pair()[0].named_parameters())
    moved = sum(float((other[name] - start[name]).norm()) for name in start)
    return sum(float((one[name] - other[name]).norm()) for name in start) / moved


def weights(model):
    return {name: value.detach().float() for name, value in mezzo.master_params(model).items()}


def one_process(level, dtype, calls=6, **args):
    """Train on the batches of both ranks without a wrapper; return losses and weights."""
    model, optimizer = make_pair()
    if dtype == "float16":
        args["scaler"] = mezzo.GradScaler("cpu", init_scale=1024.0)
    step = mezzo.TrainStep(model, mse, optimizer, level, dtype=dtype, **args)
    losses = torch.stack([step(*batch(index)) for index in range(calls)])
    step.flush()
    return losses, weights(model)


def assert_raises(kind, pattern, function, *args, **kwargs):
    with pytest.raises(kind, match=pattern):
        function(*args, **kwargs)


# -- equal to one process --------------------------------------------------------------------------


def assert_as_one_process(rank, level, dtype, bound, calls=6, wrap=None, **args):
    step, model = make_step(level, dtype, wrap=wrap, **args)
    losses = sum(gathered(train(step, rank, calls))) / 2
    step.flush()
    args.pop("reduce_dtype", None)
    expected, expected_weights = one_process(level, dtype, calls, **args)
    torch.testing.assert_close(losses, expected, rtol=bound, atol=bound)
    assert distance(weights(model), expected_weights) < bound
    assert_equal_on_all_ranks(step, model)


@scenario
def float32_losses_equal_those_of_one_process_up_to_the_order_of_sums(rank):
    assert_as_one_process(rank, "O0", "auto", 1e-5)


@scenario
def o1_losses_equal_those_of_one_process(rank):
    assert_as_one_process(rank, "O1", "float16", 2e-3)
    assert_as_one_process(rank, "O1", "bfloat16", 2e-2)


@scenario
def o2_losses_equal_those_of_one_process(rank):
    assert_as_one_process(rank, "O2", "float16", 2e-3)
    assert_as_one_process(rank, "O2", "bfloat16", 2e-2)


@scenario
def gradients_are_clipped_by_the_norm_over_all_ranks(rank):
    assert_as_one_process(rank, "O2", "float16", 2e-3, clip_norm=0.1)
    assert_as_one_process(rank, "O0", "auto", 1e-5, clip_norm=0.1)


@scenario
def accumulated_calls_equal_those_of_one_process(rank):
    assert_as_one_process(rank, "O0", "auto", 1e-5, accumulate=3)
    assert_as_one_process(rank, "O2", "float16", 2e-3, accumulate=2, accumulate_reduction="sum")


@scenario
def flush_averages_the_gradients_of_all_ranks_first(rank):
    assert_as_one_process(rank, "O0", "auto", 1e-5, calls=5, accumulate=3)
    assert_as_one_process(rank, "O2", "float16", 2e-3, calls=4, accumulate=3, clip_norm=0.1)


class _Reductions(TorchDispatchMode):
    """Counts the all-reduces of a region."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name == "c10d::allreduce_"
        return function(*args, **(kwargs or {}))


@scenario
def gradients_are_reduced_in_the_last_call_of_an_accumulation_only(rank):
    step, _ = make_step("O2", "bfloat16", wrap={"bucket_cap_mb": 0.001}, accumulate=3)
    # torch rebuilds its buckets after the first update.
    train(step, rank, 3)
    counts = []
    for index in range(3):
        with _Reductions() as reductions:
            step(*batch(index, rank))
        counts.append(reductions.count)
    assert counts[:2] == [0, 0]
    assert counts[2] > 1, "one for each bucket"


@scenario
def static_graphs_and_bucket_views_accumulate(rank):
    wrap = {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}
    assert_as_one_process(rank, "O0", "auto", 1e-5, 7, wrap, accumulate=3)
    assert_as_one_process(rank, "O2", "float16", 2e-3, 7, wrap, accumulate=2)


@scenario
def gradients_are_reduced_in_float32_on_request(rank):
    for reduce_dtype, wrap in (("float32", {}), (torch.float32, {"static_graph": True})):
        assert_as_one_process(
            rank, "O2", "bfloat16", 2e-2, 5, wrap, accumulate=2, reduce_dtype=reduce_dtype
        )
    step, _ = make_step("O2", "bfloat16", reduce_dtype="float32")
    buckets = []
    step.model.register_comm_hook = lambda state, hook: (
        buckets.append(state),
        DistributedDataParallel.register_comm_hook(step.model, state, hook),
    )
    train(step, rank, 2)
    assert [one.dtype for one in buckets] == [torch.float32]


@scenario
def small_gradients_underflow_in_float16_and_not_in_float32(rank):
    for reduce_dtype, accumulate, expected in (
        (None, 1, 0.0),
        ("float32", 1, 2.0**-24),
        (None, 2, 0.0),
        ("float32", 2, 2.0**-24),
    ):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        nn.init.zeros_(model.weight)
        mezzo.decorate(model, optimizer, "O2", dtype="float16")
        args = {"accumulate": accumulate, "accumulate_reduction": "sum", "scaler": False}
        ddp = DistributedDataParallel(model)
        step = mezzo.TrainStep(ddp, total, optimizer, reduce_dtype=reduce_dtype, **args)
        # The smallest number of float16: half of it is 0.
        x = torch.full((1, 1), 2.0**-24)
        step(x, x)
        step.flush()
        assert abs(mezzo.master_params(model)["weight"].item()) == expected


def total(output, _):
    return output.sum()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, head):
        return (self.first if head == 0 else self.second)(self.body(x)).square().mean()


@scenario
def parameters_that_one_rank_does_not_use_are_equal_on_all_ranks(rank):
    for accumulate in (1, 2):
        model = TwoHeads()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        mezzo.decorate(model, optimizer, "O2", dtype="float16")
        unused = model.second.weight.detach().clone()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        scaler = mezzo.GradScaler("cpu", init_scale=64.0)
        step = mezzo.TrainStep(ddp, optimizer=optimizer, scaler=scaler, accumulate=accumulate)
        for index in range(5):
            x = torch.ones(2, 4) * (float("inf") if rank == 1 and index == 2 else 1.0)
            step(x, 0)
        step.flush()
        assert torch.equal(unused, model.second.weight), "it has no gradient on any rank"
        step(torch.ones(2, 4), rank)
        step.flush()
        assert not torch.equal(unused, model.second.weight)
        first, second = gathered([dict(mezzo.master_params(model)), scaler.state_dict()])
        torch.testing.assert_close(first, second, rtol=0, atol=0)


# -- skipped updates -------------------------------------------------------------------------------


@scenario
def all_ranks_skip_an_overflow_of_one_rank(rank):
    for level in ("O1", "O2"):
        for wrap in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            step, model = make_step(level, "float16", wrap=wrap)
            skipped = []
            for index in range(8):
                x, y = batch(index, rank)
                step(x, y * float("inf") if rank == 1 and index in {0, 3, 4} else y)
                skipped.append(step.skipped)
            assert [index for index, skip in enumerate(skipped) if skip] == [0, 3, 4]
            assert_equal_on_all_ranks(step, model)
            assert all(value.isfinite().all() for value in weights(model).values())


@scenario
def all_ranks_skip_an_overflow_in_any_call_of_an_accumulation(rank):
    for overflow in ({0}, {1, 2}, {5}, {6}):
        step, model = make_step("O2", "float16", accumulate=3)
        train(step, rank, 7, overflow)
        step.flush()
        assert step.metrics.skipped_steps == 1
        assert_equal_on_all_ranks(step, model)


@scenario
def a_sixteen_bit_sum_that_overflows_is_skipped_by_all_ranks(rank):
    step, model = make_step(reduce_dtype="float16")
    train(step, rank, overflow={2})
    assert step.metrics.skipped_steps == 1
    assert_equal_on_all_ranks(step, model)


@scenario
def the_source_of_an_overflow_is_named_by_one_rank_alone(rank):
    step, model = make_step()
    train(step, rank, 2, overflow={1})
    if rank == 0:
        assert step._runner.first_nonfinite() == "0.weight"
    train(step, rank, 2)
    assert_equal_on_all_ranks(step, model)


@scenario
def batch_statistics_are_restored_on_all_ranks(rank):
    step, model = make_step(norm=nn.BatchNorm1d)
    train(step, rank, 2)
    before = model[1].running_mean.clone()
    train(step, rank, 1, overflow={0})
    assert torch.equal(model[1].running_mean, before)
    assert model[1].num_batches_tracked == 2


# -- functions -------------------------------------------------------------------------------------


@scenario
def a_function_step_trains_the_wrapper(rank):
    for calls_backward in (False, True):
        model, optimizer = make_pair()
        mezzo.decorate(model, optimizer, "O2", dtype="float16")
        ddp = DistributedDataParallel(model)
        scaler = mezzo.GradScaler("cpu", init_scale=1024.0)

        @mezzo.train_step(models=ddp, optimizers=optimizer, scaler=scaler, accumulate=2)
        def step(x, y, ddp=ddp, calls_backward=calls_backward):
            loss = mse(ddp(x), y)
            if calls_backward:
                loss.backward()
            return loss

        losses = sum(gathered(train(step, rank, 5))) / 2
        step.flush()
        expected, expected_weights = one_process("O2", "float16", 5, accumulate=2)
        torch.testing.assert_close(losses, expected, rtol=2e-3, atol=2e-3)
        assert distance(weights(model), expected_weights) < 2e-3


@scenario
def a_function_that_calls_the_model_without_its_wrapper_raises(rank):
    model, optimizer = make_pair()
    ddp = DistributedDataParallel(model)

    @mezzo.train_step(models=ddp, optimizers=optimizer, policy="O1", dtype="bfloat16")
    def step(x, y):
        return mse(model(x), y)

    before = weights(model)
    assert_raises(mezzo.UnsupportedError, r"ddp\(x\), not model\(x\)", train, step, rank, 1)
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())


@scenario
def a_function_that_takes_update_raises(rank):
    model, optimizer = make_pair()
    decorator = mezzo.train_step(models=DistributedDataParallel(model), optimizers=optimizer)

    def step(update, x):
        update(model(x).sum(), optimizer)

    assert_raises(mezzo.PolicyError, "waits for those of all", decorator, step)


# -- wrong orders ----------------------------------------------------------------------------------


@scenario
def a_plain_wrapped_model_at_o2_raises_with_the_order(rank):
    model, optimizer = make_pair()
    ddp = DistributedDataParallel(model)
    for level in ("O2", "O3"):
        assert_raises(
            mezzo.UnsupportedError,
            rf"(?s)First decorate, then wrap: .*decorate\(model, optimizer, '{level}'\).*TrainStep",
            lambda level=level: mezzo.TrainStep(ddp, mse, optimizer, level),
        )
        assert_raises(
            mezzo.UnsupportedError,
            "First decorate, then wrap",
            lambda level=level: mezzo.decorate(ddp.module, optimizer, level),
        )
    # Nothing is half applied.
    assert model[0].weight.dtype is torch.float32
    train(mezzo.TrainStep(ddp, mse, optimizer, "O1", dtype="bfloat16"), rank, 1)


@scenario
def a_step_over_the_module_inside_a_wrapper_raises(rank):
    model, optimizer = make_pair()
    ddp = DistributedDataParallel(model)
    pattern = r"Pass the wrapper, TrainStep\(ddp, ...\), not ddp.module"
    for part in (ddp.module, nn.Sequential(model)):
        assert_raises(
            mezzo.UnsupportedError,
            pattern,
            lambda part=part: mezzo.TrainStep(part, mse, optimizer, "O1", dtype="bfloat16"),
        )
    del ddp, part
    train(mezzo.TrainStep(model, mse, optimizer, "O1", dtype="bfloat16"), rank, 1)


@scenario
def wrapping_after_the_step_was_made_raises_at_its_first_call(rank):
    for level in ("O1", "O2"):
        model, optimizer = make_pair()
        step = mezzo.TrainStep(model, mse, optimizer, level, dtype="bfloat16")
        ddp = DistributedDataParallel(model)
        pattern = "Wrap the model before the step is created"
        assert_raises(mezzo.UnsupportedError, pattern, train, step, rank, 1)
        del ddp


@scenario
def a_model_of_each_process_needs_no_wrapper_and_no_other_process(rank):
    model, optimizer = make_pair()
    step = mezzo.TrainStep(model, mse, optimizer, "O2", dtype="bfloat16", accumulate=2)
    if rank == 0:
        train(step, rank, 3)
        step.flush()
        assert step.metrics.skipped_steps == 0


@scenario
def every_trained_model_of_a_step_is_wrapped(rank):
    model, optimizer = make_pair()
    other = nn.Linear(2, 2)
    pair = [optimizer, torch.optim.SGD(other.parameters(), lr=0.1)]
    decorator = mezzo.train_step(
        models=[DistributedDataParallel(model), other], optimizers=pair, dtype="bfloat16"
    )
    assert_raises(mezzo.UnsupportedError, "Wrap every trained model", decorator, lambda x: x)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ddp = DistributedDataParallel(model)
    assert_raises(
        mezzo.UnsupportedError,
        "gradient of '0.weight' is not averaged",
        lambda: mezzo.TrainStep(ddp, mse, optimizer, "O1", dtype="bfloat16"),
    )


@scenario
def paddles_order_error_keeps_its_message(rank):
    from mezzo.compat import paddle

    message = (
        r"For distributed AMP training, you should first use paddle.amp.decorate\(\) to decorate"
        r" origin model, and then call paddle.DataParallel get distributed model\."
    )
    for wrapped in (
        paddle.DataParallel(nn.Linear(2, 2)),
        DistributedDataParallel(nn.Linear(2, 2)),
    ):
        assert_raises(
            RuntimeError,
            message,
            lambda wrapped=wrapped: paddle.amp.decorate(models=wrapped, level="O2"),
        )


# -- communication hooks ---------------------------------------------------------------------------


@scenario
def power_sgd_with_a_loss_scale_raises(rank):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    def wrapped():
        model, optimizer = make_pair()
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(power.PowerSGDState(None), power.powerSGD_hook)
        return ddp, optimizer

    ddp, optimizer = wrapped()
    pattern = "powerSGD_hook keeps its error for the next update"
    assert_raises(
        mezzo.UnsupportedError,
        pattern,
        lambda: mezzo.TrainStep(ddp, mse, optimizer, "O1", dtype="float16"),
    )
    train(mezzo.TrainStep(ddp, mse, optimizer, "O1", dtype="bfloat16"), rank, 1)
    # Registered after the step was made.
    step, _ = make_step("O1", "float16")
    step.model.register_comm_hook(power.PowerSGDState(None), power.batched_powerSGD_hook)
    assert_raises(mezzo.UnsupportedError, "batched_powerSGD_hook keeps", train, step, rank, 1)


@scenario
def reduce_dtype_raises_beside_another_hook_and_without_a_wrapper(rank):
    model, optimizer = make_pair()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, fp16_compress_hook)

    def make(model, reduce_dtype):
        args = {"dtype": "bfloat16", "reduce_dtype": reduce_dtype}
        return mezzo.TrainStep(model, mse, optimizer, "O1", **args)

    assert_raises(mezzo.PolicyError, "'fp16_compress_hook' already", make, ddp, "float32")
    assert_raises(mezzo.PolicyError, "one of: float32, bfloat16", make, ddp, "int8")
    del ddp
    assert_raises(mezzo.PolicyError, "is not wrapped by it", make, model, "float32")


@scenario
def two_steps_share_a_wrapper_with_the_same_reduce_dtype(rank):
    step, _ = make_step(reduce_dtype="float32")
    train(step, rank, 1)
    other = mezzo.TrainStep(step.model, mse, step.optimizer, reduce_dtype="float32")
    train(other, rank, 1)
    assert_raises(
        mezzo.PolicyError,
        "'reduce_in_dtype' already",
        lambda: mezzo.TrainStep(step.model, mse, step.optimizer, reduce_dtype="bfloat16"),
    )


@scenario
def own_mixed_precision_of_the_wrapper_raises(rank):
    model, optimizer = make_pair()
    ddp = DistributedDataParallel(model)
    ddp.mixed_precision = object()
    assert_raises(
        mezzo.UnsupportedError,
        "Leave mixed_precision out",
        lambda: mezzo.TrainStep(ddp, mse, optimizer, "O1", dtype="bfloat16"),
    )


# -- agreement -------------------------------------------------------------------------------------


@scenario
def different_settings_raise_on_all_ranks_and_name_the_fields(rank):
    choices = {
        r"dtype: float16 on rank 0; bfloat16 on rank 1": {"dtype": ["float16", "bfloat16"][rank]},
        r"accumulate: 2 on rank 0; 3 on rank 1": {"accumulate": 2 + rank},
        r"clip_norm: 1.0 on rank 0; None on rank 1": {"clip_norm": [1.0, None][rank]},
        r"full: .*softmax.* on rank 1": {"full": [set(), {"softmax"}][rank]},
        r"scale: 8.0 on rank 0; 16.0 on": {"scaler": mezzo.GradScaler(init_scale=8.0 * (1 + rank))},
        r"reduce_dtype: None on rank 0; float32": {"reduce_dtype": [None, "float32"][rank]},
    }
    for pattern, choice in choices.items():
        model, optimizer = make_pair()
        args = {"dtype": "float16", **choice}
        step = mezzo.TrainStep(DistributedDataParallel(model), mse, optimizer, "O1", **args)
        assert_raises(mezzo.PolicyError, pattern, train, step, rank, 1)


@scenario
def different_optimizers_and_parameters_raise_on_all_ranks(rank):
    model, _ = make_pair()
    kind, rate = (torch.optim.SGD, torch.optim.Adam)[rank], 0.1 + rank
    optimizer = kind(model.parameters(), lr=rate)
    step = mezzo.TrainStep(DistributedDataParallel(model), mse, optimizer, dtype="bfloat16")
    pattern = r"optimizer 0: SGD on rank 0; Adam on rank 1. lr of group 0 of optimizer 0: 0.1 on"
    assert_raises(mezzo.PolicyError, pattern, train, step, rank, 1)
    model = nn.Sequential()
    model.add_module("ab"[rank], nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mezzo.TrainStep(DistributedDataParallel(model), mse, optimizer, dtype="bfloat16")
    pattern = r"parameter 'a.weight': \(4, 16\) float32 trained on rank 0; absent on rank 1"
    assert_raises(mezzo.PolicyError, pattern, train, step, rank, 1)


@scenario
def ranks_compare_settings_once(rank):
    calls, original = [], distributed.all_gather
    distributed.all_gather = lambda *args, **kwargs: (
        calls.append(args),
        original(*args, **kwargs),
    )
    try:
        step, _ = make_step()
        train(step, rank)
    finally:
        distributed.all_gather = original
    assert len(calls) == 1


@scenario
def flush_after_different_numbers_of_calls_raises_on_all_ranks(rank):
    step, _ = make_step(accumulate=3)
    train(step, rank, 4)
    step.flush()
    step.flush()
    assert step._updates == 2
    # Calls without an update have no collective, so that ranks may differ in their number.
    train(step, rank, 1 + rank)
    assert_raises(mezzo.UnsupportedError, "after 1 to 2 on all", step.flush)


# -- other objects over a wrapper ------------------------------------------------------------------


@scenario
def a_step_resumes_in_the_middle_of_an_accumulation(rank):
    step, model = make_step(accumulate=3)
    train(step, rank, 4)
    # A copy: torch's optimizers keep the tensors that they load.
    saved = copy.deepcopy(step.state_dict())
    other, other_model = make_step(accumulate=3)
    other.load_state_dict(saved)
    train(step, rank, 3)
    train(other, rank, 3)
    torch.testing.assert_close(state(step, model), state(other, other_model), rtol=0, atol=0)


@scenario
def an_evaluation_step_and_an_average_take_the_wrapper(rank):
    step, model = make_step()
    ema = mezzo.EMA(step.model, decay=0.5)
    train(step, rank, 2)
    ema.update()
    evaluate = mezzo.EvalStep(step.model)
    # Without a collective: the other rank does not evaluate.
    if rank == 0:
        assert evaluate(batch(0, rank)[0]).shape == (ROWS, 4)
    assert evaluate.model is model


@scenario
def a_parameter_that_is_added_to_the_optimizer_is_reduced(rank):
    model, _ = make_pair()
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9)
    mezzo.decorate(model, optimizer, "O2", dtype="bfloat16")
    step = mezzo.TrainStep(DistributedDataParallel(model), mse, optimizer)
    train(step, rank, 2)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    before = weights(model)
    train(step, rank, 3)
    assert not torch.equal(weights(model)["0.weight"], before["0.weight"])
    assert_equal_on_all_ranks(step, model)


@scenario
def a_model_is_compiled_before_it_is_wrapped(rank):
    for level in ("O1", "O2"):
        model, optimizer = make_pair()
        mezzo.decorate(model, optimizer, level, dtype="bfloat16")
        ddp = DistributedDataParallel(torch.compile(model, backend="eager"))
        step = mezzo.TrainStep(ddp, mse, optimizer)
        other, other_model = make_step(level, "bfloat16")
        torch.testing.assert_close(train(step, rank, 3), train(other, rank, 3), rtol=0, atol=0)
        torch.testing.assert_close(weights(model), weights(other_model), rtol=0, atol=0)
        assert mezzo.EvalStep(ddp).model is model
        assert list(mezzo.EMA(ddp).state_dict()) == list(weights(model))


@scenario
def channels_last_of_a_wrapped_model_raises(rank):
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = {"policy": "O1", "dtype": "bfloat16", "channels_last": True}
    assert_raises(
        mezzo.PolicyError,
        "channels_last.model. before that",
        lambda: mezzo.TrainStep(DistributedDataParallel(model), mse, optimizer, **make),
    )
    ddp = DistributedDataParallel(mezzo.channels_last(model))
    step = mezzo.TrainStep(ddp, mse, optimizer, **make)
    step(torch.ones(2, 3, 4, 4), torch.ones(2, 4))


@scenario
def nested_inputs_are_arranged_for_the_model_inside(rank):
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    step = mezzo.TrainStep(ddp, optimizer=optimizer, policy="O1", dtype="bfloat16")
    assert_raises(mezzo.PolicyError, "cannot take 3", step, torch.ones(2, 4), 0, 1)
    step({"x": torch.ones(2, 4), "head": 0})


# -- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(name, outcomes):
    failed = {rank: one[name] for rank, one in enumerate(outcomes) if one[name]}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())


def test_a_failing_rank_raises_with_its_traceback():
    with pytest.raises(AssertionError, match=r"(?s)rank 0:.*ZeroDivisionError"):
        run_ranks(2, fail)


def fail(rank):
    # The other rank waits for this one in vain.
    return 1 / rank if rank == 0 else distributed.barrier()


def test_many_differing_fields_are_counted():
    by_rank = [{f"field {index}": str(rank) for index in range(7)} for rank in range(2)]
    message = disagreement(by_rank)
    assert "field 4: 0 on rank 0; 1 on rank 1. 2 more fields differ." in message


def test_long_values_are_shortened():
    assert len(disagreement([{"a": "x" * 500}, {"a": "y" * 500}])) < 300


def train_until_a_rank_is_gone(rank, path, seconds):
    """Train; rank 1 ends or stops after two calls, and rank 0 writes how it ends."""
    step, _ = make_step()
    train(step, rank, 2)
    if rank == 1:
        time.sleep(seconds)
        os._exit(9)
    begin = time.monotonic()
    try:
        train(step, rank, 2)
    except RuntimeError as error:
        Path(path).write_text(f"{type(error).__name__} {time.monotonic() - begin}")


@pytest.mark.parametrize("seconds", [0.0, 4.0], ids=["ends", "stops"])
def test_a_rank_that_is_gone_ends_the_others_within_the_time_out(tmp_path, seconds):
    path, limit = tmp_path / "ended", 2.0
    with pytest.raises(AssertionError, match="rank 1 was ended"):
        run_ranks(2, train_until_a_rank_is_gone, str(path), seconds, group_seconds=limit)
    error, waited = path.read_text().split()
    assert error in {"RuntimeError", "DistBackendError"}
    assert float(waited) < limit + 1.5


def agree_alone(rank):
    check_agreement({"a": str(rank)}, None, CPU)
    return "agreed"


def test_one_process_agrees_with_itself():
    assert run_ranks(1, agree_alone) == ["agreed"]
