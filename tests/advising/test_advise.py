"""`mezzo.advise`: which setting is chosen, what is printed, and that nothing else changes."""

import copy
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo.advising import advise as advise_module
from mezzo.advising import setting_run
from mezzo.advising.advice import Precision, Setting, SettingTime, choose
from mezzo.advising.gpus import GPUS, find_gpu
from mezzo.advising.roofline import count_costs
from mezzo.advising.setting_run import Workload
from mezzo.advising.timing import interleaved_medians, time_ops

FLOAT32 = Setting("O0", Precision.FLOAT32)


def mlp(width=256):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 16))


def batch(width=256):
    torch.manual_seed(1)
    return torch.randn(32, width), torch.randint(16, (32,))


def timed(level, precision, gain, captured=False, memory=None):
    return SettingTime(Setting(level, precision, captured), 1 / gain, gain, memory)


# -- measured --------------------------------------------------------------------------------------


def test_on_a_cpu_that_emulates_16_bits_the_advice_is_to_switch_it_off(monkeypatch):
    # Everything runs; the times are those of an emulating CPU, for this one may not be.
    def times(runs, *_):
        return [[1.0] if run.setting == FLOAT32 else [1.5] for run in runs]

    monkeypatch.setattr(advise_module, "interleaved_times", times)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    advice = mezzo.advise(model, batch(), F.cross_entropy, optimizer, levels="O1", rounds=5)
    assert advice.switch_off
    assert advice.chosen.setting == FLOAT32
    assert advice.verdict.startswith(
        "Switch it off: no 16-bit setting makes a training step faster"
    )
    assert advice.line == 'step = mezzo.TrainStep(model, loss_fn, optimizer, "O0")'
    assert [str(one.setting) for one in advice.times] == ["float32", "O1 bfloat16", "O1 float16"]
    assert all(one.gain < 1.0 for one in advice.times[1:])
    assert {"mm", "addmm"} <= {one.op for one in advice.ops}
    assert len(advice.ops) == 10
    assert not advice.computed


def test_advice_changes_nothing_of_the_user():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    precision = torch.get_float32_matmul_precision()
    mezzo.advise(model, (torch.randn(8, 16), torch.zeros(8, 16)), F.mse_loss, optimizer, rounds=1)
    random = torch.get_rng_state()
    torch.set_rng_state(before[2])
    torch.randn(8, 16)
    after = (model.state_dict(), optimizer.state_dict(), random)
    expected = (*before[:2], torch.get_rng_state())
    torch.testing.assert_close(after, expected, rtol=0, atol=0)
    assert torch.get_float32_matmul_precision() == precision
    assert all(one.grad is None for one in model.parameters())
    assert model.training


def test_inference_is_timed_without_a_loss():
    advice = mezzo.advise(mlp(), batch()[0], levels=["O2"], rounds=1)
    assert not advice.training
    assert advice.times[1].memory < advice.times[0].memory
    assert "EvalStep" in advice.line
    assert "a forward pass" in str(advice)


def test_a_model_that_computes_its_loss_is_trained_with_its_optimizer():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, labels):
            return {"loss": F.mse_loss(self.layer(x), labels)}

    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sample = {"x": torch.ones(4, 8), "labels": torch.ones(4, 8)}
    advice = mezzo.advise(model, sample, optimizer=optimizer, levels="O1", rounds=1)
    assert advice.training
    assert all(one.seconds for one in advice.times)


def test_a_setting_out_of_memory_is_reported_and_the_others_are_timed(monkeypatch):
    class Run(setting_run.SettingRun):
        def __init__(self, workload, setting):
            if setting.level == "O1":
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(workload, setting)

    monkeypatch.setattr(advise_module, "SettingRun", Run)
    advice = mezzo.advise(mlp(16), batch(16), F.cross_entropy, rounds=1)
    problems = {str(one.setting): one.problem for one in advice.times}
    assert problems["O1 bfloat16"] == problems["O1 float16"] == "out of memory"
    assert problems["O2 bfloat16"] == problems["float32"] == ""
    assert all(one.gain for one in advice.times if not one.problem)
    assert "out of memory" in str(advice)


def test_float32_out_of_memory_leaves_the_fastest_that_runs(monkeypatch):
    class Run(setting_run.SettingRun):
        def __init__(self, workload, setting):
            if setting.level != "O2":
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(workload, setting)

    monkeypatch.setattr(advise_module, "SettingRun", Run)
    advice = mezzo.advise(mlp(16), batch(16), F.cross_entropy, rounds=1)
    assert advice.chosen.setting.level == "O2"
    assert advice.chosen.gain is None
    assert "the only kind that runs" in advice.verdict


def test_a_setting_that_fails_is_reported_with_its_error(monkeypatch):
    class Run(setting_run.SettingRun):
        def __init__(self, workload, setting):
            if setting.precision is Precision.FLOAT16:
                raise RuntimeError('"tanh" not implemented for Half. ' + "x" * 200)
            super().__init__(workload, setting)

    monkeypatch.setattr(advise_module, "SettingRun", Run)
    advice = mezzo.advise(mlp(16), batch(16)[0], levels="O1", rounds=1)
    assert advice.times[2].problem == '"tanh" not implemented for Half'


def test_an_error_of_the_model_in_float32_is_raised():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        mezzo.advise(mlp(16), torch.ones(4, 17))


# -- the choice ------------------------------------------------------------------------------------

O1, O2 = "O1", "O2"
BF16, F16, TF32 = Precision.BFLOAT16, Precision.FLOAT16, Precision.TF32


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ([timed(O1, BF16, 1.8), timed(O1, F16, 1.82)], "O1 bfloat16"),
        ([timed(O1, BF16, 1.2), timed(O1, F16, 1.8)], "O1 float16"),
        ([timed(O1, BF16, 1.8, memory=9), timed(O2, BF16, 1.8, memory=6)], "O2 bfloat16"),
        ([timed(O1, BF16, 1.02)], "float32"),
        ([timed(O1, BF16, 0.3)], "float32"),
        ([timed("O0", TF32, 1.6), timed(O1, BF16, 1.62)], "TF32"),
        ([timed("O0", TF32, 1.6), timed(O1, BF16, 2.5)], "O1 bfloat16"),
        (
            [timed("O0", Precision.FLOAT32, 5.0, captured=True), timed(O2, F16, 4.0, True)],
            "float32, captured",
        ),
        ([timed(O2, F16, 4.0, captured=True), timed(O2, F16, 2.0)], "O2 float16, captured"),
        ([SettingTime(Setting(O1, BF16), problem="out of memory")], "float32"),
    ],
)
def test_the_fastest_setting_by_a_margin_is_chosen(others, chosen):
    times = [timed("O0", Precision.FLOAT32, 1.0), *others]
    assert str(choose(times).setting) == chosen


def advice_for(chosen, *others, training=True):
    times = (SettingTime(FLOAT32, 0.01, 1.0, 4000), *others)
    one = chosen or times[0]
    return mezzo.Advice("H200", training, times, one, "line")


def test_the_verdict_names_gain_and_memory():
    best = SettingTime(Setting(O2, BF16, captured=True), 0.004, 2.5, 3000)
    assert advice_for(best, best).verdict == (
        "Use O2 bfloat16, captured: a training step on H200 is 2.50× as fast as float32, with 0.75"
        " of the memory."
    )
    half = SettingTime(Setting(O2, BF16), 0.01, 0.99, 2000)
    verdict = advice_for(None, half, training=False).verdict
    assert "no 16-bit setting makes a forward pass faster on H200: O2 bfloat16 is 0.99×" in verdict
    assert "needs 0.50 of the memory" in verdict


def test_the_verdict_if_no_setting_runs():
    nothing = SettingTime(FLOAT32, problem="out of memory")
    verdict = mezzo.Advice("H200", True, (nothing,), choose([nothing]), "line").verdict
    assert verdict == "No setting runs on H200: out of memory. Use smaller batches."


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            Setting(O2, F16, captured=True),
            'TrainStep(model, loss_fn, optimizer, "O2", dtype="float16")',
        ),
        (Setting(O1, BF16), 'optimizer, "O1", dtype="bfloat16", capture=False)'),
        (Setting("O0", TF32), 'torch.set_float32_matmul_precision("high")'),
        (Setting("O0", TF32, captured=True), 'precision("high")\nstep = mezzo.TrainStep('),
    ],
)
def test_the_line_to_paste_on_cuda(setting, line):
    class OnCuda(Workload):
        device = torch.device("cuda")

    workload = OnCuda(mlp(), batch(), F.cross_entropy, None, True, {})
    assert line in advise_module._line(workload, setting)


def test_settings_on_cuda_are_eager_and_captured():
    cuda = torch.device("cuda", 0)
    names = [str(one) for one in advise_module._settings(cuda, ("O2",))]
    assert names[:4] == ["float32", "float32, captured", "TF32", "TF32, captured"]
    cpu = [str(one) for one in advise_module._settings(torch.device("cpu"), ("O2",))]
    assert cpu == ["float32", "O2 bfloat16", "O2 float16"]


# -- computed for a named GPU ----------------------------------------------------------------------


def test_a_large_product_gains_what_the_data_sheet_promises():
    with torch.device("meta"):
        layer = nn.Linear(8192, 8192, bias=False)
        x = torch.empty(8192, 8192)
    advice = mezzo.advise(layer, x, gpu="A100")
    times = {str(one.setting): one for one in advice.times}
    flops = 2 * 8192**3
    assert times["float32"].seconds == pytest.approx(flops / 19.5e12)
    cast = 8192**2 * (4 + 2) / 2039e9
    assert times["O2 bfloat16"].seconds == pytest.approx(flops / 312e12 + cast)
    assert times["TF32"].gain == pytest.approx(156 / 19.5)
    assert str(advice.chosen.setting) == "O2 bfloat16"
    assert "Computed, not measured" in str(advice)
    assert "(computed, not measured)" in advice.verdict


def test_an_elementwise_model_moves_bytes_and_a_small_one_gains_nothing():
    (cost,) = count_costs(Workload(nn.ReLU(), torch.ones(1000), None, None, False, {}), FLOAT32)
    assert (cost.flops, cost.bytes) == (0, 8000)
    assert mezzo.advise(mlp(16), batch(16), F.cross_entropy, gpu="H100").switch_off


def test_costs_of_fake_tensors_are_those_of_real_ones():
    class ReadsValues(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp(32)

        def forward(self, x):
            return self.layers(x) if x.sum().item() < 1e9 else x

    plain = Workload(mlp(32), batch(32), F.cross_entropy, None, True, {})
    reads = plain._replace(model=ReadsValues())
    setting = Setting(O2, BF16)
    added = {"sum", "_local_scalar_dense"}
    real = [one for one in count_costs(reads, setting) if one.op in {"mm", "addmm"}]
    assert real == [one for one in count_costs(plain, setting) if one.op in {"mm", "addmm"}]
    assert added & {one.op for one in count_costs(reads, setting)}
    assert [one.half for one in real] == [True] * len(real) != []


def test_an_old_gpu_has_no_16_bit_settings():
    advice = mezzo.advise(mlp(), batch()[0], gpu="P100")
    assert [str(one.setting) for one in advice.times] == ["float32"]
    assert [str(one.setting) for one in mezzo.advise(mlp(), batch()[0], gpu="T4").times] == [
        "float32",
        "O1 float16",
        "O2 float16",
    ]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("rtx4090", "RTX 4090"),
        ("L40S", "L40S"),
    ],
)
def test_gpus_are_found_in_any_spelling(name, found):
    assert find_gpu(name).name == found


@pytest.mark.parametrize("name", ["NVIDIA L40", "RTX A1000", "NVIDIA A1000 Laptop GPU", "T400"])
def test_a_gpu_whose_name_begins_like_another_is_unknown(name):
    with pytest.raises(mezzo.PolicyError, match="Unknown GPU"):
        find_gpu(name)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_every_gpu_has_the_rates_of_the_dtypes_that_it_supports(gpu):
    assert gpu.hardware.name == gpu.name
    assert (gpu.bfloat16 is not None) == gpu.hardware.bfloat16.native
    assert gpu.rate("float16") > gpu.rate("float32") == gpu.float32


# -- timing and arguments --------------------------------------------------------------------------


def test_medians_are_of_interleaved_runs():
    calls = []
    interleaved_medians(
        [lambda: calls.append("a"), lambda: calls.append("b")], torch.device("cpu"), rounds=3
    )
    assert "".join(calls) == "abab" + "ab" * 3


def test_slow_runs_are_timed_once():
    calls = []

    def slow():
        calls.append(0)
        time.sleep(0.02)

    (seconds,) = interleaved_medians([slow], torch.device("cpu"), rounds=50, budget=0.01)
    assert len(calls) == 2
    assert seconds >= 0.02


@pytest.mark.parametrize(("slow", "is_said"), [(9.0, True), (1.2, False)])
def test_times_that_differ_between_rounds_come_with_a_caveat(monkeypatch, slow, is_said):
    def times(runs, *_):
        return [[1.0, 1.0, 1.1, slow, slow] for _ in runs]

    monkeypatch.setattr(advise_module, "interleaved_times", times)
    advice = mezzo.advise(mlp(16), batch(16), F.cross_entropy)
    said = "O2 float16 took from 1000.00 ms to 9000.00 ms. Something else uses this machine"
    assert (said in str(advice)) is is_said
    assert bool(advice.unsteady) is is_said


def test_a_level_is_left_out_if_a_lower_one_in_the_dtype_is_too_slow(monkeypatch):
    def times(runs, *_):
        return [[20.0] if run.setting.precision is F16 else [1.0] for run in runs]

    monkeypatch.setattr(advise_module, "interleaved_times", times)
    advice = mezzo.advise(mlp(16), batch(16), F.cross_entropy)
    problems = {str(one.setting): one.problem for one in advice.times if one.problem}
    assert problems == {"O2 float16": "not timed: O1 float16 is 0.05× as fast as float32"}


def test_ops_are_timed_in_forward_and_backward():
    x = torch.ones(4, 4, requires_grad=True)
    times = time_ops(lambda: (x @ x).sum().backward(), torch.device("cpu"))
    assert {"mm", "sum"} <= set(times)
    assert all(seconds >= 0 for seconds in times.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2), torch.ones(2)), "takes a model first, got Tensor"),
        ((mlp(16), torch.ones(4, 16), F.mse_loss), "the sample is (inputs, target), got Tensor"),
        ((nn.Identity(), torch.ones(4, 16)), "Identity has no parameters"),
        ((mlp(16).half(), torch.ones(4, 16)), "float16 parameters"),
        ((mezzo.decorate(mlp(16).eval(), None, "O1"), torch.ones(4, 16)), "is decorated"),
    ],
)
def test_wrong_arguments_raise_with_the_remedy(arguments, message):
    with pytest.raises(mezzo.PolicyError) as error:
        mezzo.advise(*arguments)
    assert message in str(error.value)


def test_unknown_levels_and_gpus_raise_with_the_choices():
    with pytest.raises(mezzo.PolicyError, match="levels='O9': choose from 'O1', 'O2'"):
        mezzo.advise(mlp(16), torch.ones(4, 16), levels="O9")
    with pytest.raises(mezzo.PolicyError, match=r"Unknown GPU 'H9000'\. Known are: P100"):
        mezzo.advise(mlp(16), torch.ones(4, 16), gpu="H9000")
