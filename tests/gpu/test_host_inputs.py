"""Inputs in pinned memory on a CUDA device: copied beside the running step, each to its replay."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo
from mezzo.step.cuda_graph import CapturedGraph, GraphCapturer
from mezzo.step.host_inputs import MIN_BYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE = MIN_BYTES
SLEEP = 200_000_000
"""Cycles: about 0.1 s."""


def _graph(size: int, cycles: int = 0) -> CapturedGraph:
    capturer = GraphCapturer.on(torch.device("cuda", torch.cuda.current_device()))

    def run(inputs: tuple[torch.Tensor]) -> torch.Tensor:
        if cycles:
            torch.cuda._sleep(cycles)
        return inputs[0].sum()

    return capturer.capture(run, (torch.zeros(size, device="cuda"),))


def test_every_replay_reads_its_own_input_even_if_it_is_freed_before_the_copy() -> None:
    graph = _graph(SIZE)
    torch.cuda._sleep(SLEEP)
    sums = [
        graph.replay([torch.full((SIZE,), float(number)).pin_memory()]) for number in range(200)
    ]
    assert [int(one) for one in sums] == [SIZE * number for number in range(200)]


def test_the_next_input_is_copied_while_a_replay_runs() -> None:
    graph = _graph(SIZE, SLEEP)
    leaf = torch.ones(SIZE).pin_memory()
    graph.replay([leaf])
    torch.cuda.synchronize()
    graph.replay([leaf])
    running = torch.cuda.Event()
    running.record()
    graph.replay([leaf])
    copied = graph.host_inputs._stages[(graph.host_inputs._calls - 1) % 2].copied
    deadline = time.perf_counter() + 0.05
    while not copied.query() and time.perf_counter() < deadline:
        pass
    assert copied.query()
    assert not running.query()
    torch.cuda.synchronize()


def test_a_captured_step_trains_on_a_loader_with_pinned_memory() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 1024), torch.randn(256, 4))
    weights = []
    for pin_memory in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(1024, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        step = mezzo.TrainStep(
            model, nn.functional.mse_loss, optimizer, "O2", dtype="bfloat16", capture=True
        )
        for _ in range(4):
            for x, y in DataLoader(data, batch_size=32, pin_memory=pin_memory):
                assert x.is_pinned() == pin_memory
                step(x, y)
        assert step.captured
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))
