"""A checkpoint holds a whole run, is there whole or not at all, and moves between levels with its exact state."""

import copy
import gc
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.states import assert_equal
from torch import nn

import mezzo
from mezzo.optim.state_dict import MASTERS
from mezzo.prepare import rng_state

KINDS = ("float32", "split", "kahan", "stochastic", "none")


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, 3))


class Run:
    """What a user has in hand."""

    def __init__(self, seed=0, dtype="bfloat16", level="O2", **words):
        torch.manual_seed(seed)
        self.model = net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.scaler = mezzo.GradScaler(
            "cpu", init_scale=2.0**8, growth_interval=3, enabled=dtype == "float16"
        )
        if level is not None:
            mezzo.decorate(self.model, self.optimizer, level, dtype=dtype, **words)

    @property
    def parts(self):
        return self.model, self.optimizer, self.scaler, self.scheduler

    def train(self, steps):
        for _ in range(steps):
            # Data, dropout and the loss's weight come from the three generators.
            x = torch.randn(16, 6) * random.random() + float(np.random.rand())  # noqa: NPY002
            loss = self.model(x).float().square().mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()

    def state(self):
        return copy.deepcopy([one.state_dict() for one in self.parts])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt"


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("bfloat16", kind) for kind in KINDS]
    + [("float16", kind) for kind in KINDS if kind != "split"],
)
def test_a_run_resumes_to_the_bit(path, dtype, kind):
    run = Run(dtype=dtype, master=kind)
    run.train(4)
    mezzo.save_checkpoint(path, *run.parts, epoch=3)
    run.train(4)

    again = Run(seed=9, dtype=dtype, master=kind)
    again.train(1)
    assert mezzo.load_checkpoint(path, *again.parts) == {"epoch": 3}
    again.train(4)
    assert_equal(run.state(), again.state())


@pytest.mark.parametrize("kind", ["float32", "split"])
def test_a_checkpoint_moves_from_o2_to_float32_and_back_exactly(path, kind):
    run = Run(master=kind)
    run.train(4)
    mezzo.save_checkpoint(path, *run.parts)
    plain = Run(seed=5, level=None)
    mezzo.load_checkpoint(path, *plain.parts)
    back = path.with_name("back.pt")
    mezzo.save_checkpoint(back, *plain.parts)
    again = Run(seed=6, master=kind)
    mezzo.load_checkpoint(back, *again.parts)
    mezzo.undecorate(run.model)
    mezzo.undecorate(again.model)
    assert_equal(run.state(), plain.state())
    assert_equal(run.state(), again.state())


def test_a_float32_run_goes_on_at_o2_from_its_exact_state(path):
    plain = Run(level=None)
    plain.train(4)
    mezzo.save_checkpoint(path, *plain.parts)
    for kind in ("float32", "split"):
        run = Run(seed=4, master=kind)
        mezzo.load_checkpoint(path, *run.parts)
        mezzo.undecorate(run.model)
        assert_equal(plain.state(), run.state())


def test_a_checkpoint_moves_between_kinds_of_masters(path):
    run = Run(master="split")
    run.train(3)
    mezzo.save_checkpoint(path, *run.parts)
    other = Run(seed=2, master="float32")
    mezzo.load_checkpoint(path, *other.parts)
    mezzo.undecorate(run.model)
    mezzo.undecorate(other.model)
    assert_equal(run.state(), other.state())


def test_exact_weights_are_in_the_file_once(path):
    run = Run(master="float32")
    mezzo.save_checkpoint(path, run.model, run.optimizer)
    content = torch.load(path, weights_only=True)
    assert content["model"][0]["0.weight"].dtype is torch.float32
    assert MASTERS not in content["optimizer"][0]
    mezzo.save_checkpoint(path, optimizer=run.optimizer)
    assert MASTERS in torch.load(path, weights_only=True)["optimizer"][0]
    run.train(1)
    mezzo.save_checkpoint(path, run.model, run.optimizer)
    assert not any(
        "mezzo_master" in held
        for held in torch.load(path, weights_only=True)["optimizer"][0]["state"].values()
    )
    mezzo.save_checkpoint(path, optimizer=run.optimizer)
    assert any(
        "mezzo_master" in held
        for held in torch.load(path, weights_only=True)["optimizer"][0]["state"].values()
    )


def test_tied_weights_are_in_the_file_once(path):
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    model[1].weight = model[0].weight
    mezzo.decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bfloat16")
    mezzo.save_checkpoint(path, model)
    assert path.stat().st_size < 1.5 * 4 * 256 * 256


def test_every_generator_goes_on_where_it_was(path):
    mezzo.save_checkpoint(path)
    expected = (
        torch.rand(3),
        random.random(),
        np.random.rand(3).tolist(),  # noqa: NPY002
        random.gauss(0, 1),
    )
    mezzo.load_checkpoint(path)
    drawn = (
        torch.rand(3),
        random.random(),
        np.random.rand(3).tolist(),  # noqa: NPY002
        random.gauss(0, 1),
    )
    assert_equal(expected, drawn)


def test_lists_are_saved_and_loaded_in_order(path):
    first, second = Run(seed=1), Run(seed=2)
    lists = (
        [first.model, second.model],
        [first.optimizer, second.optimizer],
        None,
        [first.scheduler, second.scheduler],
    )
    first.train(1)
    mezzo.save_checkpoint(path, *lists)
    before = first.state(), second.state()
    first.train(2)
    second.train(2)
    mezzo.load_checkpoint(path, *lists)
    assert_equal(before, (first.state(), second.state()))


def test_what_is_wrapped_and_what_is_bare_read_one_another(path):
    run = Run()
    mezzo.save_checkpoint(path, nn.DataParallel(run.model))
    bare = Run(seed=3)
    mezzo.load_checkpoint(path, bare.model)
    assert_equal(run.model.state_dict(), bare.model.state_dict())
    mezzo.load_checkpoint(path, nn.DataParallel(bare.model))


def test_a_model_whose_part_is_decorated_is_saved_exactly(path):
    run = Run(master="split")
    mezzo.save_checkpoint(path, nn.Sequential(run.model))
    saved = torch.load(path, weights_only=True)["model"][0]
    mezzo.undecorate(run.model)
    assert_equal(dict(nn.Sequential(run.model).state_dict()), dict(saved))


@pytest.mark.parametrize("kind", ["float32", "split"])
def test_a_part_of_a_decorated_model_is_saved_exactly_and_loaded_back(path, kind):
    run, other = Run(master=kind), Run(seed=3, master=kind)
    run.train(2)
    mezzo.save_checkpoint(path, run.model[0])
    saved = torch.load(path, weights_only=True)["model"][0]
    mezzo.load_checkpoint(path, other.model[0])
    for one in (run, other):
        mezzo.undecorate(one.model)
        assert_equal(dict(one.model[0].state_dict()), dict(saved))


def test_extra_values_come_back(path):
    extra = {"epoch": 3, "best": 0.5, "names": ["a", ("b", None)], "table": {"x": torch.ones(2)}}
    mezzo.save_checkpoint(path, **extra)
    assert_equal(mezzo.load_checkpoint(path), extra)


def test_what_could_not_be_read_again_is_refused_and_the_old_file_stays(path):
    mezzo.save_checkpoint(path, epoch=1)
    with pytest.raises(mezzo.CheckpointError, match="'extra' holds something"):
        mezzo.save_checkpoint(path, epoch=2, args=Run)
    with pytest.raises(mezzo.CheckpointError, match="'extra' holds something"):
        mezzo.save_checkpoint(path, epoch=2, function=lambda: None)
    assert mezzo.load_checkpoint(path) == {"epoch": 1}


KILLED = """
import sys, time, torch, mezzo
from torch import nn
from mezzo.prepare import checkpoint

whole = torch.save
def half(content, file):
    import io
    if file.__class__ is io.BytesIO:
        return whole(content, file)
    buffer = io.BytesIO()
    whole(content, buffer)
    file.write(buffer.getvalue()[: buffer.tell() // 2])
    file.flush()
    print("half way", flush=True)
    time.sleep(60)

checkpoint.torch.save = half
mezzo.save_checkpoint(sys.argv[1], nn.Linear(64, 64), epoch=2)
"""


def test_a_kill_in_the_middle_of_saving_leaves_the_old_file(path):
    model = nn.Linear(64, 64)
    mezzo.save_checkpoint(path, model, epoch=1)
    before = path.read_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "half way\n"
        child.kill()
    assert path.read_bytes() == before
    assert mezzo.load_checkpoint(path, model) == {"epoch": 1}


# -- steps -----------------------------------------------------------------------------------------


def a_step(seed=0, accumulate=3, dtype="float16", level="O2", width=3, **words):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    # A lambda, which no file can hold.
    return mezzo.TrainStep(
        model,
        lambda x, _: x.float().square().mean(),
        optimizer,
        level,
        dtype=dtype,
        accumulate=accumulate,
        scheduler=scheduler,
        **words,
    )


def trained(step, calls):
    return [float(step(torch.randn(16, 6), torch.zeros(1))) for _ in range(calls)]


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"dtype": "bfloat16", "master": "split"},
        {"dtype": "bfloat16", "master": "kahan"},
        {"level": "O1"},
    ],
)
def test_a_step_is_saved_whole_in_the_middle_of_an_accumulation_and_resumes_to_the_bit(path, words):
    step, again = a_step(**words), a_step(seed=4, **words)
    trained(step, 4)
    mezzo.save_checkpoint(path, step=step, epoch=2)
    trained(again, 2)
    assert mezzo.load_checkpoint(path, step=again) == {"epoch": 2}
    assert again.position == 1
    resumed = trained(again, 8)
    mezzo.load_checkpoint(path, step=step)
    assert trained(step, 8) == resumed
    assert_equal(step.state_dict(), again.state_dict())


def test_a_function_that_is_a_step_is_saved_whole(path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @mezzo.train_step(
        models=model, optimizers=optimizer, policy="O2", dtype="bfloat16", accumulate=2
    )
    def step(x):
        return model(x).square().mean()

    step(torch.ones(2, 4))
    mezzo.save_checkpoint(path, step=step)
    step(torch.ones(2, 4))
    mezzo.load_checkpoint(path, step=step)
    assert step.position == 1


def test_a_step_moves_between_levels_exactly(path):
    step, plain = (
        a_step(dtype="bfloat16", master="split"),
        a_step(seed=4, level="O1", dtype="bfloat16"),
    )
    trained(step, 3)
    mezzo.save_checkpoint(path, step=step)
    mezzo.load_checkpoint(path, step=plain)
    assert_equal(dict(mezzo.master_params(step.model)), dict(mezzo.master_params(plain.model)))


def test_the_model_of_a_step_is_loaded_alone(path):
    step = a_step(master="float32")
    trained(step, 4)
    mezzo.save_checkpoint(path, step=step)
    model = net()
    mezzo.load_checkpoint(path, model)
    assert_equal(
        {name: value.detach() for name, value in model.named_parameters()},
        dict(mezzo.master_params(step.model)),
    )
    with pytest.raises(mezzo.CheckpointError, match="gradients of 1 calls since the last update"):
        mezzo.load_checkpoint(path, model, torch.optim.AdamW(model.parameters()))


def test_the_parts_of_a_step_are_refused_while_it_accumulates(path):
    step = a_step()
    trained(step, 3)
    mezzo.save_checkpoint(path, step.model, step.optimizer, step.scaler)
    trained(step, 2)
    for parts in (
        (step.model,),
        (step.model[0],),
        (nn.Sequential(step.model),),
        (None, step.optimizer),
        (step.model, step.optimizer, step.scaler),
    ):
        with pytest.raises(
            mezzo.CheckpointError,
            match=r"gradients of 2 calls since its last update.*save_checkpoint\(path, step=step\)",
        ):
            mezzo.save_checkpoint(path, *parts)
        before = copy.deepcopy(step.state_dict())
        with pytest.raises(mezzo.CheckpointError, match=r"call step\.flush\(\) first"):
            mezzo.load_checkpoint(path, *parts)
        assert_equal(before, step.state_dict())
    step.flush()
    mezzo.save_checkpoint(path, step.model, step.optimizer, step.scaler)
    mezzo.load_checkpoint(path, step.model, step.optimizer, step.scaler)


def test_parts_are_saved_once_the_step_is_gone(path):
    step = a_step(capture=False)
    trained(step, 1)
    model = step.model
    del step
    gc.collect()
    mezzo.save_checkpoint(path, model)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"width": 4}, r"'3.weight' has shape \(3, 8\) in the checkpoint and \(4, 8\)"),
        ({"accumulate": 1}, "after 1 calls without an update, and this step has accumulate=1"),
        ({"dtype": "bfloat16"}, "The state has a scaler, and the step has none"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_and_nothing_is_changed(path, other, message):
    step, unlike = a_step(), a_step(seed=4, **other)
    trained(step, 4)
    trained(unlike, 2)
    mezzo.save_checkpoint(path, step=step)
    before, generator = copy.deepcopy(unlike.state_dict()), torch.get_rng_state()
    with pytest.raises(mezzo.CheckpointError, match=message):
        mezzo.load_checkpoint(path, step=unlike)
    assert_equal(before, unlike.state_dict())
    assert torch.equal(generator, torch.get_rng_state())


def test_a_step_and_its_parts_are_not_passed_together(path):
    step = a_step()
    with pytest.raises(mezzo.CheckpointError, match="Pass the step alone"):
        mezzo.save_checkpoint(path, step.model, step=step)
    mezzo.save_checkpoint(path, step=step)
    with pytest.raises(mezzo.CheckpointError, match="Pass the step alone"):
        mezzo.load_checkpoint(path, optimizer=step.optimizer, step=step)
    mezzo.save_checkpoint(path, step.model)
    with pytest.raises(mezzo.CheckpointError, match=r"has no step\. It has: model"):
        mezzo.load_checkpoint(path, step=step)


def test_a_number_of_steps_is_a_value_like_any_other(path):
    mezzo.save_checkpoint(path, step=1000)
    assert mezzo.load_checkpoint(path) == {"step": 1000}
    with pytest.raises(mezzo.CheckpointError, match="step=1000 is no training step"):
        mezzo.load_checkpoint(path, step=1000)


# -- what is refused: nothing is changed -----------------------------------------------------------


def wider():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda run: setattr(run, "model", nn.Sequential(nn.Linear(6, 8))),
            "of another model than this Sequential: it also has '1.weight'",
        ),
        (
            lambda run: setattr(run, "model", nn.Sequential(*net(), nn.Linear(1, 1))),
            "it lacks '4.weight', '4.bias'",
        ),
        (
            lambda run: setattr(run, "model", wider()),
            r"'3.weight' has shape \(3, 8\) in the checkpoint and \(4, 8\)",
        ),
        (
            lambda run: setattr(run, "optimizer", torch.optim.SGD([nn.Parameter(torch.ones(1))])),
            r"groups of \[6\] parameters, this SGD has \[1\]",
        ),
        (
            lambda run: setattr(
                run, "scheduler", torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
            ),
            "not a ExponentialLR.*'step_size'",
        ),
        (
            lambda run: setattr(run, "scheduler", [run.scheduler, run.scheduler]),
            "has 1 of scheduler, got 2",
        ),
        (
            lambda run: setattr(run, "scaler", mezzo.GradScaler("cpu")),
            "saved from a scaler that was not enabled",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(path, change, message):
    saved = Run()
    saved.train(1)
    mezzo.save_checkpoint(path, *saved.parts)
    run = Run(seed=3)
    run.train(2)
    parts = run.parts
    change(run)
    before, generator = [copy.deepcopy(one.state_dict()) for one in parts], torch.get_rng_state()
    with pytest.raises((mezzo.CheckpointError, mezzo.ScalerError), match=message):
        mezzo.load_checkpoint(path, *run.parts)
    assert_equal(before, [one.state_dict() for one in parts])
    assert torch.equal(generator, torch.get_rng_state())


def test_a_part_that_is_not_in_the_file_is_named(path):
    run = Run()
    mezzo.save_checkpoint(path, run.model, run.optimizer)
    with pytest.raises(mezzo.CheckpointError, match=r"has no scaler\. It has: model, optimizer"):
        mezzo.load_checkpoint(path, run.model, scaler=run.scaler)


def test_without_strict_what_both_have_is_loaded(path):
    one, other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    mezzo.save_checkpoint(path, one)
    mezzo.load_checkpoint(path, other, strict=False)
    assert torch.equal(one[0].weight, other[0].weight)


def test_other_files_are_told_from_checkpoints(path):
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(mezzo.CheckpointError, match="no mezzo checkpoint, or is damaged"):
        mezzo.load_checkpoint(path)
    torch.save(nn.Linear(1, 1).state_dict(), path)
    with pytest.raises(mezzo.CheckpointError, match=r"not written by mezzo\.save_checkpoint"):
        mezzo.load_checkpoint(path)
    torch.save({"format": "mezzo checkpoint", "version": 99}, path)
    with pytest.raises(mezzo.CheckpointError, match="version 99, and this mezzo reads up to 1"):
        mezzo.load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        mezzo.load_checkpoint(path.with_name("nowhere.pt"))


def test_a_damaged_checkpoint_is_refused(path):
    mezzo.save_checkpoint(path, nn.Linear(8, 8))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(mezzo.CheckpointError, match="damaged"):
        mezzo.load_checkpoint(path)


def test_a_file_that_is_damaged_changes_nothing(path):
    run = Run()
    mezzo.save_checkpoint(path, *run.parts)
    whole, before = path.read_bytes(), run.state()
    at = whole.index(run.model[1].weight.detach().numpy().tobytes())
    path.write_bytes(whole[:at] + b"\0\0\0\0" + whole[at + 4 :])
    run.model[1].weight.data.fill_(3.0)
    before = run.state()
    with pytest.raises(mezzo.CheckpointError, match="no mezzo checkpoint, or is damaged"):
        mezzo.load_checkpoint(path, *run.parts)
    assert_equal(before, run.state())


@pytest.mark.parametrize("content", [b"", b"PK", b"\0" * 100])
def test_files_that_are_no_archives_are_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(mezzo.CheckpointError, match="no mezzo checkpoint, or is damaged"):
        mezzo.load_checkpoint(path)


def test_a_missing_file_and_a_directory_are_told_apart(path):
    with pytest.raises(FileNotFoundError):
        mezzo.load_checkpoint(path)
    with pytest.raises(mezzo.CheckpointError, match="not a regular file"):
        mezzo.load_checkpoint(path.parent)


def test_a_converted_program_is_no_checkpoint(path):
    mezzo.convert(nn.Linear(2, 1).eval(), (torch.ones(3, 2),), dtype="bfloat16").save(path)
    with pytest.raises(mezzo.CheckpointError, match="no mezzo checkpoint, or is damaged"):
        mezzo.load_checkpoint(path)


def without(*keys):
    def change(content):
        *path, last = keys
        for key in path:
            content = content[key]
        del content[last]

    return change


def put(value, *keys):
    def change(content):
        *path, last = keys
        for key in path:
            content = content[key]
        content[last] = value

    return change


CHANGES = {
    "no version": (without("version"), "has version None"),
    "version": (put("2", "version"), "has version '2'"),
    "no rng": (without("rng"), "rng in it is missing"),
    "no torch rng": (without("rng", "torch"), "random generators"),
    "rng": (put(torch.zeros(3), "rng", "torch"), "random generators"),
    "extra": (put([1], "extra"), "extra in it is missing"),
    "models": (put({}, "model"), "model in it is missing"),
    "no scheduler": (without("scheduler"), "scheduler in it is missing"),
    "model": (put(3, "model", 0), "model is 3, not a dictionary"),
    "weight": (put(3.0, "model", 0, "0.weight"), "'0.weight' is 3.0 in the checkpoint"),
    # torch 2.15 does not read it at all.
    "sparse weight": (
        put(torch.eye(8, 6).to_sparse(), "model", 0, "0.weight"),
        "not a tensor with values|torch cannot read it",
    ),
    "complex weight": (
        put(torch.ones(8, 6, dtype=torch.complex64), "model", 0, "0.weight"),
        "is torch.complex64 in the checkpoint",
    ),
    "counter": (
        put(torch.tensor(1.5), "model", 0, "1.num_batches_tracked"),
        "is torch.float32 in the checkpoint",
    ),
    "optimizer": (put(None, "optimizer", 0), "not the state of an optimizer"),
    "groups": (without("optimizer", 0, "param_groups"), "no list 'param_groups'"),
    "group": (without("optimizer", 0, "param_groups", 0, "params"), "no list 'params'"),
    "twice": (put(1, "optimizer", 0, "param_groups", 0, "params", 0), "list a parameter twice"),
    "no lr": (without("optimizer", 0, "param_groups", 0, "lr"), "has no 'lr'"),
    "lr": (put("fast", "optimizer", 0, "param_groups", 0, "lr"), "'fast', and this optimizer has"),
    "nan lr": (
        put(float("nan"), "optimizer", 0, "param_groups", 0, "lr"),
        "is nan, and this optimizer has",
    ),
    "negative lr": (put(-1.0, "optimizer", 0, "param_groups", 0, "lr"), "Invalid learning rate"),
    "betas": (put((0.9,), "optimizer", 0, "param_groups", 0, "betas"), "'betas'"),
    "flag": (put("yes", "optimizer", 0, "param_groups", 0, "amsgrad"), "'amsgrad'"),
    "moment": (without("optimizer", 0, "state", 0, "exp_avg"), "has no 'exp_avg'"),
    "empty moment": (put(None, "optimizer", 0, "state", 0, "exp_avg"), "has no 'exp_avg'"),
    "no step": (without("optimizer", 0, "state", 0, "step"), "has no 'step'"),
    "step": (put(torch.tensor(-1.0), "optimizer", 0, "state", 0, "step"), "not a number of steps"),
    "flag for a step": (
        put(torch.tensor(True), "optimizer", 0, "state", 0, "step"),
        "not a number of steps",
    ),
    "moment of another shape": (
        put(torch.ones(3), "optimizer", 0, "state", 0, "exp_avg"),
        r"has shape \(3,\) and torch.float32, where \(8, 6\)",
    ),
    "moment of integers": (
        put(torch.ones(8, 6).int(), "optimizer", 0, "state", 0, "exp_avg"),
        "torch.int32",
    ),
    "expanded moment": (
        put(torch.ones(1).expand(8, 6), "optimizer", 0, "state", 0, "exp_avg"),
        "share their memory",
    ),
    "another parameter": (put({}, "optimizer", 0, "state", 77), "entry for parameter 77"),
    "no dictionary": (put(1, "optimizer", 0, "state", 0), "is 1, not a dictionary"),
    "scheduler": (put([], "scheduler", 0), "scheduler is \\[\\], not a dictionary"),
    "rates": (
        put([0.1, 0.2], "scheduler", 0, "base_lrs"),
        "'base_lrs' of the checkpoint's scheduler",
    ),
    "epoch": (
        put("last", "scheduler", 0, "last_epoch"),
        "'last_epoch' of the checkpoint's scheduler",
    ),
    "scaler": (put(None, "scaler", 0), "scaler in .* cannot be loaded"),
    "scale": (
        put(-1.0, "scaler", 0, "scale"),
        "scaler in .* cannot be loaded.*which no gradient survives",
    ),
    "no factor": (without("scaler", 0, "growth_factor"), "growth_factor missing"),
    "interval": (put("often", "scaler", 0, "growth_interval"), "growth_interval is 'often'"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_content_that_is_not_as_saved_is_refused_in_one_error_and_nothing_is_changed(
    path, change, message
):
    saved = Run(dtype="float16")
    saved.train(2)
    mezzo.save_checkpoint(path, *saved.parts)
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    run = Run(seed=3, dtype="float16")
    before, generators = run.state(), rng_state.capture_rng_state()
    with pytest.raises(mezzo.CheckpointError, match=message):
        mezzo.load_checkpoint(path, *run.parts)
    assert_equal(before, run.state())
    assert_equal(generators, rng_state.capture_rng_state())
    run.train(1)


@pytest.mark.parametrize("rule", [{"foreach": 3}, {"fused": "yes"}])
def test_flags_of_an_optimizer_stay_flags(path, rule):
    run = Run()
    mezzo.save_checkpoint(path, *run.parts)
    content = torch.load(path, weights_only=True)
    content["optimizer"][0]["param_groups"][0].update(rule)
    torch.save(content, path)
    with pytest.raises(mezzo.CheckpointError, match=next(iter(rule))):
        mezzo.load_checkpoint(path, *run.parts)


def test_a_state_of_an_older_torch_lacks_flags_and_is_loaded(path):
    run = Run()
    mezzo.save_checkpoint(path, *run.parts)
    content = torch.load(path, weights_only=True)
    del content["optimizer"][0]["param_groups"][0]["fused"]
    torch.save(content, path)
    mezzo.load_checkpoint(path, *run.parts)


@pytest.mark.parametrize("extra", [{"x": bytearray(3)}, {"x": torch.ones(2, device="meta")}])
def test_what_a_load_would_refuse_is_not_saved(path, extra):
    with pytest.raises(mezzo.CheckpointError, match="'extra' holds something"):
        mezzo.save_checkpoint(path, **extra)


def test_expanded_tensors_that_a_load_would_refuse_are_not_saved(path):
    with pytest.raises(mezzo.CheckpointError, match="could not be loaded again"):
        mezzo.save_checkpoint(path, wide=torch.ones(1).expand(2**30))
    assert not path.exists()


def test_a_model_without_memory_is_refused(path):
    mezzo.save_checkpoint(path, nn.Linear(2, 1))
    with pytest.raises(mezzo.CheckpointError, match=r"model\.to_empty"):
        mezzo.load_checkpoint(path, nn.Linear(2, 1, device="meta"))


# -- a load that fails halfway ---------------------------------------------------------------------


class Failing:
    """A part of the user's own, whose loading fails after the others were loaded."""

    def __init__(self, error):
        self.error, self.value = error, 1

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("dtype", "kind"), [("bfloat16", kind) for kind in KINDS] + [("float16", "float32")]
)
@pytest.mark.parametrize("error", [ValueError("not today"), KeyboardInterrupt()])
def test_what_was_loaded_is_put_back_when_a_later_part_fails(path, dtype, kind, error):
    saved, own = Run(dtype=dtype, master=kind), Failing(None)
    saved.train(3)
    own.value = 2
    mezzo.save_checkpoint(path, *saved.parts[:3], [saved.scheduler, own])

    run, twin = (Run(seed=5, dtype=dtype, master=kind) for _ in range(2))
    failing = Failing(error)
    for one in (run, twin):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002
        one.train(2)
    before, generators = run.state(), rng_state.capture_rng_state()
    addresses = [parameter.data_ptr() for parameter in run.model.parameters()]
    with pytest.raises(
        mezzo.CheckpointError if isinstance(error, Exception) else KeyboardInterrupt
    ):
        mezzo.load_checkpoint(path, *run.parts[:3], [run.scheduler, failing])
    assert failing.value == 1
    assert_equal(before, run.state())
    assert_equal(generators, rng_state.capture_rng_state())
    assert addresses == [parameter.data_ptr() for parameter in run.model.parameters()]
    # Also what no state shows: both go on alike, to the bit.
    run.train(2)
    rng_state.restore_rng_state(generators)
    twin.train(2)
    assert_equal(twin.state(), run.state())


class Picky(nn.Module):
    """A module of the user's own, that refuses what it has half loaded."""

    def __init__(self):
        super().__init__()
        self.weight, self.note = nn.Parameter(torch.ones(2)), ["a"]

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state
        if state == ["b"]:
            self.weight = nn.Parameter(torch.zeros(3))
            raise ValueError("not b")


def test_a_module_that_fails_is_put_back_with_its_extra_state(path):
    model = nn.Sequential(nn.Linear(2, 2), Picky())
    model[1].note = ["b"]
    mezzo.save_checkpoint(path, model)
    model[1].note = ["a"]
    weight = model[1].weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(
        mezzo.CheckpointError, match=r"The model in .* cannot be loaded into this Sequential: not b"
    ):
        mezzo.load_checkpoint(path, model)
    assert model[1].weight is weight
    assert_equal(before, dict(model.state_dict()))


class InPlace(torch.optim.SGD):
    """An optimizer that loads into the tensors that it has, and then fails."""

    def load_state_dict(self, state_dict):
        for state in self.state.values():
            state["momentum_buffer"].zero_()
        self.param_groups[0]["lr"] = 5.0
        raise RuntimeError("only in place")


def test_an_optimizer_that_loads_in_its_own_way_is_put_back(path):
    model = nn.Linear(2, 2)
    optimizer = InPlace(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    mezzo.save_checkpoint(path, model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(mezzo.CheckpointError, match=r"The optimizer in .* only in place"):
        mezzo.load_checkpoint(path, model, optimizer)
    assert_equal(before, optimizer.state_dict())
    assert model.weight.grad is not None
