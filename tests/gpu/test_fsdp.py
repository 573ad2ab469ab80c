"""Models that FSDP2 has sharded on a CUDA device, with one rank and NCCL."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fsdp_streams
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mezzo
from mezzo._casting import map_tensors
from mezzo.optim.binding import optimizer_binding
from mezzo.optim.fused_step import FusedBinding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not distributed.is_nccl_available(), reason="needs NCCL"),
]

LEVELS = [("O1", "bfloat16"), ("O1", "float16"), ("O2", "bfloat16"), ("O2", "float16")]
CALLS = 8


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = Path(tmp_path_factory.mktemp("store")) / "store"
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def make_model(*, sharded: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Tanh(), nn.Linear(128, 16))
    model.cuda()
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def make_batch(index: int) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(index)).cuda()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the float32 values of a model's parameters."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in mezzo.master_params(model).items()
    }


def train(
    level: str, dtype: str, *, sharded: bool, **options: Any
) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """Train with a step that skips its fourth update in float16."""
    model = make_model(sharded=sharded)
    optimizer = adamw(model)
    scaler = (
        # Not dynamic: a dynamic scale is searched at the first update.
        mezzo.GradScaler("cuda", init_scale=256.0, dynamic=False) if dtype == "float16" else None
    )
    step = mezzo.TrainStep(
        model,
        nn.functional.mse_loss,
        optimizer,
        level,
        dtype=dtype,
        scaler=scaler,
        clip_norm=0.5,
        capture=False,
        **options,
    )
    losses, norms = [], []
    for index in range(CALLS):
        x = make_batch(index)
        overflows = index == 3 and scaler is not None
        losses.append(step(x, x[:, :16] * (float("inf") if overflows else 1.0)))
        norms.append(mezzo.grad_norm(optimizer).clone())
        # Reading does not wait.
        torch.cuda.synchronize()
        assert step.skipped is overflows
    finite = [index for index in range(CALLS) if index != 3]
    results = {"losses": torch.stack(losses)[finite], "norms": torch.stack(norms)[finite]}
    return {**results, **whole(model)}, optimizer


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_one_rank_equals_a_step_without_shards(level: str, dtype: str) -> None:
    sharded, optimizer = train(level, dtype, sharded=True)
    plain, _ = train(level, dtype, sharded=False)
    torch.testing.assert_close(sharded, plain, rtol=1e-3, atol=1e-4)
    assert isinstance(optimizer_binding(optimizer), FusedBinding)
    for state in optimizer.state.values():
        assert isinstance(state["exp_avg"], DTensor)
        assert state["exp_avg"].to_local().abs().sum() > 0


@pytest.mark.parametrize(
    ("dtype", "master"),
    [
        ("bfloat16", "split"),
        ("bfloat16", "kahan"),
        ("float16", "kahan"),
        ("bfloat16", "stochastic"),
    ],
)
def test_one_rank_with_16_bit_shards_equals_a_step_without_shards(dtype: str, master: str) -> None:
    sharded, optimizer = train("O2", dtype, sharded=True, master=master)
    plain, _ = train("O2", dtype, sharded=False, master=master)
    # The norm is in a group with other layers, and 16-bit with a master too.
    torch.testing.assert_close(sharded, plain, rtol=2e-2, atol=2e-2)
    for parameter in optimizer.param_groups[0]["params"]:
        assert parameter.dtype is parameter.to_local().dtype is getattr(torch, dtype)
        assert optimizer.state[parameter]["exp_avg"].dtype is torch.float32
        if master != "stochastic":
            assert isinstance(optimizer.state[parameter]["mezzo_master"], DTensor)


def test_16_bit_shards_take_less_memory() -> None:
    used = {}
    for master in ("float32", "split", "stochastic"):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
        fully_shard(model)
        optimizer = adamw(model)
        mezzo.decorate(model, optimizer, "O2", dtype="bfloat16", master=master)
        model(torch.ones(1, 1024, device="cuda")).float().sum().backward()
        optimizer.step()
        model.reshard()
        torch.cuda.synchronize()
        gc.collect()
        used[master] = (torch.cuda.memory_allocated() - before) / (4 * 1024**2)
        del model, optimizer
    assert used["float32"] - used["split"] == pytest.approx(2, abs=0.5)
    assert used["float32"] - used["stochastic"] == pytest.approx(4, abs=0.5)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_of_a_scaler_over_shards_does_not_synchronize() -> None:
    model = make_model(sharded=True)
    optimizer, scaler = adamw(model), mezzo.GradScaler("cuda", init_scale=256.0)
    mezzo.decorate(model, optimizer, "O2", dtype="float16", clip_norm=0.5)
    for index in range(5):
        x = make_batch(index)
        scaler.scale(nn.functional.mse_loss(model(x).float(), x[:, :16])).backward()
        torch.cuda.synchronize()
        if index >= 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()
    assert scaler.state().skipped_steps == 0


def test_an_inf_in_a_shard_skips_the_step_on_the_device() -> None:
    model = make_model(sharded=True)
    optimizer, scaler = adamw(model), mezzo.GradScaler("cuda", init_scale=256.0)
    mezzo.decorate(model, optimizer, "O2", dtype="float16")
    scaler.register_parameter_names(model)
    x = make_batch(0)
    scaler.scale(nn.functional.mse_loss(model(x).float(), x[:, :16])).backward()
    model[0].weight.grad.to_local()[5, 7] = torch.inf
    before = whole(model)
    result = scaler.step(optimizer)
    scaler.update()
    assert result.skipped
    assert result.first_nonfinite == "0.weight"
    assert scaler.get_scale() == 128.0
    torch.testing.assert_close(whole(model), before, rtol=0, atol=0)


def test_torchs_fused_optimizer_steps_with_a_scaler_at_o1() -> None:
    model = make_model(sharded=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = mezzo.GradScaler("cuda", init_scale=256.0)
    x, before = make_batch(0), None
    for overflows in (False, True):
        with mezzo.autocast("cuda", torch.float16):
            loss = nn.functional.mse_loss(model(x), x[:, :16])
        scaler.scale(loss).backward()
        before = [one.to_local().clone() for one in model.parameters()]
        if overflows:
            model[3].weight.grad.to_local()[0, 0] = torch.inf
        assert scaler.step(optimizer).skipped is overflows
        scaler.update()
        optimizer.zero_grad()
        same = [
            torch.equal(one.to_local(), old)
            for one, old in zip(model.parameters(), before, strict=True)
        ]
        assert all(same) is overflows


# -- capture ---------------------------------------------------------------------------------------


class HostRead(nn.Module):
    """Reads from the device, in forward or in backward, or not at all."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.total = 0.0

    def _read(self, value: torch.Tensor) -> None:
        self.total += float(value.detach().sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            self._read(x)
        elif self.where == "backward" and x.requires_grad:
            x.register_hook(self._read)
        return x.tanh()


def make_step(
    level: str,
    dtype: str,
    capture: str | bool,
    shard: dict[str, Any] | None = None,
    read: str = "",
    **args: Any,
) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.LayerNorm(128), HostRead(read), nn.Linear(128, 16)]
    model = nn.Sequential(*layers).cuda()
    for part in (model[0], model[3], model):
        fully_shard(part, **(shard or {}))
    if dtype == "float16":
        args["scaler"] = mezzo.GradScaler("cuda", init_scale=256.0, dynamic=False)
    step = mezzo.TrainStep(
        model,
        nn.functional.mse_loss,
        adamw(model),
        level,
        dtype=dtype,
        clip_norm=0.5,
        capture=capture,
        **args,
    )
    return step, model


def train_step(
    step: Any, calls: int, overflow: tuple[int, ...] = (), start: int = 0, rows: int = 32
) -> torch.Tensor:
    losses = []
    for index in range(start, start + calls):
        x = make_batch(index)[:rows]
        losses.append(step(x, x[:, :16] * (float("inf") if index in overflow else 1.0)))
    torch.cuda.synchronize()
    return torch.stack(losses)


SHARDS: dict[str, dict[str, Any]] = {
    "default": {},
    "resharded": {"reshard_after_forward": True},
    "not resharded": {"reshard_after_forward": False},
}


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_captured_step_equals_the_eager_one(
    level: str, dtype: str, shard: str, accumulate: int
) -> None:
    overflow = (2, 18) if dtype == "float16" else ()
    runs = []
    for capture in (True, False):
        step, model = make_step(level, dtype, capture, SHARDS[shard], accumulate=accumulate)
        losses = train_step(step, 24, overflow)
        assert step.metrics.skipped_steps == len(overflow)
        assert (step.replays > 0) is capture
        assert step.eager_reason is None
        runs.append({"losses": losses, **whole(model)})
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_two_shapes_are_captured_and_others_run_eagerly_between() -> None:
    runs = []
    for capture in (True, False):
        step, model = make_step("O2", "bfloat16", capture)
        # A new shape of more than 0.3 of the largest makes graphs go.
        rows = [32] * 6 + [8] * 4 + [4, 32, 8, 32, 6, 8, 32]
        losses = [train_step(step, 1, start=i, rows=one) for i, one in enumerate(rows)]
        if capture:
            assert step._runner.graph_count == 2
        runs.append({"losses": torch.cat(losses), **whole(model)})
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_a_captured_step_resumes_from_a_state_in_the_middle() -> None:
    step, model = make_step("O2", "bfloat16", capture=True)
    train_step(step, 8)
    run_state = step.run_state()
    model_state = map_tensors(model.state_dict(), torch.clone)
    optimizer_state = map_tensors(step.optimizer.state_dict(), torch.clone)
    first = {"losses": train_step(step, 8, start=8), **whole(model)}
    model.load_state_dict(model_state)
    step.optimizer.load_state_dict(optimizer_state)
    step.load_run_state(run_state)
    replays = step.replays
    again = {"losses": train_step(step, 8, start=8), **whole(model)}
    assert step.replays > replays
    torch.testing.assert_close(first, again, rtol=0, atol=0)


@pytest.mark.parametrize("read", ["forward", "backward"])
@pytest.mark.parametrize("shard", ["default", "resharded"])
def test_a_step_that_cannot_be_captured_trains_on_eagerly(read: str, shard: str) -> None:
    runs = []
    for capture in ("auto", False):
        step, model = make_step("O2", "bfloat16", capture, SHARDS[shard], read)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = train_step(step, 16)
        if capture:
            assert "the host reads from the device" in step.eager_reason
            assert len(caught) == 1, [str(one.message) for one in caught]
        runs.append({"losses": losses, **whole(model)})
    torch.testing.assert_close(*runs, rtol=0, atol=0)


@pytest.fixture(scope="module")
def outcomes_of_streams() -> dict[str, Any]:
    """Return what happened in a process whose collectives only copy, by case."""
    command = [sys.executable, fsdp_streams.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


@pytest.mark.parametrize("case", fsdp_streams.CASES)
def test_streams_and_buffers_of_several_ranks_are_captured(
    case: str, outcomes_of_streams: dict[str, Any]
) -> None:
    outcome = outcomes_of_streams[case]
    assert "error" not in outcome, outcome["error"]
    assert outcome["equal"]
    if "read" in fsdp_streams.CASES[case]:
        assert "the host reads from the device" in outcome["reason"]
    else:
        assert outcome["reason"] is None or "a replay takes" in outcome["reason"]
        assert outcome["replays"] > 0


def test_an_evaluation_of_a_sharded_model_equals_that_of_the_whole() -> None:
    x = make_batch(0)
    outputs = [
        mezzo.EvalStep(make_model(sharded=sharded).eval(), "O2", dtype="bfloat16", capture=False)(x)
        for sharded in (True, False)
    ]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
