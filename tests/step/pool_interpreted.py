"""Max pooling in Triton's interpreter; `test_max_pool.py` runs this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from mezzo.step import inductor_pass, max_pool

WINDOWS = {
    "3 by 2": ((3, 3), (2, 2), (1, 1)),
    "2 by 2": ((2, 2), (2, 2), (0, 0)),
    "overlapping three times": ((5, 3), (2, 1), (2, 1)),
    "gaps": ((2, 2), (3, 4), (0, 1)),
    "one row": ((1, 7), (1, 3), (0, 3)),
}
CASES = [
    (torch.float32, (2, 8, 9, 12)),
    (torch.float16, (1, 3, 7, 5)),
    (torch.bfloat16, (1, 20, 5, 17)),
]


def _with_gradient(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the gradient of the input for a fixed gradient of the output."""
    leaf = x.clone(memory_format=torch.channels_last).requires_grad_()
    out = function(leaf)
    out_gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(
        torch.bfloat16
    )
    return out, torch.autograd.grad(out, leaf, out_gradient.to(out))[0]


# One of two cases has every window and every shape.
@pytest.mark.thinned(2)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=str)
def test_values_and_gradients_equal_torchs(dtype, shape, window, monkeypatch):
    torch.manual_seed(0)
    # Several Triton programs for a row, and for its channels.
    monkeypatch.setattr(max_pool, "_VALUES", 128)
    monkeypatch.setattr(max_pool, "_CHANNELS", 16)
    # Few distinct values, so that windows have several equal ones.
    x = torch.randint(-3, 4, shape).to(dtype)
    ours, gradient = _with_gradient(lambda image: max_pool.max_pool2d(image, *window)[0], x)
    assert torch.equal(ours, F.max_pool2d(x, *window))
    assert ours.is_contiguous(memory_format=torch.channels_last)
    # Sums are rounded to the dtype once; the gradients in a sum have any sign and size.
    _, exact = _with_gradient(lambda image: F.max_pool2d(image, *window), x.double())
    torch.testing.assert_close(gradient.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("nonfinite", [float("nan"), float("-inf"), float("inf")])
def test_nonfinite_values_are_compared_as_torch_does(nonfinite):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 6, 6)
    x[:, ::2, :4] = nonfinite
    x[torch.rand(x.shape) < 0.2] = nonfinite
    window = WINDOWS["3 by 2"]
    ours, gradient = _with_gradient(lambda image: max_pool.max_pool2d(image, *window)[0], x)
    torchs, expected = _with_gradient(lambda image: F.max_pool2d(image, *window), x)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(gradient, expected)


def test_the_op_passes_opcheck_and_takes_an_empty_batch():
    x = torch.randn(1, 5, 4, 4)
    assert max_pool.max_pool2d(x[:0], (2, 2), (2, 2), (0, 0))[0].shape == (0, 5, 2, 2)
    torch.library.opcheck(
        max_pool.max_pool2d,
        (x.contiguous(memory_format=torch.channels_last).requires_grad_(), (3, 3), (2, 2), (1, 1)),
    )


class Net(nn.Module):
    """Two poolings that are replaced, and four that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool, self.last = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.Linear(8, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two numbers per image."""
        x = torch.max_pool2d(self.pool(self.first(x)), 2)
        x = F.max_pool2d(
            F.max_pool2d(x, 2, 1, dilation=2), kernel_size=(2, 2), stride=1, ceil_mode=True
        )
        x = F.max_pool2d(x, 2, 1, return_indices=True)[0]
        return self.last(F.max_pool2d(x.contiguous(), 1).amax((2, 3)))


def _pass_backend(module: fx.GraphModule, _: Any) -> Any:
    inductor_pass.ConvPoolPass("cpu")(module.graph)
    module.recompile()
    return module.forward


def test_calls_with_channels_last_outputs_are_replaced(monkeypatch):
    torch.manual_seed(0)
    net = Net().to(memory_format=torch.channels_last)
    x = torch.randn(1, 3, 24, 24).contiguous(memory_format=torch.channels_last)
    net(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    launched = []
    monkeypatch.setattr(
        max_pool,
        "_grid",
        lambda out, *step, grid=max_pool._grid: (
            launched.append(tuple(out.shape)) or grid(out, *step)
        ),
    )
    torch.compile(net, backend=_pass_backend, fullgraph=True)(x).square().sum().backward()
    assert launched == [(1, 8, 12, 12), (1, 8, 6, 6), (1, 8, 12, 12), (1, 8, 24, 24)]
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_sizes_may_change_between_calls():
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.MaxPool2d(2)).to(memory_format=torch.channels_last)
    called = torch.compile(net, backend=_pass_backend, dynamic=True, fullgraph=True)
    for size in ((1, 3, 4, 6), (2, 3, 6, 5)):
        x = torch.randn(size).contiguous(memory_format=torch.channels_last)
        assert torch.equal(called(x), net(x))
