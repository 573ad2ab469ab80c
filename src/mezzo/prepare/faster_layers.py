"""Layers that a GPU computes faster in another form: padded outputs, patches as matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

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
    """A layer and the form that is faster."""

    name: str
    module: nn.Module
    forward: Callable[[Any, Tensor], Tensor]
    """Computes what the layer computes."""
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"

    def apply(self) -> Callable[[], None]:
        """Replace the forward of the layer; return a function that restores it."""
        self.module.__dict__["forward"] = MethodType(self.forward, self.module)
        return partial(self.module.__dict__.pop, "forward", None)


def find_faster_layers(
    models: Iterable[nn.Module], policy: Policy, device: str
) -> tuple[FasterLayer, ...]:
    """Return the layers that have a faster form, which happens on GPUs only."""
    return tuple(_find(models, policy)) if device == "cuda" else ()


def _find(models: Iterable[nn.Module], policy: Policy) -> Iterator[FasterLayer]:
    # Its rule for convolutions would not apply to a matrix product.
    lists_conv = any("conv2d" in policy.ops_with_rule(rule) for rule in Rule)
    for model in models:
        for name, module in model.named_modules():
            if "forward" in module.__dict__:
                continue
            # A subclass may do more than the product.
            if type(module) is nn.Linear and _is_faster_padded(module):
                yield FasterLayer(name, module, _padded_linear, _padding_reason(module))
            elif type(module) is nn.Conv2d and not lists_conv and _is_few_channel_patch(module):
                yield FasterLayer(name, module, _patch_product, _PATCH_REASON)


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


# A method is pickled by its name: an unpickled layer has the forward of its class, which returns
# the same.
_padded_linear.__name__ = _patch_product.__name__ = "forward"
