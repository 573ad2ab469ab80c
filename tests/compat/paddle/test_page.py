"""The page docs/coming-from/paddle.md names what is there, and differences that it lists.

Differences of mixed precision are in amp/test_page.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mezzo.compat import paddle

PAGE = (Path(__file__).parents[3] / "docs" / "coming-from" / "paddle.md").read_text()
CALLS = PAGE.split("## The calls")[1].split("## What to use of torch")[0]
MODULES = "amp callbacks device io jit metric nn optimizer static vision".split()


def names_of_the_tables() -> set[str]:
    """Return the dotted names in the first column; later names of a cell may lack the module."""
    names = set()
    for row in re.findall(r"^\| (.*?) \|", CALLS, re.MULTILINE):
        module = ""
        for name in re.findall(r"`(?:paddle\.)?([A-Za-z_][\w.]*)", row):
            first = name.split(".")[0]
            if first in MODULES and "." in name:
                module = name.rpartition(".")[0]
                names.add(name)
            elif module and "." not in name:
                names.add(f"{module}.{name}")
            elif "." not in name and re.match(
                r"`(paddle\.|CPUPlace|enable_static|get_de|is_)", row
            ):
                names.add(name)
    return names


def find(name: str):
    value = paddle
    for attribute in name.split("."):
        value = getattr(value, attribute)
    return value


# Methods that a row of the tables has after a module or a class.
METHODS = {"optimizer.amp_init", "optimizer.get_loss_scaling", "optimizer.minimize"}
NOT_OF_A_MODULE = {
    "nn.create_parameter": paddle.nn.Layer,
    "nn.sublayers": paddle.nn.Layer,
    "nn.add_sublayer": paddle.nn.Layer,
    "nn.register_buffer": paddle.nn.Layer,
    "nn.full_name": paddle.nn.Layer,
}


def test_every_name_in_the_tables_exists():
    names = names_of_the_tables() - METHODS
    assert len(names) > 130
    missing = []
    for name in sorted(names):
        owner = NOT_OF_A_MODULE.get(name)
        try:
            find(name) if owner is None else getattr(owner, name.rpartition(".")[2])
        except AttributeError as error:
            missing.append(str(error))
    assert missing == []


@pytest.mark.parametrize("path", ["nn.Fold", "nn.functional.fold"])
def test_a_name_of_nn_that_is_missing_names_the_one_of_torch(path):
    with pytest.raises(AttributeError, match=re.escape(f"Use torch.{path}.")):
        find(path)


def test_dtypes_are_torchs():
    x = paddle.ones([2])
    assert (x.dtype, str(x.dtype)) == (paddle.float32, "torch.float32")


def test_methods_that_the_page_does_not_list_are_torchs_and_functions_are_paddles():
    x = paddle.to_tensor([2.0, 1.0])
    assert x.equal(x) is True
    assert paddle.equal(x, x).tolist() == [True, True]
    assert len(x.sort()) == 2
    assert paddle.sort(x).tolist() == [1.0, 2.0]


def test_the_attribute_of_a_batch_norm_is_one_minus_the_argument():
    assert paddle.nn.BatchNorm2D(3, momentum=0.9).momentum == pytest.approx(0.1)


def test_images_with_channels_last_are_refused():
    with pytest.raises(ValueError, match="data_format='NHWC' is not supported"):
        paddle.nn.Conv2D(1, 1, 1, data_format="NHWC")


def test_a_parameter_that_is_not_clipped_is_refused():
    with pytest.raises(ValueError, match="Give the parameter an optimizer of its own"):
        paddle.ParamAttr(need_clip=False)


def test_rmsprop_adds_epsilon_to_the_root():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = paddle.optimizer.RMSProp(
        learning_rate=1.0, parameters=[weight], rho=0.0, epsilon=1.0
    )
    weight.grad = torch.full((1,), 3.0)
    optimizer.step()
    assert weight.item() == pytest.approx(-3 / (3 + 1))


def test_of_several_places_a_loader_uses_the_first():
    loader = paddle.io.DataLoader(
        paddle.io.TensorDataset([torch.ones(2)]), places=[paddle.CPUPlace(), paddle.CPUPlace()]
    )
    assert [batch.place for (batch,) in loader] == [paddle.CPUPlace()] * 2


def test_layers_and_optimizers_of_torch_work_in_the_same_places():
    layer = torch.nn.Linear(4, 2).to(paddle.ones([1]).device)
    net = paddle.nn.Sequential(layer, paddle.nn.ReLU())
    model, optimizer = paddle.amp.decorate(
        net, torch.optim.SGD(net.parameters(), lr=0.1), level="O2"
    )
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    with paddle.amp.auto_cast(level="O2"):
        loss = model(paddle.ones([2, 4])).mean()
    scaler.minimize(optimizer, scaler.scale(loss).backward())
    assert scaler.state_dict()["incr_count"] == 1


def test_the_loss_scale_stays_finite():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=[weight])
    scaler = paddle.amp.GradScaler(init_loss_scaling=2.0**126, incr_every_n_steps=1)
    for _ in range(4):
        scaler.scale((weight * 0.0).sum()).backward()
        scaler.minimize(optimizer)
    assert np.isfinite(scaler.state_dict()["scale"].item())


def test_several_minimize_of_one_program_train_with_the_last():
    program = paddle.static.Program()
    with paddle.static.program_guard(program):
        layer = paddle.nn.Linear(2, 1, bias_attr=False).to("cpu")
        loss = layer(paddle.static.data("x", [-1, 2])).mean()
        for rate in (1.0, 0.0):
            paddle.optimizer.SGD(learning_rate=rate, parameters=layer.parameters()).minimize(loss)
    before = layer.weight.numpy().copy()
    feed = {"x": np.ones((1, 2), "float32")}
    paddle.static.Executor(paddle.CPUPlace()).run(program, feed=feed, fetch_list=[loss])
    assert np.array_equal(layer.weight.numpy(), before)


@pytest.mark.parametrize("shape", [[None, 4], (-1, 4)])
def test_an_input_spec_describes_inputs_of_a_model_and_of_to_static(shape):
    spec = paddle.static.InputSpec(shape, "float32", "x")
    assert (spec.shape, spec.dtype, spec.name) == ((-1, 4), "float32", "x")
    layer = paddle.nn.Linear(4, 1)
    model = paddle.Model(layer, inputs=[spec])
    model.prepare(loss=paddle.nn.MSELoss())
    assert len(model.eval_batch([paddle.ones([2, 4])], [paddle.ones([2, 1])])) == 1


def test_an_input_spec_is_made_of_a_tensor_or_an_array():
    assert paddle.static.InputSpec.from_tensor(paddle.ones([2, 3])).shape == (2, 3)
    array = np.zeros((2, 3), "int64")
    assert paddle.static.InputSpec.from_numpy(array, "y") == paddle.static.InputSpec(
        [2, 3], "int64", "y"
    )
    with pytest.raises(TypeError, match="'shape' in InputSpec must be list or tuple, but received"):
        paddle.static.InputSpec(4)


def test_a_list_of_elementwise_add_applies_to_numbers_too():
    with paddle.amp.auto_cast(custom_white_list={"elementwise_add"}):
        assert (paddle.ones([2]) + 1.0).dtype is paddle.float16


@pytest.mark.parametrize(("unscale", "gradient"), [(False, 8.0), (True, 1.0)])
def test_gradients_of_16_bit_parameters_are_unscaled_after_a_step_if_unscale_was_called(
    unscale, gradient
):
    layer = paddle.nn.Linear(1, 1, bias_attr=False)
    optimizer = paddle.optimizer.SGD(learning_rate=0.5, parameters=layer.parameters())
    paddle.amp.decorate(layer, optimizer, level="O2")
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    before = float(layer.weight)
    with paddle.amp.auto_cast(level="O2"):
        loss = layer(paddle.ones([1, 1])).sum()
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.minimize(optimizer)
    assert layer.weight.grad.item() == gradient
    assert before - float(layer.weight) == pytest.approx(0.5, abs=1e-2)
