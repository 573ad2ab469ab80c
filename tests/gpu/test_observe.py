"""Observed runs on a GPU: history and counts of captured steps, without a host read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.step_models import Made, batches, boosted
from torch import nn

import mezzo
from mezzo.observing.numerics import NumericsCollector
from mezzo.observing.tensor_stats import compute_stats, sample
from mezzo.scaling import check_unscale
from mezzo.scaling.gradient_counts import GradientCounts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 40


def _step(**options: Any) -> mezzo.TrainStep:
    made = Made("mlp", "AdamW", "cuda")
    return mezzo.TrainStep(
        made.model, boosted, made.optimizer, "O2", **{"dtype": "float16"} | options
    )


def _train(step: mezzo.TrainStep, overflows: tuple[int, ...] = ()) -> list[torch.Tensor]:
    return [step(x, y) for x, y in batches("mlp", STEPS, overflows=list(overflows), device="cuda")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("unscale", [False, True])
def test_the_check_counts_what_torch_counts(dtype: torch.dtype, unscale: bool) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    sizes = (7, 4096, 4097, 100_000, 0, 3_000_001)
    tensors = [torch.randn(size, generator=generator, device="cuda").to(dtype) for size in sizes]
    for tensor in tensors:
        tensor[::5] = 0
        tensor[1::7] = torch.finfo(dtype).smallest_normal / 4
    tensors[3][17::1000], tensors[5][-1] = torch.inf, torch.nan
    parameters = [torch.zeros_like(one) for one in tensors]
    by_kernel, in_torch = GradientCounts(parameters), GradientCounts(parameters)
    in_torch.of(parameters).add(tensors)
    found = torch.zeros((), device="cuda")
    counted = by_kernel.of(parameters)
    if unscale:
        check_unscale.check_and_unscale(
            tensors, torch.tensor(0.5, device="cuda"), found, None, counted
        )
    else:
        check_unscale.check(tensors, found, None, counted)
    assert torch.equal(by_kernel.memory, in_torch.memory)
    assert by_kernel.first_parameter(by_kernel.first.item()) == 3


@pytest.mark.parametrize("capture", [True, False])
def test_every_step_is_in_the_history_of_a_run(capture: bool, tmp_path: Path) -> None:
    step = _step(capture=capture)
    with mezzo.observe(step, log=tmp_path / "run.jsonl", every=10) as run:
        losses = _train(step, overflows=(20, 33))
    assert step.captured == capture
    assert [one.step for one in run.steps] == list(range(1, STEPS + 1))
    assert [one.loss for one in run.steps] == pytest.approx(
        [float(loss) for loss in losses], nan_ok=True
    )
    assert len(run.skips) == step.metrics.skipped_steps > 0
    assert all(skip.parameter in dict(step.models[0].named_parameters()) for skip in run.skips)
    assert run.steps[-1].scale == step.metrics.scale
    parameters = dict(step.models[0].named_parameters())
    totals = {name: one.total for name, one in run.gradients.items()}
    assert totals == {name: STEPS * one.numel() for name, one in parameters.items()}
    assert sum(one.overflowed for one in run.gradients.values()) > 0
    kinds = {line["kind"] for line in mezzo.read_log(tmp_path / "run.jsonl")}
    assert {"run", "step", "gradients", "tensors", "end"} <= kinds


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2}, {"clip_norm": 0.1}, {"dtype": "bfloat16", "master": "split"}],
)
def test_observing_changes_no_bit_of_a_captured_step(options: dict[str, Any]) -> None:
    weights = []
    for every in (None, 10_000, 7):
        torch.manual_seed(0)
        step = _step(capture=True, **options)
        run = None if every is None else mezzo.observe(step, every=every)
        _train(step, overflows=(20,) if step.scaler is not None else ())
        if run is not None:
            run.stop()
        weights.append(mezzo.master_params(step.models[0]))
    for name, expected in weights[0].items():
        for other in weights[1:]:
            assert torch.equal(expected, other[name]), name


def test_an_observed_replay_reads_nothing_from_the_device(request: pytest.FixtureRequest) -> None:
    step = _step(capture=True)
    run = mezzo.observe(step, every=10, numerics=False)
    inputs = list(batches("mlp", STEPS, device="cuda"))
    for x, y in inputs:
        step(x, y)
    assert step.captured
    request.getfixturevalue("no_host_reads")
    for x, y in inputs:
        step(x, y)
    torch.cuda.set_sync_debug_mode("default")
    run.stop()
    assert len(run.steps) == 2 * STEPS


def test_a_run_can_be_attached_to_a_captured_step_and_stopped() -> None:
    step = _step(capture=True)
    _train(step)
    replays = step.replays
    with mezzo.observe(step, every=1000) as run:
        _train(step)
    assert len(run.steps) == STEPS
    _train(step)
    assert step.captured
    assert step.replays > replays + STEPS
    assert len(run.steps) == STEPS


@pytest.mark.parametrize("scaler", [mezzo.GradScaler, torch.amp.GradScaler])
def test_a_loop_is_observed_with_either_scaler(scaler: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = scaler("cuda", init_scale=1024.0)
    with mezzo.observe(model, optimizer, scaler, every=5) as run:
        for number in range(1, 13):
            x = torch.full((16, 64), torch.inf if number == 7 else 1.0, device="cuda")
            with torch.autocast("cuda", torch.float16):
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [one.step for one in run.steps if one.skipped] == [7]
    assert run.skips[0].parameter == "0.weight"
    assert [one.scale for one in run.steps] == [1024.0] * 6 + [512.0] * 6
    assert run.gradients["2.bias"].total == 12 * 8


def test_statistics_on_a_gpu_equal_those_on_a_cpu() -> None:
    torch.manual_seed(0)
    tensors = [
        (torch.randn(300, 70) * 10.0 ** (-index % 9)).to(dtype)
        for index, dtype in enumerate([torch.float16, torch.bfloat16, torch.float32] * 50)
    ]
    tensors[1][3, 3], tensors[2][0, 0] = torch.nan, torch.inf
    named = [(str(index), one) for index, one in enumerate(tensors)]
    here = compute_stats([(name, sample(one)) for name, one in named])
    there = compute_stats([(name, sample(one.cuda())) for name, one in named])
    torch.cuda.synchronize()
    expected = here.read()
    for name, stats in there.read().items():
        assert stats.rms == pytest.approx(expected[name].rms)
        assert vars(stats) | {"rms": 0} == vars(expected[name]) | {"rms": 0}


def test_a_sample_reads_nothing_from_the_device(request: pytest.FixtureRequest) -> None:
    model = nn.Sequential(nn.Linear(64, 300), nn.LayerNorm(300), nn.Linear(300, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = mezzo.decorate(model, optimizer, "O2", dtype="bfloat16")
    x = torch.randn(16, 64, device="cuda")

    def run() -> NumericsCollector:
        collector = NumericsCollector([model])
        collector.start(1)
        model(x).float().square().mean().backward()
        optimizer.step()
        collector.stop()
        optimizer.zero_grad()
        return collector

    # Kernels are compiled, and pinned memory is allocated.
    run()
    torch.cuda.synchronize()
    request.getfixturevalue("no_host_reads")
    collector = run()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    collector.take(0.0)
    names = set(dict(model.named_parameters()))
    assert set(collector.latest["updates"]) == set(collector.latest["gradients"]) == names
    assert set(collector.latest["activations"]) == {"0", "1", "2"}


@pytest.mark.parametrize("capture", [True, False])
def test_loggers_get_every_step_of_a_run_with_its_rate(capture: bool, tmp_path: Path) -> None:
    step = _step(capture=capture)
    path = tmp_path / "run.csv"
    with mezzo.observe(step, every=10, loggers=[mezzo.CSVLogger(path)]) as run:
        _train(step, overflows=(20,))
    assert step.captured == capture
    rows = [line.split(",", 3) for line in path.read_text().splitlines()]
    scales = [float(row[2]) for row in rows if row[1] == "step/scale"]
    assert scales == [one.scale for one in run.steps]
    rate = step.optimizers[0].param_groups[0]["lr"]
    assert {float(row[2]) for row in rows if row[1] == "step/rate"} == {float(rate)}
    assert {int(row[0]) for row in rows if row[1] == "skips"} == {one.step for one in run.skips}
    assert any(row[1].startswith("headroom of gradients/") for row in rows)
