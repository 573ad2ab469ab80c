import pytest
import torch
from torch import nn

from mezzo.conversion import nodes
from mezzo.policy.registry import registry

X, HALF = torch.randn(4, 4), torch.randn(4, 4).to(torch.float16)

_TWO = {"where": lambda x, y: torch.where(x > 0, x, y)} | {
    name: lambda x, y, name=name: getattr(torch, name)([x, y])
    for name in ("cat", "stack", "hstack", "vstack", "dstack")
}


@pytest.mark.parametrize("name", sorted(nodes.PROMOTING))
def test_a_promoting_kernel_takes_two_dtypes_and_computes_in_the_widest(name):
    function = _TWO.get(name) or getattr(torch, name)
    widest = function(HALF.abs().float(), X.abs())
    for mixed in (function(HALF.abs(), X.abs()), function(X.abs(), HALF.abs())):
        assert mixed.dtype is widest.dtype
    assert torch.equal(function(HALF.abs(), X.abs()), widest)


@pytest.mark.parametrize(
    "function",
    [
        torch.relu,
        torch.neg,
        torch.abs,
        lambda x: x.clamp(-0.3, 0.7),
        lambda x: torch.nn.functional.max_pool2d(x[None], 2),
        lambda x: x.amax(0),
        lambda x: x.t(),
    ],
    ids=["relu", "neg", "abs", "clamp", "max_pool2d", "amax", "t"],
)
def test_exact_ops_give_the_same_numbers_rounded_before_or_after(function):
    assert torch.equal(function(X.to(torch.bfloat16)), function(X).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_batch_norm_takes_float32_parameters_beside_16_bit_inputs(dtype):
    norm = nn.BatchNorm1d(4)
    assert norm(X.to(dtype)).dtype is dtype
    assert nodes.MIXED_PARAMETERS["batch_norm"] == {"weight", "bias", "running_mean", "running_var"}


def test_what_torch_keeps_in_float32_on_gpus_is_delicate_everywhere():
    assert {"softmax", "layer_norm", "exp", "sum"} <= set(nodes.delicate_ops())
    assert not {"linear", "relu", "upsample_nearest2d"} & set(nodes.delicate_ops())


def test_the_tables_name_ops_that_exist():
    known = registry().names | nodes.STRUCTURAL | {"to", "copy"}
    assert known >= nodes.PROMOTING
    assert {
        name
        for name in nodes.VALUE_PRESERVING - known
        if not hasattr(torch.ops.aten, name) and not hasattr(torch.ops.aten, f"_{name}")
    } == set()
