"""`paddle.static.amp`: op lists and both signatures of `decorate`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle import static
from mezzo.compat.paddle.amp._scaler_parameters import ScalerParameters
from mezzo.compat.paddle.static.amp import AutoMixedPrecisionLists, CustomOpLists


def make_optimizer():
    return paddle.optimizer.SGD(learning_rate=0.1, parameters=[nn.Parameter(torch.ones(1))])


def precision_of(*args, **kwargs):
    return static.amp.decorate(make_optimizer(), *args, **kwargs)._precision


NEWER = ScalerParameters(65536.0, 2.0, 0.5, 2000, 1, True, min_scale=1.0)
OLDER = ScalerParameters(32768.0, 2.0, 0.8, 1000, 2, True, min_scale=1.0)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, ("O1", "float16", False, NEWER)),
        ((), {"level": "O2"}, ("O2", "float16", False, NEWER)),
        ((), {"level": "O2", "use_amp_guard": True}, ("O2", "float16", True, NEWER)),
        ((None, "O2"), {}, ("O2", "float16", False, NEWER)),
        ((), {"dtype": "bfloat16"}, ("O1", "bfloat16", False, None)),
        ((), {"level": "O0"}, ("O0", "float16", False, None)),
        ((), {"use_pure_fp16": False}, ("O1", "float16", False, OLDER)),
        ((), {"use_pure_fp16": True}, ("O2", "float16", True, OLDER)),
        ((), {"use_pure_fp16": True, "use_fp16_guard": False}, ("O2", "float16", False, OLDER)),
        (
            (),
            {"use_bf16": True, "use_dynamic_loss_scaling": False},
            ("O1", "bfloat16", False, None),
        ),
        (
            (None, 128.0),
            {},
            (
                "O1",
                "float16",
                False,
                ScalerParameters(128.0, 2.0, 0.8, 1000, 2, True, min_scale=1.0),
            ),
        ),
    ],
    ids=str,
)
def test_each_signature_has_its_defaults(args, kwargs, expected):
    precision = precision_of(*args, **kwargs)
    actual = (precision.level, precision.dtype, precision.guarded, precision.scaling)
    assert actual == expected


def test_every_argument_of_the_newer_signature_is_used():
    precision = precision_of(
        level="O2",
        dtype="float16",
        master_weight=False,
        master_grad=True,
        init_loss_scaling=8.0,
        incr_every_n_steps=3,
        decr_every_n_nan_or_inf=4,
        incr_ratio=5.0,
        decr_ratio=0.25,
        use_dynamic_loss_scaling=False,
        use_amp_guard=True,
        use_promote=True,
    )
    flags = (precision.masters, precision.master_grad, precision.promote, precision.guarded)
    assert flags == (False, True, True, True)
    assert precision.scaling == ScalerParameters(8.0, 5.0, 0.25, 3, 4, False, min_scale=1.0)


def test_dynamic_scaling_with_bfloat16_warns_in_the_callers_file():
    with pytest.warns(
        UserWarning, match="Dynamic loss scaling for bfloat16 amp training is disabled"
    ) as warned:
        static.amp.decorate(make_optimizer(), dtype="bfloat16", use_dynamic_loss_scaling=True)
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: precision_of(use_pure_fp16=True, level="O2"),
            TypeError,
            "two signatures, and these arguments mix them: use_pure_fp16 with level",
        ),
        (
            lambda: precision_of(None, 128.0, dtype="float16"),
            TypeError,
            "a scale as third argument with dtype",
        ),
        (lambda: precision_of(level="O4"), ValueError, "level should be O0, OD, O1 or O2"),
        (
            lambda: precision_of(dtype="float32"),
            ValueError,
            "dtype should be 'float16' or 'bfloat16'",
        ),
        (
            lambda: precision_of(colour="red"),
            TypeError,
            r"decorate\(\) got an unexpected keyword argument 'colour'.*takes: level, dtype",
        ),
        (
            lambda: precision_of({"conv2d"}),
            TypeError,
            "amp_lists should be a CustomOpLists, got set",
        ),
        (
            lambda: precision_of(init_loss_scaling="128"),
            TypeError,
            "init_loss_scaling='128' is str. It should be a number",
        ),
        (
            lambda: static.amp.decorate(static.amp.decorate(make_optimizer())),
            TypeError,
            "got OptimizerWithMixedPrecision. It is decorated already",
        ),
        (
            lambda: static.amp.decorate(make_optimizer()).minimize("loss"),
            TypeError,
            r"minimize\(\) takes the loss of a static program.*received str",
        ),
        (
            lambda: static.amp.decorate("SGD"),
            TypeError,
            "optimizer should be an optimizer, got str",
        ),
        (
            lambda: static.amp.decorate(make_optimizer()).amp_init(paddle.CPUPlace()),
            AssertionError,
            "Please call the minimize method first",
        ),
        (
            lambda: static.amp.decorate(make_optimizer()).get_loss_scaling(),
            AssertionError,
            "Please call the minimize method first",
        ),
        (
            lambda: static.amp.decorate(make_optimizer()).minimize(torch.ones(())),
            TypeError,
            "takes the loss of a static program, got a tensor with values",
        ),
    ],
    ids=[
        "both",
        "position",
        "level",
        "dtype",
        "unknown",
        "lists",
        "scaling",
        "twice",
        "loss",
        "optimizer",
        "amp_init",
        "scale",
        "tensor",
    ],
)
def test_invalid_arguments_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_other_attributes_are_the_wrapped_optimizers():
    assert static.amp.decorate(make_optimizer()).get_lr() == 0.1


def test_amp_init_casts_parameters_to_16_bits(exe, program):
    model = nn.Linear(4, 1)
    loss = model(static.data("x", [-1, 4])).mean()
    optimizer = static.amp.decorate(
        paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters()),
        use_pure_fp16=True,
        use_fp16_guard=False,
    )
    optimizer.minimize(loss)
    assert model.weight.dtype is torch.float32
    optimizer.amp_init(paddle.CPUPlace(), scope=static.global_scope())
    assert model.weight.dtype is torch.float16


def test_without_loss_scaling_the_loss_scale_is_one(program):
    model = nn.Linear(4, 1)
    optimizer = static.amp.decorate(
        paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters()), dtype="bfloat16"
    )
    optimizer.minimize(model(static.data("x", [-1, 4])).mean())
    assert optimizer.get_loss_scaling() == 1.0


def test_custom_names_move_between_the_default_lists():
    lists = CustomOpLists(
        custom_white_list=["softmax", "elementwise_add"], custom_black_list=["matmul_v2"]
    )
    assert {"softmax", "elementwise_add", "conv2d"} <= lists.white_list
    assert {"matmul_v2", "exp"} <= lists.black_list
    assert not lists.white_list & lists.black_list
    assert "elementwise_add" not in lists.gray_list
    assert "relu" in lists.gray_list
    assert lists.half >= {"softmax", "add"}


def test_both_names_of_the_lists_are_one_class():
    assert CustomOpLists is AutoMixedPrecisionLists


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"custom_white_list": ["relu"], "custom_black_list": ["relu"]},
            "The given custom_white_list overlaps custom_black_list with < relu >!",
        ),
        ({"custom_black_varnames": ["w_0"]}, "is not supported: tensors have no names here"),
        (
            {"dtype": "float32"},
            "The dtype of the lists should be 'float16' or 'bfloat16', got 'float32'",
        ),
    ],
    ids=["overlap", "names", "dtype"],
)
def test_invalid_lists_raise(kwargs, message):
    with pytest.raises(ValueError, match=message):
        CustomOpLists(**kwargs)


@pytest.mark.parametrize("names", ["conv2d", 3, [["conv2d"]]], ids=str)
def test_a_list_that_holds_no_names_raises(names):
    with pytest.raises(TypeError, match=r"custom_white_list=.* should be a set of op names"):
        CustomOpLists(custom_white_list=names)


def test_amp_init_with_something_else_than_a_test_program_raises():
    model = nn.Linear(4, 1)
    optimizer = static.amp.decorate(
        paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
    )
    optimizer.minimize(model(static.data("x", [-1, 4])).mean())
    with pytest.raises(TypeError, match="test_program should be a Program, got str"):
        optimizer.amp_init(paddle.CPUPlace(), test_program="test")
