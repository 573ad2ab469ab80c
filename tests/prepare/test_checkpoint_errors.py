"""Checkpoints that do not fit or are damaged are refused, and a load that fails changes nothing."""

import copy
import random

import numpy as np
import pytest
import torch
from support.checkpoint_runs import FORMATS, Run, net
from support.states import assert_equal
from torch import nn

import mezzo
from mezzo.prepare import checkpoint_checks, rng_state


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt"


# -- states that do not fit ------------------------------------------------------------------------


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
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_is_changed(path, change, message):
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


def test_a_part_that_is_not_in_the_file_is_refused_by_name(path):
    run = Run()
    mezzo.save_checkpoint(path, run.model, run.optimizer)
    with pytest.raises(mezzo.CheckpointError, match=r"has no scaler\. It has: model, optimizer"):
        mezzo.load_checkpoint(path, run.model, scaler=run.scaler)


def test_without_strict_common_parameters_are_loaded(path):
    one, other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    mezzo.save_checkpoint(path, one)
    mezzo.load_checkpoint(path, other, strict=False)
    assert torch.equal(one[0].weight, other[0].weight)


def test_other_files_are_refused(path):
    path.write_bytes(b"nothing of the master")
    with pytest.raises(mezzo.CheckpointError, match="not a mezzo checkpoint, or is damaged"):
        mezzo.load_checkpoint(path)
    torch.save(nn.Linear(1, 1).state_dict(), path)
    with pytest.raises(mezzo.CheckpointError, match=r"not written by mezzo\.save_checkpoint"):
        mezzo.load_checkpoint(path)
    torch.save({"format": "mezzo checkpoint", "version": 99}, path)
    with pytest.raises(mezzo.CheckpointError, match="version 99, and this mezzo reads up to 1"):
        mezzo.load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        mezzo.load_checkpoint(path.with_name("nowhere.pt"))


def test_a_truncated_checkpoint_is_refused(path):
    mezzo.save_checkpoint(path, nn.Linear(8, 8))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(mezzo.CheckpointError, match="damaged"):
        mezzo.load_checkpoint(path)


def test_a_damaged_checkpoint_is_refused_and_nothing_is_changed(path):
    run = Run()
    mezzo.save_checkpoint(path, *run.parts)
    whole, before = path.read_bytes(), run.state()
    at = whole.index(run.model[1].weight.detach().numpy().tobytes())
    path.write_bytes(whole[:at] + b"\0\0\0\0" + whole[at + 4 :])
    run.model[1].weight.data.fill_(3.0)
    before = run.state()
    with pytest.raises(mezzo.CheckpointError, match="not a mezzo checkpoint, or is damaged"):
        mezzo.load_checkpoint(path, *run.parts)
    assert_equal(before, run.state())


@pytest.mark.parametrize("content", [b"", b"PK", b"\0" * 100])
def test_files_that_are_not_archives_are_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(mezzo.CheckpointError, match="not a mezzo checkpoint, or is damaged"):
        mezzo.load_checkpoint(path)


def test_a_missing_file_and_a_directory_raise_different_errors(path):
    with pytest.raises(FileNotFoundError):
        mezzo.load_checkpoint(path)
    with pytest.raises(mezzo.CheckpointError, match="not a regular file"):
        mezzo.load_checkpoint(path.parent)


def test_a_converted_model_is_refused(path):
    mezzo.convert(nn.Linear(2, 1).eval(), (torch.ones(3, 2),), dtype="bfloat16").save(path)
    with pytest.raises(mezzo.CheckpointError, match="not a mezzo checkpoint, or is damaged"):
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
    "no factor": (without("scaler", 0, "growth_factor"), "lacks growth_factor"),
    "interval": (put("often", "scaler", 0, "growth_interval"), "growth_interval is 'often'"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_invalid_content_is_refused_and_nothing_is_changed(path, change, message):
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
def test_invalid_flags_of_an_optimizer_are_refused(path, rule):
    run = Run()
    mezzo.save_checkpoint(path, *run.parts)
    content = torch.load(path, weights_only=True)
    content["optimizer"][0]["param_groups"][0].update(rule)
    torch.save(content, path)
    with pytest.raises(mezzo.CheckpointError, match=next(iter(rule))):
        mezzo.load_checkpoint(path, *run.parts)


def test_a_state_of_an_older_torch_without_some_flags_is_loaded(path):
    run = Run()
    mezzo.save_checkpoint(path, *run.parts)
    content = torch.load(path, weights_only=True)
    del content["optimizer"][0]["param_groups"][0]["fused"]
    torch.save(content, path)
    mezzo.load_checkpoint(path, *run.parts)


@pytest.mark.parametrize(
    "value", [bytearray(3), torch.ones(2, device="meta"), torch.eye(2).to_sparse()]
)
def test_values_that_a_load_would_refuse_are_not_saved(path, value):
    with pytest.raises(mezzo.CheckpointError, match="'extra' holds a value"):
        mezzo.save_checkpoint(path, x=value)


def test_a_model_with_a_sparse_buffer_is_saved_if_that_is_not_persistent(path):
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    with pytest.raises(mezzo.CheckpointError, match=r"'model'.*sparse_coo.*persistent=False\."):
        mezzo.save_checkpoint(path, model)
    model.register_buffer("adjacency", model.adjacency, persistent=False)
    mezzo.save_checkpoint(path, model)
    mezzo.load_checkpoint(path, model)


def test_expanded_tensors_that_a_load_would_refuse_are_not_saved(path):
    with pytest.raises(mezzo.CheckpointError, match="could not be loaded again"):
        mezzo.save_checkpoint(path, wide=torch.ones(1).expand(2**30))
    assert not path.exists()


def test_loading_into_a_model_on_the_meta_device_is_refused(path):
    mezzo.save_checkpoint(path, nn.Linear(2, 1))
    with pytest.raises(mezzo.CheckpointError, match=r"model\.to_empty"):
        mezzo.load_checkpoint(path, nn.Linear(2, 1, device="meta"))


# -- loads that fail halfway -----------------------------------------------------------------------


class Failing:
    """A custom part, whose load fails after the others were loaded."""

    def __init__(self, error):
        self.error, self.value = error, 1

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("dtype", "master"), [("bfloat16", master) for master in FORMATS] + [("float16", "float32")]
)
@pytest.mark.parametrize("error", [ValueError("not today"), KeyboardInterrupt()])
def test_loaded_parts_are_restored_if_a_later_part_fails(path, dtype, master, error):
    saved, custom = Run(dtype=dtype, master=master), Failing(None)
    saved.train(3)
    custom.value = 2
    mezzo.save_checkpoint(path, *saved.parts[:3], [saved.scheduler, custom])

    run, twin = (Run(seed=5, dtype=dtype, master=master) for _ in range(2))
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
    # Internal state too: both runs continue alike, to the bit.
    run.train(2)
    rng_state.restore_rng_state(generators)
    twin.train(2)
    assert_equal(twin.state(), run.state())


class FailingModule(nn.Module):
    """A custom module, whose load fails halfway."""

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


def test_a_module_whose_load_fails_is_restored_with_its_extra_state(path):
    model = nn.Sequential(nn.Linear(2, 2), FailingModule())
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
    """An optimizer that loads in place, and then fails."""

    def load_state_dict(self, state_dict):
        for state in self.state.values():
            state["momentum_buffer"].zero_()
        self.param_groups[0]["lr"] = 5.0
        raise RuntimeError("only in place")


def test_an_optimizer_that_loads_in_place_is_restored(path):
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


# -- checks ----------------------------------------------------------------------------------------


def test_targets_are_paired_with_their_states_in_order():
    pairs = checkpoint_checks.match_parts(
        "file", {"model": [1, 2], "scaler": None}, {"model": ("a", "b"), "scaler": ()}
    )
    assert pairs == {"model": [("a", 1), ("b", 2)], "scaler": []}


def test_long_lists_of_names_are_shortened():
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(8)))
    with pytest.raises(
        mezzo.CheckpointError,
        match=r"it lacks '0.weight', '1.weight', '2.weight', '3.weight', '4.weight' and 3 more",
    ):
        checkpoint_checks.refuse_other_model(model, {}, strict=True)


def test_another_shape_is_refused_without_strict_too():
    with pytest.raises(mezzo.CheckpointError, match="shape"):
        checkpoint_checks.refuse_other_model(
            nn.Linear(1, 1), {"weight": torch.ones(2, 2)}, strict=False
        )


def test_the_same_model_in_another_dtype_fits():
    checkpoint_checks.refuse_other_model(
        nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).state_dict(), strict=True
    )


def test_masters_of_other_shapes_are_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {**optimizer.state_dict(), "mezzo_masters": {0: {"mezzo_master": torch.zeros(3, 3)}}}
    with pytest.raises(mezzo.PolicyError, match=r"master of shape \(3, 3\)"):
        checkpoint_checks.refuse_other_optimizer(optimizer, state)
