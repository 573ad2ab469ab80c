"""`paddle.optimizer.lr`: the formulas, and the optimizers that take their rate from a scheduler."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from mezzo.compat import paddle

LR = paddle.optimizer.lr


def rates(scheduler, steps=8):
    found = []
    for _ in range(steps):
        found.append(scheduler())
        scheduler.step()
    return found


def torch_rates(make, steps=8):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("scheduler", "reference"),
    [
        (
            lambda: LR.StepDecay(0.5, 3, gamma=0.1),
            lambda o: lr_scheduler.StepLR(o, 3),
        ),
        (
            lambda: LR.MultiStepDecay(0.5, [2, 5], gamma=0.1),
            lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
        ),
        (
            lambda: LR.ExponentialDecay(0.5, 0.9),
            lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        ),
        (
            lambda: LR.LambdaDecay(0.5, lambda epoch: 0.95**epoch),
            lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.95**epoch),
        ),
        (
            lambda: LR.MultiplicativeDecay(0.5, lambda epoch: 1 / epoch),
            lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 1 / epoch),
        ),
        (
            lambda: LR.CosineAnnealingDecay(0.5, T_max=3, eta_min=0.1),
            lambda o: lr_scheduler.CosineAnnealingLR(o, 3, 0.1),
        ),
        (
            lambda: LR.CosineAnnealingWarmRestarts(0.5, T_0=2, T_mult=2, eta_min=0.1),
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2, 0.1),
        ),
        (
            lambda: LR.LinearLR(0.5, total_steps=4),
            lambda o: lr_scheduler.LinearLR(o, total_iters=4),
        ),
    ],
    ids=lambda value: "",
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_that_torch_has_too_computes_the_same(scheduler, reference):
    assert rates(scheduler()) == pytest.approx(torch_rates(reference))


@pytest.mark.parametrize("three_phase", [False, True])
def test_one_cycle_turns_where_torchs_does(three_phase):
    def make(optimizer):
        return lr_scheduler.OneCycleLR(
            optimizer, 0.5, total_steps=20, cycle_momentum=False, three_phase=three_phase
        )

    scheduler = LR.OneCycleLR(
        0.5, total_steps=20, end_learning_rate=0.5 / 25 / 1e4, three_phase=three_phase
    )
    assert rates(scheduler, 19) == pytest.approx(torch_rates(make, 19))


@pytest.mark.parametrize(
    ("scheduler", "formula"),
    [
        (
            LR.NoamDecay(d_model=4, warmup_steps=3, learning_rate=2.0),
            lambda n: 2.0 * 0.5 * min(1.0 if n == 0 else n**-0.5, n * 3**-1.5),
        ),
        (
            LR.PiecewiseDecay([2, 5], [0.3, 0.2, 0.1]),
            lambda n: 0.3 if n < 2 else 0.2 if n < 5 else 0.1,
        ),
        (LR.NaturalExpDecay(0.5, 0.1), lambda n: 0.5 * math.exp(-0.1 * n)),
        (LR.InverseTimeDecay(0.5, 0.1), lambda n: 0.5 / (1 + 0.1 * n)),
        (
            LR.PolynomialDecay(0.5, decay_steps=4, end_lr=0.1, power=2.0),
            lambda n: 0.4 * (1 - min(n, 4) / 4) ** 2 + 0.1,
        ),
        (
            LR.PolynomialDecay(0.5, decay_steps=3, end_lr=0.0, cycle=True),
            lambda n: 0.5 * (1 - n / (3 * max(1, math.ceil(n / 3)))),
        ),
        (
            LR.LinearWarmup(LR.StepDecay(0.5, 2), warmup_steps=4, start_lr=0.0, end_lr=0.5),
            lambda n: 0.125 * n if n < 4 else 0.5 * 0.1 ** ((n - 4) // 2),
        ),
        (LR.LinearWarmup(0.5, 2, 0.1, 0.5), lambda n: 0.1 + 0.2 * n if n < 2 else 0.5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_scheduler_that_only_paddle_has_follows_its_formula(scheduler, formula):
    assert rates(scheduler) == pytest.approx([formula(n) for n in range(8)])


@pytest.mark.parametrize("mode", ["min", "max"])
def test_reduce_on_plateau_reduces_after_patience_and_waits_for_the_cooldown(mode):
    scheduler = LR.ReduceOnPlateau(1.0, mode, factor=0.5, patience=1, cooldown=1, min_lr=0.3)
    found = []
    for _ in range(9):
        scheduler.step(paddle.to_tensor(1.0))
        found.append(scheduler())
    # The first is the best, two more are bad, one is cooled down, and so on.
    assert found == [1.0, 1.0, 0.5, 0.5, 0.5, 0.3, 0.3, 0.3, 0.3]
    for _ in range(2):  # the first is cooled down
        scheduler.step(np.float32(0.5 if mode == "min" else 2.0))
    assert (scheduler.best, scheduler.num_bad_epochs) == (0.5 if mode == "min" else 2.0, 0)


def test_step_with_an_epoch_jumps_to_it():
    scheduler = LR.CosineAnnealingDecay(1.0, T_max=4)
    scheduler.step(2)
    assert (scheduler(), scheduler.last_epoch) == (pytest.approx(0.5), 2)


def test_a_scheduler_of_ones_own_defines_get_lr():
    class Halving(LR.LRScheduler):
        def get_lr(self):
            return self.base_lr * 0.5**self.last_epoch

    assert rates(Halving(1.0), 3) == [1.0, 0.5, 0.25]
    with pytest.raises(NotImplementedError, match="Define get_lr"):
        LR.LRScheduler(0.1)


@pytest.fixture
def layer():
    return paddle.nn.Linear(2, 1)


def test_optimizers_step_with_the_rate_of_the_scheduler(layer):
    scheduler = LR.StepDecay(1.0, step_size=1, gamma=0.5)
    optimizer = paddle.optimizer.SGD(
        learning_rate=scheduler,
        parameters=[
            {"params": [layer.weight]},
            {"params": [layer.bias], "learning_rate": 0.1},
        ],
    )
    assert optimizer._learning_rate is scheduler
    before = layer.bias.item()
    for expected in (1.0, 0.5, 0.25):
        assert optimizer.get_lr() == expected
        layer(paddle.ones([1, 2])).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        scheduler.step()
    assert before - layer.bias.item() == pytest.approx(0.1 * (1.0 + 0.5 + 0.25))


def test_the_rate_of_a_scheduler_cannot_be_set_but_the_scheduler_can(layer):
    first, second = LR.StepDecay(1.0, 1), LR.StepDecay(0.25, 1)
    optimizer = paddle.optimizer.Adam(first, parameters=layer.parameters())
    with pytest.raises(RuntimeError, match="learning rate can't be LRScheduler when invoke"):
        optimizer.set_lr(0.5)
    optimizer.set_lr_scheduler(second)
    first.step()
    assert optimizer.get_lr() == optimizer.param_groups[0]["lr"] == 0.25
    with pytest.raises(TypeError, match="must be LRScheduler, but received StepLR"):
        optimizer.set_lr_scheduler(lr_scheduler.StepLR(optimizer, 1))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_saved_optimizer_continues_the_schedule(level, layer, tmp_path):
    def make(model):
        inner = LR.CosineAnnealingDecay(0.5, T_max=4)
        scheduler = LR.LinearWarmup(inner, warmup_steps=2, start_lr=0.0, end_lr=0.5)
        optimizer = paddle.optimizer.AdamW(scheduler, parameters=model.parameters())
        paddle.amp.decorate(model, optimizer, level=level)
        return scheduler, optimizer

    scheduler, optimizer = make(layer)
    for _ in range(4):
        with paddle.amp.auto_cast(level=level):
            layer(paddle.ones([1, 2])).sum().backward()
        optimizer.step()
        scheduler.step()
    paddle.save(optimizer.state_dict(), str(tmp_path / "model.pdopt"))
    other, loaded = make(paddle.nn.Linear(2, 1))
    loaded.set_state_dict(paddle.load(str(tmp_path / "model.pdopt")))
    assert loaded.get_lr() == loaded.param_groups[0]["lr"] == scheduler()
    assert rates(other, 4) == rates(scheduler, 4)


def test_a_state_dict_without_a_key_is_refused():
    with pytest.raises(RuntimeError, match=r"Can't find \[ last_lr \] in state_dict"):
        LR.StepDecay(1.0, 1).set_state_dict({"last_epoch": 3})


def test_a_copied_scheduler_leaves_the_optimizer_alone(layer):
    scheduler = LR.StepDecay(1.0, 1)
    optimizer = paddle.optimizer.SGD(scheduler, parameters=layer.parameters())
    copy.deepcopy(scheduler).step()
    assert optimizer.get_lr() == 1.0


def test_verbose_prints_the_rate(capsys):
    LR.StepDecay(1.0, 1, verbose=True)
    assert capsys.readouterr().out == "Epoch 0: StepDecay set learning rate to 1.0.\n"


def test_a_static_program_trains_with_the_rate_of_the_scheduler(layer):
    layer = layer.to("cpu")
    program = paddle.static.Program()
    scheduler = LR.PiecewiseDecay([1], [1.0, 0.0])
    with paddle.static.program_guard(program):
        loss = layer(paddle.static.data("x", [-1, 2])).mean()
        paddle.optimizer.SGD(scheduler, parameters=layer.parameters()).minimize(loss)
    executor, feed = paddle.static.Executor(paddle.CPUPlace()), {"x": np.ones((1, 2), "float32")}
    weights = []
    for _ in range(2):
        executor.run(program, feed=feed, fetch_list=[loss])
        weights.append(layer.weight.numpy().copy())
        scheduler.step()
    assert np.array_equal(weights[0], weights[1])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LR.StepDecay("a", 1), TypeError, "type of learning rate must be float"),
        (lambda: LR.StepDecay(-1.0, 1), ValueError, "Invalid learning rate: -1.0"),
        (lambda: LR.StepDecay(1.0, 1.5), TypeError, "'step_size' must be 'int'"),
        (lambda: LR.MultiStepDecay(1.0, [3, 2]), ValueError, "must be incremented"),
        (lambda: LR.PiecewiseDecay([1], [1.0]), ValueError, "one element more than boundaries"),
        (lambda: LR.LinearWarmup(1.0, 2, 1.0, 0.5), AssertionError, "must be greater than"),
        (lambda: LR.CosineAnnealingDecay(1.0, 2.5), TypeError, "'T_max' in"),
        (lambda: LR.ReduceOnPlateau(1.0, "low"), ValueError, "mode: low is unknown!"),
        (lambda: LR.LambdaDecay(1.0, 0.5), TypeError, "'lr_lambda' in 'LambdaDecay' must be"),
        (lambda: LR.NoamDecay(0, 1), ValueError, "d_model should be grater than 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_arguments_raise_as_in_paddle(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_fit_steps_the_scheduler_after_each_batch_or_epoch():
    data = paddle.io.TensorDataset([paddle.ones([8, 2]), paddle.zeros([8, 1])])
    for callbacks, expected in ((None, 8), ([paddle.callbacks.LRScheduler(False, True)], 2)):
        layer = paddle.nn.Linear(2, 1)
        scheduler = LR.StepDecay(0.1, 100)
        model = paddle.Model(layer)
        optimizer = paddle.optimizer.SGD(scheduler, parameters=layer.parameters())
        model.prepare(optimizer, paddle.nn.MSELoss())
        model.fit(data, epochs=2, batch_size=2, verbose=0, callbacks=callbacks)
        assert scheduler.last_epoch == expected
    with pytest.raises(ValueError, match="by_step option is mutually exclusive with by_epoch"):
        paddle.callbacks.LRScheduler(True, True)
