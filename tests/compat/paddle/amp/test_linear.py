"""Custom lists and linear layers, which Paddle's guide describes as `matmul` and `elementwise_add`.

Also the dtype of a loss at O2.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mezzo.compat import paddle
from mezzo.compat.paddle import static

HALF, FULL = torch.float16, torch.float32
ADD = {"elementwise_add"}


def outputs(layer, **kwargs):
    x = paddle.to_tensor(np.ones((2, 4), "float32"), place="cpu")
    with paddle.amp.auto_cast(**kwargs):
        return layer(x)


@pytest.mark.parametrize(
    ("kwargs", "dtype"),
    [
        ({}, HALF),
        ({"custom_white_list": ADD}, HALF),
        ({"custom_black_list": ADD}, FULL),
        ({"custom_black_list": {"matmul_v2"}}, FULL),
        ({"custom_black_list": ADD, "enable": False}, FULL),
        ({"custom_black_list": ADD, "level": "O2"}, FULL),
        ({"level": "O2"}, HALF),
    ],
    ids=str,
)
def test_elementwise_add_in_the_black_list_adds_the_bias_in_float32(kwargs, dtype):
    layer = paddle.nn.Linear(4, 3).to("cpu")
    assert outputs(layer, **kwargs).dtype is dtype


def test_only_the_sum_with_the_bias_is_float32():
    layer = paddle.nn.Linear(4, 3).to("cpu")
    layer.bias.set_value(np.full(3, 1e-6, "float32"))
    with_bias = outputs(layer, custom_black_list=ADD)
    layer.bias.set_value(np.zeros(3, "float32"))
    product = outputs(layer)
    assert product.dtype is HALF
    assert torch.equal(with_bias, product.float() + 1e-6)


def test_a_linear_layer_without_a_bias_has_nothing_to_add():
    layer = paddle.nn.Linear(4, 3, bias_attr=False).to("cpu")
    assert outputs(layer, custom_black_list=ADD).dtype is HALF


def test_a_linear_layer_of_torch_is_one_op():
    assert outputs(torch.nn.Linear(4, 3), custom_black_list=ADD).dtype is HALF


@pytest.mark.parametrize(("name", "dtype"), [("white", np.float16), ("black", np.float32)])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_elementwise_add_in_a_list_of_a_static_program_applies_to_linear_layers(name, dtype, level):
    program = static.Program()
    with static.program_guard(program, static.Program()):
        layer = paddle.nn.Linear(4, 3)
        out = layer(static.data("x", [-1, 4]))
        lists = static.amp.CustomOpLists(**{f"custom_{name}_list": ["elementwise_add"]})
        optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=layer.parameters())
        static.amp.decorate(optimizer, lists, level=level).minimize(out.square().mean())
    exe = static.Executor(paddle.CPUPlace())
    (value,) = exe.run(program, feed={"x": np.ones((2, 4), "float32")}, fetch_list=[out])
    assert value.dtype == dtype


@pytest.mark.parametrize(
    ("kwargs", "label", "dtype"),
    [
        ({"level": "O2"}, "float32", FULL),
        ({"level": "O2"}, "float16", HALF),
        ({"level": "O2", "use_promote": False}, "float32", HALF),
        ({"level": "O1"}, "float32", FULL),
    ],
    ids=str,
)
def test_the_dtype_of_a_loss_is_that_of_paddle_3(kwargs, label, dtype):
    model = paddle.amp.decorate(models=paddle.nn.Linear(4, 3).to("cpu"), level="O2")
    labels = paddle.to_tensor(np.ones((2, 3), label), place="cpu")
    with paddle.amp.auto_cast(**kwargs):
        output = model(paddle.to_tensor(np.ones((2, 4), "float32"), place="cpu"))
        loss = paddle.nn.MSELoss()(output, labels)
    assert output.dtype is HALF
    assert loss.dtype is dtype
