"""Compute the time of a model on a GPU that is not there, from data sheets and tensor sizes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo._torch import FakeTensorMode, TorchDispatchMode, pytree
from mezzo.advising.advice import Precision, Setting, SettingTime
from mezzo.advising.estimate import estimate
from mezzo.advising.gpus import Gpu
from mezzo.advising.lint_subject import device_of
from mezzo.advising.op_trace import buffers_restored
from mezzo.advising.setting_run import Workload
from mezzo.autocasting.arguments import region_for
from mezzo.autocasting.regions import enter_regions
from mezzo.policy.policy import Policy
from mezzo.prepare.decorate import decorate
from mezzo.prepare.kept_results import copy_with_results
from mezzo.step.inputs import ModelArguments, call_model
from mezzo.step.outputs import loss_of_output, split_loss

_KERNEL = 2e-6
"""Seconds that any kernel takes at least, with its launch overlapped."""
_UPDATE_BYTES = 28
"""Bytes that an update with Adam moves for each parameter: gradient, weight, two moments."""
_NO_KERNEL = frozenset({"detach", "empty", "empty_like", "empty_strided"})
_NOTE = """\
Computed, not measured: each op takes the longer of its operations at the peak rate and its bytes at
the full bandwidth of the data sheet, and at least 2 µs. Real kernels reach part of these rates.
{gpu}: {rates}, {bandwidth:,.0f} GB/s. Memory does not include activations."""


class OpCost(NamedTuple):
    """Operations and bytes of one call of an op."""

    op: str
    flops: float
    bytes: int
    half: bool
    """Whether it computes in 16 bits."""

    def seconds(self, gpu: Gpu, precision: Precision) -> float:
        """Return the time on a GPU: the longer of computing and moving."""
        rate = gpu.rate(_rate_name(precision)) if self.half or _is_tf32(precision) else gpu.float32
        return max(self.flops / (rate * 1e12), self.bytes / (gpu.bandwidth * 1e9), _KERNEL)


def _is_tf32(precision: Precision) -> bool:
    return precision is Precision.TF32


def _rate_name(precision: Precision) -> str:
    return precision.value.lower()


Tables = dict[Setting, dict[str, float]]


def estimate_times(
    workload: Workload, levels: Sequence[str], gpu: Gpu
) -> tuple[tuple[SettingTime, ...], Tables, str]:
    """Return computed times of each setting, of each op in them, and a note on how."""
    settings = [Setting("O0", Precision.FLOAT32)]
    if gpu.tf32 is not None:
        settings.append(Setting("O0", Precision.TF32))
    halves = [
        Precision(dtype_name(dtype))
        for dtype in reversed(HALF_DTYPES)
        if gpu.hardware.support(dtype).native
    ]
    settings += [Setting(level, half) for level in levels for half in halves]
    tables: Tables = {}
    times: list[SettingTime] = []
    for setting in settings:
        tables[setting] = _op_seconds(workload, setting, gpu)
        seconds = max(sum(tables[setting].values()), _KERNEL)
        gain = (times[0].seconds or seconds) / seconds if times else 1.0
        times.append(SettingTime(setting, seconds, gain, _state_bytes(workload, setting)))
    rates = ", ".join(
        f"{gpu.rate(name):g} TFLOPS {name}"
        for name in ("float32", *(half.value for half in halves[:1]))
    )
    return tuple(times), tables, _NOTE.format(gpu=gpu.name, rates=rates, bandwidth=gpu.bandwidth)


def _op_seconds(workload: Workload, setting: Setting, gpu: Gpu) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for cost in count_costs(workload, setting):
        seconds[cost.op] += cost.seconds(gpu, setting.precision)
    if workload.training:
        numel = sum(
            parameter.numel()
            for parameter in workload.model.parameters()
            if parameter.requires_grad
        )
        seconds["optimizer"] = max(numel * _UPDATE_BYTES / (gpu.bandwidth * 1e9), _KERNEL)
    return dict(seconds)


def _state_bytes(workload: Workload, setting: Setting) -> int:
    if not workload.training:
        size = 2 if setting.level == "O2" else 4
        return sum(parameter.numel() * size for parameter in workload.model.parameters())
    optimizer: Any = "AdamW" if workload.optimizer is None else workload.optimizer
    policy = _policy(workload, setting, master="auto")
    return estimate(workload.model, policy, optimizer=optimizer).memory


def count_costs(workload: Workload, setting: Setting) -> list[OpCost]:
    """Return the ops of one call of a model at a setting, counted with fake tensors.

    A model whose control flow reads values cannot run on those: it then runs on a real copy.
    """
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            return _count(workload, setting, _on_fake_cpu)
    except Exception:  # noqa: BLE001 - data-dependent code raises what it likes on fake tensors
        return _count(workload, setting, lambda value: value)


def _on_fake_cpu(value: Any) -> Any:
    """Return fake tensors like these, which may be on any device, and on meta too."""

    def like(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    return pytree.tree_map_only(Tensor, like, value)


def _count(workload: Workload, setting: Setting, convert: Callable[[Any], Any]) -> list[OpCost]:
    model = copy_with_results(workload.model)
    model.train(workload.training and workload.model.training)
    _convert_tensors(model, convert)
    if setting.level == "O2":
        decorate(model, None, _policy(workload, setting))
    sample = convert(workload.sample)
    inputs = sample[0] if workload.loss_fn is not None else sample
    arranged = ModelArguments(model).arrange((inputs,), {})
    counter = _CostMode()
    policy = _policy(workload, setting)
    with buffers_restored(model), torch.set_grad_enabled(workload.training), counter:
        with enter_regions(region_for(policy, device_of(model).type)):
            outputs = call_model(model, arranged)
            if not workload.training:
                return counter.costs
            loss = _loss(workload, outputs, sample)
        loss.backward()
    return counter.costs


def _loss(workload: Workload, outputs: Any, sample: Any) -> Tensor:
    if workload.loss_fn is None:
        return loss_of_output(outputs)
    target = sample[1] if isinstance(sample[1], tuple) else (sample[1],)
    loss, _ = split_loss(workload.loss_fn(outputs, *target))
    return loss if loss is not None else loss_of_output(outputs)


def _policy(workload: Workload, setting: Setting, master: str = "none") -> Policy:
    if setting.level == "O0":
        return Policy.parse("O0")
    overrides = {"master": master, **workload.overrides}
    return Policy.parse(setting.level, dtype=setting.precision.value, **overrides)


def _convert_tensors(model: nn.Module, convert: Callable[[Any], Any]) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(
                    convert(parameter.detach()), requires_grad=parameter.requires_grad
                )
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else convert(buffer)


class _CostMode(TorchDispatchMode):
    """Counts the operations and bytes of each op."""

    def __init__(self) -> None:
        super().__init__()
        # Imported here: it loads private parts of torch that training does not need.
        from torch.utils.flop_counter import flop_registry  # noqa: PLC0415

        self.costs: list[OpCost] = []
        self._flops: dict[Any, Callable[..., int]] = flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        computes = func.namespace == "aten" and not func.is_view
        if computes and packet.__name__ not in _NO_KERNEL:
            count = self._flops.get(packet)
            flops = 0 if count is None else count(*args, **kwargs, out_val=result)
            tensors = [
                leaf
                for leaf in pytree.tree_leaves((args, kwargs, result))
                if isinstance(leaf, Tensor)
            ]
            size = sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)
            half = any(tensor.dtype in HALF_DTYPES for tensor in tensors)
            self.costs.append(OpCost(packet.__name__, float(flops), size, half))
        return result
