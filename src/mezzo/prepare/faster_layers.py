"""Layers with a form that is faster on a GPU, or that keeps fewer tensors for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import functional as F

from mezzo._torch import transforms_are_active
from mezzo.policy.policy import Policy
from mezzo.policy.types import Rule

MULTIPLE = 8
"""Rows of 16-bit numbers are fast if they are multiples of 16 bytes."""
_MIN_WEIGHT_ELEMENTS = 2**20
"""Below this size of a weight the extra copies cost more than they save."""
_FEW_CHANNELS = 4
"""Up to so many input channels, those of images, cuDNN takes longer than a matrix product: on an
H200 in float16 2 to 6 times as long for 16 × 16 and 4 × 4 patches; with 96 channels it does not."""


@dataclass(frozen=True, eq=False)
class FasterLayer:
    """A layer, and a form of one of its methods that is faster or takes less memory."""

    name: str
    module: nn.Module
    method: Callable[[Any, Tensor], Tensor]
    """Computes what the layer's method of this name computes."""
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"

    def apply(self) -> Callable[[], None]:
        """Replace the method of the layer; return a function that restores it."""
        name = self.method.__name__
        self.module.__dict__[name] = MethodType(self.method, self.module)
        return partial(self.module.__dict__.pop, name, None)


def find_faster_layers(
    models: Iterable[nn.Module], policy: Policy, device: str
) -> tuple[FasterLayer, ...]:
    """Return the layers that have a better form, which happens on GPUs only."""
    return tuple(_find(models, policy)) if device == "cuda" else ()


def _find(models: Iterable[nn.Module], policy: Policy) -> Iterator[FasterLayer]:
    listed = frozenset[str]().union(*map(policy.ops_with_rule, Rule))
    for model in models:
        for name, module in model.named_modules():
            is_replaced = not {"forward", "_ff_block"}.isdisjoint(module.__dict__)
            form = None if is_replaced else _form(module, listed)
            if form is not None:
                yield FasterLayer(name, module, *form)


def _form(module: nn.Module, listed: AbstractSet[str]) -> tuple[Callable[..., Tensor], str] | None:
    """Return the method of a better form and its reason, if all its ops are in no list."""
    # A subclass may do more than the layer.
    if type(module) is nn.Linear and _is_faster_padded(module):
        return _padded_linear, _padding_reason(module)
    # A rule for convolutions would not apply to a matrix product.
    if type(module) is nn.Conv2d and "conv2d" not in listed and _is_few_channel_patch(module):
        return _patch_product, _PATCH_REASON
    if type(module) in _TRANSFORMER_LAYERS and not listed & _DROPPED and _drops_relu(module):
        return _feed_forward, _DROPPED_REASON
    return None


# -- linear layers ---------------------------------------------------------------------------------


def _is_faster_padded(module: nn.Linear) -> bool:
    is_unaligned = module.out_features % MULTIPLE != 0
    return is_unaligned and module.weight.numel() >= _MIN_WEIGHT_ELEMENTS


def _padding_reason(module: nn.Linear) -> str:
    outputs = module.out_features
    return (
        f"computes {outputs + -outputs % MULTIPLE} outputs and returns {outputs}:"
        f" rows of 16-bit numbers are fast in multiples of {MULTIPLE}"
    )


def _padded_linear(module: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
    missing = -module.out_features % MULTIPLE
    weight = F.pad(module.weight, (0, 0, 0, missing))
    bias = None if module.bias is None else F.pad(module.bias, (0, missing))
    # Contiguous, as the outputs of any linear layer, because callers may use `view`.
    return F.linear(input, weight, bias)[..., : module.out_features].contiguous()


# -- convolutions of patches -----------------------------------------------------------------------

_PATCH_REASON = "computes its patches as one matrix product, which is faster for few channels"


def _is_few_channel_patch(module: nn.Conv2d) -> bool:
    """Return whether each input pixel is read once, by one window."""
    return (
        module.kernel_size == module.stride
        and module.kernel_size != (1, 1)
        and module.in_channels <= _FEW_CHANNELS
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
    )


def _patch_product(module: nn.Conv2d, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
    height, width = module.kernel_size
    # A compiled step has its own form of these convolutions; odd borders are not read by any.
    if (
        is_dynamo_compiling()
        or input.dim() != 4
        or input.shape[2] % height
        or input.shape[3] % width
    ):
        return nn.Conv2d.forward(module, input)
    rows, columns = input.shape[2] // height, input.shape[3] // width
    channels, outputs = module.in_channels, module.out_channels
    split = input.reshape(-1, channels, rows, height, columns, width)
    if input.is_contiguous():
        patches, weight = split.permute(0, 2, 4, 1, 3, 5), module.weight
    else:
        # channels_last: the channels of a pixel stay together.
        patches, weight = split.permute(0, 2, 4, 3, 5, 1), module.weight.permute(0, 2, 3, 1)
    product = F.linear(
        patches.reshape(-1, height * width * channels), weight.reshape(outputs, -1), module.bias
    )
    images = product.reshape(-1, rows, columns, outputs).permute(0, 3, 1, 2)
    # In the memory format of the input, as a convolution, because callers may use `view`.
    return images.contiguous() if input.is_contiguous() else images


# -- feed-forward blocks of torch's transformer layers ---------------------------------------------

_TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_DROPPED = {"relu", "dropout"}
_REPLACEMENTS = (
    "forward",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Attributes of a module that make a call of it do more, or something else."""
_DROPPED_REASON = "keeps one tensor of its ReLU and dropout for backward instead of three"


class _DroppedReLU(torch.autograd.Function):
    """ReLU, then dropout, with only their output kept for backward.

    Each of them keeps a tensor of 16 bits or a mask beside the output, which the next product keeps
    anyway. The output is zero exactly where one of them made it zero. Results are those of torch to
    the bit, but for one: an infinite gradient of a dropped value gives zero, and in torch NaN.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, probability: float) -> Tensor:  # noqa: A002 - torch's name
        output = F.dropout(F.relu(input), probability)
        ctx.save_for_backward(output)
        ctx.factor = 1 / (1 - probability)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (output,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(gradients[0] * ctx.factor, output, 0), None


def _drops_relu(layer: Any) -> bool:
    """Return whether a transformer layer applies a ReLU, then dropout, which does something."""
    has_relu = layer.activation in (F.relu, torch.relu) or type(layer.activation) is nn.ReLU
    return has_relu and type(layer.dropout) is nn.Dropout and 0 < layer.dropout.p < 1


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    replaced = (layer.dropout, layer.activation)
    if (
        is_compiling()
        or transforms_are_active()
        or not (layer.dropout.training and _drops_relu(layer))
        or any(
            getattr(part, "__dict__", {}).get(name) for part in replaced for name in _REPLACEMENTS
        )
    ):
        plain: Tensor = type(layer)._ff_block(layer, x)
        return plain
    hidden: Tensor = _DroppedReLU.apply(layer.linear1(x), layer.dropout.p)
    is_decoder = isinstance(layer, nn.TransformerDecoderLayer)
    last_dropout = layer.dropout3 if is_decoder else layer.dropout2
    outputs: Tensor = last_dropout(layer.linear2(hidden))
    return outputs


# A method is pickled by its name: an unpickled layer has that of its class, which returns the same.
_padded_linear.__name__ = _patch_product.__name__ = "forward"
_feed_forward.__name__ = "_ff_block"
