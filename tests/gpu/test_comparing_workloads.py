"""The built-in workloads of `mezzo compare` on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from mezzo.comparing.detector import detection_loss
from mezzo.comparing.paddle_programs import run_programs
from mezzo.comparing.registry import WORKLOADS, load_workload
from mezzo.comparing.workload import Preset

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_loss_of_a_small_workload_is_that_of_the_cpu(name: str) -> None:
    workload = load_workload(name, Preset.SMALL)
    torch.manual_seed(0)
    model = workload.make_model()
    batch = workload.make_batch(0)
    expected = workload.loss(model, batch).item()
    moved = tuple(value.cuda() for value in batch)
    assert workload.loss(model.cuda(), moved).item() == pytest.approx(expected, rel=1e-2)
    if workload.evaluate is not None:
        assert 0.0 <= workload.evaluate(model.eval()) <= 1.0


def test_the_loss_of_a_detector_can_be_captured_at_6132_anchors() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(8, 6132, 81, generator=generator).cuda().requires_grad_()
    offsets = torch.randn(8, 6132, 4, generator=generator).cuda().requires_grad_()
    is_positive = torch.rand(8, 6132, generator=generator) < 0.01
    classes = (torch.randint(1, 81, (8, 6132), generator=generator) * is_positive).cuda()
    targets = torch.randn(8, 6132, 4, generator=generator).cuda()

    def run() -> tuple[torch.Tensor, ...]:
        loss = detection_loss(scores, offsets, classes, targets)
        return loss, *torch.autograd.grad(loss, (scores, offsets))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    for one, other in zip(captured, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_programs_of_paddle_have_the_losses_of_the_cpu() -> None:
    there, here = (run_programs(Preset.SMALL, device, 4) for device in ("cuda", "cpu"))
    for mode, expected in zip(there.modes, here.modes, strict=True):
        # Devices draw different weights from the same seed: losses are near, not equal.
        assert mode.loss == pytest.approx(expected.loss, rel=0.2)
        assert mode.peak_bytes
    losses = {mode.mode: mode.loss for mode in there.modes}
    assert losses["dynamic O1"] == pytest.approx(losses["dynamic float32"], rel=1e-3)
    assert losses["static float32"] == pytest.approx(losses["dynamic float32"], rel=1e-5)
