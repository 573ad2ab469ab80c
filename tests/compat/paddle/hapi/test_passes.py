"""`fit`, `evaluate` and `predict` over whole data sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mezzo.compat import paddle

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
DATA = TensorDataset(X, Y)


class Heard(paddle.callbacks.Callback):
    def __init__(self, stop_after=None):
        self.events, self.stop_after = [], stop_after

    def on_train_begin(self, logs=None):
        self.events.append("train")

    def on_epoch_begin(self, epoch, logs=None):
        self.events.append(f"epoch {epoch}")

    def on_train_batch_end(self, step, logs=None):
        self.events.append(f"step {step}")

    def on_epoch_end(self, epoch, logs=None):
        self.logs = logs
        if epoch == self.stop_after:
            self.model.stop_training = True

    def on_train_end(self, logs=None):
        self.events.append("end")


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = paddle.Model(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)))
    made.prepare(
        paddle.optimizer.Adam(learning_rate=0.05, parameters=made.parameters()),
        nn.CrossEntropyLoss(),
        paddle.metric.Accuracy(),
        amp_configs="O1",
    )
    return made


def test_training_makes_it_right_more_often(model, capsys):
    before = model.evaluate(DATA, batch_size=8, verbose=0)
    model.fit(DATA, batch_size=8, epochs=10, verbose=0)
    after = model.evaluate(DATA, batch_size=8, verbose=0)
    assert after["acc"] > before["acc"]
    assert after["loss"][0] < before["loss"][0]
    assert capsys.readouterr().out == ""


def test_callbacks_hear_every_step_and_may_end_training(model):
    heard = Heard(stop_after=0)
    model.fit(DATA, DATA, batch_size=8, epochs=5, verbose=0, callbacks=[heard])
    assert heard.events == ["train", "epoch 0", "step 0", "step 1", "step 2", "end"]
    assert heard.logs.keys() == {"loss", "acc", "eval_loss", "eval_acc"}


def test_what_is_no_callback_is_refused(model):
    with pytest.raises(
        TypeError, match=r"callbacks should be instances of callbacks.Callback, got function"
    ):
        model.fit(DATA, callbacks=[lambda: None])


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 5), (2, 3), (10, 1)])
def test_the_last_batches_of_an_epoch_are_an_update_too(accumulate, updates, model):
    model.fit(DATA, batch_size=4, verbose=0, accumulate_grad_batches=accumulate)
    assert model._scaler.state_dict()["incr_count"] == updates


def test_fewer_steps_can_be_asked_for(model):
    heard = Heard()
    model.fit(DATA, batch_size=4, verbose=0, num_iters=2, callbacks=heard)
    assert heard.events[-2:] == ["step 1", "end"]


def test_epochs_are_saved(model, tmp_path):
    model.fit(DATA, batch_size=10, epochs=2, verbose=0, save_dir=str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{ending}" for name in ("0", "1", "final") for ending in ("pdparams", "pdopt")
    }


def test_predictions_come_batch_by_batch_or_stacked(model):
    (batches,) = model.predict(DATA, batch_size=8, verbose=0)
    (stacked,) = model.predict(DATA, batch_size=8, verbose=0, stack_outputs=True)
    assert [len(batch) for batch in batches] == [8, 8, 4]
    assert np.array_equal(np.concatenate(batches), stacked)
    assert stacked.dtype == np.float16


def test_progress_says_what_paddle_says(model, capsys):
    model.fit(DATA, batch_size=10, verbose=2)
    model.evaluate(DATA, batch_size=10, verbose=2)
    model.predict(DATA, batch_size=10)
    out = capsys.readouterr().out
    assert out.startswith(
        "The loss value printed in the log is the current step, and the metric is the average value"
        " of previous steps.\nEpoch 1/1\nstep 2/2 - loss:"
    )
    assert "Eval begin...\n" in out
    assert "Eval samples: 20\n" in out
    assert out.endswith("Predict samples: 20\n")


def test_there_is_something_to_train_on(model):
    with pytest.raises(AssertionError, match="train_data must be given!"):
        model.fit()
