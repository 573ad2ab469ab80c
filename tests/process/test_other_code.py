"""Code that does not use mezzo does not notice that other code of its process does."""

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
def seen() -> dict[str, list[str]]:
    """What a process of its own has seen: in this one mezzo was used long ago."""
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
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_plain_torch_answers_after_mezzo_was_used_as_before(seen: dict[str, list[str]]) -> None:
    assert seen["after"] == []
    assert seen["compiled after"] == []


def test_plain_torch_answers_the_same_while_another_thread_uses_mezzo(
    seen: dict[str, list[str]],
) -> None:
    assert seen["rounds"]
    assert seen["beside"] == []


def test_whatever_mezzo_replaces_in_torch_is_in_the_table(seen: dict[str, list[str]]) -> None:
    listed = {hook.target for hook in HOOKS}
    assert seen["changed"]
    # torch has some of its classes under several names.
    assert [names for names in seen["changed"] if not listed.intersection(names)] == []


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
        except Exception as error:  # noqa: BLE001 - shown in the thread of the test
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
        # A vector with a gradient: what a loss of a step may not be.
        weight.exp().backward(torch.ones(3))
        finished.set()

    thread = threading.Thread(target=plain)
    thread.start()
    step(torch.ones(1, 1))
    thread.join()
    assert torch.equal(weight.grad, weight.exp().detach())
    assert model.weight.item() == -1.0


def test_a_region_in_one_thread_knows_nothing_of_an_export_in_another() -> None:
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
