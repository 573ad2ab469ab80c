"""Measurements for lint rules: time in products, gains of 16 bits, of channels_last, of padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from mezzo.advising.lint_subject import Cost, SampleRun, device_of
from mezzo.advising.op_trace import Product, buffers_restored
from mezzo.advising.timing import interleaved_medians, synchronize, time_once, time_ops
from mezzo.prepare.kept_results import copy_with_results
from mezzo.step.inputs import IMAGE_DIMS, move_inputs

_PRODUCTS = frozenset(
    "mm addmm bmm baddbmm linear convolution _convolution cudnn_convolution mkldnn_convolution"
    " mkldnn_linear thnn_conv2d _slow_conv2d_forward cudnn_convolution_transpose"
    " _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
    " _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu"
    " _flash_attention_forward _efficient_attention_forward _addmm_activation"
    " _cudnn_attention_forward".split()
)
_ROUNDS = 5
_BUDGET = 10.0
"""Seconds for the comparison with float32, which may be slow on a CPU."""
_REPEATS = 20
"""Products that are timed at once: a single one is shorter than its launch."""


def measure_cost(run: SampleRun) -> Cost:
    """Measure the forward pass of a sample. Parameters, buffers and random state are restored."""
    device = device_of(run.plain)
    with run.grad_mode(), buffers_restored(run.model), buffers_restored(run.plain):
        run.forward()
        used = _peak_memory(run.forward, device)
        wall = time_once(run.forward, device)
        products, total = profile_products(run.forward, device)
        gain = None
        if run.is_comparable:
            fast, slow = interleaved_medians(
                [run.forward, run.forward_float32], device, _ROUNDS, _BUDGET
            )
            gain = slow / fast
    utilisation = min(total / wall, 1.0) if device.type == "cuda" else None
    return Cost(products / total if total else 0.0, utilisation, used, gain)


def profile_products(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the seconds of products and of all ops in one run."""
    times = time_ops(run, device)
    products = sum(seconds for op, seconds in times.items() if op in _PRODUCTS)
    return products, sum(times.values())


def _peak_memory(run: Callable[[], object], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_allocated(device) / total


def measure_layout(run: SampleRun) -> float | None:
    """Return how much faster the forward pass is channels last; None without images on CUDA."""
    device = device_of(run.plain)
    has_images = any(isinstance(module, nn.Conv2d) for module in run.model.modules())
    if device.type != "cuda" or not has_images:
        return None
    last = copy_with_results(run.model)
    for parameter in last.parameters():
        if parameter.dim() == IMAGE_DIMS:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    inputs = move_inputs(run.inputs, device, channels_last=True)
    with run.grad_mode(), buffers_restored(run.model):
        first, second = interleaved_medians(
            [run.forward, lambda: run.run_on(last, inputs)], device, _ROUNDS
        )
    return first / second


def padding_gain(device: torch.device) -> Callable[[Product, tuple[int, int, int]], float]:
    """Return a function that times a product with its sizes and with padded ones."""

    def gain(product: Product, sizes: tuple[int, int, int]) -> float:
        runs = [_repeated(product, shape, device) for shape in (product.sizes, sizes)]
        before, after = interleaved_medians(runs, device, _ROUNDS)
        return before / after

    return gain


def _repeated(
    product: Product, sizes: tuple[int, int, int], device: torch.device
) -> Callable[[], None]:
    run = _make_convolution(product, sizes, device) if product.kernel else None
    once = run or _make_matmul(product, sizes, device)

    def repeated() -> None:
        with torch.no_grad():
            for _ in range(_REPEATS):
                once()

    return repeated


def _make_matmul(
    product: Product, sizes: tuple[int, int, int], device: torch.device
) -> Callable[[], torch.Tensor]:
    rows, columns, inner = sizes
    like = {"dtype": product.dtype, "device": device}
    batch = (product.batch,) if product.batch > 1 else ()
    left = torch.zeros(*batch, rows, inner, **like)  # type: ignore[call-overload]
    # Weights are stored as columns × inner size, and transposed.
    right = torch.zeros(*batch, columns, inner, **like).transpose(-1, -2)  # type: ignore[call-overload]
    return lambda: torch.matmul(left, right)


def _make_convolution(
    product: Product, sizes: tuple[int, int, int], device: torch.device
) -> Callable[[], torch.Tensor]:
    pixels, outputs, inputs = sizes
    side = max(int(pixels**0.5), 1)
    form = torch.contiguous_format if product.channels_first else torch.channels_last
    like = {"dtype": product.dtype, "device": device}
    kernel = product.kernel if len(product.kernel) == 2 else (1, product.kernel[0])
    image = torch.zeros(1, inputs, side, side, **like).contiguous(memory_format=form)  # type: ignore[call-overload]
    weight = torch.zeros(outputs, inputs, *kernel, **like).contiguous(memory_format=form)  # type: ignore[call-overload]
    padding = tuple(size // 2 for size in kernel)
    return lambda: F.conv2d(image, weight, padding=padding)
