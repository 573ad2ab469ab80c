"""Training steps over DistributedDataParallel on a CUDA device, with one rank and NCCL."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
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


def make_step(
    level: str,
    dtype: str,
    *,
    wrapped: bool = True,
    wrap: Any = None,
    norm: Any = nn.LayerNorm,
    middle: nn.Module | None = None,
    **args: Any,
) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), norm(128), middle or nn.Tanh(), nn.Linear(128, 16)]
    model = nn.Sequential(*layers).cuda()
    args = {"capture": False, **args}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mezzo.decorate(model, optimizer, level, dtype=dtype, clip_norm=1.0)
    if dtype == "float16":
        # Not dynamic: a dynamic scale is searched at the first update.
        args["scaler"] = mezzo.GradScaler("cuda", init_scale=256.0, dynamic=False)
    target = DistributedDataParallel(model, **(wrap or {})) if wrapped else model
    return mezzo.TrainStep(target, nn.functional.mse_loss, optimizer, **args), model


def train(
    step: Any, overflow: tuple[int, ...] = (), calls: int = CALLS, start: int = 0, rows: int = 32
) -> torch.Tensor:
    losses = []
    for index in range(start, start + calls):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(rows, 64, generator=generator).cuda()
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


# -- capture ---------------------------------------------------------------------------------------


def compare_with_eager(
    level: str, dtype: str, calls: int, overflow: tuple[int, ...] = (), **args: Any
) -> Any:
    """Train captured and eagerly, and compare bit for bit; return the captured step."""
    steps, runs = [], []
    for capture in (True, False):
        step, model = make_step(level, dtype, capture=capture, **args)
        losses = train(step, overflow, calls)
        assert step.metrics.skipped_steps == len(overflow)
        steps.append(step)
        runs.append({"losses": losses, **masters(model)})
    torch.testing.assert_close(*runs, rtol=0, atol=0)
    assert steps[0].replays > 0
    assert steps[0].eager_reason is None
    return steps[0]


WRAPS = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 0.02},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused in a static graph": {"static_graph": True, "find_unused_parameters": True},
}


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters")
def test_a_captured_step_equals_the_eager_one(level: str, dtype: str, wrap: str) -> None:
    overflow = (3, 18) if dtype == "float16" else ()
    step = compare_with_eager(level, dtype, 22, overflow, wrap=WRAPS[wrap])
    # Eleven calls, and at O2 or in float16 one before them that finds the written buffers.
    assert step.replays >= 22 - 13


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("wrap", ["plain", "static graph"])
def test_accumulated_calls_are_captured(level: str, dtype: str, wrap: str) -> None:
    overflow = (40,) if dtype == "float16" else ()
    runs = []
    for capture in (True, False):
        step, model = make_step(level, dtype, capture=capture, accumulate=3, wrap=WRAPS[wrap])
        # Of the last update only two calls are left, which flush() reduces.
        losses = train(step, overflow, 47)
        assert step.metrics.skipped_steps == len(overflow)
        assert (step.replays > 0) is capture
        runs.append({"losses": losses, **masters(model)})
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_buffers_that_the_wrapper_broadcasts_are_captured() -> None:
    compare_with_eager("O1", "bfloat16", 20, norm=nn.BatchNorm1d)


def test_a_reduction_in_float32_is_captured() -> None:
    compare_with_eager("O2", "bfloat16", 20, reduce_dtype="float32")


def test_two_shapes_are_captured() -> None:
    runs = []
    for capture in (True, False):
        step, model = make_step("O2", "bfloat16", capture=capture)
        losses = [train(step, calls=13), train(step, calls=3, start=13, rows=16)]
        losses += [
            train(step, calls=2, start=16 + index, rows=rows)
            for index, rows in enumerate((32, 16, 32))
        ]
        runs.append({"losses": torch.cat(losses), **masters(model)})
        if capture:
            assert step._runner.graph_count == 2
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_a_function_is_captured() -> None:
    losses = []
    for capture in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(64, 16).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ddp = DistributedDataParallel(model)

        @mezzo.train_step(
            models=ddp, optimizers=optimizer, policy="O1", dtype="bfloat16", capture=capture
        )
        def step(x: torch.Tensor, y: torch.Tensor, ddp: Any = ddp) -> torch.Tensor:
            return nn.functional.mse_loss(ddp(x).float(), y)

        losses.append(train(step, calls=20))
        assert (step.replays > 0) is capture
    torch.testing.assert_close(*losses, rtol=0, atol=0)


def test_a_captured_step_resumes_from_a_checkpoint_in_the_middle() -> None:
    step, model = make_step("O2", "float16", capture=True)
    train(step, calls=16)
    state = copy.deepcopy(step.state_dict())
    first = {"losses": train(step, calls=16, start=16), **masters(model)}
    replays = step.replays
    step.load_state_dict(state)
    again = {"losses": train(step, calls=16, start=16), **masters(model)}
    assert step.replays > replays
    torch.testing.assert_close(first, again, rtol=0, atol=0)


class HostRead(nn.Module):
    """Reads from the device, in forward or in backward."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.backward = backward
        self.total = 0.0

    def _read(self, value: torch.Tensor) -> None:
        self.total += float(value.detach().sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.backward:
            self._read(x)
        elif x.requires_grad:
            x.register_hook(self._read)
        return x.tanh()


@pytest.mark.parametrize("backward", [False, True])
def test_a_step_that_cannot_be_captured_trains_on_eagerly(*, backward: bool) -> None:
    runs = []
    for capture in ("auto", False):
        step, model = make_step(
            "O2", "bfloat16", capture=capture, middle=HostRead(backward=backward)
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = train(step, calls=40)
        if capture:
            assert "the host reads from the device" in step.eager_reason
            assert len(caught) == 1, [str(one.message) for one in caught]
        runs.append({"losses": losses, **masters(model)})
    torch.testing.assert_close(*runs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("wrap", "accumulate", "reason"),
    [
        ({"find_unused_parameters": True}, 1, "find_unused_parameters=True"),
        ({"gradient_as_bucket_view": True}, 2, "gradient_as_bucket_view=True"),
    ],
)
def test_wrappers_that_cannot_be_captured_run_eagerly_with_one_warning(
    wrap: dict[str, bool], accumulate: int, reason: str
) -> None:
    with pytest.warns(UserWarning, match=reason):
        step, _ = make_step("O2", "bfloat16", capture="auto", wrap=wrap, accumulate=accumulate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(step)
    assert not step.captured
    assert reason in step.eager_reason
    with pytest.raises(mezzo.UnsupportedError, match=reason):
        make_step("O2", "bfloat16", capture=True, wrap=wrap, accumulate=accumulate)


def test_an_unknown_communication_hook_is_not_captured() -> None:
    model = nn.Linear(64, 16).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, counting_hook)
    with pytest.warns(UserWarning, match="counting_hook"):
        step = mezzo.TrainStep(ddp, nn.functional.mse_loss, optimizer, "O1", dtype="bfloat16")
    train(step)
    assert "counting_hook" in step.eager_reason


def counting_hook(state: Any, bucket: Any) -> Any:
    return allreduce_hook(state, bucket)


counting_hook.__annotations__.clear()


def test_wrong_orders_raise() -> None:
    model = nn.Linear(64, 16).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ddp = DistributedDataParallel(model)
    with pytest.raises(mezzo.UnsupportedError, match="First decorate, then wrap"):
        mezzo.TrainStep(ddp, nn.functional.mse_loss, optimizer, "O2", dtype="float16")
    with pytest.raises(mezzo.UnsupportedError, match="given the model itself"):
        mezzo.TrainStep(ddp.module, nn.functional.mse_loss, optimizer, "O1", dtype="float16")
    assert model.weight.dtype is torch.float32
