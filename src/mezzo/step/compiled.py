"""A model compiled by torch for a training step, with what Inductor is slow at done here.

Of a compiled ResNet-50's step on an H200 (batch 128, 224², 18.7 ms) Inductor's max pooling takes 0.91 ms, ours 0.27 and its bytes 0.13: it goes by 64-bit places in
the whole image. In torch 2.13 it adds up with atomics besides, in an order that is another each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from mezzo.scaling.kernels import has_kernel
from mezzo.step import pool
from mezzo.step.inputs import IMAGES, is_channels_last

_POOLS = (F.max_pool2d, torch.max_pool2d)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PLACES = 127
"""The largest window whose places an int8 can tell."""


def compiled(model: nn.Module) -> Any:
    """The model as `torch.compile` makes it. A pass that the user has given Inductor stays, and keeps ours out."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if config.pre_grad_custom_pass is not None or not has_kernel(device):
        return torch.compile(model)
    return torch.compile(model, options={"pre_grad_custom_pass": Substitutes(device.type)})


class Substitutes(CustomGraphPass):
    """A pass over what a model calls: max pooling with channels last goes to the ops of `pool.py`."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, graph: fx.Graph) -> None:
        """Replace such calls."""
        for node in graph.nodes:
            pooling = _pooling(*node.args, **node.kwargs) if node.op == "call_function" and node.target in _POOLS else None
            if pooling is not None and self._fits(pooling.x):
                with graph.inserting_before(node):
                    both = graph.call_function(torch.ops.mezzo.max_pool2d.default, (pooling.x, pooling.kernel, pooling.stride, pooling.padding))
                    largest = graph.call_function(getitem, (both, 0))
                largest.meta = dict(node.meta)
                node.replace_all_uses_with(largest)
                graph.erase_node(node)

    def uuid(self) -> Any:
        """What a compiled graph owes to this pass."""
        return get_hash_for_files((__file__, pool.__file__), self.device)

    def _fits(self, x: fx.Node) -> bool:
        value = x.meta.get("example_value")
        if not isinstance(value, FakeTensor) or value.device.type != self.device or value.dtype not in _DTYPES:
            return False
        return value.dim() == IMAGES and is_channels_last(value)


@dataclass(frozen=True)
class Pooling:
    """What a max pooling was asked for."""

    x: fx.Node
    """Its input."""
    kernel: tuple[int, int]
    """Rows and columns of a window."""
    stride: tuple[int, int]
    """From window to window."""
    padding: tuple[int, int]
    """On either side."""


def _pooling(
    input: fx.Node,  # noqa: A002
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,  # noqa: FBT001, FBT002
    return_indices: bool = False,  # noqa: FBT001, FBT002
) -> Pooling | None:
    """The call in one form, or None if it is of no kind that is done here."""
    kernel, steps, pads = _pair(kernel_size), _pair(stride or kernel_size), _pair(padding)
    if ceil_mode or return_indices or _pair(dilation) != (1, 1) or kernel is None or steps is None or pads is None or prod(kernel) > _PLACES:
        return None
    return Pooling(input, kernel, steps, pads)


def _pair(value: Any) -> tuple[int, int] | None:
    """A size in both directions, if it is one: torch takes a number, or a sequence of one or two."""
    match [value] if isinstance(value, int) else list(value) if isinstance(value, list | tuple) else []:
        case [int(both)]:
            return both, both
        case [int(first), int(second)]:
            return first, second
        case _:
            return None
