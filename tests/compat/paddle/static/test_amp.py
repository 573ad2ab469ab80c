"""`static.amp.decorate` in both generations' words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle import static
from mezzo.compat.paddle.amp._grad_scaler import ScalerParameters


def optimizer(**words):
    return paddle.optimizer.SGD(
        learning_rate=0.1, parameters=[nn.Parameter(torch.ones(1))], **words
    )


def precision(*args, **words):
    return static.amp.decorate(optimizer(), *args, **words)._precision


NEWER = ScalerParameters(65536.0, 2.0, 0.5, 2000, 1, True, min_scale=1.0)
OLDER = ScalerParameters(32768.0, 2.0, 0.8, 1000, 2, True, min_scale=1.0)


@pytest.mark.parametrize(
    ("args", "words", "expected"),
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
def test_each_signature_has_its_defaults(args, words, expected):
    made = precision(*args, **words)
    assert (made.level, made.dtype, made.guarded, made.scaling) == expected


def test_every_word_of_the_newer_signature_arrives():
    made = precision(
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
    assert (made.masters, made.master_grad, made.promote, made.guarded) == (False, True, True, True)
    assert made.scaling == ScalerParameters(8.0, 5.0, 0.25, 3, 4, False, min_scale=1.0)


def test_dynamic_scaling_of_bfloat16_is_told_to_be_off():
    with pytest.warns(
        UserWarning, match="Dynamic loss scaling for bfloat16 amp training is disabled"
    ) as told:
        static.amp.decorate(optimizer(), dtype="bfloat16", use_dynamic_loss_scaling=True)
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: precision(use_pure_fp16=True, level="O2"),
            TypeError,
            "two signatures, and these words are of both: use_pure_fp16 with level",
        ),
        (
            lambda: precision(None, 128.0, dtype="float16"),
            TypeError,
            "a scale as third argument with dtype",
        ),
        (lambda: precision(level="O4"), ValueError, "level should be O0, OD, O1 or O2"),
        (lambda: precision(dtype="float32"), ValueError, "dtype should be 'float16' or 'bfloat16'"),
        (
            lambda: precision(colour="red"),
            TypeError,
            r"decorate\(\) got an unexpected keyword argument 'colour'.*takes: level, dtype",
        ),
        (
            lambda: static.amp.decorate("SGD"),
            TypeError,
            "optimizer should be an optimizer, got str",
        ),
        (
            lambda: static.amp.decorate(optimizer()).amp_init(paddle.CPUPlace()),
            AssertionError,
            "Please call the minimize method first",
        ),
        (
            lambda: static.amp.decorate(optimizer()).get_loss_scaling(),
            AssertionError,
            "Please call the minimize method first",
        ),
        (
            lambda: static.amp.decorate(optimizer()).minimize(torch.ones(())),
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
        "optimizer",
        "amp_init",
        "scale",
        "tensor",
    ],
)
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_what_is_not_mixed_precision_is_the_optimizers_own():
    assert static.amp.decorate(optimizer()).get_lr() == 0.1


def test_parameters_are_16_bit_after_amp_init_and_at_the_first_run_at_the_latest(exe, program):
    model = nn.Linear(4, 1)
    loss = model(static.data("x", [-1, 4])).mean()
    made = static.amp.decorate(
        paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters()),
        use_pure_fp16=True,
        use_fp16_guard=False,
    )
    made.minimize(loss)
    assert model.weight.dtype is torch.float32
    made.amp_init(paddle.CPUPlace(), scope=static.global_scope())
    assert model.weight.dtype is torch.float16


def test_without_scaling_the_scale_is_one(program):
    model = nn.Linear(4, 1)
    made = static.amp.decorate(
        paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters()), dtype="bfloat16"
    )
    made.minimize(model(static.data("x", [-1, 4])).mean())
    assert made.get_loss_scaling() == 1.0
