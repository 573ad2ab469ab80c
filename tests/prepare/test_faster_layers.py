"""Layers that are computed in a faster form on GPUs: padded linear layers, convolved patches."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import mezzo
from mezzo.prepare.faster_layers import find_faster_layers

ODD = 1025
O2 = mezzo.Policy(level="O2", dtype="float16")


class Subclass(nn.Linear):
    """May override `forward`."""


def found(model: nn.Module, policy: mezzo.Policy = O2) -> list[str]:
    return [layer.name for layer in find_faster_layers([model], policy, "cuda")]


def linear_layers() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "head": nn.Linear(1024, ODD),
            "even": nn.Linear(1024, 1024),
            "small": nn.Linear(8, 9),
            "subclass": Subclass(1024, ODD),
        }
    )


def patch_layers() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "patches": nn.Conv2d(3, 8, 4, stride=4),
            "valid": nn.Conv2d(3, 8, (4, 2), stride=(4, 2), padding="valid"),
            "overlapping": nn.Conv2d(3, 8, 7, stride=4),
            "padded": nn.Conv2d(3, 8, 4, stride=4, padding=1),
            "many channels": nn.Conv2d(96, 8, 2, stride=2),
            "points": nn.Conv2d(3, 8, 1),
            "groups": nn.Conv2d(3, 9, 4, stride=4, groups=3),
            "dilated": nn.Conv2d(3, 8, 2, stride=2, dilation=2),
            "one dimension": nn.Conv1d(3, 8, 4, stride=4),
        }
    )


def test_large_linear_layers_with_unaligned_rows_are_found_on_a_gpu():
    assert found(linear_layers()) == ["head"]
    assert find_faster_layers([linear_layers()], O2, "cpu") == ()


def test_convolutions_of_image_patches_are_found():
    assert found(patch_layers()) == ["patches", "valid"]


@pytest.mark.parametrize(("make", "name"), [(linear_layers, "head"), (patch_layers, "patches")])
def test_a_layer_with_a_replaced_forward_is_left_alone(make, name):
    model = make()
    model[name].forward = lambda x: x
    assert name not in found(model)


def test_convolutions_are_left_alone_if_the_policy_has_a_rule_for_them():
    assert found(patch_layers(), mezzo.Policy(level="O2", full={"conv2d"})) == []


def test_descriptions_give_the_reason():
    (padded,) = find_faster_layers([linear_layers()], O2, "cuda")
    assert str(padded) == (
        "head computes 1032 outputs and returns 1025:"
        " rows of 16-bit numbers are fast in multiples of 8"
    )
    first, _ = find_faster_layers([patch_layers()], O2, "cuda")
    assert str(first).startswith("patches computes its patches as one matrix product")


def apply(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer in its faster form."""
    copied = copy.deepcopy(layer)
    (faster,) = find_faster_layers([nn.Sequential(copied)], O2, "cuda")
    faster.apply()
    return copied


def assert_equal_results(layer: nn.Module, faster: nn.Module, x: torch.Tensor) -> None:
    results = []
    for one in (layer, faster):
        inputs = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        outputs = one(inputs)
        torch.manual_seed(1)
        outputs.backward(torch.randn(outputs.shape, dtype=outputs.dtype))
        results.append([outputs, inputs.grad, *(value.grad for value in one.parameters())])
    for expected, value in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)
    assert results[0][0].stride() == results[1][0].stride()


@pytest.mark.parametrize("bias", [True, False])
def test_a_padded_layer_gives_the_outputs_and_gradients_of_the_plain_one(bias):
    plain = nn.Linear(1024, ODD, bias=bias).double()
    assert_equal_results(plain, apply(plain), torch.randn(3, 2, 1024, dtype=torch.float64))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_patches_give_the_outputs_and_gradients_of_the_convolution(bias, memory_format):
    plain = nn.Conv2d(3, 8, (4, 2), stride=(4, 2), bias=bias).double()
    x = torch.randn(2, 3, 12, 10, dtype=torch.float64).to(memory_format=memory_format)
    assert_equal_results(plain, apply(plain), x)


@pytest.mark.parametrize("shape", [(2, 3, 13, 12), (2, 3, 12, 15), (3, 12, 16)])
def test_borders_that_no_patch_reads_and_single_images_run_as_a_convolution(shape):
    plain = nn.Conv2d(3, 8, 4, stride=4).double()
    assert_equal_results(plain, apply(plain), torch.randn(shape, dtype=torch.float64))


def test_slices_of_a_batch_are_read_correctly():
    plain = nn.Conv2d(3, 8, 4, stride=4).double()
    whole = torch.randn(4, 6, 16, 24, dtype=torch.float64)
    for x in (whole[::2, 1:4, 4:12, 8:], whole.transpose(2, 3)[:, :3], whole[:, :3].flip(3)):
        torch.testing.assert_close(apply(plain)(x), plain(x), rtol=1e-11, atol=1e-11)


def test_results_are_in_the_dtype_of_autocast():
    layer = apply(nn.Conv2d(3, 8, 4, stride=4))
    x = torch.ones(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(1024, ODD), (2, 1024)), (nn.Conv2d(3, 8, 4, stride=4), (2, 3, 8, 8))],
    ids=["linear", "convolution"],
)
def test_undo_and_pickle_give_the_forward_of_the_class(layer, shape):
    layer = copy.deepcopy(layer)
    (faster,) = find_faster_layers([layer], O2, "cuda")
    undo = faster.apply()
    assert "forward" in layer.__dict__
    loaded = pickle.loads(pickle.dumps(layer))
    assert loaded.forward.__func__ is type(layer).forward
    x = torch.randn(shape)
    torch.testing.assert_close(loaded(x), layer(x))
    undo()
    assert "forward" not in layer.__dict__


def test_linear_outputs_are_contiguous():
    assert apply(nn.Linear(1024, ODD))(torch.ones(2, 1024)).view(-1).shape == (2 * ODD,)
