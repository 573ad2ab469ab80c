"""Inductor pass: faster max pooling and first convolutions in compiled channels_last models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from operator import getitem
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional as F

from mezzo._dtypes import HALF_DTYPES
from mezzo._launch import has_triton
from mezzo._torch import CustomGraphPass, FakeTensor, get_hash_for_files, inductor_config
from mezzo.step import inputs, max_pool
from mezzo.step.inputs import IMAGE_DIMS, is_channels_last

Pair: TypeAlias = tuple[int, int]
Shapes: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Shapes of input and weight."""
ConvForm: TypeAlias = Callable[[Any, Any, Any, Shapes, Pair, Pair], Any]
"""Computes a convolution from input, weight, bias, shapes, stride and padding. The first three are
tensors, or proxies of them in a graph."""

_POOLS = (F.max_pool2d, torch.max_pool2d)
_DTYPES = (*HALF_DTYPES, torch.float32)
_MAX_WINDOW = 127
"""Values in a window at most: positions are stored as int8."""


def compiled(model: nn.Module) -> Any:
    """Return `torch.compile(model)` with this pass; a pass that the user has set takes precedence.

    The pass is left out where Triton does not run.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if inductor_config.pre_grad_custom_pass is not None or not has_triton(device):
        return torch.compile(model)
    return torch.compile(model, options={"pre_grad_custom_pass": ConvPoolPass(device.type)})


class ConvPoolPass(CustomGraphPass):
    """Replace calls whose outputs are channels_last images on one device type.

    Max pooling is replaced by the custom op of `max_pool.py`, a convolution of few channels by its
    fastest form.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, graph: fx.Graph) -> None:
        """Replace the calls in a graph."""
        for node in graph.nodes:
            call = _parse_call(node) if self._returns_images(node) else None
            if call is not None:
                with graph.inserting_before(node):
                    new = call.replacement(graph)
                new.meta = dict(node.meta)
                node.replace_all_uses_with(new)
                graph.erase_node(node)

    def uuid(self) -> Any:
        """Return a hash of the sources for the keys of Inductor's caches.

        A graph compiled without the pass, or with another version of it, is then not reused.
        """
        return get_hash_for_files((__file__, max_pool.__file__, inputs.__file__), self.device)

    def _returns_images(self, node: fx.Node) -> bool:
        """Return whether the output of a node is to be replaced.

        The output and not the inputs: later nodes rely on its memory format, and an autocast region
        around the model may cast the inputs to its dtype.
        """
        value = _example_value(node)
        return (
            value is not None
            and value.device.type == self.device
            and value.dtype in _DTYPES
            and value.dim() == IMAGE_DIMS
            and _has_channels_last(value)
        )


@dataclass(frozen=True)
class Pooling:
    """A max pooling call."""

    x: fx.Node
    kernel: Pair
    stride: Pair
    padding: Pair

    def replacement(self, graph: fx.Graph) -> fx.Node:
        """Add the custom op to a graph; return the node of its first output, the maxima."""
        outputs = graph.call_function(
            torch.ops.mezzo.max_pool2d.default, (self.x, self.kernel, self.stride, self.padding)
        )
        return graph.call_function(getitem, (outputs, 0))


@dataclass(frozen=True)
class Convolution:
    """A convolution of few channels."""

    operands: tuple[fx.Node, fx.Node, fx.Node | None]
    """Input, weight and bias."""
    shapes: tuple[torch.Size, torch.Size]
    """Shapes of input and weight."""
    stride: Pair
    padding: Pair
    form: ConvForm

    def replacement(self, graph: fx.Graph) -> fx.Node:
        """Add the ops of the form to a graph; return the node of the result."""
        tracer = fx.proxy.GraphAppendingTracer(graph)
        x, weight, bias = (node and fx.Proxy(node, tracer) for node in self.operands)
        result: fx.Proxy = self.form(x, weight, bias, self.shapes, self.stride, self.padding)
        return result.node


def _parse_call(node: fx.Node) -> Pooling | Convolution | None:
    """Return the arguments of a call in one form; None if it is not replaced."""
    if node.op != "call_function":
        return None
    if node.target in _POOLS:
        return _parse_pooling(*node.args, **node.kwargs)
    if node.target is torch.conv2d:
        return _parse_convolution(node.meta["example_value"].dtype, *node.args, **node.kwargs)
    return None


def _parse_pooling(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: Any = False,
    return_indices: Any = False,
) -> Pooling | None:
    kernel, strides, pads = _pair(kernel_size), _pair(stride or kernel_size), _pair(padding)
    if (
        ceil_mode
        or return_indices
        or _pair(dilation) != (1, 1)
        or kernel is None
        or strides is None
        or pads is None
        or prod(kernel) > _MAX_WINDOW
    ):
        return None
    return Pooling(input, kernel, strides, pads)


def _parse_convolution(
    dtype: torch.dtype,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
) -> Convolution | None:
    strides, pads = _pair(stride), _pair(padding)
    x, kernel = _example_value(input), _example_value(weight)
    if (
        strides is None
        or pads is None
        or _pair(dilation) != (1, 1)
        or groups != 1
        or x is None
        or kernel is None
        or x.dim() != IMAGE_DIMS
        or not all(isinstance(size, int) for size in (*x.shape[1:], *kernel.shape))
    ):
        return None
    form = fast_conv_form(kernel.shape, strides, dtype)
    if form is None:
        return None
    return Convolution((input, weight, bias), (x.shape, kernel.shape), strides, pads, form)


def _has_channels_last(value: FakeTensor) -> bool:
    _, channels, rows, columns = value.shape
    if not all(isinstance(size, int) for size in (channels, rows, columns)):
        return is_channels_last(value)
    # By strides: for the output of a convolution with a dynamic batch size, torch 2.11 returns
    # False for `is_contiguous(memory_format=torch.channels_last)`.
    return (
        channels > 1
        and rows * columns > 1
        and value.stride()[1:] == (1, columns * channels, channels)
    )


def _example_value(node: Any) -> FakeTensor | None:
    """Return the fake tensor of a node, if it has one."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, FakeTensor) else None


def _pair(value: Any) -> Pair | None:
    """Return a size for rows and columns: torch takes a number, or a sequence of one or two."""
    values = [value] if isinstance(value, int) else value
    match values:
        case [int(both)]:
            return both, both
        case [int(first), int(second)]:
            return first, second
        case _:
            return None


# -- faster forms of convolutions of few channels --------------------------------------------------

_FEW = 4
"""Convolutions of at most this many channels are replaced; cuDNN's float16 kernels for few channels
take exactly this many."""
_CHANNEL_MULTIPLE = 8
"""Channels of blocks are padded to a multiple of this."""
_MAX_BLOCKS = {torch.float16: 3, torch.bfloat16: 4}
"""Blocks that a kernel may span in either direction. 7 × 7 with stride 2 is slower in blocks in
float16, for which cuDNN has its own kernels."""


def fast_conv_form(weight: Sequence[int], stride: Pair, dtype: torch.dtype) -> ConvForm | None:
    """Return the fastest known form for a weight of this shape; None if that is `conv2d` itself.

    A kernel smaller than its stride is left alone: it does not read all of a block.

    >>> fast_conv_form((64, 3, 4, 4), (4, 4), torch.bfloat16).__name__
    'in_blocks'
    >>> fast_conv_form((64, 3, 7, 7), (2, 2), torch.float16).__name__
    'with_four'
    >>> fast_conv_form((64, 3, 3, 3), (1, 1), torch.bfloat16) is None
    True
    """
    _, channels, *kernel = weight
    if channels > _FEW or dtype not in _MAX_BLOCKS:
        return None
    if stride != (1, 1) and all(
        step <= taps <= _MAX_BLOCKS[dtype] * step for taps, step in zip(kernel, stride, strict=True)
    ):
        return in_blocks
    return with_four if dtype is torch.float16 and channels < _FEW else None


def in_blocks(x: Any, weight: Any, bias: Any, shapes: Shapes, stride: Pair, padding: Pair) -> Any:
    """Compute a convolution with the pixels of each stride-sized block as channels.

    A kernel whose size is not a multiple of the stride is padded with zeros.

    >>> x, weight = torch.randn(2, 3, 15, 16), torch.randn(8, 3, 7, 5)
    >>> out = in_blocks(x, weight, None, (x.shape, weight.shape), (2, 3), (3, 1))
    >>> torch.allclose(out, F.conv2d(x, weight, None, (2, 3), (3, 1)), atol=1e-4)
    True
    """
    (_, channels, *sizes), (_, _, *kernel) = shapes
    window, blocks, x_pads, weight_pads = [], [], [], []
    for size, taps, step, pad in zip(sizes, kernel, stride, padding, strict=True):
        window.append(-(-taps // step))
        blocks.append((size + 2 * pad - taps) // step + window[-1])
        x_pads.append(blocks[-1] * step - pad - size)
        weight_pads.append(window[-1] * step - taps)
    padded_x = F.pad(x, (padding[1], x_pads[1], padding[0], x_pads[0]))
    padded_weight = F.pad(weight, (0, weight_pads[1], 0, weight_pads[0]))
    return F.conv2d(
        _blocks(padded_x, channels, blocks, stride),
        _blocks(padded_weight, channels, window, stride),
        bias,
    )


def with_four(x: Any, weight: Any, bias: Any, shapes: Shapes, stride: Pair, padding: Pair) -> Any:
    """Compute a convolution with zero channels added, four in all."""
    pads = (0, 0, 0, 0, 0, _FEW - shapes[1][1])
    return F.conv2d(F.pad(x, pads), F.pad(weight, pads), bias, stride, padding)


def _blocks(tensor: Any, channels: int, counts: Sequence[int], stride: Pair) -> Any:
    """Return the pixels of each block as channels, in the channels_last memory format."""
    (rows, columns), (height, width) = counts, stride
    inside = height * width * channels
    split = tensor.reshape(-1, channels, rows, height, columns, width).permute(0, 2, 4, 3, 5, 1)
    return F.pad(
        split.reshape(-1, rows, columns, inside), (0, -inside % _CHANNEL_MULTIPLE)
    ).permute(0, 3, 1, 2)
