"""`compare`: what it measures in each mode, and what it does when a mode fails or Ctrl-C comes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo._errors import PolicyError
from mezzo.comparing import measure
from mezzo.comparing.compare import compare
from mezzo.comparing.modes import Mode, Setting, make_training
from mezzo.comparing.workload import Documented, Preset, Workload

CPU = torch.device("cpu")
STEPS = 6


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch):
    monkeypatch.setattr(measure, "_ROUND_SECONDS", 0.001)


def make_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def make_batch(number):
    torch.manual_seed(100 + number)
    return torch.randn(12, 8), torch.randint(4, (12,))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


WORKLOAD = Workload(
    name="tiny",
    title="MLP 8-16-4",
    preset=Preset.SMALL,
    data="synthetic",
    make_model=make_model,
    make_optimizer=make_optimizer,
    make_batch=make_batch,
    loss=loss,
    samples=12,
    steps=STEPS,
    documented=(Documented("O1", 4.5, "PaddlePaddle, V100"),),
)


def run(*modes, workload=WORKLOAD, rounds=1, dtype="float16", **options):
    return compare(workload, modes=list(modes), dtype=dtype, device="cpu", rounds=rounds, **options)


# -- numerics --------------------------------------------------------------------------------------


def test_the_losses_of_float32_are_those_of_a_plain_loop_to_the_bit():
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model)
    batches = [make_batch(number) for number in range(STEPS)]
    torch.manual_seed(0)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        value = F.cross_entropy(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert list(run("float32").modes[0].loss_curve) == losses


@pytest.mark.parametrize(("mode", "level"), [("O1", "O1"), ("O2", "O2")])
def test_the_losses_of_a_level_are_those_of_a_train_step_to_the_bit(mode, level):
    torch.manual_seed(0)
    model = make_model()
    step = mezzo.TrainStep(
        model, F.cross_entropy, make_optimizer(model), level, dtype="float16", capture=False
    )
    batches = [make_batch(number) for number in range(STEPS)]
    torch.manual_seed(0)
    losses = [float(step(x, y)) for x, y in batches]
    assert list(run(mode).mode(mode).loss_curve) == losses


def test_the_losses_of_torch_amp_are_those_of_the_documented_loop_to_the_bit():
    torch.manual_seed(0)
    model = make_model()
    optimizer, scaler = make_optimizer(model), torch.amp.GradScaler("cpu")
    batches = [make_batch(number) for number in range(STEPS)]
    torch.manual_seed(0)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            value = F.cross_entropy(model(x), y)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(value.item())
    assert list(run("torch.amp").mode("torch.amp").loss_curve) == losses


def test_all_modes_start_from_the_same_weights_and_stay_close_to_float32():
    result = run(*(mode.value for mode in Mode if mode is not Mode.CONVERTED))
    trained = [one for one in result.modes if one.loss is not None]
    assert [one.mode for one in trained] == "float32,torch.amp,Apex O1,Apex O2,O1,O2".split(",")
    for one in trained:
        assert one.loss_curve == pytest.approx(trained[0].loss_curve, rel=5e-3), one.mode
        assert one.milliseconds > 0
        assert one.samples_per_second == pytest.approx(12_000 / one.milliseconds)
    assert result.mode("TF32").note == "not run: needs an NVIDIA GPU"
    assert "captured on CUDA only" in result.mode("O2 captured").note


# -- what is measured ------------------------------------------------------------------------------


def test_the_result_has_the_run_and_the_machine():
    result = run("float32", rounds=2)
    assert (result.workload, result.preset, result.steps, result.rounds) == ("tiny", "small", 6, 2)
    assert (result.torch, result.mezzo) == (torch.__version__, mezzo.__version__)
    assert result.machine == mezzo.hardware("cpu").name
    assert result.documented == WORKLOAD.documented
    assert result.complete
    support = mezzo.hardware("cpu").float16
    assert result.emulated == (None if support.native else support.reason)


def test_casts_and_bytes_for_backward_are_those_of_one_step():
    plain = replace(WORKLOAD, make_model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    result = run("O1", "O2", workload=plain, dtype="bfloat16")
    float32, o1, o2 = (result.mode(name) for name in ("float32", "O1", "O2"))
    # The batch, the hidden and the output layer, log-softmax and its target; no weights.
    assert float32.saved_bytes >= 4 * 12 * (8 + 16 + 4) + 8 * 12
    assert o1.saved_bytes < float32.saved_bytes
    assert (float32.casts, float32.dtype) == (0, None)
    # Four parameters and the input, the loss and the gradients of the parameters.
    assert o1.casts >= 9
    assert (o1.dtype, o2.dtype) == ("bfloat16", "bfloat16")
    weights = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert float32.peak_bytes == 3 * weights  # parameters, gradients, momentum
    # 16-bit parameters and gradients, float32 masters and momentum.
    assert o2.peak_bytes == 3 * weights


def test_skipped_steps_are_counted_in_every_float16_mode():
    def overflowing(model, batch):
        # The gradients of the second batch are infinite in float32 too, once they are scaled.
        factor = torch.where(batch[2] > 0, 1e38, 1.0)
        return loss(model, batch[:2]) * factor

    workload = replace(
        WORKLOAD,
        make_batch=lambda number: (*make_batch(number), torch.tensor(number == 2)),
        loss=overflowing,
    )
    result = run("torch.amp", "Apex O1", "Apex O2", "O1", "O2", workload=workload)
    skipped = {one.mode: one.skipped for one in result.modes}
    assert skipped.pop("float32") is None
    assert all(count == 1 for count in skipped.values()), skipped


def test_a_fused_optimizer_of_torch_amp_shows_no_count_of_skips():
    workload = replace(
        WORKLOAD, make_optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1, fused=True)
    )
    assert run("torch.amp", workload=workload).mode("torch.amp").skipped is None


def test_accuracy_is_measured_after_each_epoch_in_eval_mode_and_in_the_precision_of_the_mode():
    seen = []

    def evaluate(model):
        seen.append((model.training, model(torch.ones(1, 8)).dtype))
        return len(seen) / 100

    workload = replace(WORKLOAD, evaluate=evaluate, epoch_steps=4)
    result = run("torch.amp", "Apex O1", "O1", workload=workload)
    # After four steps, and after the two of the last epoch.
    dtypes = [torch.float32] * 2 + [torch.float16] * 6
    assert seen == [(False, dtype) for dtype in dtypes]
    assert result.mode("float32").accuracy_curve == (0.01,)
    assert result.mode("float32").accuracy == 0.02
    assert len(result.mode("O1").loss_curve) == 2


def test_accuracy_without_epochs_is_that_of_the_end():
    result = run("float32", workload=replace(WORKLOAD, evaluate=lambda _: 0.5))
    assert (result.modes[0].accuracy, result.modes[0].accuracy_curve) == (0.5, ())


def test_the_converted_model_is_timed_as_a_forward_pass_beside_float32():
    converted = run("converted", dtype="bfloat16").mode("converted")
    assert converted.dtype == "bfloat16"
    assert converted.milliseconds > 0
    assert converted.casts >= 1
    assert converted.peak_bytes == 2 * (8 * 16 + 16 + 16 * 4 + 4)
    assert converted.note.startswith("a forward pass; relative error of its outputs ")
    assert "; float32 takes " in converted.note
    assert converted.loss is None


def test_a_loss_that_does_not_call_the_model_leaves_the_conversion_out():
    workload = replace(WORKLOAD, loss=lambda model, batch: model[0](batch[0]).square().mean())
    result = run("converted", workload=workload)
    assert result.mode("converted").note == (
        "failed: The loss of the workload does not call the model itself."
    )
    assert result.mode("float32").milliseconds > 0


def test_batches_are_made_once_for_all_modes_unless_they_are_large(monkeypatch):
    made = []

    def counted(number):
        made.append(number)
        return make_batch(number)

    workload = replace(WORKLOAD, make_batch=counted)
    run("O1", workload=workload)
    assert sorted(made) == list(range(STEPS))
    made.clear()
    monkeypatch.setattr(measure, "_KEPT_BYTES", 0)
    run("O1", workload=workload)
    assert len(made) > 2 * STEPS


# -- timing ----------------------------------------------------------------------------------------


def test_rounds_alternate_between_modes():
    order = []
    runs = [measure.Timed(name, lambda name=name: order.append(name), calls=2) for name in "ab"]
    measure.time_rounds(runs, CPU, 3, lambda: None)
    assert "".join(order) == "aabb" * 3


def test_the_time_of_a_mode_is_the_median_of_its_rounds(monkeypatch):
    clock = iter([0, 1, 0, 9, 0, 2])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timed = measure.Timed("a", lambda: None, calls=4)
    measure.time_rounds([timed], CPU, 3, lambda: None)
    assert timed.milliseconds == 500


@pytest.mark.parametrize(
    ("seconds", "note"),
    [
        ([1, 1, 9, 1.1, 1.2], None),
        ([1, 2], None),
        ([1, 1, 2, 3, 9], "unsteady: rounds took from 1e+03 to 3e+03 ms"),
        ([0.02, 0.05, 0.02, 0.09, 0.03], "unsteady: rounds took from 20 to 50 ms"),
    ],
)
def test_rounds_that_differ_by_more_than_one_outlier_have_a_note(seconds, note):
    assert measure.Timed("a", lambda: None, seconds=seconds).unsteady == note


def test_short_calls_are_repeated_within_a_round(monkeypatch):
    monkeypatch.setattr(measure, "_ROUND_SECONDS", 0.05)
    monkeypatch.setattr(measure, "time_once", lambda run, device: 0.01)
    assert measure.timed("a", lambda: None, CPU).calls == 5
    monkeypatch.setattr(measure, "time_once", lambda run, device: 0.0)
    assert measure.timed("a", lambda: None, CPU).calls == 20
    monkeypatch.setattr(measure, "time_once", lambda run, device: 3.0)
    assert measure.timed("a", lambda: None, CPU).calls == 1


# -- failures --------------------------------------------------------------------------------------


class NoHalf(nn.Linear):
    """Fails in 16 bits, as an op without a kernel does."""

    def forward(self, x):
        if self.weight.dtype is not torch.float32:
            raise RuntimeError("no kernel for this dtype\nC++ frames")
        return super().forward(x)


def test_a_mode_that_raises_is_noted_and_the_rest_is_measured():
    result = run("O1", "O2", workload=replace(WORKLOAD, make_model=lambda: NoHalf(8, 4)))
    assert result.mode("O2").note == "failed: RuntimeError: no kernel for this dtype"
    assert result.mode("O2").milliseconds is None
    assert result.mode("O1").milliseconds > 0
    assert result.complete


def test_an_error_of_the_workload_in_float32_propagates():
    workload = replace(WORKLOAD, make_batch=lambda _: (torch.ones(3, 5), torch.zeros(3).long()))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run("O1", workload=workload)


def test_float32_that_does_not_fit_into_memory_is_noted():
    def fails(model, batch):
        if batch[0].dtype is torch.float32 and not torch.is_autocast_enabled("cpu"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(model, batch)

    result = run("torch.amp", workload=replace(WORKLOAD, loss=fails))
    assert result.mode("float32").note == "failed: out of memory"
    assert result.mode("torch.amp").milliseconds > 0
    assert result.speedup("torch.amp") is None


def test_a_mode_that_fails_while_it_is_timed_keeps_its_losses():
    calls = []

    def counted(model, batch):
        calls.append(0)
        if len(calls) > STEPS + 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(model, batch)

    # One more step counts casts.
    result = run("float32", workload=replace(WORKLOAD, loss=counted))
    assert result.modes[0].note == "not timed: out of memory"
    assert result.modes[0].loss is not None
    assert result.modes[0].milliseconds is None


def test_a_mode_that_fails_in_a_later_round_leaves_the_others_timed():
    def fails():
        if len(bad.seconds) == 1:
            raise RuntimeError("out of luck")

    bad, good = measure.Timed("bad", fails), measure.Timed("good", lambda: None)
    measure.time_rounds([bad, good], CPU, 3, lambda: None)
    assert (len(bad.seconds), len(good.seconds), str(bad.error)) == (1, 3, "out of luck")


def interrupt_at(text, number):
    def progress(doing, done, total):
        if text in doing and done == number:
            raise KeyboardInterrupt

    return progress


def test_ctrl_c_while_training_keeps_the_modes_before():
    result = run("O1", "O2", progress=interrupt_at("steps in O1", 3))
    assert not result.complete
    assert result.mode("float32").loss is not None
    assert result.mode("float32").milliseconds is None
    assert result.mode("O1").note == result.mode("O2").note == "not run: interrupted"


def test_ctrl_c_while_timing_keeps_the_rounds_before():
    result = run("O1", rounds=50, progress=interrupt_at("rounds", 3))
    assert not result.complete
    assert all(one.milliseconds > 0 for one in result.modes)


def test_progress_counts_steps_and_rounds():
    seen = []
    run("O1", rounds=2, progress=lambda *one: seen.append(one))
    assert seen[0] == ("train 6 steps in float32", 0, 6)
    assert ("train 6 steps in O1", 6, 6) in seen
    assert seen[-1] == ("time 2 rounds", 4, 4)


# -- what is left behind ---------------------------------------------------------------------------


def test_random_generators_casts_and_tf32_are_as_before():
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate(), torch.backends.cudnn.allow_tf32
    run("Apex O1", "Apex O2", "O2")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), torch.backends.cudnn.allow_tf32) == before[1:]
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32


def test_products_are_in_tf32_in_that_mode_only():
    seen = []

    def recorded(model, batch):
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        return loss(model, batch)

    setting = Setting(replace(WORKLOAD, loss=recorded), CPU, torch.bfloat16)
    for mode in (Mode.FLOAT32, Mode.TF32, Mode.O1):
        make_training(mode, setting)(make_batch(0))
    assert seen == [("highest", False), ("high", True), ("highest", False)]


# -- arguments -------------------------------------------------------------------------------------


def test_modes_are_found_without_regard_to_case_and_hyphens_and_float32_is_among_them():
    result = run("o1", "TORCH-AMP", steps=1)
    assert [one.mode for one in result.modes] == ["float32", "torch.amp", "O1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modes": ["O4"]}, "There is no mode 'O4'. Choose one of: float32, TF32, torch.amp"),
        ({"steps": 0}, "steps=0 is too few. Pass 1 or more."),
        ({"rounds": 0}, "rounds=0 is too few. Pass 1 or more."),
        ({"dtype": "float32"}, "Choose one of: float16, bfloat16."),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(PolicyError) as error:
        compare(WORKLOAD, **{"device": "cpu"} | options)
    assert message in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_device_is_refused():
    with pytest.raises(PolicyError, match="device='cuda' computes no 16-bit dtype"):
        compare(WORKLOAD, device="cuda")
