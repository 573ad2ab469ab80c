import pytest
import torch
from torch import nn

from mezzo import EvalStep, Policy
from mezzo.compat.oneflow.nn.graph import Evaluation, Training, Whole, program_of
from mezzo.prepare.decoration import decoration_of
from mezzo.step.train_step import FunctionStep

HALF = Policy("O1", "bfloat16", preset="oneflow")


def test_what_is_built_comes_out_in_float32_where_anything_was_cast():
    half = torch.ones(1, dtype=torch.float16)
    assert Whole(lambda: {"out": [half, 3]}, HALF, {})()["out"][0].dtype is torch.float32
    assert Whole(lambda: half, Policy("O0"), {})() is half


def test_a_training_step_leaves_no_mark_on_modules_and_optimizers():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = program_of(
        Training(lambda x: model(x).sum(), HALF, (optimizer,), (), None), {"model": model}
    )
    assert isinstance(made.run, FunctionStep)
    assert decoration_of(model) is decoration_of(optimizer) is None


def test_an_evaluation_of_modules_is_a_step():
    model = nn.Linear(2, 1)
    made = program_of(Evaluation(lambda x: model(x), HALF), {"model": model})
    assert isinstance(made.run, EvalStep)
    assert made.run(torch.ones(3, 2)).shape == (3, 1)


def test_parameters_of_nobody_are_refused():
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="no module with parameters"):
        program_of(Training(torch.sum, HALF, (optimizer,), (), None), {})
