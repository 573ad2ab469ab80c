"""Test the eight programs of PaddlePaddle's guide as `mezzo compare` runs them."""

from __future__ import annotations

import random

import pytest
import torch

import mezzo
from mezzo.comparing import paddle_programs, paddle_runs
from mezzo.comparing.comparison import Comparison
from mezzo.comparing.paddle_runs import PROGRAMS, run_programs
from mezzo.comparing.workload import Preset
from mezzo.compat import paddle

np = pytest.importorskip("numpy")

MODES = [
    "dynamic float32",
    "dynamic O1",
    "dynamic O2",
    "dynamic accumulation",
    "static float32",
    "static O1",
    "static O2",
    "static guard",
]


@pytest.fixture(scope="module")
def result() -> Comparison:
    return run_programs(Preset.SMALL, "cpu")


def losses(result: Comparison) -> dict[str, float]:
    return {mode.mode: mode.loss for mode in result.modes}


def test_eight_programs_run_in_the_order_of_the_guide(result):
    assert [mode.mode for mode in result.modes] == MODES
    assert (result.workload, result.steps, result.complete) == ("paddle-programs", 20, True)
    assert "9 × Linear(128), batch 16" in result.title
    for mode in result.modes:
        assert mode.milliseconds > 0
        assert len(mode.loss_curve) == 2
    assert [mode.dtype for mode in result.modes] == [None, *["float16"] * 3] * 2


def test_dynamic_and_static_programs_have_equal_losses_and_o1_those_of_float32(result):
    loss = losses(result)
    assert loss["static float32"] == pytest.approx(loss["dynamic float32"], rel=1e-6)
    assert loss["static O1"] == pytest.approx(loss["dynamic O1"], rel=1e-6)
    # Four digits, as in the guide.
    assert loss["dynamic O1"] == pytest.approx(loss["dynamic float32"], rel=5e-4)
    # The static loss is itself float16.
    assert loss["static O2"] == pytest.approx(loss["dynamic O2"], rel=1e-3)


def test_programs_without_master_weights_have_the_error_of_the_guide(result):
    loss = losses(result)
    guide = {program.mode: program.loss for program in PROGRAMS}
    for mode in ("dynamic O2", "dynamic accumulation", "static O2", "static guard"):
        increase = loss[mode] / loss["dynamic float32"] - 1
        assert increase == pytest.approx(guide[mode] / guide["dynamic float32"] - 1, abs=0.02)
        assert increase > 0.003


def test_speedups_are_over_the_dynamic_float32_program(result):
    assert result.speedup("dynamic float32") == 1.0
    expected = result.modes[0].milliseconds / result.modes[6].milliseconds
    assert result.speedup("static O2") == expected
    assert Comparison.from_json(result.to_json()) == result


def test_the_numbers_of_the_guide_are_attached(result):
    assert {one.mode: one.speedup for one in result.documented} == {
        "dynamic O1": 4.5,
        "dynamic O2": 5.2,
        "dynamic accumulation": 4.7,
        "static O1": 4.5,
        "static O2": 5.4,
        "static guard": 3.8,
    }
    assert result.modes[0].note.endswith("on a V100: 529 ms, loss 0.6486028")
    for program in PROGRAMS:
        base = PROGRAMS[4 if program.is_static else 0]
        ratio = base.seconds / program.seconds
        assert program.speedup is None or program.speedup == pytest.approx(ratio, abs=0.051)


def test_the_full_sizes_are_those_of_the_guide():
    sizes = paddle_programs.Sizes()
    assert (sizes.input_size, sizes.output_size) == (8192, 8192)
    assert (sizes.batch_size, sizes.nums_batch, paddle_programs.EPOCHS) == (2048, 10, 2)


def test_the_process_is_as_before_afterwards():
    torch.manual_seed(1)
    np.random.seed(1)
    expected = torch.rand(3), np.random.random(3), random.getstate(), paddle.get_device()
    torch.manual_seed(1)
    np.random.seed(1)
    run_programs(Preset.SMALL, "cpu", steps=2)
    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.random(3) == expected[1]).all()
    assert random.getstate() == expected[2]
    assert paddle.get_device() == expected[3]
    assert paddle.in_dynamic_mode()


def test_ctrl_c_keeps_the_programs_that_have_run():
    def interrupt(mode: str) -> None:
        if mode == "dynamic O2":
            raise KeyboardInterrupt

    result = run_programs(Preset.SMALL, "cpu", 2, interrupt)
    assert [mode.mode for mode in result.modes] == MODES[:2]
    assert (result.complete, result.steps) == (False, 2)


def test_ctrl_c_inside_a_static_program_leaves_static_mode(monkeypatch):
    def interrupt(sizes, place):
        raise KeyboardInterrupt

    first = paddle_runs.Program("static O1", interrupt, 1.0, 1.0, is_static=True)
    monkeypatch.setattr(paddle_runs, "PROGRAMS", (first,))
    with pytest.raises(KeyboardInterrupt):
        run_programs(Preset.SMALL, "cpu", 2)
    assert paddle.in_dynamic_mode()


@pytest.mark.parametrize("steps", [0, 1, 3, -2])
def test_steps_that_are_not_two_equal_epochs_are_refused(steps):
    with pytest.raises(mezzo.PolicyError, match=rf"steps={steps}: .* a multiple of 2"):
        run_programs(Preset.SMALL, "cpu", steps)
