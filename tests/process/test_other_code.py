"""Code that does not use mezzo is not affected by code in the same process that does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import mezzo
from mezzo.autocasting.torch_hooks import HOOKS


@pytest.fixture(scope="module")
def report() -> dict[str, list[str]]:
    """Return the report of a new process: in this one mezzo has already been used."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "support.process.plain_beside_mezzo"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    differences: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return differences


@pytest.mark.slow
def test_plain_torch_gives_the_same_results_after_mezzo_was_used(
    report: dict[str, list[str]],
) -> None:
    assert report["after"] == []
    assert report["compiled after"] == []


@pytest.mark.slow
def test_plain_torch_gives_the_same_results_while_another_thread_uses_mezzo(
    report: dict[str, list[str]],
) -> None:
    assert report["rounds"]
    assert report["beside"] == []


@pytest.mark.slow
def test_everything_that_mezzo_replaces_in_torch_is_in_the_table(
    report: dict[str, list[str]],
) -> None:
    listed = {hook.target for hook in HOOKS}
    assert report["changed"]
    # Some classes of torch have several names.
    assert [names for names in report["changed"] if not listed.intersection(names)] == []


def _pair() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def test_two_threads_step_at_once_and_each_scales_its_own_loss() -> None:
    barrier = threading.Barrier(2, timeout=10)
    weights, errors = {}, []

    def train(scale: float) -> None:
        model, optimizer = _pair()
        scaler = mezzo.GradScaler("cpu", init_scale=scale)

        @mezzo.train_step(
            models=model, optimizers=optimizer, policy="O1", dtype="float16", scaler=scaler
        )
        def step(x: torch.Tensor) -> None:
            loss = model(x).float().sum()
            barrier.wait()
            loss.backward()
            barrier.wait()

        try:
            for _ in range(3):
                step(torch.ones(1, 1))
            weights[scale] = model.weight.item()
        except Exception as error:  # noqa: BLE001 - raised in the thread of the test
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=train, args=(scale,)) for scale in (1024.0, 4.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert weights == {1024.0: -3.0, 4.0: -3.0}


def test_a_step_leaves_the_backward_pass_of_other_threads_alone() -> None:
    inside, finished = threading.Event(), threading.Event()
    model, optimizer = _pair()

    @mezzo.train_step(
        models=model,
        optimizers=optimizer,
        policy="O1",
        dtype="float16",
        scaler=mezzo.GradScaler("cpu", init_scale=1024.0),
    )
    def step(x: torch.Tensor) -> None:
        inside.set()
        assert finished.wait(60)
        model(x).float().sum().backward()

    weight = torch.ones(3, requires_grad=True)

    def plain() -> None:
        inside.wait(60)
        # A vector, which the loss of a step cannot be.
        weight.exp().backward(torch.ones(3))
        finished.set()

    thread = threading.Thread(target=plain)
    thread.start()
    step(torch.ones(1, 1))
    thread.join()
    assert torch.equal(weight.grad, weight.exp().detach())
    assert model.weight.item() == -1.0


def test_a_region_in_one_thread_is_not_affected_by_an_export_in_another() -> None:
    inside, finished = threading.Event(), threading.Event()

    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert finished.wait(60)
            return x + 1

    exported = []
    thread = threading.Thread(
        target=lambda: exported.append(torch.export.export(Slow(), (torch.ones(2),)))
    )
    thread.start()
    assert inside.wait(60)
    from torch.fx import traceback

    before = dict(traceback.current_meta)
    with mezzo.autocast("cpu", dtype=torch.bfloat16):
        meanwhile = dict(traceback.current_meta)
    finished.set()
    thread.join()
    assert meanwhile == before
    assert exported
