"""Checkpoints in folders: what sharded models are saved to, here of models that are not sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.states import assert_equal
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo.prepare import checkpoint_folder

X, Y = torch.linspace(-1, 1, 24).view(6, 4), torch.linspace(0, 1, 12).view(6, 2)


@pytest.fixture(autouse=True)
def _as_if_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "is_sharded", lambda *_: True)


def make_step(seed: int = 0, **options) -> mezzo.TrainStep:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.25), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    options = {"dtype": "float16", **options}
    return mezzo.TrainStep(model, F.mse_loss, optimizer, "O2", scheduler=scheduler, **options)


@pytest.mark.parametrize("master", ["float32", "kahan"])
def test_a_step_resumes_from_a_folder_bit_for_bit(tmp_path: Path, master: str):
    step, other = make_step(master=master), make_step(seed=1, master=master)
    for _ in range(3):
        step(X, Y)
    mezzo.save_checkpoint(tmp_path / "run", step=step, epoch=3)
    expected, state = [step(X, Y) for _ in range(3)], step.state_dict()
    assert mezzo.load_checkpoint(tmp_path / "run", step=other) == {"epoch": 3}
    assert_equal([other(X, Y) for _ in range(3)], expected)
    assert_equal(other.state_dict(), state)


def test_the_parts_of_a_step_are_loaded_from_its_folder(tmp_path: Path):
    step, other = make_step(), make_step(seed=1)
    step(X, Y)
    mezzo.save_checkpoint(tmp_path / "run", step=step)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.25), nn.Linear(8, 2))
    mezzo.load_checkpoint(tmp_path / "run", model)
    mezzo.load_checkpoint(
        tmp_path / "run", other.model, other.optimizer, other.scaler, other._scheduler
    )
    assert_equal(mezzo.undecorate(other.model).state_dict(), dict(model.state_dict()))
    assert_equal(mezzo.undecorate(step.model).state_dict(), dict(model.state_dict()))
    assert_equal(other._scheduler.state_dict(), step._scheduler.state_dict())


def test_several_models_and_optimizers_are_saved_together(tmp_path: Path):
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.Adam(one.parameters()) for one in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    mezzo.save_checkpoint(tmp_path / "run", models, optimizers)
    others = [nn.Linear(2, 1), nn.Linear(2, 1)]
    fresh = [torch.optim.Adam(one.parameters()) for one in others]
    mezzo.load_checkpoint(tmp_path / "run", others, fresh)
    for one, other in ((models, others), (optimizers, fresh)):
        assert_equal([dict(x.state_dict()) for x in other], [dict(x.state_dict()) for x in one])
    with pytest.raises(mezzo.CheckpointError, match="has 2 of model, got 1"):
        mezzo.load_checkpoint(tmp_path / "run", others[0])


def test_a_parameter_without_a_gradient_has_no_state_after_loading(tmp_path: Path):
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
        return model, torch.optim.Adam(model.parameters())

    (model, optimizer), (other, fresh) = make(), make()
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    mezzo.save_checkpoint(tmp_path / "run", model, optimizer)
    mezzo.load_checkpoint(tmp_path / "run", other, fresh)
    assert_equal(fresh.state_dict(), optimizer.state_dict())


def test_states_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    mezzo.save_checkpoint(tmp_path / "run", model, optimizer)
    other = nn.Linear(2, 1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    for arguments, message in (
        ((other, torch.optim.Adam(other.parameters())), "also has 'optimizer0.state.*amsgrad|max_"),
        ((nn.Linear(3, 1),), "cannot be loaded: Size mismatch"),
        ((nn.Linear(2, 1, bias=False),), "also has 'model0.bias'"),
        ((nn.Sequential(other),), "also has 'model0.bias'"),
        ((other, None, mezzo.GradScaler()), "has no scaler"),
    ):
        with pytest.raises(mezzo.CheckpointError, match=message):
            mezzo.load_checkpoint(tmp_path / "run", *arguments)
    with pytest.raises(mezzo.CheckpointError, match="was saved without a step"):
        mezzo.load_checkpoint(tmp_path / "run", step=make_step())
    assert_equal(dict(other.state_dict()), before)
    partial = nn.Sequential(other)
    mezzo.load_checkpoint(tmp_path / "run", partial, strict=False)
    assert_equal(dict(other.state_dict()), before)


def test_what_cannot_be_saved_is_refused(tmp_path: Path):
    model = nn.Linear(2, 1)
    (tmp_path / "file").touch()
    step = make_step(accumulate=2)
    step(X, Y)
    for path, arguments, options, error, message in (
        ("none/run", (model,), {}, FileNotFoundError, "there is no directory"),
        ("file", (model,), {}, mezzo.CheckpointError, "exists and is not a sharded checkpoint"),
        ("run", (model,), {"value": object()}, mezzo.CheckpointError, "part 'extra' holds"),
        ("run", (), {"step": step}, mezzo.CheckpointError, "gradients of 1 calls"),
    ):
        with pytest.raises(error, match=message):
            mezzo.save_checkpoint(tmp_path / path, *arguments, **options)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_file_is_not_loaded_into_sharded_parameters(tmp_path: Path):
    torch.save({}, tmp_path / "run.pt")
    with pytest.raises(mezzo.CheckpointError, match="is not a folder, and the parameters are shar"):
        mezzo.load_checkpoint(tmp_path / "run.pt", nn.Linear(1, 1))


def test_the_optimizer_of_sharded_parameters_needs_its_model(tmp_path: Path):
    optimizer = torch.optim.Adam(nn.Linear(2, 1).parameters())
    with pytest.raises(mezzo.CheckpointError, match="Pass the model too"):
        mezzo.save_checkpoint(tmp_path / "run", optimizer=optimizer)
