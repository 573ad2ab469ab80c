import logging

import numpy as np
import pytest
import torch
from torch import nn

from mezzo.compat.mxnet import amp


def linear():
    return nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype


def softmax():
    return torch.softmax(torch.ones(2, dtype=torch.float16), 0).dtype


@pytest.mark.parametrize(
    ("word", "dtype"),
    [("float16", torch.float16), (np.float16, torch.float16), ("bfloat16", torch.bfloat16)],
    ids=repr,
)
def test_init_switches_on_and_uninit_off(word, dtype):
    amp.init(target_dtype=word)
    assert (linear(), softmax()) == (
        dtype,
        torch.float32 if dtype is torch.float16 else torch.float16,
    )
    amp.uninit()
    assert linear() is torch.float32
    amp.uninit()


def test_as_a_context_it_ends_with_the_block():
    with amp.init():
        assert linear() is torch.float16
    assert linear() is torch.float32


def test_the_log_says_so_once(caplog):
    with caplog.at_level(logging.INFO):
        amp.init()
        amp.init("bfloat16")
    assert [(one.name, one.levelname, one.getMessage()) for one in caplog.records] == [
        ("root", "INFO", "Using AMP")
    ]
    assert linear() is torch.float16


def test_a_network_that_was_made_before_is_warned_of(caplog):
    network = nn.Linear(1, 1)
    amp.init()
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert caplog.messages[0].startswith(f"Block network created in [{__file__}:")
    assert caplog.messages[0].endswith("] before AMP init.")
    assert network is not None


def test_without_a_network_nothing_is_warned_of(caplog):
    amp.init()
    assert not caplog.records


def test_lists_take_the_place_of_mxnets():
    amp.init(
        target_precision_ops=["Convolution"],
        fp32_ops=["FullyConnected"],
        conditional_fp32_ops=[("Activation", "act_type", ["relu"])],
    )
    assert nn.functional.conv1d(torch.ones(1, 1, 2), torch.ones(1, 1, 1)).dtype is torch.float16
    half = torch.ones(1, 1, dtype=torch.float16)
    assert nn.functional.linear(half, half).dtype is torch.float32
    assert (softmax(), torch.relu(half).dtype) == (torch.float16, torch.float32)


def test_other_dtypes_are_refused_as_there_and_nothing_is_switched_on():
    with pytest.raises(
        AssertionError,
        match="AMP currently supports only float16 or bfloat16 as a target_dtype, got 'int8'",
    ):
        amp.init("int8")
    with pytest.raises(AttributeError, match="MXNet has no op 'Conv'"):
        amp.init(fp32_ops=["Conv"])
    assert linear() is torch.float32


def test_a_hint_to_mxnets_compiler_says_what_to_do_instead():
    with pytest.raises(RuntimeError, match=r"mezzo.channels_last\(net\)"):
        amp.init(layout_optimization=True)
