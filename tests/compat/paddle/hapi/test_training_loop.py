"""`paddle.Model`: `fit`, `evaluate` and `predict`, data loading and progress."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mezzo.compat import paddle
from mezzo.compat.paddle.hapi._training_loop import (
    Progress,
    count_inputs,
    make_loader,
    to_device,
)

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
DATA = TensorDataset(X, Y)


class Recorder(paddle.callbacks.Callback):
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
    model = paddle.Model(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)))
    model.prepare(
        paddle.optimizer.Adam(learning_rate=0.05, parameters=model.parameters()),
        nn.CrossEntropyLoss(),
        paddle.metric.Accuracy(),
        amp_configs="O1",
    )
    return model


def test_training_raises_accuracy_and_lowers_the_loss(model, capsys):
    before = model.evaluate(DATA, batch_size=8, verbose=0)
    model.fit(DATA, batch_size=8, epochs=10, verbose=0)
    after = model.evaluate(DATA, batch_size=8, verbose=0)
    assert after["acc"] > before["acc"]
    assert after["loss"][0] < before["loss"][0]
    assert capsys.readouterr().out == ""


def test_callbacks_are_called_at_every_step_and_can_end_training(model):
    recorder = Recorder(stop_after=0)
    model.fit(DATA, DATA, batch_size=8, epochs=5, verbose=0, callbacks=[recorder])
    assert recorder.events == ["train", "epoch 0", "step 0", "step 1", "step 2", "end"]
    assert recorder.logs.keys() == {"loss", "acc", "eval_loss", "eval_acc"}


def test_a_callback_of_another_type_raises(model):
    with pytest.raises(
        TypeError, match=r"callbacks should be instances of callbacks.Callback, got function"
    ):
        model.fit(DATA, callbacks=[lambda: None])


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 5), (2, 3), (10, 1)])
def test_the_last_batches_of_an_epoch_are_an_update_even_if_fewer(accumulate, updates, model):
    model.fit(DATA, batch_size=4, verbose=0, accumulate_grad_batches=accumulate)
    assert model._scaler.state_dict()["incr_count"] == updates


def test_num_iters_limits_the_steps(model):
    recorder = Recorder()
    model.fit(DATA, batch_size=4, verbose=0, num_iters=2, callbacks=recorder)
    assert recorder.events[-2:] == ["step 1", "end"]


def test_fit_saves_every_epoch_and_the_final_state(model, tmp_path):
    model.fit(DATA, batch_size=10, epochs=2, verbose=0, save_dir=str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{ending}" for name in ("0", "1", "final") for ending in ("pdparams", "pdopt")
    }


def test_predictions_are_per_batch_or_stacked(model):
    (batches,) = model.predict(DATA, batch_size=8, verbose=0)
    (stacked,) = model.predict(DATA, batch_size=8, verbose=0, stack_outputs=True)
    assert [len(batch) for batch in batches] == [8, 8, 4]
    assert np.array_equal(np.concatenate(batches), stacked)
    assert stacked.dtype == np.float16


def test_fit_evaluate_and_predict_print_what_paddle_prints(model, capsys):
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


def test_fit_without_data_raises(model):
    with pytest.raises(AssertionError, match="train_data must be given!"):
        model.fit()


NUMBERS = TensorDataset(torch.arange(10.0))


def test_a_data_set_is_loaded_in_batches():
    assert [len(batch[0]) for batch in make_loader(NUMBERS, batch_size=4)] == [4, 4, 2]
    assert [len(batch[0]) for batch in make_loader(NUMBERS, batch_size=4, drop_last=True)] == [4, 4]


def test_shuffling_follows_torchs_seed():
    def order():
        torch.manual_seed(3)
        return [
            value.item()
            for batch in make_loader(NUMBERS, batch_size=5, shuffle=True)
            for value in batch[0]
        ]

    assert order() == order()
    assert order() != sorted(order())
    assert sorted(order()) == NUMBERS.tensors[0].tolist()


def test_loaders_and_lists_of_batches_are_used_unchanged():
    loader, batches = DataLoader(NUMBERS), [(torch.ones(1),)]
    assert make_loader(loader, batch_size=4) is loader
    assert make_loader(batches, batch_size=4) is batches


def test_data_that_is_not_iterable_raises():
    with pytest.raises(
        TypeError,
        match=r"should be a paddle.io.Dataset or DataLoader, or an iterable of batches, got int",
    ):
        make_loader(3, batch_size=1)


def test_inputs_are_as_many_as_forward_requires():
    class TwoInputs(nn.Module):
        def forward(self, first, second, mask=None):
            return first + second

    assert count_inputs(TwoInputs().forward) == 2
    assert count_inputs(lambda *values: values) == 1


def test_numbers_become_tensors():
    assert [value.tolist() for value in to_device([1, [2.0]], torch.device("cpu"))] == [1, [2.0]]


def printed(capsys, verbose, steps=4, log_freq=2):
    progress = Progress(verbose, log_freq, steps)
    progress.write_line("Epoch 1/1")
    for step in range(1, 5):
        progress.show_step(step, {"loss": [0.5], "acc": 0.25})
    return re.sub(r"\d+(us|ms)/step", "T", capsys.readouterr().out)


def test_verbose_0_prints_nothing(capsys):
    assert printed(capsys, 0) == ""


def test_verbose_1_overwrites_one_line_with_a_bar(capsys):
    *_, last = printed(capsys, 1).rstrip("\n").split("\r")
    assert last == "step 4/4 [==============================] - loss: 0.5000 - acc: 0.2500 - T"


def test_verbose_2_prints_a_line_every_log_freq_steps(capsys):
    assert (
        printed(capsys, 2) == "Epoch 1/1\nstep 2/4 - loss: 0.5000 - acc: 0.2500 - T\n"
        "step 4/4 - loss: 0.5000 - acc: 0.2500 - T\n"
    )


def test_the_last_step_is_always_printed(capsys):
    assert printed(capsys, 2, log_freq=3).splitlines()[-1].startswith("step 4/4")


def test_data_without_a_length_is_printed_without_a_total(capsys):
    assert "step 2 - loss" in printed(capsys, 2, steps=None)
