"""Max pooling of compiled steps on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo.step import max_pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WINDOWS = {
    "3 by 2": ((3, 3), (2, 2), (1, 1)),
    "2 by 2": ((2, 2), (2, 2), (0, 0)),
    "5 by 1": ((5, 5), (1, 1), (2, 2)),
    "gaps": ((2, 3), (3, 4), (1, 0)),
}
CASES = [
    (torch.float16, (4, 64, 112, 112)),
    (torch.bfloat16, (3, 300, 27, 31)),
    (torch.float32, (2, 5, 13, 9)),
    (torch.float16, (0, 8, 8, 8)),
]
LAST = torch.channels_last


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=str)
def test_values_and_gradients_equal_those_of_float64(dtype, shape, window):
    x = (
        torch.randint(-9, 9, shape, device="cuda")
        .to(dtype)
        .contiguous(memory_format=LAST)
        .requires_grad_()
    )
    out, _ = max_pool.max_pool2d(x, *window)
    exact = x.detach().double().requires_grad_()
    expected = F.max_pool2d(exact, *window) if len(x) else out.double()
    assert torch.equal(out.double(), expected)
    if len(x):
        output_gradient = torch.randn(out.shape, device="cuda").to(dtype)
        (gradient,) = torch.autograd.grad(out, x, output_gradient)
        (reference,) = torch.autograd.grad(expected, exact, output_gradient.double())
        torch.testing.assert_close(
            gradient.double(), reference, rtol=torch.finfo(dtype).eps, atol=1e-5
        )


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_nonfinite_values_are_pooled_as_in_torch(value):
    x = torch.randn(2, 8, 30, 30, device="cuda")
    x[:, ::2, :9] = value
    x = (
        torch.where(torch.rand_like(x) < 0.2, value, x)
        .contiguous(memory_format=LAST)
        .requires_grad_()
    )
    # Compared with a CPU: torch's kernel for CUDA chooses another index in windows of only -inf.
    on_cpu = x.detach().cpu().requires_grad_()
    found, expected = (
        max_pool.max_pool2d(x, (3, 3), (2, 2), (1, 1))[0],
        F.max_pool2d(on_cpu, 3, 2, 1),
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    gradients = [
        torch.autograd.grad(out, leaf, torch.ones_like(out))[0].cpu()
        for out, leaf in ((found, x), (expected, on_cpu))
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_a_compiled_step_uses_the_kernels_and_trains_as_without_them(monkeypatch):
    # If another test has compiled the same layers for other sizes, dynamo makes sizes dynamic.
    torch._dynamo.reset()
    launched = []
    monkeypatch.setattr(
        max_pool,
        "_grid",
        lambda out, *args, grid=max_pool._grid: (
            launched.append(tuple(out.shape)) or grid(out, *args)
        ),
    )
    losses = {}
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            nn.Flatten(),
            nn.Linear(16 * 64, 10),
        ).cuda()
        step = mezzo.TrainStep(
            model,
            F.cross_entropy,
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            "O2",
            dtype="float16",
            compile=compiles,
            channels_last=True,
        )
        torch.manual_seed(1)
        batches = [
            (torch.randn(8, 3, 16, 16, device="cuda"), torch.randint(10, (8,), device="cuda"))
            for _ in range(4)
        ]
        losses[compiles] = [float(step(*batches[number % 4])) for number in range(24)]
        assert step.captured, step.eager_reason
    assert set(launched) == {(8, 16, 8, 8), (8, 16, 16, 16)}
    assert losses[True] == pytest.approx(losses[False], rel=0.02, abs=0.02)
