"""Lightning's Trainer and Fabric with mezzo's plugins, against a plain loop with mezzo."""

import copy
import os
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

import mezzo

pl = pytest.importorskip("pytorch_lightning")
fabric_package = pytest.importorskip("lightning_fabric")

from mezzo.integrations.lightning import MezzoFabricPrecision, MezzoPrecision  # noqa: E402
from mezzo.integrations.precision import import_extra  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:pytorch_lightning"),
]

BATCHES = [torch.randn(4, 4, generator=torch.Generator().manual_seed(n)) for n in range(8)]
LIMIT = 1e-2
"""A norm below that of every gradient."""
LEVELS = [("O1", "bfloat16"), ("O1", "float16"), ("O2", "bfloat16"), ("O2", "float16")]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model, batch):
    return model(batch).float().square().mean()


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def train_plain(policy, dtype, batches=BATCHES, *, clip=None, every=1, scaler=None, **options):
    """Train with mezzo alone; return the losses and the float32 weights."""
    model = make_model()
    optimizer = adam(model, **options)
    mezzo.decorate(model, optimizer, policy, dtype=dtype)
    scaler = scaler or mezzo.GradScaler("cpu", enabled=dtype == "float16")
    losses = []
    for index, batch in enumerate(batches):
        loss = loss_of(model, batch)
        losses.append(loss.item())
        scaler.scale(loss / every).backward()
        if (index + 1) % every == 0:
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return losses, list(mezzo.undecorate(model).parameters())


class Module(pl.LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.model, self.options = make_model(), options
        self.losses, self.dtypes = [], []

    def forward(self, batch):
        return self.model(batch)

    def training_step(self, batch, _index):
        loss = loss_of(self.model, batch)
        self.losses.append(loss.item())
        self.dtypes.append(self.model[0].weight.dtype)
        return loss

    def validation_step(self, batch, _index):
        self.log("dtype", float(self.model(batch).dtype is torch.float32))

    def configure_optimizers(self):
        return adam(self.model, **self.options)


def make_trainer(plugin, **options):
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "plugins": [plugin],
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )


class OtherStrategy(pl.strategies.ParallelStrategy):
    root_device = torch.device("cpu")
    is_global_zero = True

    def model_to_device(self): ...
    def reduce(self, tensor, *args, **kwargs): ...
    def barrier(self, *args): ...
    def broadcast(self, value, src=0):
        return value

    def all_gather(self, tensor, *args, **kwargs): ...


def loader(batches=BATCHES):
    return DataLoader(batches, batch_size=None)


def assert_equal(actual, expected):
    assert all(map(torch.equal, actual, expected))


# -- Trainer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "dtype"), LEVELS)
def test_trainer_trains_as_the_plain_loop(policy, dtype):
    module = Module()
    make_trainer(MezzoPrecision(policy, dtype=dtype)).fit(module, loader())
    losses, weights = train_plain(policy, dtype)
    assert module.losses == losses
    expected = torch.float32 if policy == "O1" else getattr(torch, dtype)
    assert set(module.dtypes) == {expected}
    # After training the module is plain again, with the exact weights.
    assert "forward" not in vars(module)
    assert_equal(module.parameters(), weights)


@pytest.mark.parametrize("fused", [False, True])
def test_trainer_clips_with_fused_optimizers(fused):
    module = Module(fused=fused)
    trainer = make_trainer(MezzoPrecision("O2", dtype="float16"), gradient_clip_val=LIMIT)
    trainer.fit(module, loader())
    assert module.losses == train_plain("O2", "float16", clip=LIMIT, fused=fused)[0]
    assert module.losses != train_plain("O2", "float16", fused=fused)[0]


def test_trainer_accumulates():
    module = Module()
    trainer = make_trainer(MezzoPrecision("O2", dtype="float16"), accumulate_grad_batches=2)
    trainer.fit(module, loader())
    losses, weights = train_plain("O2", "float16", every=2)
    assert module.losses == losses
    assert_equal(module.parameters(), weights)


def test_trainer_resumes_to_the_bit(tmp_path):
    whole, first, second = Module(), Module(), Module()
    scalers = [mezzo.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in range(3)]
    plugins = [MezzoPrecision("O2", dtype="float16", scaler=scaler) for scaler in scalers]
    make_trainer(plugins[0], max_epochs=2).fit(whole, loader())
    # Saved during training.
    trainer = make_trainer(
        plugins[1],
        enable_checkpointing=True,
        callbacks=[pl.callbacks.ModelCheckpoint(tmp_path, filename="last")],
    )
    trainer.fit(first, loader())
    # Saved after it, when the module is plain again.
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    for name in ("last.ckpt", "after.ckpt"):
        second = Module()
        plugin = MezzoPrecision("O2", dtype="float16", scaler=copy.deepcopy(scalers[2]))
        make_trainer(plugin, max_epochs=2).fit(second, loader(), ckpt_path=tmp_path / name)
        assert first.losses + second.losses == whole.losses
        assert_equal(second.parameters(), whole.parameters())
        assert plugin.scaler.state_dict() == scalers[0].state_dict()
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["state_dict"]["model.0.weight"].dtype is torch.float32


def test_trainer_skips_nonfinite_steps_and_counts_them():
    batches = [BATCHES[0], torch.full((4, 4), torch.inf), BATCHES[1]]
    module = Module()
    plugin = MezzoPrecision("O2", dtype="float16")
    make_trainer(plugin).fit(module, loader(batches))
    state = plugin.scaler.state()
    assert (state.good_steps, state.skipped_steps) == (2, 1)
    assert state.scale == 2.0**15
    assert all(bool(one.isfinite().all()) for one in module.parameters())


def test_hooks_run_in_order_and_see_unscaled_gradients():
    calls, norms = [], []

    class Hooked(Module):
        def on_before_backward(self, loss):
            calls.append("before_backward")

        def on_after_backward(self):
            calls.append("after_backward")

        def on_before_optimizer_step(self, optimizer):
            calls.append("before_step")
            norms.append(float(nn.utils.get_total_norm([one.grad for one in self.parameters()])))

        def configure_gradient_clipping(self, optimizer, *args, **kwargs):
            calls.append("clip")
            super().configure_gradient_clipping(optimizer, *args, **kwargs)

        def optimizer_step(self, *args, **kwargs):
            calls.append("step")
            super().optimizer_step(*args, **kwargs)

        def on_before_zero_grad(self, optimizer):
            calls.append("zero_grad")

    make_trainer(MezzoPrecision("O2", dtype="float16")).fit(Hooked(), loader(BATCHES[:1]))
    order = ["step", "zero_grad", "before_backward", "after_backward", "before_step", "clip"]
    assert calls == order
    assert 0.0 < norms[0] < 10.0


def test_trainer_skips_a_batch_without_a_loss():
    class Sparse(Module):
        def training_step(self, batch, index):
            return None if index == 1 else super().training_step(batch, index)

    module = Sparse()
    make_trainer(MezzoPrecision("O2", dtype="float16")).fit(module, loader(BATCHES[:3]))
    assert module.losses == train_plain("O2", "float16", [BATCHES[0], BATCHES[2]])[0]


class TwoOptimizers(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = make_model(), make_model()
        self.automatic_optimization = False
        self.results = []

    def training_step(self, batch, _index):
        self.manual_backward(
            self.first(batch).float().square().mean() + loss_of(self.second, batch)
        )
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, LIMIT, "norm")
            self.results.append(optimizer.step())
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [adam(self.first), adam(self.second)]


def test_optimizers_of_one_backward_unscale_with_its_scale():
    # The scale grows after every step; the second optimizer must not use the new one.
    scaler = mezzo.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    module = TwoOptimizers()
    plugin = MezzoPrecision("O2", dtype="float16", scaler=scaler)
    make_trainer(plugin).fit(module, loader(BATCHES[:4]))
    assert_equal(module.first.parameters(), module.second.parameters())
    assert_equal(
        module.first.parameters(), train_plain("O2", "float16", BATCHES[:4], clip=LIMIT)[1]
    )
    assert [one.skipped for one in module.results] == [False] * 8
    assert scaler.get_scale() == 2.0**14


def test_evaluation_runs_in_the_policy_and_leaves_the_module_plain():
    module = Module()
    trainer = make_trainer(MezzoPrecision("O2", dtype="bfloat16"))
    before = [one.detach().clone() for one in module.parameters()]
    assert trainer.validate(module, loader(), verbose=False) == [{"dtype": 0.0}]
    assert_equal(module.parameters(), before)
    trainer.fit(module, loader(), loader())
    assert trainer.callback_metrics["dtype"] == 0.0
    assert trainer.predict(module, loader(BATCHES[:1]))[0].dtype is torch.bfloat16


def test_an_error_in_training_leaves_a_plain_module():
    class Failing(Module):
        def training_step(self, batch, index):
            raise ZeroDivisionError

    module = Failing()
    with pytest.raises(ZeroDivisionError):
        make_trainer(MezzoPrecision("O2", dtype="float16")).fit(module, loader())
    assert module.model[0].weight.dtype is torch.float32
    assert "forward" not in vars(module)


def test_a_module_that_decorated_itself_is_refused():
    class Own(Module):
        def configure_optimizers(self):
            optimizer = adam(self.model)
            mezzo.decorate(self.model, optimizer, dtype="bfloat16")
            return optimizer

    with pytest.raises(mezzo.PolicyError, match="decorated already"):
        make_trainer(MezzoPrecision("O2", dtype="float16")).fit(Own(), loader())


def test_wrong_arguments_are_refused_when_the_plugin_is_created():
    with pytest.raises(mezzo.PolicyError, match="O9"):
        MezzoPrecision("O9")
    with pytest.raises(mezzo.PolicyError, match="dtyp"):
        MezzoFabricPrecision("O2", dtyp="float16")
    with pytest.raises(mezzo.PolicyError, match=r"mezzo\.GradScaler"):
        MezzoPrecision("O2", scaler=torch.amp.GradScaler("cpu"))


@pytest.fixture
def one_process(monkeypatch):
    """A process group of one process, in which DDP and FSDP2 wrap models as in any other."""
    # Lightning sets variables that must not stay.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("policy", ["O1", "O2"])
def test_trainer_decorates_before_ddp_wraps(policy):
    module = Module()
    trainer = make_trainer(
        MezzoPrecision(policy, dtype="float16"), strategy="ddp", use_distributed_sampler=False
    )
    trainer.fit(module, loader())
    losses, weights = train_plain(policy, "float16")
    assert module.losses == losses
    assert_equal(module.parameters(), weights)


class Sharded(Module):
    def configure_model(self):
        if not isinstance(self.model[0], FSDPModule):
            for part in (self.model[0], self.model[2], self.model):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("policy", ["O1", "O2"])
def test_trainer_trains_a_module_that_is_sharded_by_fsdp2(policy, tmp_path):
    def fit(epochs, **options):
        module = Sharded()
        trainer = make_trainer(
            MezzoPrecision(policy, dtype="float16"),
            strategy=pl.strategies.ModelParallelStrategy(1, 1, save_distributed_checkpoint=False),
            use_distributed_sampler=False,
            max_epochs=epochs,
        )
        trainer.fit(module, loader(), **options)
        return module, trainer

    whole, _ = fit(2)
    assert whole.losses[:8] == pytest.approx(train_plain(policy, "float16")[0], rel=1e-3)
    first, trainer = fit(1)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    second, _ = fit(2, ckpt_path=tmp_path / "first.ckpt")
    assert first.losses + second.losses == whole.losses


@pytest.mark.parametrize("options", [{"master": None}, {"master": "stochastic"}, {"level": "O3"}])
def test_policies_without_exact_weights_train(options):
    module = Module()
    plugin = MezzoPrecision(options.pop("level", "O2"), dtype="bfloat16", **options)
    make_trainer(plugin).fit(module, loader())
    assert len(module.losses) == 8
    assert module.model[0].weight.dtype is torch.float32


def test_lbfgs_is_refused_where_the_loss_is_scaled():
    class Lbfgs(Module):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(mezzo.UnsupportedError, match=r"LBFGS.*dtype='bfloat16'"):
        make_trainer(MezzoPrecision("O1", dtype="float16")).fit(Lbfgs(), loader())
    module = Lbfgs()
    make_trainer(MezzoPrecision("O1", dtype="bfloat16")).fit(module, loader(BATCHES[:1]))
    assert module.losses


def test_a_step_after_a_callback_skipped_backward_is_left_out():
    class Averaged(Module):
        def __init__(self):
            super().__init__()
            # Its statistics are updated in an epoch without backward passes.
            self.model.append(nn.BatchNorm1d(2))

    module, plugin = Averaged(), MezzoPrecision("O1", dtype="float16")
    average = pl.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1)
    make_trainer(plugin, max_epochs=2, callbacks=[average]).fit(module, loader())
    assert plugin.scaler.state().good_steps == 16


@pytest.mark.parametrize(("policy", "warned"), [("O1", 0), ("O2", 1)])
def test_callbacks_that_average_16_bit_weights_are_warned_of(policy, warned):
    callbacks = [
        pl.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1),
        pl.callbacks.EMAWeightAveraging(),
    ]
    for callback in callbacks:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = make_trainer(MezzoPrecision(policy, dtype="bfloat16"), callbacks=[callback])
            trainer.fit(Module(), loader(BATCHES[:2]))
        name = f"{type(callback).__name__} averages the 16-bit weights of O2"
        assert sum(name in str(one.message) for one in caught) == warned


def test_a_missing_package_is_named_with_its_install_command():
    with pytest.raises(mezzo.UnsupportedError, match=r"pip install 'mezzo\[lightning\]'"):
        import_extra("no_such_package.plugins", "lightning")


def test_other_strategies_are_refused():
    trainer = make_trainer(MezzoPrecision("O2"), strategy=OtherStrategy())
    with pytest.raises(mezzo.UnsupportedError, match="does not run with OtherStrategy"):
        trainer.fit(Module(), loader())


# -- Fabric ----------------------------------------------------------------------------------------


def make_fabric(policy, dtype, **options):
    plugin = MezzoFabricPrecision(policy, dtype=dtype, **options)
    return fabric_package.Fabric(accelerator="cpu", devices=1, plugins=plugin), plugin


def train_fabric(fabric, model, optimizer, batches=BATCHES, clip=None):
    losses, results = [], []
    for batch in batches:
        loss = loss_of(model, batch)
        losses.append(loss.item())
        fabric.backward(loss)
        if clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=clip)
        results.append(optimizer.step())
        optimizer.zero_grad()
    return losses, results


@pytest.mark.parametrize("clip", [None, LIMIT])
@pytest.mark.parametrize(("policy", "dtype"), LEVELS)
def test_fabric_trains_as_the_plain_loop(policy, dtype, clip):
    fabric, _ = make_fabric(policy, dtype)
    original = make_model()
    model, optimizer = fabric.setup(original, adam(original, fused=True))
    losses, _ = train_fabric(fabric, model, optimizer, clip=clip)
    expected, weights = train_plain(policy, dtype, clip=clip, fused=True)
    assert losses == expected
    assert_equal(mezzo.undecorate(original).parameters(), weights)


def test_fabric_resumes_to_the_bit(tmp_path):
    def start():
        fabric, plugin = make_fabric("O2", "float16")
        model = make_model()
        model, optimizer = fabric.setup(model, adam(model))
        return fabric, {"model": model, "optimizer": optimizer, "precision": plugin}

    fabric, state = start()
    batches = [*BATCHES[:2], torch.full((4, 4), torch.inf), *BATCHES[2:]]
    train_fabric(fabric, state["model"], state["optimizer"], batches[:5])
    fabric.save(tmp_path / "state", state)
    losses, _ = train_fabric(fabric, state["model"], state["optimizer"], batches[5:])
    fabric, resumed = start()
    fabric.load(tmp_path / "state", resumed)
    assert train_fabric(fabric, resumed["model"], resumed["optimizer"], batches[5:])[0] == losses
    assert resumed["precision"].scaler.state() == state["precision"].scaler.state()


def test_fabric_reports_skipped_steps():
    fabric, plugin = make_fabric("O2", "float16")
    model = make_model()
    model, optimizer = fabric.setup(model, adam(model))
    batches = [BATCHES[0], torch.full((4, 4), torch.inf)]
    results = train_fabric(fabric, model, optimizer, batches)[1]
    assert [one.skipped for one in results] == [False, True]
    assert results[1].first_nonfinite == "0.weight"
    assert plugin.state_dict()["scale"] == 2.0**15


def test_fabric_keeps_the_policy_of_a_decorated_model():
    fabric, plugin = make_fabric("O1", "bfloat16")
    model = make_model()
    optimizer = adam(model)
    mezzo.decorate(model, optimizer, "O2", dtype="float16")
    wrapped, stepped = fabric.setup(model, optimizer)
    assert train_fabric(fabric, wrapped, stepped)[0] == train_plain("O2", "float16")[0]
    assert plugin.scaler is not None


def test_fabric_refuses_a_decorated_model_with_another_optimizer():
    fabric, _ = make_fabric("O2", "float16")
    model = make_model()
    mezzo.decorate(model, adam(model), "O2", dtype="float16")
    with pytest.raises(mezzo.PolicyError, match="not with these optimizers"):
        fabric.setup(model, adam(model))


@pytest.mark.parametrize("is_training", [True, False])
def test_fabric_may_set_up_a_model_and_its_optimizer_apart_at_o1(is_training):
    fabric, plugin = make_fabric("O1", "float16")
    model = make_model().train(is_training)
    optimizer = fabric.setup_optimizers(adam(model))
    losses, _ = train_fabric(fabric, fabric.setup_module(model), optimizer)
    assert losses == train_plain("O1", "float16")[0]
    # The scale is updated late: at the next loss, or when it is saved.
    plugin.state_dict()
    assert plugin.scaler.state().good_steps == len(BATCHES)


def test_fabric_setup_without_the_optimizer_is_refused_in_training():
    fabric, _ = make_fabric("O2", "float16")
    model = make_model()
    with pytest.raises(mezzo.UnsupportedError, match=r"fabric\.setup\(model, optimizer\)"):
        fabric.setup(model)
    assert model[0].weight.dtype is torch.float32
    evaluated = fabric.setup(model.eval())
    with torch.autocast("cpu", torch.float16):
        expected = model(BATCHES[0]).float()
    assert torch.equal(evaluated(BATCHES[0]), expected)
    assert model[0].weight.dtype is torch.float32


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("policy", ["O1", "O2"])
def test_fabric_decorates_before_ddp_wraps(policy):
    plugin = MezzoFabricPrecision(policy, dtype="float16")
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, strategy="ddp", plugins=plugin)
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, adam(model))
    assert isinstance(model._forward_module, nn.parallel.DistributedDataParallel)
    assert train_fabric(fabric, model, optimizer)[0] == train_plain(policy, "float16")[0]


def start_sharded(policy, **options):
    """Return Fabric with a sharded model, its optimizer and the plugin, ready to be saved."""

    def shard(model, mesh):
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh["data_parallel"])
        return model

    plugin = MezzoFabricPrecision(policy, dtype="float16")
    strategy = fabric_package.strategies.ModelParallelStrategy(shard, 1, 1, **options)
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, strategy=strategy, plugins=plugin)
    fabric.launch()
    model = fabric.setup_module(make_model())
    optimizer = fabric.setup_optimizers(adam(model))
    return fabric, {"model": model, "optimizer": optimizer, "precision": plugin}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("clip", [None, LIMIT])
@pytest.mark.parametrize("policy", ["O1", "O2"])
def test_fabric_trains_a_model_that_is_sharded_by_fsdp2(policy, clip):
    fabric, state = start_sharded(policy)
    assert isinstance(state["model"]._forward_module, FSDPModule)
    losses, _ = train_fabric(fabric, state["model"], state["optimizer"], clip=clip)
    assert losses == pytest.approx(train_plain(policy, "float16", clip=clip)[0], rel=1e-3)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("policy", ["O1", "O2"])
def test_fabric_resumes_a_sharded_model_to_the_bit(policy, shards, tmp_path):
    fabric, state = start_sharded(policy, save_distributed_checkpoint=shards)
    batches = [*BATCHES[:2], torch.full((4, 4), torch.inf), *BATCHES[2:]]
    results = train_fabric(fabric, state["model"], state["optimizer"], batches[:5])[1]
    assert [one.skipped for one in results] == [False, False, True, False, False]
    fabric.save(tmp_path / "state", state)
    losses, _ = train_fabric(fabric, state["model"], state["optimizer"], batches[5:])
    fabric, resumed = start_sharded(policy, save_distributed_checkpoint=shards)
    plugin = resumed["precision"]
    fabric.load(tmp_path / "state", resumed)
    if shards:
        # From folders Fabric returns what is neither a model nor an optimizer as it was saved.
        plugin.load_state_dict(resumed["precision"])
    assert train_fabric(fabric, resumed["model"], resumed["optimizer"], batches[5:])[0] == losses
    assert plugin.scaler.state() == state["precision"].scaler.state()


@pytest.mark.usefixtures("one_process")
def test_fabric_shards_before_it_decorates():
    fabric, _ = start_sharded("O2")
    model = make_model()
    optimizer = adam(model)
    fabric.setup_module(model)
    with pytest.raises(mezzo.UnsupportedError, match=r"Create it after\s+model = fabric.setup_mod"):
        fabric.setup_optimizers(optimizer)
    model = make_model()
    mezzo.decorate(model, adam(model), "O2", dtype="float16")
    with pytest.raises(mezzo.UnsupportedError, match=r"Leave out mezzo\.decorate"):
        fabric.setup_module(model)
