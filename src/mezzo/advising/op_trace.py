"""Trace the ops of a block of code: sizes and dtypes of products, 16-bit softmax and losses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mezzo._dtypes import dtype_name
from mezzo._torch import TorchDispatchMode, current_autograd_node, pytree
from mezzo.observing.op_places import OpPlace, PlaceTracker
from mezzo.observing.user_lines import user_line
from mezzo.prepare.rng_state import capture_rng_state, restore_rng_state
from mezzo.prepare.rollback import attributes_restorer
from mezzo.step.inputs import IMAGE_DIMS

SOFTMAX = frozenset({"_softmax", "_safe_softmax"})
LOSSES = frozenset(
    "_log_softmax nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss"
    " binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss _ctc_loss"
    " multi_margin_loss kl_div".split()
)
_MATMULS: Mapping[str, tuple[int, int]] = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "_addmm_activation": (1, 2),
}
"""Op → the positions of its two matrices."""
_CONVOLUTIONS = frozenset({"convolution", "convolution_overrideable", "cudnn_convolution"})
_TRANSPOSED = 6
"""The position of `transposed` among the arguments of `convolution`."""


@dataclass(frozen=True)
class Product:
    """A matrix product or a convolution that ran in the forward pass."""

    op: str
    dtype: torch.dtype
    place: OpPlace
    batch: int
    """Products of a batched matrix product; 1 for others."""
    sizes: tuple[int, int, int]
    """Rows, columns and inner size; for a convolution pixels, output and input channels."""
    kernel: tuple[int, ...] = ()
    """Sizes of the window of a convolution; empty for matrix products."""
    groups: int = 1
    channels_first: bool = False
    """Whether a convolution reads images whose pixels of one channel are adjacent in memory."""

    @property
    def flops(self) -> int:
        """Floating-point operations: two for each multiplication and addition."""
        return 2 * self.batch * math.prod(self.sizes) * math.prod(self.kernel)


@dataclass(frozen=True)
class HalfOp:
    """A softmax or a loss that ran in 16 bits."""

    op: str
    dtype: torch.dtype
    place: OpPlace


@dataclass
class OpTrace:
    """What ran in a traced block."""

    products: list[Product] = field(default_factory=list)
    half_ops: list[HalfOp] = field(default_factory=list)
    backward: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls by op and dtype in backward."""

    def product_dtypes(self) -> Counter[torch.dtype]:
        """Return floating-point operations of products by dtype."""
        total: Counter[torch.dtype] = Counter()
        for product in self.products:
            total[product.dtype] += product.flops
        return total


class TracingMode(TorchDispatchMode):
    """Writes what runs to an `OpTrace`."""

    def __init__(self, trace: OpTrace, tracker: PlaceTracker) -> None:
        super().__init__()
        self.trace, self._tracker = trace, tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if current_autograd_node() is not None:
            self._count_backward(name, result)
        elif name in _MATMULS:
            self._add_matmul(name, args)
        elif name in _CONVOLUTIONS:
            self._add_convolution(name, args, result)
        elif name in SOFTMAX or name in LOSSES:
            self._add_half_op(name, args, result)
        return result

    def _count_backward(self, name: str, result: Any) -> None:
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.trace.backward[name, dtype_name(leaf.dtype)] += 1
                return

    def _add_matmul(self, name: str, args: Any) -> None:
        left, right = (args[position] for position in _MATMULS[name])
        batch = left.shape[0] if left.dim() > 2 else 1
        sizes = (left.shape[-2], right.shape[-1], left.shape[-1])
        self.trace.products.append(Product(name, left.dtype, self._tracker.place(), batch, sizes))

    def _add_convolution(self, name: str, args: Any, result: Tensor) -> None:
        image, weight = args[0], args[1]
        transposed = len(args) > _TRANSPOSED and bool(args[_TRANSPOSED])
        read = result if not transposed else image
        pixels = read.shape[0] * math.prod(read.shape[2:])
        outputs, inputs = weight.shape[:2]
        groups = args[8] if len(args) > 8 else 1
        self.trace.products.append(
            Product(
                name,
                image.dtype,
                self._tracker.place(),
                1,
                (pixels, outputs, inputs),
                tuple(weight.shape[2:]),
                groups,
                image.dim() == IMAGE_DIMS and _is_channels_first(image),
            )
        )

    def _add_half_op(self, name: str, args: Any, result: Any) -> None:
        dtypes = {
            leaf.dtype
            for leaf in pytree.tree_leaves((args, result))
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        }
        # A softmax with dtype= reads 16 bits and computes in float32.
        if dtypes and all(dtype.itemsize == 2 for dtype in dtypes):
            self.trace.half_ops.append(HalfOp(name, min(dtypes, key=str), self._tracker.place()))


def _is_channels_first(image: Tensor) -> bool:
    # With one channel or one pixel it is in both formats.
    return image.is_contiguous() and not image.is_contiguous(memory_format=torch.channels_last)


def source_line() -> str:
    """Return the file and line of the traced code that runs now; empty if torch's was called."""
    return user_line(_run.__code__)


def _run(function: Callable[[], Any]) -> Any:
    """Call the user's code. `source_line` searches the frames above this one."""
    return function()


def traced(model: nn.Module, function: Callable[[], Any], trace: OpTrace) -> Any:
    """Call a function, and write what runs in it to a trace. Leaves no hook behind."""
    tracker = PlaceTracker(model, sources=True, caller=_run.__code__)
    tracker.start()
    try:
        with TracingMode(trace, tracker):
            return _run(function)
    finally:
        tracker.stop()


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Restore what a forward pass changes: buffers, attributes of modules, random generators."""
    random, restore_attributes = capture_rng_state(), attributes_restorer(model)
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        restore_attributes()
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        restore_rng_state(random)
