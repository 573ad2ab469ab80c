"""Layers with a better form on GPUs: padded linear layers, patches, feed-forward blocks."""

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
        torch.manual_seed(1)
        outputs = one(inputs)
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
    ("layer", "method", "shape"),
    [
        (nn.Linear(1024, ODD), "forward", (2, 1024)),
        (nn.Conv2d(3, 8, 4, stride=4), "forward", (2, 3, 8, 8)),
        (nn.TransformerEncoderLayer(8, 2), "_ff_block", (3, 5, 8)),
    ],
    ids=["linear", "convolution", "transformer layer"],
)
def test_undo_and_pickle_give_the_method_of_the_class(layer, method, shape):
    layer = copy.deepcopy(layer)
    (faster,) = find_faster_layers([layer], O2, "cuda")
    undo = faster.apply()
    assert method in layer.__dict__
    loaded = pickle.loads(pickle.dumps(layer))
    assert getattr(loaded, method).__func__ is getattr(type(layer), method)
    x = torch.randn(shape)
    results = []
    for one in (layer, loaded):
        torch.manual_seed(0)
        results.append(one(x))
    torch.testing.assert_close(*results)
    undo()
    assert method not in layer.__dict__


def test_linear_outputs_are_contiguous():
    assert apply(nn.Linear(1024, ODD))(torch.ones(2, 1024)).view(-1).shape == (2 * ODD,)


# -- feed-forward blocks ---------------------------------------------------------------------------

WIDTH = 8


class Decoder(nn.TransformerDecoderLayer):
    """May override `_ff_block`."""


class OwnMemory(nn.Module):
    """A decoder layer whose input is its memory too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 4 * WIDTH, 0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


def encoder_layer(dropout: float = 0.3, activation="relu") -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout, activation, batch_first=True)


def test_transformer_layers_with_relu_and_dropout_are_found():
    layers = {
        "encoder": encoder_layer(),
        "module": encoder_layer(activation=nn.ReLU()),
        "decoder": nn.TransformerDecoderLayer(WIDTH, 2),
        "gelu": encoder_layer(activation="gelu"),
        "no dropout": encoder_layer(0.0),
        "all dropped": encoder_layer(1.0),
        "subclass": Decoder(WIDTH, 2),
    }
    assert found(nn.ModuleDict(layers)) == ["encoder", "module", "decoder"]


@pytest.mark.parametrize("op", ["relu", "dropout"])
def test_transformer_layers_are_left_alone_if_the_policy_has_a_rule_for_a_part(op):
    assert found(encoder_layer(), mezzo.Policy(level="O2", full={op})) == []


def test_a_transformer_layer_with_a_replaced_block_is_left_alone():
    layer = encoder_layer()
    layer._ff_block = lambda x: x
    assert found(layer) == []


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [encoder_layer, OwnMemory])
def test_a_feed_forward_block_gives_the_outputs_and_gradients_of_the_plain_one(make, training):
    plain = make().double().train(training)
    assert_equal_results(plain, apply(plain), torch.randn(3, 5, WIDTH, dtype=torch.float64))


def hidden_tensors_kept(layer: nn.Module) -> int:
    """Return how many tensors as large as the hidden one a training pass keeps for backward."""
    x = torch.randn(3, 5, WIDTH)
    hidden, storages = x.numel() * 4, set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == hidden and not isinstance(tensor, nn.Parameter):
            storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(x)
    output.sum().backward()
    return len(storages)


def test_a_feed_forward_block_keeps_one_hidden_tensor_for_backward():
    layer = encoder_layer()
    assert (hidden_tensors_kept(layer), hidden_tensors_kept(apply(layer))) == (3, 1)


def test_infinite_and_nan_gradients_and_values_pass_a_feed_forward_block():
    layer = encoder_layer()
    # Layer norms after the block would hide what it returns.
    expected, value = layer, apply(layer)
    for position in range(WIDTH):
        x = torch.randn(1, 2, WIDTH)
        x[..., position] = (torch.inf, torch.nan)[position % 2]
        results = []
        for one in (expected, value):
            inputs = x.clone().requires_grad_()
            torch.manual_seed(position)
            one._ff_block(inputs).backward(torch.full((1, 2, WIDTH), torch.inf))
            results.append(inputs.grad.isfinite())
        assert torch.equal(*results)


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_in_a_feed_forward_block_are_called(register):
    layer = apply(encoder_layer())
    called = []
    getattr(layer.dropout, register)(lambda *_: called.append("dropout"))
    layer(torch.randn(3, 5, WIDTH)).sum().backward()
    assert called == ["dropout"]


def test_a_replaced_forward_in_a_feed_forward_block_is_called():
    layer = apply(encoder_layer())
    layer.dropout.forward = torch.zeros_like
    bias = layer.linear2.bias.expand(1, 2, WIDTH)
    layer.dropout2.eval()
    assert torch.equal(layer._ff_block(torch.randn(1, 2, WIDTH)), bias)


def test_a_feed_forward_block_runs_in_a_transform_of_other_tensors():
    plain = encoder_layer()
    x, weights = torch.randn(3, 5, WIDTH), torch.ones(3, 5, WIDTH)
    gradients = []
    for layer in (plain, apply(plain)):
        torch.manual_seed(0)
        gradients.append(torch.func.grad(lambda y, ff=layer._ff_block: (ff(x) * y).sum())(weights))
    assert torch.equal(*gradients)


def test_a_feed_forward_block_is_differentiated_twice():
    layer = encoder_layer().double()
    x = torch.randn(1, 2, WIDTH, dtype=torch.float64)
    gradients = []
    for one in (layer, apply(layer)):
        inputs = x.clone().requires_grad_()
        torch.manual_seed(0)
        (gradient,) = torch.autograd.grad(
            one._ff_block(inputs).square().sum(), inputs, create_graph=True
        )
        gradients.append(torch.autograd.grad(gradient.square().sum(), inputs)[0])
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)
