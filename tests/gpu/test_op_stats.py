"""Op statistics and checks of numerics on a GPU, where backward runs in another thread."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from support.step_models import Made, batches, boosted
from support.training_models import make_batch, make_model, make_step
from support.zoo import ResNet50
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import mezzo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PRODUCTS = {"mm", "addmm", "bmm", "convolution", "convolution_backward", "cudnn_convolution"}
GEMM = re.compile(r"gemm|gemv|nvjet|cutlass|xmma|convol|fprop|dgrad|wgrad", re.IGNORECASE)
FLOAT32 = re.compile(r"sgemm|f32f32|tf32", re.IGNORECASE)
HALF = re.compile(r"bf16|bfloat16", re.IGNORECASE)


def train(model: nn.Module, loss: Any, *inputs: Any, **options: Any) -> None:
    with mezzo.autocast("cuda", dtype="bfloat16"):
        result = loss(model(*inputs, **options))
    result.backward()


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return make_model("llama", "cuda"), make_batch(device="cuda")


def resnet() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return ResNet50().cuda(), torch.randn(2, 3, 64, 64, device="cuda")


def run_llama(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    train(model, lambda outputs: outputs.loss, **batch)


def run_resnet(model: nn.Module, x: torch.Tensor) -> None:
    train(model, lambda outputs: outputs.float().square().mean(), x)


CASES = {"llama": (llama, run_llama), "resnet": (resnet, run_resnet)}


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("name", CASES)
def test_counts_are_those_of_the_profiler(name: str) -> None:
    make, run = CASES[name]
    model, inputs = make()
    run(model, inputs)
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run(model, inputs)
        torch.cuda.synchronize()
    model.zero_grad()
    with mezzo.op_stats(model) as ops:
        run(model, inputs)
    found = Counter()
    for row in ops.rows:
        found[row.op] += row.calls
    for op in ("mm", "addmm", "bmm", "convolution_backward", "silu", "native_layer_norm"):
        events = [one for one in recorded.key_averages() if one.key == f"aten::{op}"]
        assert found[op] == sum(one.count for one in events), op
    products = [row for row in ops.rows if row.op in PRODUCTS]
    half = sum(row.calls for row in products if row.dtype == "bfloat16")
    full = sum(row.calls for row in products if row.dtype == "float32")
    kernels = [
        event.name
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and GEMM.search(event.name)
    ]
    # Kernels of float32 products, if any, are at most those of float32 ops; 16-bit ones at least
    # one for each 16-bit product, two for the backward of a convolution.
    in_full = [name for name in kernels if FLOAT32.search(name) and not HALF.search(name)]
    assert half > 10
    assert len(kernels) - len(in_full) >= half
    # cuDNN computes parts of some convolutions in float32 by itself.
    assert bool(full) or not in_full or name == "resnet"


def test_backward_ops_are_counted_under_their_modules() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.GELU(), nn.Linear(64, 8))).cuda()
    x = torch.randn(16, 64, device="cuda")
    with mezzo.op_stats(model, time=True) as ops:
        train(model, lambda y: y.float().sum(), x)
    counts = {(row.module, row.op): row.calls for row in ops.rows}
    assert counts["0", "mm"] == 1
    assert counts["1.1", "mm"] == 2
    assert counts["1.0", "gelu_backward"] == 1
    assert all(row.microseconds > 0 for row in ops.rows)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_captured_step_is_counted_and_replayed_again(level: str) -> None:
    made = Made("mlp", "AdamW", "cuda")
    step = mezzo.TrainStep(made.model, boosted, made.optimizer, level, dtype="bfloat16")
    other = Made("mlp", "AdamW", "cuda")
    plain = mezzo.TrainStep(other.model, boosted, other.optimizer, level, dtype="bfloat16")
    for index, (x, y) in enumerate(batches("mlp", 16, device="cuda")):
        if index == 10:
            assert step.captured
            with mezzo.op_stats(step) as ops:
                step(x, y)
        else:
            step(x, y)
        plain(x, y)
    assert step.captured
    assert {row.dtype for row in ops.rows if row.op == "addmm"} == {"bfloat16"}
    for one, two in zip(made.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=5e-3)


def test_a_captured_step_of_a_llama_is_counted() -> None:
    step = make_step(make_model("llama", "cuda"), "O1", "bfloat16")
    batch = make_batch(device="cuda")
    for _ in range(8):
        step(batch)
    with mezzo.op_stats(step) as ops:
        step(batch)
    products = [row for row in ops.rows if row.op in PRODUCTS]
    assert {row.dtype for row in products if "layers.0" in row.module} == {"bfloat16"}
    assert "matrix products" in str(ops)
    step(batch)


def test_an_eval_step_is_counted() -> None:
    evaluate = mezzo.EvalStep(nn.Linear(8, 8).cuda(), "O1", dtype="bfloat16")
    for _ in range(6):
        evaluate(torch.ones(2, 8, device="cuda"))
    with mezzo.op_stats(evaluate) as ops:
        evaluate(torch.ones(2, 8, device="cuda"))
    # Inference mode does not take the layer apart.
    assert ops.of("linear") == {"bfloat16": 1}


# -- checks ----------------------------------------------------------------------------------------


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 0).sqrt()


@pytest.mark.parametrize("mode", ["abort", "record"])
def test_a_bad_gradient_is_found_in_the_thread_of_the_device(mode: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Root()).cuda()
    x = torch.ones(2, 8, device="cuda")
    check = mezzo.check_numerics(model, mode)
    if mode == "abort":
        with pytest.raises(mezzo.NumericsError) as caught, check:
            model(x).sum().backward()
        found = caught.value.finding
    else:
        with check:
            model(x).sum().backward()
        found = check.findings[0]
    assert (found.op, found.module, found.backward) == ("sqrt", "1", True)
    assert found.source.startswith("test_op_stats.py:")


def test_recording_does_not_read_the_device(request: pytest.FixtureRequest) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.ones(2, 8, device="cuda")
    check = mezzo.check_numerics(model, "record")
    request.getfixturevalue("no_host_reads")
    for _ in range(3):
        with check:
            train(model, lambda y: y.float().sum(), x)
            optimizer.step()


def test_a_captured_step_is_checked_and_replayed_again() -> None:
    made = Made("mlp", "AdamW", "cuda")
    step = mezzo.TrainStep(made.model, boosted, made.optimizer, "O1", dtype="bfloat16")
    for x, y in batches("mlp", 12, device="cuda"):
        step(x, y)
    assert step.captured
    replays = step._runner.replays
    with mezzo.check_numerics(step, "record") as check:
        step(x, y)
    assert check.findings == ()
    assert step._runner.replays == replays
    step(x, y)
    assert step._runner.replays == replays + 1


def test_results_and_random_numbers_are_those_without_the_check() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda()
    x = torch.ones(2, 8, device="cuda")
    torch.manual_seed(1)
    plain, after = model(x), torch.rand(1, device="cuda")
    torch.manual_seed(1)
    with mezzo.check_numerics(model, "record"):
        found = model(x)
    assert torch.equal(found, plain)
    assert torch.equal(torch.rand(1, device="cuda"), after)


def test_masked_attention_is_not_reported() -> None:
    x = torch.randn(1, 2, 16, 32, device="cuda", dtype=torch.float16, requires_grad=True)
    with mezzo.check_numerics():
        F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
