"""Autocast on a CUDA device: torch's own lists, custom policies, the cache, compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.torch_cases import CANNOT_RUN, Case, check, cuda_cases, identify
from torch import nn

import mezzo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDNN = {"cudnn_convolution", "cudnn_convolution_transpose"}


def cases() -> list[Any]:
    if not torch.cuda.is_available():
        return []
    return [
        pytest.param(case, id=identify(case))
        for case in cuda_cases("cuda")
        if case[0] not in set(CANNOT_RUN) - CUDNN
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cache", ["torch", "versioned", "off"])
@pytest.mark.parametrize("case", cases())
def test_every_entry_of_torchs_cuda_list_runs_as_in_torch(case: Case, cache: str) -> None:
    check(case, mezzo.autocast("cuda", dtype=torch.float16, cache=cache))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", cases())
def test_the_function_mode_alone_casts_as_torchs_cuda_list(case: Case) -> None:
    from mezzo.autocasting.arguments import region_for, without_torch_autocast
    from mezzo.autocasting.regions import enter_regions

    class FunctionModeOnly:
        def __enter__(self) -> None:
            region = region_for(mezzo.Policy(dtype=torch.float16), "cuda")
            self.entered = enter_regions(without_torch_autocast(region))
            self.entered.__enter__()

        def __exit__(self, *_: object) -> None:
            self.entered.__exit__()

    check(case, FunctionModeOnly())  # type: ignore[arg-type]


def test_the_default_dtype_is_torchs_own_and_auto_depends_on_the_hardware() -> None:
    x = torch.randn(8, 8, device="cuda")
    with mezzo.autocast("cuda"):
        assert torch.mm(x, x).dtype is torch.float16
    with mezzo.autocast():
        assert torch.mm(x, x).dtype is mezzo.hardware().preferred.dtype


def test_a_nested_region_of_another_dtype_gets_no_stale_cached_weight() -> None:
    layer, x = nn.Linear(8, 8, device="cuda"), torch.randn(8, 8, device="cuda")
    with mezzo.autocast("cuda", dtype=torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
        with mezzo.autocast("cuda", dtype=torch.float16):
            assert layer(x).dtype is torch.float16
        assert layer(x).dtype is torch.bfloat16


@pytest.mark.parametrize("policy", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_a_fused_optimizer_step_inside_a_region_invalidates_cached_weights(
    policy: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8, device="cuda"), torch.randn(8, 8, device="cuda")
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, fused=True)
    with mezzo.autocast("cuda", dtype=torch.bfloat16, **policy):
        before = layer(x)
        before.float().sum().backward()
        optimizer.step()
        after = layer(x)
    assert torch.equal(
        after, F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    )
    assert not torch.equal(before, after)


def test_a_cuda_region_does_not_cast_cpu_tensors() -> None:
    x = torch.randn(4, 4)
    with mezzo.autocast("cuda", dtype=torch.bfloat16, half={"add"}):
        assert (x + x).dtype is torch.float32
        assert (x.cuda() + x.cuda()).dtype is torch.bfloat16


@pytest.mark.filterwarnings(
    "ignore"
)  # torch warns about its own modules while Inductor imports them
@pytest.mark.parametrize("where", ["around", "inside"])
def test_compiled_code_equals_eager_code_under_a_custom_policy(where: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm = (
                nn.MultiheadAttention(16, 4, batch_first=True),
                nn.LayerNorm(16),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.normalize(self.norm(self.attention(x, x, x, need_weights=False)[0] + x))

    torch._dynamo.reset()
    model, x = Model().cuda(), torch.randn(2, 8, 16, device="cuda")

    def in_region(x: torch.Tensor, policy: dict[str, Any]) -> torch.Tensor:
        with mezzo.autocast("cuda", dtype=torch.bfloat16, **policy):
            return model(x)

    compiled = torch.compile(model, fullgraph=True)
    for policy in ({"half": {"add", "div"}}, {"full": {"linear"}}, {"preset": "paddle"}, {}):
        with mezzo.autocast("cuda", dtype=torch.bfloat16, **policy):
            eager, found = model(x), compiled(x) if where == "around" else None
        if found is None:
            found = torch.compile(lambda x, policy=policy: in_region(x, policy), fullgraph=True)(x)
        assert found.dtype is eager.dtype
        torch.testing.assert_close(found.float(), eager.float(), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    "op", [torch.linalg.det, torch.linalg.inv, torch.special.bessel_j0], ids=lambda op: op.__name__
)
@pytest.mark.parametrize("policy", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_an_op_without_a_16_bit_kernel_runs_in_float32(op: Any, policy: dict[str, Any]) -> None:
    x = torch.eye(4, device="cuda")
    with mezzo.autocast("cuda", dtype=torch.bfloat16, **policy):
        assert op(torch.mm(x, x)).dtype is torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_in_the_precision_of_forward(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    weight, x, seen = (
        torch.randn(8, 8, device="cuda", requires_grad=True),
        torch.randn(8, 8, device="cuda", requires_grad=True),
        [],
    )

    def block(x: torch.Tensor) -> torch.Tensor:
        out = torch.mm(x, weight) + x
        seen.append(out.dtype)
        return torch.sin(out)

    with mezzo.autocast("cuda", dtype=torch.bfloat16, half={"add"}):
        out = checkpoint(block, x, use_reentrant=reentrant)
    out.float().sum().backward()
    assert seen == [torch.bfloat16, torch.bfloat16]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_region_does_not_synchronize() -> None:
    layer, x = nn.Linear(8, 8, device="cuda"), torch.randn(8, 8, device="cuda")
    with mezzo.autocast("cuda", dtype=torch.float16, half={"add"}):
        layer(x) + x
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with mezzo.autocast("cuda", dtype=torch.float16, half={"add"}, full={"softmax"}):
            torch.softmax(layer(x) + x, -1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
