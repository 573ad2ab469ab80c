"""`mezzo compare` on a GPU: all modes of two workloads, captured steps among them."""

from __future__ import annotations

import pytest
import torch

from mezzo.comparing.compare import compare
from mezzo.comparing.modes import Mode, Setting, make_training
from mezzo.comparing.workload import Preset

pytestmark = pytest.mark.gpu
STEPS = 20


def load_workload(name, preset):
    from mezzo.comparing import builtin_workloads

    return builtin_workloads.load_workload(name, preset)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["mlp", "resnet18"])
def test_every_mode_trains_like_float32_and_is_timed(name, dtype):
    workload = load_workload(name, Preset.SMALL)
    result = compare(workload, dtype=dtype, device="cuda", steps=STEPS, rounds=2)
    float32 = result.modes[0]
    assert [one.mode for one in result.modes] == [mode.value for mode in Mode]
    for one in result.modes:
        failed = one.note and ("failed" in one.note or "not " in one.note)
        assert not failed, f"{one.mode}: {one.note}"
        assert one.milliseconds > 0, one.mode
        assert one.peak_bytes > 0, one.mode
        if one.mode != Mode.CONVERTED:
            assert one.loss_curve[0] == pytest.approx(float32.loss_curve[0], rel=0.05), one.mode
            assert one.saved_bytes > 0, one.mode
            assert (one.casts == 0) == (one.dtype is None), one.mode
    assert result.mode("O2").saved_bytes < float32.saved_bytes
    assert result.emulated is None
    assert result.machine == torch.cuda.get_device_name()


def test_the_captured_mode_replays_and_gives_the_losses_of_the_eager_one():
    workload = load_workload("mlp", Preset.SMALL)
    setting = Setting(workload, torch.device("cuda"), torch.float16)
    batches = [setting.move(setting.make_batch(number)) for number in range(STEPS)]
    eager, captured = (make_training(mode, setting) for mode in (Mode.O2, Mode.O2_CAPTURED))
    losses = [[float(training(batch)) for batch in batches] for training in (eager, captured)]
    assert captured.captured.captured
    assert captured.captured.replays > 0
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_images_and_models_are_channels_last_in_every_mode():
    workload = load_workload("resnet18", Preset.SMALL)
    setting = Setting(workload, torch.device("cuda"), torch.float16)
    batch = setting.move(setting.make_batch(0))
    assert workload.channels_last
    assert batch[0].is_contiguous(memory_format=torch.channels_last)
    for mode in (Mode.FLOAT32, Mode.APEX_O2, Mode.O2):
        weights = [one for one in make_training(mode, setting).model.parameters() if one.dim() == 4]
        assert all(one.is_contiguous(memory_format=torch.channels_last) for one in weights), mode


def test_no_cast_and_no_tf32_is_left_behind():
    compare(load_workload("mlp", Preset.SMALL), device="cuda", steps=3, rounds=1)
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.allow_tf32
    one = torch.ones(1, 1, device="cuda")
    assert torch.mm(one, one).dtype is torch.float32
