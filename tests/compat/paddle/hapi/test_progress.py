"""What is shown while a model works."""

from __future__ import annotations

import re

from mezzo.compat.paddle.hapi._training_loop import Progress


def shown(capsys, verbose, steps=4, log_freq=2):
    progress = Progress(verbose, log_freq, steps)
    progress.say("Epoch 1/1")
    for step in range(1, 5):
        progress.show(step, {"loss": [0.5], "acc": 0.25})
    return re.sub(r"\d+(us|ms)/step", "T", capsys.readouterr().out)


def test_nothing(capsys):
    assert shown(capsys, 0) == ""


def test_one_line_that_is_written_over(capsys):
    *_, last = shown(capsys, 1).rstrip("\n").split("\r")
    assert last == "step 4/4 [==============================] - loss: 0.5000 - acc: 0.2500 - T"


def test_a_line_every_few_steps(capsys):
    assert (
        shown(capsys, 2)
        == "Epoch 1/1\nstep 2/4 - loss: 0.5000 - acc: 0.2500 - T\nstep 4/4 - loss: 0.5000 - acc:"
        " 0.2500 - T\n"
    )


def test_the_last_step_shows_in_any_case(capsys):
    assert shown(capsys, 2, log_freq=3).splitlines()[-1].startswith("step 4/4")


def test_data_without_a_length_has_no_total(capsys):
    assert "step 2 - loss" in shown(capsys, 2, steps=None)
