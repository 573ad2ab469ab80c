"""`TrainStep` inside Lightning, Fabric, Accelerate and transformers, against `TrainStep` alone.

On a CPU a step runs eagerly; tests/gpu captures the same steps.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

import mezzo

pl = pytest.importorskip("pytorch_lightning")
fabric_package = pytest.importorskip("lightning_fabric")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from mezzo.integrations.accelerate import use  # noqa: E402
from mezzo.integrations.lightning import MezzoFabricPrecision, MezzoPrecision  # noqa: E402
from mezzo.integrations.transformers import MezzoTrainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:pytorch_lightning"),
]

VALUES = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(0))
"""Eight batches of two rows."""
WITH_SKIP = torch.cat([VALUES[:1], torch.full((1, 2, 4), torch.inf), VALUES[2:]])
LIMIT = 1e-2
"""A norm below that of every gradient."""
LEVELS = pytest.mark.parametrize(
    ("policy", "dtype"),
    [("O1", "bfloat16"), ("O1", "float16"), ("O2", "bfloat16"), ("O2", "float16")],
)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_model()

    def forward(self, x, labels=None):
        logits = self.net(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": (logits.float() - labels).square().mean(), "logits": logits}


def loss_fn(output):
    return output.float().square().mean()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def decay(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train_alone(policy, dtype, values=VALUES, **options):
    """Train by a step alone; return the losses and the float32 weights."""
    model = make_model()
    optimizer = adam(model)
    step = mezzo.TrainStep(
        model, loss_fn, optimizer, policy, dtype=dtype, scheduler=decay(optimizer), **options
    )
    losses = [float(step(batch)) for batch in values]
    return losses, list(mezzo.undecorate(model).parameters())


def assert_equal(actual, expected):
    assert all(map(torch.equal, actual, expected))


# -- Accelerate ------------------------------------------------------------------------------------


def start(policy="O2", dtype="float16", values=VALUES, **options):
    accelerator = use(accelerate.Accelerator(cpu=True), policy, dtype=dtype, **options)
    model = make_model()
    optimizer = adam(model)
    loader = DataLoader(values, batch_size=None)
    return accelerator, *accelerator.prepare(model, optimizer, decay(optimizer), loader)


@LEVELS
def test_a_step_of_what_an_accelerator_prepared_trains_as_a_step_alone(policy, dtype):
    accelerator, model, optimizer, scheduler, loader = start(policy, dtype, clip_norm=LIMIT)
    step = mezzo.TrainStep(model, loss_fn, optimizer)
    losses = []
    for batch in loader:
        losses.append(float(step(batch)))
        scheduler.step()
    expected, weights = train_alone(policy, dtype, clip_norm=LIMIT)
    assert losses == expected
    assert_equal(mezzo.undecorate(model).parameters(), weights)
    if dtype == "float16":
        assert accelerator.scaler.scaler is step.scaler


def test_a_skipped_step_of_an_accelerator_is_reported_and_does_not_move_the_scheduler():
    accelerator, model, optimizer, scheduler, loader = start(values=WITH_SKIP[:3])
    step = mezzo.TrainStep(model, loss_fn, optimizer)
    assert not optimizer.step_was_skipped
    seen = []
    for batch in loader:
        step(batch)
        # Loops that call it keep working: the step has stepped the optimizer.
        assert optimizer.step() is None
        scheduler.step()
        seen.append((accelerator.optimizer_step_was_skipped, scheduler.get_last_lr()[0]))
    assert seen == [(False, 1e-2 * 0.9), (True, 1e-2 * 0.9), (False, 1e-2 * 0.9 * 0.9)]


def test_an_accelerator_resumes_a_step_to_the_bit(tmp_path):
    def train(run, step, values):
        losses = []
        for batch in values:
            losses.append(float(step(batch)))
            if not step.position:
                run[3].step()
        return losses

    first, second = start(clip_norm=LIMIT), start(clip_norm=LIMIT)
    steps = [mezzo.TrainStep(run[1], loss_fn, run[2], accumulate=2) for run in (first, second)]
    train(first, steps[0], WITH_SKIP[:4])
    first[0].save_state(str(tmp_path))
    losses = train(first, steps[0], WITH_SKIP[4:])
    second[0].load_state(str(tmp_path))
    assert train(second, steps[1], WITH_SKIP[4:]) == losses
    assert second[0].scaler.state_dict() == first[0].scaler.state_dict()
    assert second[3].get_last_lr() == first[3].get_last_lr()
    assert_equal(*(mezzo.undecorate(run[1]).parameters() for run in (first, second)))


def test_the_optimizer_of_an_accelerator_steps_again_after_a_step_is_not_used_any_more():
    accelerator, model, optimizer, _, _ = start()
    step = mezzo.TrainStep(model, loss_fn, optimizer)
    step(VALUES[0])
    optimizer.step()
    accelerator.backward(loss_fn(model(VALUES[1])))
    assert not optimizer.step().skipped


def test_an_accelerator_uses_the_scaler_of_a_step_that_was_created_before(tmp_path):
    model = make_model()
    optimizer = adam(model)
    step = mezzo.TrainStep(model, loss_fn, optimizer, "O2", dtype="float16")
    accelerator = use(accelerate.Accelerator(cpu=True), "O2", dtype="float16")
    accelerator.prepare(model, optimizer)
    losses = [float(step(batch)) for batch in VALUES[:2]]
    assert accelerator.scaler.scaler is step.scaler
    assert losses == train_alone("O2", "float16", VALUES[:2])[0]


def test_clipping_that_the_optimizer_was_not_decorated_with_is_refused():
    _, model, optimizer, _, _ = start()
    with pytest.raises(mezzo.PolicyError, match=r"clip_norm=1\.0.*to mezzo's plugin or use"):
        mezzo.TrainStep(model, loss_fn, optimizer, clip_norm=1.0)


# -- transformers ----------------------------------------------------------------------------------


class Recording(MezzoTrainer):
    """A trainer that keeps the losses of its steps, and reads the rows in order."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(loss.item())
        return loss

    def _get_train_sampler(self, *_args):
        return SequentialSampler(self.train_dataset)


def make_trainer(folder, values=VALUES, *, arguments=None, **options):
    model = WithLoss()
    optimizer = adam(model)
    given = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        **(arguments or {}),
    }
    rows = [{"x": x, "labels": x.nan_to_num(0, 0, 0)[:2]} for batch in values for x in batch]
    trainer = Recording(
        model,
        transformers.TrainingArguments(str(folder), **given),
        train_dataset=rows,
        eval_dataset=rows[:2],
        optimizers=(optimizer, decay(optimizer)),
        **{"policy": "O2", "dtype": "float16", "capture": "auto", **options},
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def weights_of(trainer):
    return list(mezzo.undecorate(trainer.model).parameters())


@pytest.mark.parametrize(("policy", "dtype"), [("O1", "bfloat16"), ("O2", "float16")])
def test_a_trainer_with_captured_steps_trains_as_a_step_alone(tmp_path, policy, dtype):
    trainer = make_trainer(tmp_path, policy=policy, dtype=dtype, arguments={"max_grad_norm": LIMIT})
    trainer.train()
    model = WithLoss()
    optimizer = adam(model)
    step = mezzo.TrainStep(
        model,
        None,
        optimizer,
        policy,
        dtype=dtype,
        clip_norm=LIMIT,
        scheduler=decay(optimizer),
    )
    assert trainer.losses == [float(step(x, x[:, :2])) for x in VALUES]
    assert_equal(weights_of(trainer), mezzo.undecorate(model).parameters())
    assert trainer.mezzo_step.updates == 8


def label_loss(outputs, labels, num_items_in_batch=None):
    """A loss with products, which an autocast region around it would compute in 16 bits."""
    difference = outputs["logits"].flatten() - labels.flatten()
    return difference @ difference / num_items_in_batch


@pytest.mark.parametrize("loss", [None, label_loss])
def test_captured_steps_accumulate_and_log_as_eager_ones(tmp_path, loss):
    # Eight batches: the last update is from two of them.
    arguments = {
        "gradient_accumulation_steps": 3,
        "max_grad_norm": 0.0,
        "logging_strategy": "steps",
        "logging_steps": 1,
    }
    runs = [
        make_trainer(
            tmp_path,
            WITH_SKIP,
            arguments=arguments,
            capture=capture,
            scaler=mezzo.GradScaler("cpu", init_scale=2.0**10),
            compute_loss_func=loss,
        )
        for capture in (False, "auto")
    ]
    for trainer in runs:
        trainer.train()
    eager, captured = runs
    # Not the lists: one loss is NaN.
    assert str(captured.losses) == str(eager.losses)
    assert_equal(weights_of(captured), weights_of(eager))
    logs = [trainer.state.log_history[:-1] for trainer in runs]
    norms = [[one.pop("grad_norm") for one in log] for log in logs]
    assert str(logs[1]) == str(logs[0])
    # The norm of the skipped update is not finite.
    assert norms[1][1:] == pytest.approx(norms[0][1:], rel=1e-3)
    assert captured.mezzo_step.updates == 3


def test_a_trainer_resumes_captured_steps_to_the_bit(tmp_path):
    evaluates = {"eval_strategy": "steps", "eval_steps": 2}
    whole = make_trainer(tmp_path, WITH_SKIP, arguments=evaluates)
    whole.train()
    saves = {**evaluates, "save_strategy": "steps", "save_steps": 4}
    make_trainer(tmp_path, WITH_SKIP, arguments=saves).train()
    second = make_trainer(tmp_path, WITH_SKIP, arguments=evaluates)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert second.losses == whole.losses[4:]
    # The skipped step did not move the scheduler.
    assert second.lr_scheduler.get_last_lr() == whole.lr_scheduler.get_last_lr()
    assert whole.lr_scheduler.get_last_lr() == [pytest.approx(1e-2 * 0.9**7)]
    scales = [one.accelerator.scaler.state_dict() for one in (second, whole)]
    assert scales[0] == scales[1]
    assert_equal(weights_of(second), weights_of(whole))


def test_a_trainer_trains_again_and_evaluates_after_captured_steps(tmp_path):
    trainer = make_trainer(tmp_path)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    first = trainer.mezzo_step
    assert trainer.evaluate()["eval_loss"] < before
    trainer.train()
    assert trainer.mezzo_step is not first
    assert len(trainer.losses) == 16


def test_wrong_arguments_about_captures_are_refused(tmp_path):
    with pytest.raises(mezzo.PolicyError, match="capture 'yes'"):
        make_trainer(tmp_path, capture="yes")
    with pytest.raises(mezzo.UnsupportedError, match="the model is on cpu"):
        make_trainer(tmp_path, capture=True).train()
    trainer = make_trainer(tmp_path, decorate_options={"clip_norm": 2.0})
    with pytest.raises(mezzo.PolicyError, match=r"clip_norm=1\.0.*clip_norm=2\.0"):
        trainer.train()


# -- Fabric ----------------------------------------------------------------------------------------


def set_up(policy="O2", dtype="float16", **options):
    precision = MezzoFabricPrecision(policy, dtype=dtype, **options)
    fabric = fabric_package.Fabric(accelerator="cpu", plugins=precision)
    model = make_model()
    return fabric, precision, *fabric.setup(model, adam(model))


@LEVELS
def test_a_step_of_what_fabric_set_up_trains_as_a_step_alone(policy, dtype):
    _, precision, model, optimizer = set_up(policy, dtype, clip_norm=LIMIT)
    scheduler = decay(optimizer.optimizer)
    step = mezzo.TrainStep(model, loss_fn, optimizer, accumulate=2, scheduler=scheduler)
    losses = [float(step(batch)) for batch in VALUES]
    expected, weights = train_alone(policy, dtype, clip_norm=LIMIT, accumulate=2)
    assert losses == expected
    assert step.scaler is precision.scaler
    assert_equal(mezzo.undecorate(model.module).parameters(), weights)


def test_fabric_resumes_a_step_to_the_bit(tmp_path):
    runs = [set_up(), set_up()]
    steps = [mezzo.TrainStep(run[2], loss_fn, run[3]) for run in runs]
    states = [{"model": run[2], "optimizer": run[3], "precision": run[1]} for run in runs]
    for batch in WITH_SKIP[:3]:
        steps[0](batch)
    runs[0][0].save(tmp_path / "state.ckpt", states[0])
    runs[1][0].load(tmp_path / "state.ckpt", states[1])
    losses = [[float(step(batch)) for batch in WITH_SKIP[3:]] for step in steps]
    assert losses[0] == losses[1]
    assert runs[0][1].state_dict() == runs[1][1].state_dict()


def test_a_function_step_calls_the_model_inside_fabric():
    _, _, model, optimizer = set_up()

    @mezzo.train_step(models=model, optimizers=optimizer)
    def step(batch):
        return loss_fn(model.module(batch))

    assert [float(step(batch)) for batch in VALUES[:2]] == train_alone("O2", "float16", VALUES[:2])[
        0
    ]


# -- Lightning -------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    """A module that trains by a step, in manual optimization."""

    def __init__(self, accumulate=1):
        super().__init__()
        self.automatic_optimization = False
        self.model, self.accumulate, self.losses = make_model(), accumulate, []

    def forward(self, batch):
        return self.model(batch)

    def on_train_start(self):
        self.step = mezzo.TrainStep(
            self.trainer.strategy.model, loss_fn, self.optimizers(), accumulate=self.accumulate
        )

    def training_step(self, batch, _index):
        self.losses.append(float(self.step(batch)))
        if not self.step.position:
            # Counts the step; it is done already.
            self.optimizers().step()
            if not self.step.skipped:
                self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = adam(self.model)
        return [optimizer], [decay(optimizer)]


def fit(policy="O2", dtype="float16", values=VALUES, *, epochs=1, accumulate=1, steps=-1, **path):
    precision = MezzoPrecision(policy, dtype=dtype, clip_norm=LIMIT)
    module = Module(accumulate)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        max_steps=steps,
        plugins=[precision],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(values, batch_size=None), **path)
    return module, trainer, precision


@LEVELS
def test_a_step_in_manual_optimization_trains_as_a_step_alone(policy, dtype):
    module, trainer, precision = fit(policy, dtype)
    losses, weights = train_alone(policy, dtype, clip_norm=LIMIT)
    assert module.losses == losses
    assert_equal(module.model.parameters(), weights)
    assert module.step.scaler is precision.scaler
    assert trainer.global_step == 8


def test_lightning_counts_the_steps_of_a_step_that_accumulates():
    module, trainer, _ = fit(accumulate=2, steps=3)
    losses, _ = train_alone("O2", "float16", VALUES[:6], clip_norm=LIMIT, accumulate=2)
    assert module.losses == losses
    assert trainer.global_step == 3


def test_lightning_resumes_a_step_to_the_bit(tmp_path):
    whole, _, precision = fit(values=WITH_SKIP, epochs=2)
    first, trainer, _ = fit(values=WITH_SKIP)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    second, _, resumed = fit(values=WITH_SKIP, epochs=2, ckpt_path=tmp_path / "first.ckpt")
    assert str(first.losses + second.losses) == str(whole.losses)
    assert resumed.state_dict() == precision.state_dict()
    assert_equal(second.model.parameters(), whole.model.parameters())
