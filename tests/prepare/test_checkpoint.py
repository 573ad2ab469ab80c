"""A checkpoint holds a whole run, is written atomically, and is loaded exactly at any level."""

import copy
import gc
import random
import subprocess
import sys
from enum import Enum

import numpy as np
import pytest
import torch
from support.checkpoint_runs import FORMATS, Run, net
from support.states import assert_equal
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR

import mezzo
from mezzo.optim.companion import MASTERS


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt"


@pytest.mark.parametrize(
    ("dtype", "master"),
    [("bfloat16", master) for master in FORMATS]
    + [("float16", master) for master in FORMATS if master != "split"],
)
def test_a_run_resumes_to_the_bit(path, dtype, master):
    run = Run(dtype=dtype, master=master)
    run.train(4)
    mezzo.save_checkpoint(path, *run.parts, epoch=3)
    run.train(4)

    again = Run(seed=9, dtype=dtype, master=master)
    again.train(1)
    assert mezzo.load_checkpoint(path, *again.parts) == {"epoch": 3}
    again.train(4)
    assert_equal(run.state(), again.state())


@pytest.mark.parametrize("master", ["float32", "split"])
def test_a_checkpoint_is_loaded_from_o2_in_float32_and_back_exactly(path, master):
    run = Run(master=master)
    run.train(4)
    mezzo.save_checkpoint(path, *run.parts)
    plain = Run(seed=5, level=None)
    mezzo.load_checkpoint(path, *plain.parts)
    back = path.with_name("back.pt")
    mezzo.save_checkpoint(back, *plain.parts)
    again = Run(seed=6, master=master)
    mezzo.load_checkpoint(back, *again.parts)
    mezzo.undecorate(run.model)
    mezzo.undecorate(again.model)
    assert_equal(run.state(), plain.state())
    assert_equal(run.state(), again.state())


def test_a_float32_run_continues_at_o2_from_its_exact_state(path):
    plain = Run(level=None)
    plain.train(4)
    mezzo.save_checkpoint(path, *plain.parts)
    for master in ("float32", "split"):
        run = Run(seed=4, master=master)
        mezzo.load_checkpoint(path, *run.parts)
        mezzo.undecorate(run.model)
        assert_equal(plain.state(), run.state())


def test_a_checkpoint_is_loaded_with_another_master_format(path):
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
        "mezzo_master" in entries
        for entries in torch.load(path, weights_only=True)["optimizer"][0]["state"].values()
    )
    mezzo.save_checkpoint(path, optimizer=run.optimizer)
    assert any(
        "mezzo_master" in entries
        for entries in torch.load(path, weights_only=True)["optimizer"][0]["state"].values()
    )


def test_tied_weights_are_in_the_file_once(path):
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    model[1].weight = model[0].weight
    mezzo.decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bfloat16")
    mezzo.save_checkpoint(path, model)
    assert path.stat().st_size < 1.5 * 4 * 256 * 256


def test_every_random_generator_is_restored(path):
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


def test_checkpoints_of_wrapped_and_bare_models_are_interchangeable(path):
    run = Run()
    mezzo.save_checkpoint(path, nn.DataParallel(run.model))
    bare = Run(seed=3)
    mezzo.load_checkpoint(path, bare.model)
    assert_equal(run.model.state_dict(), bare.model.state_dict())
    mezzo.load_checkpoint(path, nn.DataParallel(bare.model))


def test_a_model_with_a_decorated_submodule_is_saved_exactly(path):
    run = Run(master="split")
    mezzo.save_checkpoint(path, nn.Sequential(run.model))
    saved = torch.load(path, weights_only=True)["model"][0]
    mezzo.undecorate(run.model)
    assert_equal(dict(nn.Sequential(run.model).state_dict()), dict(saved))


@pytest.mark.parametrize("master", ["float32", "split"])
def test_a_submodule_of_a_decorated_model_is_saved_and_loaded_exactly(path, master):
    run, other = Run(master=master), Run(seed=3, master=master)
    run.train(2)
    mezzo.save_checkpoint(path, run.model[0])
    saved = torch.load(path, weights_only=True)["model"][0]
    mezzo.load_checkpoint(path, other.model[0])
    for one in (run, other):
        mezzo.undecorate(one.model)
        assert_equal(dict(one.model[0].state_dict()), dict(saved))


def test_extra_values_are_returned(path):
    extra = {"epoch": 3, "best": 0.5, "names": ["a", ("b", None)], "table": {"x": torch.ones(2)}}
    mezzo.save_checkpoint(path, **extra)
    assert_equal(mezzo.load_checkpoint(path), extra)


def test_values_that_could_not_be_read_are_refused_and_the_old_file_stays(path):
    mezzo.save_checkpoint(path, epoch=1)
    with pytest.raises(mezzo.CheckpointError, match="'extra' holds a value"):
        mezzo.save_checkpoint(path, epoch=2, args=Run)
    with pytest.raises(mezzo.CheckpointError, match="'extra' holds a value"):
        mezzo.save_checkpoint(path, epoch=2, function=lambda: None)
    assert mezzo.load_checkpoint(path) == {"epoch": 1}


class Norm(Enum):
    """A class of a package, such as an option in the groups of an optimizer."""

    SPECTRAL = 1


def test_the_error_of_a_value_of_a_class_has_a_remedy_that_works(path):
    with pytest.raises(
        mezzo.CheckpointError, match=r"no checkpoint needs\. Save plain.*add_safe_globals"
    ):
        mezzo.save_checkpoint(path, norm=Norm.SPECTRAL)
    with torch.serialization.safe_globals([Norm]):
        mezzo.save_checkpoint(path, norm=Norm.SPECTRAL)
        assert mezzo.load_checkpoint(path)["norm"] is Norm.SPECTRAL


INTERRUPTED = """
import sys, time, torch, mezzo
from torch import nn

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

torch.save = half
mezzo.save_checkpoint(sys.argv[1], nn.Linear(64, 64), epoch=2)
"""


def test_a_kill_while_saving_leaves_the_old_file(path):
    model = nn.Linear(64, 64)
    mezzo.save_checkpoint(path, model, epoch=1)
    before = path.read_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "half way\n"
        child.kill()
    assert path.read_bytes() == before
    assert mezzo.load_checkpoint(path, model) == {"epoch": 1}


# -- steps -----------------------------------------------------------------------------------------


def make_step(seed=0, accumulate=3, dtype="float16", level="O2", width=3, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    # A lambda, which cannot be saved.
    return mezzo.TrainStep(
        model,
        lambda x, _: x.float().square().mean(),
        optimizer,
        level,
        dtype=dtype,
        accumulate=accumulate,
        scheduler=scheduler,
        **options,
    )


def trained(step, calls):
    return [float(step(torch.randn(16, 6), torch.zeros(1))) for _ in range(calls)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16", "master": "split"},
        {"dtype": "bfloat16", "master": "kahan"},
        {"level": "O1"},
    ],
)
def test_a_step_saved_during_accumulation_resumes_to_the_bit(path, options):
    step, again = make_step(**options), make_step(seed=4, **options)
    trained(step, 4)
    mezzo.save_checkpoint(path, step=step, epoch=2)
    trained(again, 2)
    assert mezzo.load_checkpoint(path, step=again) == {"epoch": 2}
    assert again.position == 1
    resumed = trained(again, 8)
    mezzo.load_checkpoint(path, step=step)
    assert trained(step, 8) == resumed
    assert_equal(step.state_dict(), again.state_dict())


def test_a_decorated_step_function_is_saved(path):
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


def test_a_step_is_loaded_at_another_level_exactly(path):
    step, plain = (
        make_step(dtype="bfloat16", master="split"),
        make_step(seed=4, level="O1", dtype="bfloat16"),
    )
    trained(step, 3)
    mezzo.save_checkpoint(path, step=step)
    mezzo.load_checkpoint(path, step=plain)
    assert_equal(dict(mezzo.master_params(step.model)), dict(mezzo.master_params(plain.model)))


def test_the_model_of_a_step_is_loaded_alone(path):
    step = make_step(master="float32")
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
    step = make_step()
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


def test_parts_of_a_deleted_step_are_saved(path):
    step = make_step(capture=False)
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
    step, unlike = make_step(), make_step(seed=4, **other)
    trained(step, 4)
    trained(unlike, 2)
    mezzo.save_checkpoint(path, step=step)
    before, generator = copy.deepcopy(unlike.state_dict()), torch.get_rng_state()
    with pytest.raises(mezzo.CheckpointError, match=message):
        mezzo.load_checkpoint(path, step=unlike)
    assert_equal(before, unlike.state_dict())
    assert torch.equal(generator, torch.get_rng_state())


def test_a_step_and_its_parts_are_not_passed_together(path):
    step = make_step()
    with pytest.raises(mezzo.CheckpointError, match="Pass the step alone"):
        mezzo.save_checkpoint(path, step.model, step=step)
    mezzo.save_checkpoint(path, step=step)
    with pytest.raises(mezzo.CheckpointError, match="Pass the step alone"):
        mezzo.load_checkpoint(path, optimizer=step.optimizer, step=step)
    mezzo.save_checkpoint(path, step.model)
    with pytest.raises(mezzo.CheckpointError, match=r"has no step\. It has: model"):
        mezzo.load_checkpoint(path, step=step)


def test_a_scheduler_that_the_loop_steps_is_saved_beside_a_step(path):
    def run():
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mezzo.TrainStep(model, F.mse_loss, optimizer, "O2", dtype="bfloat16")
        return step, ExponentialLR(optimizer, 0.5)

    step, scheduler = run()
    step(torch.ones(4, 6), torch.ones(4, 3))
    scheduler.step()
    mezzo.save_checkpoint(path, step=step, scheduler=scheduler)
    other, resumed = run()
    mezzo.load_checkpoint(path, step=other, scheduler=resumed)
    assert_equal(other.state_dict(), step.state_dict())
    assert resumed.state_dict() == scheduler.state_dict()


def test_the_scheduler_of_a_step_is_not_passed_beside_it(path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = ExponentialLR(optimizer, 0.5)
    step = mezzo.TrainStep(model, None, optimizer, "O1", dtype="bfloat16", scheduler=scheduler)
    assert step.schedulers == (scheduler,)
    with pytest.raises(mezzo.CheckpointError, match="Pass the step alone"):
        mezzo.save_checkpoint(path, scheduler=[scheduler], step=step)
    with pytest.raises(mezzo.CheckpointError, match="Pass the step alone"):
        mezzo.RunState(step, scheduler=scheduler)


def test_step_may_be_a_number_and_is_saved_as_an_extra_value(path):
    mezzo.save_checkpoint(path, step=1000)
    assert mezzo.load_checkpoint(path) == {"step": 1000}
    with pytest.raises(mezzo.CheckpointError, match="step=1000 is not a training step"):
        mezzo.load_checkpoint(path, step=1000)
