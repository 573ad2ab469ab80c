"""The Trainer of transformers with mezzo, against a plain loop with mezzo."""

import pytest
import torch
from torch import nn
from torch.utils.data import SequentialSampler

import mezzo

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from mezzo.integrations.transformers import MezzoTrainer, MezzoTrainerMixin  # noqa: E402

VALUES = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(0))
"""Eight batches of two rows."""
LEVELS = [("O1", "bfloat16"), ("O1", "float16"), ("O2", "bfloat16"), ("O2", "float16")]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": (logits.float() - labels).square().mean(), "logits": logits}


class Recording(MezzoTrainer):
    """A trainer that keeps the losses of its steps, and reads the rows in order."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(loss.item())
        return loss

    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)


def rows(values):
    return [{"x": x, "labels": x.nan_to_num(0, 0)[:2]} for batch in values for x in batch]


def arguments(folder, **options):
    return transformers.TrainingArguments(
        str(folder),
        **{
            "use_cpu": True,
            "per_device_train_batch_size": 2,
            "num_train_epochs": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "logging_strategy": "no",
            "dataloader_pin_memory": False,
            **options,
        },
    )


def optimizer_and_scheduler(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def make_trainer(folder, policy, dtype, values=VALUES, model=None, **options):
    model = model or Model()
    trainer = Recording(
        model,
        arguments(folder, **options),
        train_dataset=rows(values),
        eval_dataset=rows(values[:1]),
        optimizers=optimizer_and_scheduler(model),
        policy=policy,
        dtype=dtype,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def train_plain(policy, dtype, values=VALUES, *, every=1):
    model = Model()
    optimizer, scheduler = optimizer_and_scheduler(model)
    mezzo.decorate(model, optimizer, policy, dtype=dtype)
    scaler = mezzo.GradScaler("cpu", enabled=dtype == "float16")
    losses = []
    for index, x in enumerate(values):
        loss = model(x, x.nan_to_num(0, 0)[:, :2])["loss"] / every
        losses.append(loss.item())
        scaler.scale(loss).backward()
        if (index + 1) % every == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not scaler.step(optimizer).skipped:
                scheduler.step()
            scaler.update()
            optimizer.zero_grad()
    return losses, list(mezzo.undecorate(model).parameters())


def assert_equal(actual, expected):
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize(("policy", "dtype"), LEVELS)
def test_trainer_trains_as_the_plain_loop(tmp_path, policy, dtype):
    trainer = make_trainer(tmp_path, policy, dtype)
    trainer.train()
    losses, weights = train_plain(policy, dtype)
    assert trainer.losses == losses
    assert_equal(mezzo.undecorate(trainer.model).parameters(), weights)


def test_trainer_accumulates(tmp_path):
    trainer = make_trainer(tmp_path, "O2", "float16", gradient_accumulation_steps=2)
    trainer.train()
    losses, weights = train_plain("O2", "float16", every=2)
    assert trainer.losses == losses
    assert_equal(mezzo.undecorate(trainer.model).parameters(), weights)


def test_a_skipped_step_does_not_move_the_scheduler(tmp_path):
    values = VALUES[:3].clone()
    values[1] = torch.inf
    trainer = make_trainer(tmp_path, "O2", "float16", values)
    trainer.train()
    assert trainer.lr_scheduler.get_last_lr() == [pytest.approx(1e-2 * 0.9**2)]
    assert trainer.accelerator.scaler.state_dict()["scale"] == 2.0**15
    assert_equal(
        mezzo.undecorate(trainer.model).parameters(), train_plain("O2", "float16", values)[1]
    )


def test_trainer_resumes_to_the_bit(tmp_path):
    values = VALUES.clone()
    values[1] = torch.inf
    whole = make_trainer(tmp_path / "whole", "O2", "float16", values)
    whole.train()
    first = make_trainer(
        tmp_path / "first", "O2", "float16", values, save_strategy="steps", save_steps=4
    )
    first.train()
    second = make_trainer(tmp_path / "second", "O2", "float16", values)
    second.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-4"))
    assert second.losses == whole.losses[4:]
    assert_equal(
        mezzo.undecorate(second.model).parameters(), mezzo.undecorate(whole.model).parameters()
    )
    scales = [one.accelerator.scaler.state_dict() for one in (second, whole)]
    assert scales[0] == scales[1]


def test_evaluation_before_and_after_training(tmp_path):
    trainer = make_trainer(tmp_path, "O2", "float16", bf16=False)
    before = trainer.evaluate()["eval_loss"]
    assert trainer.model.net[0].weight.dtype is torch.float32
    trainer.train()
    assert trainer.model.net[0].weight.dtype is torch.float16
    assert trainer.evaluate()["eval_loss"] < before
    # A second call trains the same model further.
    trainer.train()
    assert len(trainer.losses) == 16


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_a_cast_of_the_model_for_evaluation_is_refused(tmp_path, name):
    with pytest.raises(mezzo.PolicyError, match=rf"{name}=True\) casts the model"):
        make_trainer(tmp_path, "O2", "bfloat16", **{name: True})


def test_a_language_model_is_trained_and_saved_in_float32(tmp_path):
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.arange(32).reshape(8, 4) % 16
    data = [{"input_ids": row, "labels": row} for row in tokens]

    class Trainer(MezzoTrainerMixin, transformers.Trainer):
        pass

    trainer = Trainer(model, arguments(tmp_path, bf16=True), train_dataset=data, policy="O2")
    trainer.remove_callback(transformers.PrinterCallback)
    assert trainer.train().training_loss < 4.0
    assert model.transformer.h[0].mlp.c_fc.weight.dtype is torch.bfloat16
    trainer.save_model(tmp_path / "saved")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert_equal(loaded.parameters(), mezzo.undecorate(model).parameters())
