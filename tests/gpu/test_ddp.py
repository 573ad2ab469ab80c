"""Training steps over DistributedDataParallel on a CUDA device, with one rank and NCCL."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not distributed.is_nccl_available(), reason="needs NCCL"),
]

LEVELS = [("O1", "bfloat16"), ("O1", "float16"), ("O2", "bfloat16"), ("O2", "float16")]
CALLS = 12


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = Path(tmp_path_factory.mktemp("store")) / "store"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl", init_method=f"file://{store}", rank=0, world_size=1, device_id=device
    )
    yield
    distributed.destroy_process_group()


def make_step(level: str, dtype: str, *, wrapped: bool, wrap: Any = None, **args: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Tanh(), nn.Linear(128, 16))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mezzo.decorate(model, optimizer, level, dtype=dtype, clip_norm=1.0)
    if dtype == "float16":
        # Not dynamic: a dynamic scale is searched at the first update.
        args["scaler"] = mezzo.GradScaler("cuda", init_scale=256.0, dynamic=False)
    target = DistributedDataParallel(model, **(wrap or {})) if wrapped else model
    return mezzo.TrainStep(target, nn.functional.mse_loss, optimizer, capture=False, **args), model


def train(step: Any, overflow: tuple[int, ...] = ()) -> torch.Tensor:
    losses = []
    for index in range(CALLS):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(32, 64, generator=generator).cuda()
        losses.append(step(x, x[:, :16] * (float("inf") if index in overflow else 1.0)))
    step.flush()
    # Metrics are copied to the host asynchronously.
    torch.cuda.synchronize()
    return torch.stack(losses)


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in mezzo.master_params(model).items()}


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("accumulate", [1, 5])
@pytest.mark.parametrize(
    "wrap",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
    ids=["plain", "bucket views", "static graph"],
)
def test_one_rank_equals_a_step_without_the_wrapper(
    level: str, dtype: str, accumulate: int, wrap: dict[str, bool]
) -> None:
    overflow = (3,) if dtype == "float16" else ()
    runs = []
    for wrapped in (True, False):
        step, model = make_step(level, dtype, wrapped=wrapped, wrap=wrap, accumulate=accumulate)
        losses = train(step, overflow)
        assert step.metrics.skipped_steps == len(overflow)
        runs.append({"losses": losses, **masters(model)})
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_gradients_are_reduced_in_float32_on_request() -> None:
    step, model = make_step("O2", "bfloat16", wrapped=True, reduce_dtype="float32")
    other, other_model = make_step("O2", "bfloat16", wrapped=False)
    torch.testing.assert_close(train(step), train(other), rtol=0, atol=0)
    torch.testing.assert_close(masters(model), masters(other_model), rtol=0, atol=0)


def test_a_wrapped_step_runs_eagerly_and_states_the_reason() -> None:
    model = nn.Linear(64, 16).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ddp = DistributedDataParallel(model)
    make: dict[str, Any] = {"policy": "O1", "dtype": "bfloat16"}
    with pytest.warns(UserWarning, match="wrapped by DistributedDataParallel"):
        step = mezzo.TrainStep(ddp, nn.functional.mse_loss, optimizer, **make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(step)
    assert not step.captured
    assert "all ranks" in step.eager_reason
    with pytest.raises(mezzo.UnsupportedError, match="wrapped by DistributedDataParallel"):
        mezzo.TrainStep(ddp, nn.functional.mse_loss, optimizer, capture=True)


def test_wrong_orders_raise() -> None:
    model = nn.Linear(64, 16).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ddp = DistributedDataParallel(model)
    with pytest.raises(mezzo.UnsupportedError, match="First decorate, then wrap"):
        mezzo.TrainStep(ddp, nn.functional.mse_loss, optimizer, "O2", dtype="float16")
    with pytest.raises(mezzo.UnsupportedError, match="given the model itself"):
        mezzo.TrainStep(ddp.module, nn.functional.mse_loss, optimizer, "O1", dtype="float16")
    assert model.weight.dtype is torch.float32
