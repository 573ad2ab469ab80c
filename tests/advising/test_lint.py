"""`mezzo.lint`: each rule has an example that it finds and one that it does not."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import mezzo
from mezzo._hardware.support import Support
from mezzo.advising.lint import RULES
from mezzo.advising.lint_subject import Cost, Subject

NATIVE = Support(supported=True, native=True, reason="it has instructions for it")
SLOW = Support(supported=True, native=False, reason="torch emulates it in software")
NO_SUPPORT = Support(supported=False, native=False, reason="it has no such arithmetic")
H200 = mezzo.Hardware("cuda", "NVIDIA H200", "9.0", float16=NATIVE, bfloat16=NATIVE)
V100 = mezzo.Hardware("cuda", "V100", "7.0", float16=NATIVE, bfloat16=SLOW)


def rules_of(findings):
    return [one.rule for one in findings]


def mlp(inputs=32, outputs=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


def lint(*args, **kwargs):
    # Whether this machine computes 16 bits natively is not what these tests are about.
    kwargs.setdefault("measure", False)
    kwargs.setdefault("ignore", {"slow-dtype", "unsupported-dtype"})
    return mezzo.lint(*args, **kwargs)


class Loop:
    """A loop in torch.amp's shape, with one mistake where a test makes one."""

    def __init__(self, dtype=torch.float16, *, scaler=True, model=None):
        self.model = mlp() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scaler)
        self.dtype = dtype
        torch.manual_seed(1)
        self.x, self.y = torch.randn(16, 32), torch.randint(16, (16,))

    def lint(self, step, **kwargs):
        kwargs = {"scheduler": self.scheduler, **kwargs}
        return lint(self.model, self.optimizer, self.scaler, step=step, **kwargs)

    def forward(self):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=self.dtype):
            return F.cross_entropy(self.model(self.x), self.y)

    def update(self):
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self.scheduler.step()

    def correct(self):
        self.scaler.scale(self.forward()).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.update()


# -- loops -----------------------------------------------------------------------------------------


def test_a_correct_torch_amp_loop_has_no_findings():
    loop = Loop()
    found = loop.lint(loop.correct)
    assert rules_of(found) == []
    assert "scheduler-on-skip" in found.checked


def test_a_correct_bfloat16_loop_has_no_findings():
    loop = Loop(torch.bfloat16, scaler=False)
    assert rules_of(loop.lint(loop.correct)) == []


def test_a_correct_loop_with_mezzo_has_no_findings():
    loop = Loop()
    model, optimizer = mezzo.decorate(loop.model, loop.optimizer, "O2", dtype="float16")
    scaler = mezzo.GradScaler()

    def step():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(loop.x).float(), loop.y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not scaler.step(optimizer).skipped:
            loop.scheduler.step()
        scaler.update()

    assert rules_of(lint(model, optimizer, scaler, step=step, scheduler=loop.scheduler)) == []


@pytest.mark.parametrize(
    "clip",
    [
        lambda ps: nn.utils.clip_grad_norm_(ps, 1.0),
        lambda ps: nn.utils.clip_grad_norm_(ps, 1.0, foreach=False),
        lambda ps: nn.utils.clip_grad_value_(ps, 1.0),
        lambda ps: [p.grad.clamp_(-1.0, 1.0) for p in ps],
    ],
    ids=["norm", "norm-one-by-one", "value", "by-hand"],
)
def test_clipping_before_unscaling_is_found_with_its_line(clip):
    loop = Loop()

    def step():
        loop.scaler.scale(loop.forward()).backward()
        clip(list(loop.model.parameters()))
        loop.update()

    (found,) = loop.lint(step)
    assert found.rule == "clip-before-unscale"
    assert found.where.startswith("test_lint.py:")
    assert "unscale_" in found.instead


def test_clipping_after_a_backward_that_unscales_is_not_found():
    loop = Loop()
    scaler = mezzo.GradScaler(num_losses=2)

    def step():
        for index in range(2):
            scaler.backward(loop.forward(), loss_id=index, optimizers=loop.optimizer)
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        scaler.step(loop.optimizer)
        scaler.update()

    assert rules_of(lint(loop.model, loop.optimizer, scaler, step=step)) == []


def test_dividing_scaled_gradients_by_a_number_is_no_clipping():
    loop = Loop()

    def step():
        loop.scaler.scale(loop.forward()).backward()
        for parameter in loop.model.parameters():
            parameter.grad.mul_(0.5).div_(2)
        loop.update()

    assert rules_of(loop.lint(step)) == []


class Float32Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x):
        h = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(h.float())


def backward_inside(loop):
    def step():
        loop.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=loop.dtype):
            loop.scaler.scale(F.cross_entropy(loop.model(loop.x), loop.y)).backward()
        loop.update()

    return step


def test_backward_inside_of_autocast_is_found_where_it_changes_a_dtype():
    loop = Loop(model=Float32Part())
    (found,) = loop.lint(backward_inside(loop))
    assert found.rule == "backward-in-autocast"
    assert "mm in float16 instead of float32" in found.what
    assert found.where.startswith("test_lint.py:")


def test_backward_inside_of_autocast_that_changes_no_dtype_is_not_found():
    loop = Loop()
    assert rules_of(loop.lint(backward_inside(loop))) == []


def test_a_scheduler_that_steps_on_skips_is_found():
    loop = Loop()

    def step():
        loop.scaler.scale(loop.forward()).backward()
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        loop.scheduler.step()

    (found,) = loop.lint(step)
    assert (found.rule, found.where) == ("scheduler-on-skip", "LinearLR")


def without_autocast(loop):
    def step():
        loop.optimizer.zero_grad()
        loop.scaler.scale(F.cross_entropy(loop.model(loop.x), loop.y)).backward()
        loop.update()

    return step


def test_autocast_that_is_never_entered_is_found():
    loop = Loop()
    (found,) = loop.lint(without_autocast(loop))
    assert found.rule == "autocast-never-entered"


def test_a_float32_loop_without_scaler_and_policy_has_no_findings():
    loop = Loop(scaler=False)
    assert rules_of(loop.lint(without_autocast(loop))) == []
    assert rules_of(loop.lint(without_autocast(loop), policy="O1")) == ["autocast-never-entered"]


def test_a_scaler_that_the_step_never_uses_is_found():
    loop = Loop()

    def step():
        loop.forward().backward()
        loop.optimizer.step()

    found = loop.lint(step)
    assert rules_of(found) == ["float16-without-scaler"]
    assert "never calls scaler.scale" in found[0].what


# -- the state of the user's run -------------------------------------------------------------------


@pytest.mark.parametrize("scaler", ["torch", "mezzo"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_lint_leaves_everything_as_it_was(scaler, trained):
    loop = Loop(model=nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)))
    if scaler == "mezzo":
        loop.scaler = mezzo.GradScaler(init_scale=256.0)

    def step():
        for group in loop.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None if parameter.grad is None else parameter.grad.zero_()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(loop.model(loop.x), loop.y)
        loop.scaler.scale(loss).backward()
        random.random()
        loop.update()

    if trained:
        step()

    def everything():
        return copy.deepcopy(
            [
                loop.model.state_dict(),
                [one.grad for one in loop.model.parameters()],
                loop.optimizer.state_dict(),
                loop.scaler.state_dict(),
                loop.scheduler.state_dict(),
                torch.get_rng_state(),
                random.getstate(),
                [len(one._forward_hooks) for one in loop.model.modules()],
                dict.fromkeys(vars(loop.scaler), 0),
                dict.fromkeys(vars(loop.scheduler), 0),
            ]
        )

    before = everything()
    loop.lint(step, sample=loop.x)
    torch.testing.assert_close(everything(), before, rtol=0, atol=0)
    step()


class Average(nn.Module):
    """Counts its calls and keeps a mean, in attributes that are no buffers."""

    def __init__(self):
        super().__init__()
        self.calls, self.mean = 0, torch.zeros(16)

    def forward(self, h):
        self.calls += 1
        self.mean = 0.9 * self.mean + h.detach().float().mean(0)
        return h - self.mean


def test_a_lint_leaves_what_a_forward_pass_assigns_as_it_was():
    loop = Loop(model=nn.Sequential(nn.Linear(32, 16), Average()))
    loop.lint(loop.correct, sample=loop.x)
    mezzo.lint(loop.model, sample=loop.x)
    assert loop.model[1].calls == 0
    assert not loop.model[1].mean.any()


def test_a_step_that_raises_leaves_everything_as_it_was():
    loop = Loop()
    before = copy.deepcopy(loop.model.state_dict())

    def step():
        loop.correct()
        raise KeyError("batch")

    with pytest.raises(KeyError, match="batch"):
        loop.lint(step)
    torch.testing.assert_close(loop.model.state_dict(), before, rtol=0, atol=0)
    assert not loop.model[0]._forward_hooks
    assert "step" not in vars(loop.scaler)


# -- setups ----------------------------------------------------------------------------------------


def test_a_train_step_at_o2_has_no_findings():
    loop = Loop()
    step = mezzo.TrainStep(loop.model, F.cross_entropy, loop.optimizer, "O2", dtype="float16")
    step(loop.x, loop.y)
    assert rules_of(lint(step, sample=(loop.x, loop.y))) == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_float16_without_a_scaler_is_found(level):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = lint(model, optimizer, policy=level, dtype="float16")
    assert rules_of(found) == ["float16-without-scaler"]
    scaler = mezzo.GradScaler()
    assert rules_of(lint(model, optimizer, scaler, level, dtype="float16")) == []
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    assert len(lint(model, optimizer, disabled, level, dtype="float16")) == 1


def test_inference_in_float16_needs_no_scaler():
    assert rules_of(lint(mlp(), policy="O2", dtype="float16", sample=torch.ones(16, 32))) == []


def test_a_scaler_with_bfloat16_is_found():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = mezzo.GradScaler()
    assert rules_of(lint(model, optimizer, scaler, "O1", dtype="bfloat16")) == [
        "scaler-with-bfloat16"
    ]
    assert rules_of(lint(model, optimizer, None, "O1", dtype="bfloat16")) == []


def test_optimizer_states_in_16_bits_and_missing_masters_are_found():
    model = mlp().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    assert rules_of(lint(model, optimizer)) == ["masters-missing"]
    model(torch.ones(2, 32).bfloat16()).sum().backward()
    optimizer.step()
    found = lint(model, optimizer)
    assert rules_of(found) == ["16-bit-optimizer-state", "masters-missing"]
    assert "AdamW: exp_avg" in found[0].where
    assert found[1].where == "0.weight, 0.bias, 2.weight, 2.bias"


def test_states_that_the_step_creates_in_16_bits_are_found():
    model = mlp().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(2, 32).bfloat16()).float().sum().backward()
        optimizer.step()

    assert "16-bit-optimizer-state" in rules_of(lint(model, optimizer, step=step))


@pytest.mark.parametrize("master", ["float32", "split", "kahan", "stochastic"])
def test_a_decorated_optimizer_has_masters(master):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = mezzo.decorate(model, optimizer, "O2", dtype="bfloat16", master=master)
    model(torch.ones(2, 32)).float().sum().backward()
    optimizer.step()
    assert rules_of(lint(model, optimizer)) == []


def test_an_optimizer_created_after_decorate_bypasses_the_masters():
    model = mlp()
    first = torch.optim.SGD(model.parameters(), 0.1)
    mezzo.decorate(model, first, "O2", dtype="bfloat16")
    second = torch.optim.SGD(model.parameters(), 0.1)
    assert rules_of(lint(model, second)) == ["masters-bypassed"]
    assert rules_of(lint(model, first)) == []


def test_parameters_in_no_optimizer_are_found_by_name():
    model = mlp()
    (found,) = lint(model, torch.optim.SGD(model[0].parameters(), 0.1))
    assert (found.rule, found.where) == ("parameter-in-no-optimizer", "2.weight, 2.bias")
    model[2].requires_grad_(requires_grad=False)
    assert rules_of(lint(model, torch.optim.SGD(model[0].parameters(), 0.1))) == []


def test_parameters_in_the_second_of_two_optimizers_are_not_missing():
    model = mlp()
    two = [torch.optim.SGD(model[index].parameters(), 0.1) for index in (0, 2)]
    assert rules_of(lint(model, two)) == []


def test_an_average_of_16_bit_weights_is_found():
    model = mlp()
    assert rules_of(lint(model, ema=AveragedModel(mlp().bfloat16()))) == ["16-bit-ema"]
    assert rules_of(lint(model, ema=mlp().half().state_dict())) == ["16-bit-ema"]
    assert rules_of(lint(model, ema=AveragedModel(model))) == []
    assert rules_of(lint(model, ema=mezzo.EMA(model))) == []


class Attention(nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.project, self.dtype = nn.Linear(32, 32), dtype

    def forward(self, x):
        h = self.project(x)
        return torch.softmax(h @ h.mT, -1, dtype=self.dtype).to(h.dtype) @ h


def test_a_softmax_in_16_bits_is_found_with_its_line():
    x = torch.ones(16, 32).bfloat16()
    line = Attention.forward.__code__.co_firstlineno + 2
    (found,) = lint(nn.Sequential(Attention().bfloat16()), sample=x)
    assert (found.rule, found.where) == ("16-bit-softmax", f"0 (test_lint.py:{line})")
    in_float32 = nn.Sequential(Attention(torch.float32).bfloat16())
    assert rules_of(lint(in_float32, sample=x)) == []
    # torch's autocast on a CPU leaves softmax in 16 bits; that on CUDA does not.
    assert rules_of(lint(Attention(), sample=x.float(), policy="O1")) == []


def test_a_loss_in_16_bits_is_found():
    model, batch = mlp().bfloat16(), (torch.ones(16, 32).bfloat16(), torch.ones(16, 16).bfloat16())
    assert rules_of(lint(model, sample=batch, loss_fn=F.mse_loss)) == ["16-bit-loss"]

    def float32(outputs, y):
        return F.mse_loss(outputs.float(), y.float())

    assert rules_of(lint(model, sample=batch, loss_fn=float32)) == []
    plain = lint(mlp(), sample=(torch.ones(16, 32), torch.ones(16, 16)), loss_fn=F.mse_loss)
    assert rules_of(plain) == []


# -- sizes -----------------------------------------------------------------------------------------


def sizes(model, sample, gpu="A100", dtype="float16", **kwargs):
    return lint(model, policy="O1", dtype=dtype, sample=sample, gpu=gpu, **kwargs)


def test_matrix_sizes_are_found_with_the_padded_size():
    (found,) = sizes(nn.Linear(64, 30522), torch.ones(16, 64))
    assert found.rule == "matrix-multiple"
    assert "30522 → 30528" in found.instead
    assert found.gain is None
    assert rules_of(sizes(nn.Linear(64, 30528), torch.ones(16, 64))) == []


@pytest.mark.parametrize(("gpu", "count"), [("V100", 0), ("T4", 0), ("A100", 1), ("H100", 1)])
def test_sizes_are_multiples_of_16_from_compute_capability_8_0_on(gpu, count):
    assert len(sizes(nn.Linear(64, 24), torch.ones(16, 64), gpu)) == count
    assert len(sizes(nn.Linear(64, 20), torch.ones(16, 64), gpu)) == 1


def test_a_batch_that_is_no_multiple_is_found():
    (found,) = sizes(mlp(), torch.ones(30, 32))
    assert found.rule == "batch-multiple"
    assert "32 rows" in found.instead
    assert rules_of(sizes(mlp(), torch.ones(32, 32))) == []


def test_equal_layers_are_one_finding():
    model = nn.Sequential(*(nn.Linear(30, 30) for _ in range(4)))
    (found,) = sizes(model, torch.ones(16, 30))
    assert found.where == "0 and 3 more"


def test_a_small_head_of_a_large_model_is_not_worth_a_change():
    small = nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512), nn.Linear(512, 10))
    assert rules_of(sizes(small, torch.ones(16, 512))) == ["matrix-multiple"]
    wide = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512), nn.Linear(512, 10))
    assert rules_of(sizes(wide, torch.ones(16, 512))) == []


def test_sizes_do_not_matter_without_tensor_cores():
    model, x = nn.Linear(30, 30), torch.ones(30, 30)
    assert rules_of(sizes(model, x, "V100", "bfloat16")) == []
    assert rules_of(sizes(model, x, "P100")) == []
    assert rules_of(lint(model, policy="O1", sample=x)) == []
    assert rules_of(lint(model, sample=x, gpu="A100")) == []


def test_channels_that_are_no_multiples_are_found():
    images = mezzo.channels_last(torch.ones(2, 16, 8, 8))
    model = mezzo.channels_last(nn.Conv2d(16, 20, 3))
    (found,) = sizes(model, images)
    assert (found.rule, "24 output channels" in found.instead) == ("channel-multiple", True)
    assert rules_of(sizes(mezzo.channels_last(nn.Conv2d(16, 24, 3)), images)) == []
    odd = mezzo.channels_last(torch.ones(2, 20, 8, 8))
    (found,) = sizes(mezzo.channels_last(nn.Conv2d(20, 16, 3)), odd)
    assert (found.rule, "24 input" in found.instead) == ("channel-multiple", True)


def test_a_first_convolution_with_3_channels_is_found():
    images = mezzo.channels_last(torch.ones(2, 3, 8, 8))
    found = sizes(mezzo.channels_last(nn.Conv2d(3, 16, 3)), images)
    assert rules_of(found) == ["first-convolution"]
    four = mezzo.channels_last(torch.ones(2, 8, 8, 8))
    assert rules_of(sizes(mezzo.channels_last(nn.Conv2d(8, 16, 3)), four)) == []


def test_channels_first_convolutions_are_found_on_tensor_cores():
    model, images = (
        nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3)),
        torch.ones(2, 16, 9, 9),
    )
    (found,) = sizes(model, images)
    assert (found.rule, found.what) == ("channels-first", "2 convolutions with channels first")
    assert rules_of(sizes(model, images, "V100", "bfloat16")) == []
    last = mezzo.channels_last(model)
    assert rules_of(sizes(last, mezzo.channels_last(images))) == []


# -- measurements, from given numbers --------------------------------------------------------------


def check(name, **facts):
    (rule,) = [rule for rule in RULES if name in rule.names]
    facts = {"model": mlp(), "hardware": H200, "dtype": torch.float16, **facts}
    return [one.rule for one in rule.check(Subject(**facts))]


@pytest.mark.parametrize(
    ("cost", "count"),
    [
        (Cost(share=0.05, gain=1.01), 1),
        (Cost(share=0.9, gain=0.6), 1),
        (Cost(share=0.9, utilisation=0.1, memory=0.02, gain=1.0), 1),
        (Cost(share=0.05), 1),
        (Cost(share=0.05, gain=1.4), 0),
        (Cost(share=0.9, gain=0.98), 0),
        (Cost(share=0.9, gain=1.9), 0),
        (Cost(share=0.9), 0),
    ],
)
def test_little_gain_is_found_from_measurements(cost, count):
    assert len(check("little-gain", cost=cost)) == count


def test_little_gain_advises_to_switch_it_off():
    (rule,) = [rule for rule in RULES if "little-gain" in rule.names]
    cost = Cost(share=0.05, utilisation=0.2, memory=0.01, gain=0.8)
    (found,) = rule.check(Subject(mlp(), H200, dtype=torch.float16, cost=cost))
    assert found.instead.startswith("Switch it off")
    assert "computes 20% of the time, 1% of its memory" in found.what
    assert found.gain == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("hardware", "dtype", "found"),
    [
        (
            mezzo.Hardware("cuda", "K40m", "3.5", NO_SUPPORT, SLOW),
            torch.float16,
            "unsupported-dtype",
        ),
        (mezzo.Hardware("cuda", "P100", "6.0", SLOW, SLOW), torch.float16, "slow-dtype"),
        (mezzo.Hardware("cpu", "CPU", "avx2", SLOW, SLOW), torch.bfloat16, "slow-dtype"),
        (V100, torch.bfloat16, "slow-dtype"),
        (H200, torch.bfloat16, None),
        (V100, torch.float16, None),
    ],
)
def test_dtypes_that_a_device_lacks_or_emulates_are_found(hardware, dtype, found):
    for name in ("unsupported-dtype", "slow-dtype"):
        assert check(name, hardware=hardware, dtype=dtype) == [name] * (name == found)


def test_an_old_gpu_is_named_with_its_compute_capability():
    found = mezzo.lint(mlp(), policy="O1", dtype="float16", gpu="P100")
    assert rules_of(found) == ["slow-dtype"]
    assert "compute capability 7.0 on, this GPU has 6.0" in found[0].what


def test_gains_that_are_measured_as_none_are_no_findings():
    for gain, count in ((1.0, 0), (1.4, 1)):
        run = lint_products(mlp(30), torch.ones(16, 30))
        facts = {"forward": run, "padding_gain": lambda *_, gain=gain: gain}
        assert len(check("matrix-multiple", **facts)) == count


def lint_products(model, x):
    from mezzo.advising.lint_subject import SampleRun

    return SampleRun(model, x, None, mezzo.Policy("O1", dtype="float16")).trace()


def test_the_cost_of_a_sample_is_measured():
    found = mezzo.lint(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), sample=torch.ones(4, 8))
    assert "little-gain" in found.skipped
    with_policy = mezzo.lint(mlp(), policy="O1", sample=torch.ones(4, 32))
    assert "little-gain" in with_policy.checked


# -- results and arguments -------------------------------------------------------------------------


def test_every_rule_has_a_name_of_its_own():
    names = [name for rule in RULES for name in rule.names]
    assert len(set(names)) == len(names)


def test_findings_print_what_where_why_and_instead():
    model = mlp().half()
    found = lint(model, torch.optim.SGD(model.parameters(), 0.1))
    text = str(found)
    assert text.startswith("2 findings, ")
    assert "not checked: " in text
    for one in found:
        assert str(one) in text
        for part in ("where", "why", "instead"):
            assert f"\n  {part} " in str(one)
    assert found.of("masters-missing") == (found[1],)
    assert found.to_dicts()[1]["rule"] == "masters-missing"
    assert max(map(len, text.splitlines())) <= 100


def test_ignored_rules_are_left_out():
    model = mlp().half()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = mezzo.lint(model, optimizer, ignore=["masters-missing", "slow-dtype"])
    assert rules_of(found) == ["float16-without-scaler"]
    assert "masters-bypassed" in found.checked


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.ones(2),), {}, "takes a model or a TrainStep first, got Tensor"),
        ((mlp(), None, 2.0), {}, "scaler=float is no gradient scaler"),
        ((mlp(),), {"ignore": "typo"}, "ignore='typo' is no rule. Choose from: float16"),
        ((mlp(),), {"gpu": "Voodoo 2"}, "Unknown GPU 'Voodoo 2'. Known are: P100"),
        ((mlp(),), {"step": 3}, "step=3 cannot be called"),
        ((mlp(),), {"sample": torch.ones(2, 32), "loss_fn": F.mse_loss}, "(inputs, target)"),
    ],
)
def test_wrong_arguments_raise_with_the_remedy(args, kwargs, message):
    with pytest.raises(mezzo.PolicyError) as error:
        mezzo.lint(*args, **kwargs)
    assert message in str(error.value)


def test_a_train_step_as_step_raises_with_the_remedy():
    model = mlp()
    step = mezzo.TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(mezzo.PolicyError, match=r"mezzo.lint\(step, sample=\(x, y\)\)"):
        mezzo.lint(model, step=step)


# -- models of the field ---------------------------------------------------------------------------


def test_the_sample_of_a_step_whose_loss_takes_the_output_only_has_no_target():
    model = mlp()
    step = mezzo.TrainStep(model, lambda y: y.square().mean(), torch.optim.SGD(model.parameters()))
    x = torch.ones(16, 32)
    assert rules_of(lint(step, sample=(x,))) == rules_of(lint(step, sample={"input": x})) == []


def test_a_model_may_compute_gradients_itself():
    class Forces(nn.Linear):
        def forward(self, x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]

    model, x = Forces(8, 8), torch.randn(16, 8)
    findings = mezzo.lint(model, policy="O1", dtype="bfloat16", sample=x)
    assert "matrix-multiple" not in findings.skipped


def test_the_sample_of_a_step_without_a_target_may_be_a_tuple_of_inputs():
    model = nn.Bilinear(8, 8, 8)
    step = mezzo.TrainStep(model, lambda y: y.square().mean(), torch.optim.SGD(model.parameters()))
    x = torch.ones(16, 8)
    step((x, x))
    assert rules_of(lint(step, sample=((x, x),))) == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_transformers_have_no_findings(level):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    small = {**sizes, "num_attention_heads": 2, "vocab_size": 64}
    models = [
        transformers.BertForMaskedLM(transformers.BertConfig(**small)),
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, num_key_value_heads=2)),
    ]
    tokens = torch.randint(64, (2, 16))
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters())
        step = mezzo.TrainStep(model, None, optimizer, level, dtype="bfloat16")
        found = lint(step, sample={"input_ids": tokens, "labels": tokens}, gpu="H100")
        assert rules_of(found) == []
