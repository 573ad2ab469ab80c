"""A model compiled by torch for a training step, with what Inductor is slow at done here.

Of a compiled ResNet-50's step on an H200 (batch 128, 224², 18.7 ms) Inductor's max pooling takes 0.91 ms, ours 0.27 and its bytes 0.13: it goes by 64-bit places in
the whole image. In torch 2.13 it adds up with atomics besides, in an order that is another each time. First convolutions take a form of `stem.py`: 0.17 ms less there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from mezzo._dtypes import HALF_DTYPES
from mezzo._torch import CustomGraphPass, FakeTensor, get_hash_for_files, inductor_config
from mezzo.scaling.kernels import has_kernel
from mezzo.step import inputs, pool, stem
from mezzo.step.inputs import IMAGES, is_channels_last

_POOLS = (F.max_pool2d, torch.max_pool2d)
_DTYPES = (*HALF_DTYPES, torch.float32)
_PLACES = 127
"""The largest window whose places an int8 can tell."""


def compiled(model: nn.Module) -> Any:
    """The model as `torch.compile` makes it. A pass that the user has given Inductor stays, and keeps ours out."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if inductor_config.pre_grad_custom_pass is not None or not has_kernel(device):
        return torch.compile(model)
    return torch.compile(model, options={"pre_grad_custom_pass": Substitutes(device.type)})


class Substitutes(CustomGraphPass):
    """A pass over what a model calls, for images with channels last: max pooling goes to the ops of `pool.py`, a first convolution to `stem.py`."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, graph: fx.Graph) -> None:
        """Replace such calls."""
        for node in graph.nodes:
            call = _call(node) if self._gives_images(node) else None
            if call is not None:
                with graph.inserting_before(node):
                    made = call.instead(graph)
                made.meta = dict(node.meta)
                node.replace_all_uses_with(made)
                graph.erase_node(node)

    def uuid(self) -> Any:
        """Identify the pass in the keys of Inductor's caches: a graph compiled without it, or with another version of it, is never served."""
        return get_hash_for_files((__file__, pool.__file__, stem.__file__, inputs.__file__), self.device)

    def _gives_images(self, node: fx.Node) -> bool:
        """Of a call's result, which has the layout that whoever comes next relies on, and the dtype that a region around the model may have cast the inputs to."""
        value = _value(node)
        return value is not None and value.device.type == self.device and value.dtype in _DTYPES and value.dim() == IMAGES and _has_channels_last(value)


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

    def instead(self, graph: fx.Graph) -> fx.Node:
        """Our op, of whose results the maxima are the first."""
        both = graph.call_function(torch.ops.mezzo.max_pool2d.default, (self.x, self.kernel, self.stride, self.padding))
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
    form: stem.Form
    """How it is computed."""

    def instead(self, graph: fx.Graph) -> fx.Node:
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
    return _convolution(node.meta["example_value"].dtype, *node.args, **node.kwargs) if node.target is torch.conv2d else None


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
    if ceil_mode or return_indices or _pair(dilation) != (1, 1) or kernel is None or steps is None or pads is None or prod(kernel) > _PLACES:
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
    if steps is None or pads is None or _pair(dilation) != (1, 1) or groups != 1 or x is None or kernel is None or x.dim() != IMAGES:
        return None
    form = stem.form_of(kernel.shape, steps, dtype) if all(isinstance(size, int) for size in (*x.shape[1:], *kernel.shape)) else None
    return None if form is None else Convolution((input, weight, bias), (x.shape, kernel.shape), steps, pads, form)


def _has_channels_last(value: FakeTensor) -> bool:
    _, channels, rows, columns = value.shape
    if not all(isinstance(size, int) for size in (channels, rows, columns)):
        return is_channels_last(value)
    # By strides: of a convolution's result with a batch of any size torch 2.11 says that its channels are not last.
    return channels > 1 and rows * columns > 1 and value.stride()[1:] == (1, columns * channels, channels)


def _value(node: Any) -> FakeTensor | None:
    """What is known of a node's tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, FakeTensor) else None


def _pair(value: Any) -> tuple[int, int] | None:
    """A size in both directions, if it is one: torch takes a number, or a sequence of one or two."""
    match [value] if isinstance(value, int) else list(value) if isinstance(value, list | tuple) else []:
        case [int(both)]:
            return both, both
        case [int(first), int(second)]:
            return first, second
        case _:
            return None
