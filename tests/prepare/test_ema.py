"""`EMA` averages float32 weights, and `applied()` uses them in the model for a while."""

import copy
from contextlib import suppress

import pytest
import torch
from support.states import assert_equal
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mezzo

CASES = [(None, {}), ("O1", {})] + [
    ("O2", {"master": master}) for master in ("float32", "split", "kahan", "stochastic", "none")
]
IDS = ["plain", "O1", "float32", "split", "kahan", "stochastic", "none"]
every_case = pytest.mark.parametrize(("level", "options"), CASES, ids=IDS)


class Run:
    def __init__(self, level="O2", decay=0.9, **options):
        torch.manual_seed(0)
        self.use_buffers = options.pop("use_buffers", False)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.model.register_buffer("positions", torch.arange(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.001)
        if level is not None:
            mezzo.decorate(self.model, self.optimizer, level, dtype="bfloat16", **options)
        self.ema = mezzo.EMA(self.model, decay, use_buffers=self.use_buffers)
        self.data = torch.Generator().manual_seed(1)

    def train(self, steps=1):
        for _ in range(steps):
            self.model(torch.randn(8, 4, generator=self.data)).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ema.update()

    def state(self):
        """Return copies of weights, companions, moments, buffers and averages."""
        return copy.deepcopy(
            (
                self.model.state_dict(),
                self.optimizer.state_dict(),
                dict(mezzo.master_params(self.model)),
                self.ema.state_dict(),
            )
        )


@every_case
def test_the_average_is_of_the_float32_weights(level, options):
    run = Run(level, **options)
    wanted = {name: value.double() for name, value in mezzo.master_params(run.model).items()}
    for _ in range(20):
        run.train()
        for name, value in mezzo.master_params(run.model).items():
            wanted[name] = 0.9 * wanted[name] + 0.1 * value.double()
    averages = run.ema.state_dict()
    assert averages.keys() == wanted.keys()
    for name, value in averages.items():
        assert value.dtype is torch.float32
        torch.testing.assert_close(value.double(), wanted[name], rtol=3e-6, atol=1e-7)


def test_the_average_includes_updates_below_16_bit_steps():
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    mezzo.decorate(
        model, optimizer := torch.optim.SGD(model.parameters(), lr=0.001), dtype="bfloat16"
    )
    ema = mezzo.EMA(model)
    for _ in range(300):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    # The weight decreases from 1 by 0.001 a step.
    assert ema.state_dict()["weight"][0, 0].item() == pytest.approx(
        1.0 - 0.001 * (300 - 999 * (1 - 0.999**300)), abs=1e-5
    )


@pytest.mark.parametrize("level", [None, "O1"])
def test_without_masters_the_average_equals_torchs(level):
    run = Run(level)
    torchs = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    torchs.update_parameters(run.model)
    for _ in range(5):
        run.train()
        torchs.update_parameters(run.model)
    assert_equal(
        run.ema.state_dict(),
        {name: value.detach() for name, value in torchs.module.named_parameters()},
    )


# -- applied ---------------------------------------------------------------------------------------


@every_case
def test_the_model_holds_the_average_inside_applied(level, options):
    run = Run(level, **options)
    run.train(10)
    average = copy.deepcopy(run.ema.state_dict())
    exact = level != "O2" or options["master"] in ("float32", "split")
    with run.ema.applied() as averaged:
        assert averaged is run.model
        for name, parameter in run.model.named_parameters():
            torch.testing.assert_close(
                parameter.detach(),
                average[name].to(parameter.dtype),
                rtol=0 if exact else 2.0**-7,
                atol=0,
            )
        if exact:
            assert_equal(dict(mezzo.master_params(run.model)), average)


@every_case
@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_restored_to_the_bit_after_applied(level, options, raises):
    run, other = Run(level, **options), Run(level, **options)
    for one in (run, other):
        one.train(5)
    before = run.state()
    for _ in range(2):
        with suppress(KeyError), run.ema.applied():
            run.model(torch.ones(2, 4))
            if raises:
                raise KeyError
    assert_equal(before, run.state())
    for one in (run, other):
        one.train(5)
    assert_equal(run.state(), other.state())


def test_addresses_of_parameters_and_masters_stay_the_same():
    run = Run()
    run.train()
    addresses = lambda: [  # noqa: E731
        one.data_ptr()
        for one in (
            *run.model.parameters(),
            *mezzo.master_params(run.model).values(),
            *run.model.buffers(),
        )
    ]
    before = addresses()
    with run.ema.applied():
        assert addresses() == before
    assert addresses() == before


@pytest.mark.parametrize("master", ["float32", "split"])
def test_weights_that_other_code_wrote_before_are_restored(master):
    run = Run(master=master)
    run.train(2)
    with torch.no_grad():
        run.model[0].weight.fill_(0.25)
    with run.ema.applied():
        pass
    assert bool((mezzo.master_params(run.model)["0.weight"] == 0.25).all())


@pytest.mark.parametrize("master", ["float32", "split"])
def test_applied_can_be_nested(master):
    run = Run(master=master)
    slow = mezzo.EMA(run.model, 0.999)
    for _ in range(5):
        run.train()
        slow.update()
    before, averages = run.state(), [copy.deepcopy(ema.state_dict()) for ema in (run.ema, slow)]
    with run.ema.applied():
        with slow.applied():
            assert_equal(dict(mezzo.master_params(run.model)), averages[1])
        assert_equal(dict(mezzo.master_params(run.model)), averages[0])
    assert_equal(before, run.state())


def test_a_surrounding_autocast_region_uses_the_averaged_weights():
    run, x = Run(None), torch.ones(2, 4)
    with mezzo.autocast("cpu", dtype="bfloat16"):
        run.ema.load_state_dict(
            {name: torch.zeros_like(value) for name, value in run.ema.state_dict().items()}
        )
        run.model.eval()
        before = run.model(x)
        with run.ema.applied():
            assert not run.model(x).any()
        assert torch.equal(run.model(x), before)


def test_applied_does_not_change_the_grad_mode():
    run = Run()
    with torch.no_grad(), run.ema.applied():
        assert not run.model(torch.ones(2, 4)).requires_grad
    with run.ema.applied():
        assert run.model(torch.ones(2, 4)).requires_grad


# -- buffers ---------------------------------------------------------------------------------------


def test_changes_of_buffers_inside_applied_are_undone():
    run = Run()
    run.train(2)
    assert "1.running_mean" not in run.ema.state_dict()
    before = copy.deepcopy(run.model.state_dict())
    with run.ema.applied():
        assert torch.equal(run.model[1].running_mean, before["1.running_mean"])
        run.model(torch.ones(2, 4))
        assert not torch.equal(run.model[1].running_mean, before["1.running_mean"])
    assert_equal(before, run.model.state_dict())


def test_with_use_buffers_floating_point_buffers_are_averaged():
    run = Run(use_buffers=True)
    wanted = run.model[1].running_var.clone()
    for _ in range(4):
        run.train()
        wanted.lerp_(run.model[1].running_var, 0.1)
    assert torch.allclose(run.ema.state_dict()["1.running_var"], wanted)
    assert "1.num_batches_tracked" not in run.ema.state_dict()
    with run.ema.applied():
        assert torch.allclose(run.model[1].running_var, wanted)
        assert run.model[1].num_batches_tracked == 4


def test_sparse_buffers_are_not_averaged():
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    ema = mezzo.EMA(model, use_buffers=True)
    ema.update()
    assert list(ema.state_dict()) == ["weight", "bias"]


# -- steps inside applied --------------------------------------------------------------------------


@every_case
def test_an_optimizer_step_inside_applied_is_refused(level, options):
    run = Run(level, **options)
    run.train(2)
    run.model(torch.ones(2, 4)).sum().backward()
    before = run.state()
    with (
        run.ema.applied(),
        pytest.raises(
            mezzo.UnsupportedError,
            match=r"AdamW\.step\(\) was called inside `with ema\.applied\(\)`",
        ),
    ):
        run.optimizer.step()
    assert_equal(before, run.state())
    run.optimizer.step()


def test_other_models_may_be_trained_inside_applied():
    run, weight = Run(), nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    with run.ema.applied():
        torch.optim.SGD([weight], lr=0.5).step()
    assert weight.item() == 0.5


@pytest.mark.parametrize(
    "call",
    [
        lambda step: step(torch.ones(2, 4), torch.ones(2, 2)),
        lambda step: step.flush(),
        lambda step: step.state_dict(),
    ],
)
def test_a_train_step_inside_applied_is_refused(call):
    model = nn.Linear(4, 2)
    step = mezzo.TrainStep(
        model,
        nn.functional.mse_loss,
        torch.optim.SGD(model.parameters(), lr=0.1),
        "O2",
        dtype="bfloat16",
        accumulate=2,
    )
    ema = mezzo.EMA(model)
    step(torch.ones(2, 4), torch.ones(2, 2))
    with (
        ema.applied(),
        pytest.raises(mezzo.UnsupportedError, match=r"inside `with ema\.applied\(\)`"),
    ):
        call(step)
    call(step)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("master", ["float32", "split"])
def test_an_average_resumes_from_a_checkpoint_to_the_bit(tmp_path, master):
    run, again = Run(master=master), Run(master=master)
    run.train(3)
    mezzo.save_checkpoint(tmp_path / "run.pt", run.model, run.optimizer, ema=run.ema.state_dict())
    extra = mezzo.load_checkpoint(tmp_path / "run.pt", again.model, again.optimizer)
    again.ema.load_state_dict(extra["ema"])
    again.data.set_state(run.data.get_state())
    for one in (run, again):
        one.train(3)
    assert_equal(run.state(), again.state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("0.weight"), r"lacks \['0.weight'\]"),
        (lambda state: state.update(more=torch.ones(1)), r"also has \['more'\]"),
        (lambda state: state.update({"2.bias": torch.ones(3)}), r"'2.bias' has shape \(3,\)"),
    ],
)
def test_an_average_of_another_model_is_refused_before_anything_changes(change, message):
    run = Run()
    before = copy.deepcopy(run.ema.state_dict())
    state = {name: value + 1 for name, value in before.items()}
    change(state)
    with pytest.raises(mezzo.CheckpointError, match=message):
        run.ema.load_state_dict(state)
    assert_equal(before, run.ema.state_dict())


def test_inside_applied_the_model_can_be_saved_and_a_run_cannot(tmp_path):
    run = Run(master="split")
    run.train(5)
    path, average = tmp_path / "average.pt", copy.deepcopy(run.ema.state_dict())
    with run.ema.applied():
        mezzo.save_checkpoint(path, run.model)
        with pytest.raises(mezzo.CheckpointError, match="Save the run outside"):
            mezzo.save_checkpoint(path, run.model, run.optimizer)
        with pytest.raises(mezzo.CheckpointError, match="Load outside"):
            mezzo.load_checkpoint(path, run.model)
    saved = torch.load(path, weights_only=True)["model"][0]
    assert_equal({name: saved[name] for name in average}, average)


# -- changes of the model --------------------------------------------------------------------------


@pytest.mark.parametrize("master", ["float32", "split"])
def test_an_average_continues_when_the_model_is_decorated_and_undecorated(master):
    run, other = Run(None), Run(None)
    run.ema, other.ema = (mezzo.EMA(one.model, 0.5) for one in (run, other))
    mezzo.decorate(run.model, run.optimizer, dtype="bfloat16", master=master)
    for step in range(4):
        if step == 2:
            mezzo.undecorate(run.model)
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.add_(2.0**-12)
        run.model.load_state_dict(other.model.state_dict())
        run.ema.update()
        other.ema.update()
    assert_equal(run.ema.state_dict(), other.ema.state_dict())


def test_an_average_follows_new_strides_and_new_parameters():
    model = nn.Conv2d(3, 4, 3)
    ema = mezzo.EMA(model, 0.5)
    before = model.weight.detach().clone()
    model.to(memory_format=torch.channels_last)
    ema.update()
    assert torch.equal(ema.state_dict()["weight"], before)
    assert ema.state_dict()["weight"].stride() == model.weight.stride()
    model.load_state_dict(
        {name: value + 1 for name, value in model.state_dict().items()}, assign=True
    )
    ema.update()
    torch.testing.assert_close(ema.state_dict()["weight"], before + 0.5)


def test_tied_weights_are_averaged_once():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert list(mezzo.EMA(model).state_dict()) == ["0.weight"]


def test_names_of_a_wrapped_model_have_no_prefix():
    assert list(mezzo.EMA(nn.DataParallel(nn.Linear(2, 2))).state_dict()) == ["weight", "bias"]


def test_weights_reconstructed_in_parts_give_the_same_average(monkeypatch):
    from mezzo.prepare import ema

    runs = []
    for count in (ema._MAX_GROUP_ELEMENTS, 5):
        monkeypatch.setattr(ema, "_MAX_GROUP_ELEMENTS", count)
        run = Run(master="split")
        run.train(3)
        runs.append((run, run.state()))
    assert len(runs[1][0].ema._averaged._groups) > len(runs[0][0].ema._averaged._groups)
    assert_equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("decay", [-0.1, 1.1, "0.9", True, None])
def test_an_invalid_decay_is_refused(decay):
    with pytest.raises(mezzo.PolicyError, match="a number from 0 to 1"):
        mezzo.EMA(nn.Linear(1, 1), decay)


def test_more_than_one_model_is_refused():
    with pytest.raises(mezzo.PolicyError, match="averages one model, got 2"):
        mezzo.EMA([nn.Linear(1, 1), nn.Linear(1, 1)])


# -- torch's AveragedModel -------------------------------------------------------------------------


def test_an_averaged_model_of_a_decorated_model_is_refused():
    run = Run()
    with pytest.raises(mezzo.UnsupportedError, match=r"mezzo\.EMA\(model"):
        AveragedModel(run.model)
    with pytest.raises(mezzo.UnsupportedError, match=r"mezzo\.master_params\(model\)"):
        AveragedModel(nn.Sequential(run.model))
    AveragedModel(Run("O1").model)
    copy.deepcopy(run.model)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_averaged_model_created_before_decorating_accepts_master_params(use_buffers):
    run = Run(None, use_buffers=use_buffers)
    torchs = AveragedModel(
        run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers
    )
    mezzo.decorate(run.model, run.optimizer, dtype="bfloat16", master="split")
    torchs.update_parameters(mezzo.master_params(run.model))
    for _ in range(5):
        run.train()
        torchs.update_parameters(mezzo.master_params(run.model))
    assert_equal(
        {
            name: value
            for name, value in torchs.module.state_dict().items()
            if name in run.ema.state_dict()
        },
        run.ema.state_dict(),
    )


@pytest.mark.parametrize("state", [3, {"weight": 1.0, "bias": torch.ones(1)}])
def test_an_invalid_state_is_refused(state):
    ema = mezzo.EMA(nn.Linear(1, 1))
    before = {name: value.clone() for name, value in ema.state_dict().items()}
    with pytest.raises(mezzo.CheckpointError, match="dictionary of tensors"):
        ema.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in ema.state_dict().items())
