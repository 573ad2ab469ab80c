"""First convolutions of compiled steps on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import mezzo
from mezzo._dtypes import HALF_DTYPES
from mezzo.step import inductor_pass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KERNELS = [(16, 16, 0), (7, 4, 3), (3, 2, 1), (7, 2, 3), (3, 1, 1)]
CASES = [
    (*kernel, dtype)
    for kernel in KERNELS
    for dtype in HALF_DTYPES
    if inductor_pass.fast_conv_form((32, 3, kernel[0], kernel[0]), (kernel[1], kernel[1]), dtype)
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dtype"), CASES, ids=str)
def test_errors_of_values_and_gradients_are_at_most_those_of_torch(kernel, stride, padding, dtype):
    x, weight = (
        torch.randn(8, 3, 64, 80, device="cuda"),
        torch.randn(32, 3, kernel, kernel, device="cuda") / kernel,
    )
    leaves = [
        tensor.to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
        for tensor in (x, weight)
    ]
    form = inductor_pass.fast_conv_form(weight.shape, (stride, stride), dtype)
    assert form is not None
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    outs = [
        form(*leaves, None, (x.shape, weight.shape), (stride, stride), (padding, padding)),
        F.conv2d(*leaves, None, stride, padding),
        F.conv2d(*exact, None, stride, padding),
    ]
    output_gradient = torch.randn_like(outs[0])
    results, torch_results, references = (
        (out, *torch.autograd.grad(out, used, output_gradient.to(out.dtype)))
        for out, used in zip(outs, (leaves, leaves, exact), strict=True)
    )
    for result, torch_result, reference in zip(results, torch_results, references, strict=True):
        errors = [
            float(((value.double() - reference).norm() / reference.norm()).detach())
            for value in (result, torch_result)
        ]
        assert errors[0] <= 1.05 * errors[1] + 1e-6, errors


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("kernel", "form"), [(4, inductor_pass.in_blocks), (13, inductor_pass.with_four)]
)
def test_a_compiled_step_uses_the_fast_form_and_trains_as_without_it(
    kernel, form, level, monkeypatch
):
    # Code that another test compiled could be reused, or sizes become dynamic.
    torch._dynamo.reset()
    used = set()
    monkeypatch.setattr(
        inductor_pass,
        "fast_conv_form",
        lambda *args, form_of=inductor_pass.fast_conv_form: (
            used.add(form_of(*args)) or form_of(*args)
        ),
    )
    losses = {}
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 16, kernel, 4, padding=4),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
        optimizer = torch.optim.SGD(model.cuda().parameters(), lr=0.05, momentum=0.9)
        step = mezzo.TrainStep(
            model,
            F.cross_entropy,
            optimizer,
            level,
            dtype="float16",
            compile=compiles,
            channels_last=True,
        )
        torch.manual_seed(1)
        batches = [
            (torch.randn(8, 3, 32, 32, device="cuda"), torch.randint(10, (8,), device="cuda"))
            for _ in range(4)
        ]
        # With a warm cache Inductor would not run the pass.
        with fresh_cache():
            losses[compiles] = [float(step(*batch)) for _ in range(4) for batch in batches]
        assert step.captured, step.eager_reason
    assert used == {form}
    torch.testing.assert_close(losses[True], losses[False], rtol=2e-2, atol=2e-2)
    assert losses[True][-1] < losses[True][0]
