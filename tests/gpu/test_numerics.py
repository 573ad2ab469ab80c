"""Precisions on a CUDA device: explicit float32, norms and softmax, in captured steps too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mezzo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HALVES = [torch.float16, torch.bfloat16]
X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


class Explicit(nn.Module):
    """Makes float32 in the ways that users do, and records the dtypes of its values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
        self.register_buffer("table", torch.full((64,), 1e5))
        self.dtypes: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        values = {
            "float": h.float().abs().add(1e5),
            "to": h.to(torch.float32) * 1e5,
            "dtype": h.sum(dtype=torch.float32) + 1e5,
            "buffer": h + self.table,
            "normalized": nn.functional.normalize(h.detach() * 0, eps=1e-12),
            "norm of float32": self.norm(h.float()),
            "half": self.linear(h.float()),
            "norm": self.norm(h),
        }
        self.dtypes = {name: value.dtype for name, value in values.items()}
        return torch.stack([value.float().mean() for value in values.values()]).sum()


@pytest.mark.parametrize("half", HALVES)
def test_explicit_float32_stays_and_norms_keep_their_dtype_in_a_captured_step(half) -> None:
    torch.manual_seed(0)
    model = Explicit().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = mezzo.TrainStep(model, lambda loss: loss, optimizer, "O2", dtype=half)
    losses = torch.stack([step(X.cuda()) for _ in range(8)])
    assert step.captured, step.eager_reason
    dtypes = dict(model.dtypes)
    assert dtypes.pop("half") is dtypes.pop("norm") is half
    assert set(dtypes.values()) == {torch.float32}
    assert bool(losses.isfinite().all())
    # The same under torch.autocast with float32 parameters, up to the rounding of the weights.
    torch.manual_seed(0)
    plain = Explicit().cuda()
    with torch.no_grad(), torch.autocast("cuda", half):
        expected = plain(X.cuda())
    torch.testing.assert_close(losses, expected.expand(8), rtol=1e-2, atol=0.0)


def test_o2_runs_on_torchs_own_autocast_without_a_function_mode() -> None:
    model = nn.Linear(64, 64).cuda()
    mezzo.decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", dtype="float16")
    assert model.forward.mezzo_wrapper.region.table_key == ""


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("size", [12, 1000, 5000])
def test_a_16_bit_softmax_rounds_the_float32_result_once(half, size) -> None:
    """`mezzo.convert` narrows a softmax that feeds a product for this reason."""
    torch.manual_seed(0)
    x = (torch.randn(64, size, device="cuda") * 8).to(half)
    exact = x.double().softmax(-1)
    largest = exact > torch.finfo(half).tiny
    error = ((x.softmax(-1).double() - exact).abs() / exact)[largest].max()
    assert error <= 0.51 * torch.finfo(half).eps
