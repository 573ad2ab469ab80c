"""mezzo.compat.torch on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.torch_cases import CANNOT_RUN, Case, check, cuda_cases, identify
from torch import nn

from mezzo.compat import torch as dialect

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with dialect.install():
        yield


def cases() -> list[Any]:
    if not torch.cuda.is_available():
        return []
    return [
        pytest.param(case, id=identify(case))
        for case in cuda_cases("cuda")
        if case[0] not in CANNOT_RUN
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", cases())
def test_every_entry_of_torchs_cuda_list_runs_as_in_torch(case: Case) -> None:
    check(case, torch.autocast("cuda", dtype=torch.float16))


def losses(autocast: Any, scaler: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    x, y = torch.randn(32, 16, device="cuda"), torch.randint(4, (32,), device="cuda")
    values = []
    for step in range(8):
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x * (float("inf") if step == 3 else 1.0)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        values.append(loss.item())
    return [*values[:3], *values[4:], scaler.get_scale()]


def test_training_is_bit_equal_to_torchs_own() -> None:
    with_mezzo = losses(torch.autocast, torch.amp.GradScaler("cuda", init_scale=1024.0))
    dialect.uninstall()
    with_torch = losses(torch.autocast, torch.amp.GradScaler("cuda", init_scale=1024.0))
    assert with_mezzo == with_torch


def test_a_captured_backward_reads_the_current_scale() -> None:
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    weight = torch.ones(100, device="cuda", requires_grad=True)
    optimizer, x = torch.optim.SGD([weight], lr=0.1), torch.ones(100, device="cuda")

    def backward() -> None:
        scaler.scale((weight.half() * x).sum()).backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backward()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward()
    seen = []
    for value in (5.0, 20000.0, 5.0, 40000.0):
        x.fill_(value)
        weight.grad.zero_()
        graph.replay()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler._scale.item(), scaler._growth_tracker.item()))
    assert seen == [(4.0, 1), (2.0, 0), (2.0, 1), (1.0, 0)]
