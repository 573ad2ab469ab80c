"""Replace max pooling and first convolutions in models that Inductor compiles."""

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
from mezzo.step.inputs import IMAGES, is_channels_last

Pair: TypeAlias = tuple[int, int]
Form: TypeAlias = Callable[[Any, Any, Any, tuple[Sequence[int], Sequence[int]], Pair, Pair], Any]
"""Input, weight and bias, the shapes of the first two, stride and padding: tensors, or what
stands for them in a graph."""

_FEW = 4
"""Channels that are few, and those that kernels for few channels in float16 have."""
_TOGETHER = 8
"""Channels that blocks have come in multiples of it."""
_BLOCKS = {torch.float16: 3, torch.bfloat16: 4}
"""How many blocks a kernel may reach over in either direction: 7 × 7 by 2 is slower on them in
float16, for which cuDNN has kernels of its own."""


def fast_conv_form(weight: Sequence[int], stride: Pair, dtype: torch.dtype) -> Form | None:
    """The fastest known form for a weight of this shape; None is as it is. A kernel that is smaller than its stride does not look at all of a block.

    >>> [form and form.__name__ for form in (fast_conv_form((64, 3, 4, 4), (4, 4), torch.bfloat16), fast_conv_form((64, 3, 7, 7), (2, 2), torch.float16))]
    ['in_blocks', 'with_four']
    >>> fast_conv_form((64, 3, 3, 3), (1, 1), torch.bfloat16), fast_conv_form((64, 16, 4, 4), (4, 4), torch.float16)
    (None, None)
    """
    _, channels, *kernel = weight
    if channels > _FEW or dtype not in _BLOCKS:
        return None
    if stride != (1, 1) and all(
        step <= taps <= _BLOCKS[dtype] * step for taps, step in zip(kernel, stride, strict=True)
    ):
        return in_blocks
    return with_four if dtype is torch.float16 and channels < _FEW else None


def in_blocks(
    x: Any,
    weight: Any,
    bias: Any,
    shapes: tuple[Sequence[int], Sequence[int]],
    stride: Pair,
    padding: Pair,
) -> Any:
    """With the pixels of a block as channels. Blocks reach over the edge of a kernel whose size is no multiple of the stride; weights there are 0.

    >>> x, weight = torch.randn(2, 3, 15, 16), torch.randn(8, 3, 7, 5)
    >>> out = in_blocks(x, weight, None, (x.shape, weight.shape), (2, 3), (3, 1))
    >>> torch.allclose(out, F.conv2d(x, weight, None, (2, 3), (3, 1)), atol=1e-4)
    True
    """
    (_, channels, *sizes), (_, _, *kernel) = shapes
    window, blocks, beyond, spare = [], [], [], []
    for size, taps, step, pad in zip(sizes, kernel, stride, padding, strict=True):
        window.append(-(-taps // step))
        blocks.append((size + 2 * pad - taps) // step + window[-1])
        beyond.append(blocks[-1] * step - pad - size)
        spare.append(window[-1] * step - taps)
    images = _blocks(
        F.pad(x, (padding[1], beyond[1], padding[0], beyond[0])), channels, blocks, stride
    )
    return F.conv2d(
        images, _blocks(F.pad(weight, (0, spare[1], 0, spare[0])), channels, window, stride), bias
    )


def with_four(
    x: Any,
    weight: Any,
    bias: Any,
    shapes: tuple[Sequence[int], Sequence[int]],
    stride: Pair,
    padding: Pair,
) -> Any:
    """With zeros for the channels that are missing."""
    spare = (0, 0, 0, 0, 0, _FEW - shapes[1][1])
    return F.conv2d(F.pad(x, spare), F.pad(weight, spare), bias, stride, padding)


def _blocks(tensor: Any, channels: int, counts: Sequence[int], stride: Pair) -> Any:
    """Pixels of a block as channels, in memory innermost as channels are in `channels_last`."""
    (rows, columns), (height, width) = counts, stride
    inside = height * width * channels
    apart = tensor.reshape(-1, channels, rows, height, columns, width).permute(0, 2, 4, 3, 5, 1)
    return F.pad(apart.reshape(-1, rows, columns, inside), (0, -inside % _TOGETHER)).permute(
        0, 3, 1, 2
    )


_POOLS = (F.max_pool2d, torch.max_pool2d)
_DTYPES = (*HALF_DTYPES, torch.float32)
_PLACES = 127
"""The largest window whose places an int8 can tell."""


def compiled(model: nn.Module) -> Any:
    """The model as `torch.compile` makes it. A pass that the user has given Inductor stays, and keeps ours out."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if inductor_config.pre_grad_custom_pass is not None or not has_triton(device):
        return torch.compile(model)
    return torch.compile(model, options={"pre_grad_custom_pass": ConvPoolPass(device.type)})


class ConvPoolPass(CustomGraphPass):
    """A pass over what a model calls, for images with channels last: max pooling goes to the ops of `pool.py`, a first convolution to `stem.py`."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, graph: fx.Graph) -> None:
        """Replace such calls."""
        for node in graph.nodes:
            call = _call(node) if self._gives_images(node) else None
            if call is not None:
                with graph.inserting_before(node):
                    made = call.replacement(graph)
                made.meta = dict(node.meta)
                node.replace_all_uses_with(made)
                graph.erase_node(node)

    def uuid(self) -> Any:
        """Identify the pass in the keys of Inductor's caches: a graph compiled without it, or with another version of it, is never served."""
        return get_hash_for_files(
            (__file__, max_pool.__file__, __file__, inputs.__file__), self.device
        )

    def _gives_images(self, node: fx.Node) -> bool:
        """Of a call's result, which has the layout that whoever comes next relies on, and the dtype that a region around the model may have cast the inputs to."""
        value = _value(node)
        return (
            value is not None
            and value.device.type == self.device
            and value.dtype in _DTYPES
            and value.dim() == IMAGES
            and _has_channels_last(value)
        )


@dataclass(frozen=True)
class Pooling:
    """A max pooling."""

    x: fx.Node
    """Its input."""
    kernel: tuple[int, int]
    """Rows and columns of a window."""
    stride: tuple[int, int]
    """From window to window."""
    padding: tuple[int, int]
    """On either side."""

    def replacement(self, graph: fx.Graph) -> fx.Node:
        """Our op, of whose results the maxima are the first."""
        both = graph.call_function(
            torch.ops.mezzo.max_pool2d.default, (self.x, self.kernel, self.stride, self.padding)
        )
        return graph.call_function(getitem, (both, 0))


@dataclass(frozen=True)
class Convolution:
    """A convolution of few channels."""

    operands: tuple[fx.Node, fx.Node, fx.Node | None]
    """Input, weight and bias."""
    shapes: tuple[torch.Size, torch.Size]
    """Of the first two."""
    stride: tuple[int, int]
    """Rows and columns from window to window."""
    padding: tuple[int, int]
    """On either side."""
    form: Form
    """How it is computed."""

    def replacement(self, graph: fx.Graph) -> fx.Node:
        """What the form calls."""
        tracer = fx.proxy.GraphAppendingTracer(graph)
        x, weight, bias = (node and fx.Proxy(node, tracer) for node in self.operands)
        made: fx.Proxy = self.form(x, weight, bias, self.shapes, self.stride, self.padding)
        return made.node


def _call(node: fx.Node) -> Pooling | Convolution | None:
    """A call in one form, or None if it is of no kind that is done here."""
    if node.op != "call_function":
        return None
    if node.target in _POOLS:
        return _pooling(*node.args, **node.kwargs)
    return (
        _convolution(node.meta["example_value"].dtype, *node.args, **node.kwargs)
        if node.target is torch.conv2d
        else None
    )


def _pooling(
    input: Any,  # noqa: A002
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: Any = False,  # noqa: FBT002
    return_indices: Any = False,  # noqa: FBT002
) -> Pooling | None:
    kernel, steps, pads = _pair(kernel_size), _pair(stride or kernel_size), _pair(padding)
    if (
        ceil_mode
        or return_indices
        or _pair(dilation) != (1, 1)
        or kernel is None
        or steps is None
        or pads is None
        or prod(kernel) > _PLACES
    ):
        return None
    return Pooling(input, kernel, steps, pads)


def _convolution(
    dtype: torch.dtype,
    input: Any,  # noqa: A002
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
) -> Convolution | None:
    steps, pads, x, kernel = _pair(stride), _pair(padding), _value(input), _value(weight)
    if (
        steps is None
        or pads is None
        or _pair(dilation) != (1, 1)
        or groups != 1
        or x is None
        or kernel is None
        or x.dim() != IMAGES
    ):
        return None
    form = (
        fast_conv_form(kernel.shape, steps, dtype)
        if all(isinstance(size, int) for size in (*x.shape[1:], *kernel.shape))
        else None
    )
    return (
        None
        if form is None
        else Convolution((input, weight, bias), (x.shape, kernel.shape), steps, pads, form)
    )


def _has_channels_last(value: FakeTensor) -> bool:
    _, channels, rows, columns = value.shape
    if not all(isinstance(size, int) for size in (channels, rows, columns)):
        return is_channels_last(value)
    # By strides: of a convolution's result with a batch of any size torch 2.11 says that its
    # channels are not last.
    return (
        channels > 1
        and rows * columns > 1
        and value.stride()[1:] == (1, columns * channels, channels)
    )


def _value(node: Any) -> FakeTensor | None:
    """What is known of a node's tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, FakeTensor) else None


def _pair(value: Any) -> tuple[int, int] | None:
    """A size in both directions, if it is one: torch takes a number, or a sequence of one or two."""
    match (
        [value]
        if isinstance(value, int)
        else list(value)
        if isinstance(value, list | tuple)
        else []
    ):
        case [int(both)]:
            return both, both
        case [int(first), int(second)]:
            return first, second
        case _:
            return None
