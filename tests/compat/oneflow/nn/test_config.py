import pytest
import torch

from mezzo import Policy
from mezzo.compat.oneflow.nn.graph import GraphConfig

ENDS = {"cross_entropy", "nll_loss", "log_softmax", "mean", "sum"}


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ({}, Policy("O1", "float16", preset="oneflow", full=ENDS)),
        (
            {"mode": True, "dtype": torch.bfloat16},
            Policy("O1", "bfloat16", preset="oneflow", full=ENDS),
        ),
        ({"mode": False}, Policy("O0")),
    ],
    ids=["plain", "bfloat16", "off"],
)
def test_amp_becomes_a_policy(words, policy):
    config = GraphConfig()
    assert config.policy() == Policy("O0")
    config.enable_amp(**words)
    assert config.policy() == policy


@pytest.mark.parametrize("mode", [1, "yes", None], ids=repr)
def test_a_mode_that_is_no_bool_is_refused_as_there(mode):
    with pytest.raises(AssertionError, match="takes True or False"):
        GraphConfig().enable_amp(mode)


def test_other_dtypes_are_refused_as_there():
    with pytest.raises(AssertionError, match=r"takes float16 or bfloat16, got torch.float32"):
        GraphConfig().enable_amp(True, dtype=torch.float32)


def test_hints_to_the_compiler_are_taken_and_other_settings_are_not():
    GraphConfig().allow_fuse_model_update_ops(True)
    with pytest.raises(
        AttributeError, match=r"no 'set_gradient_accumulation_steps' here. There are: enable_amp"
    ):
        GraphConfig().set_gradient_accumulation_steps(4)
