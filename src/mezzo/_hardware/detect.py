"""Read from torch what a device is."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mezzo._errors import PolicyError


class Backend(Enum):
    """The families of devices that mezzo has rules for, and the rest."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    """AMD GPUs, which torch also calls `cuda`."""
    XPU = "xpu"
    MPS = "mps"
    OTHER = "other"
    """NPU, MLU, HPU, MTIA and others: judged by what their back end reports."""


@dataclass(frozen=True)
class DeviceFacts:
    """What torch reports about one device."""

    device: str
    """The device type, as torch spells it."""
    name: str
    """The product name."""
    backend: Backend
    capability: str | None = None
    """The generation, in the vendor's notation: `9.0`, `gfx90a`, `avx2`."""
    absent: str | None = None
    """Why this machine has no such device; None if it has one."""
    features: frozenset[str] = frozenset()
    """Names of features: instruction sets of a CPU, properties of an XPU, `macos14` for MPS."""
    autocast: bool = True
    """Whether torch has autocast for this device type."""
    dtypes: frozenset[torch.dtype] | None = None
    """The dtypes that the back end lists as supported; None if it has no list."""
    bfloat16: bool | None = None
    """Whether the back end reports bfloat16 support; None if it has no such query."""
    native_bfloat16: bool | None = None
    """The same without emulation; None if the back end makes no such distinction."""


def find_device(value: str | torch.device | None) -> torch.device:
    """Return a device with its index: the current one where none is passed.

    None is the current accelerator, or the CPU if there is none. Raises `PolicyError` for an
    unknown name.
    """
    if value is None:
        device = _accelerator() or torch.device("cpu")
    elif isinstance(value, torch.device):
        device = value
    else:
        device = _parse(value)
    if device.type == "cpu":
        return torch.device("cpu")
    return (
        torch.device(device.type, _current_index(device.type)) if device.index is None else device
    )


def probe(device: torch.device) -> DeviceFacts:
    """Return what torch reports about a device. Queries no other: the CPU must not wake a GPU."""
    if device.type == "cpu":
        return _probe_cpu()
    module = _module(device.type)
    count = _count(module)
    if module is None or device.index >= count:
        return _absent(device, count)
    if device.type == "cuda":
        return _probe_rocm(device) if torch.version.hip else _probe_cuda(device)
    if device.type == "xpu":
        return _probe_xpu(device)
    if device.type == "mps":
        return _probe_mps()
    return _probe_other(device, module)


def _parse(value: object) -> torch.device:
    if isinstance(value, str):
        try:
            return torch.device(value)
        except RuntimeError as error:
            raise PolicyError(_unknown(value)) from error
    raise PolicyError(_unknown(value))


def _unknown(value: object) -> str:
    accelerator = _accelerator()
    here = ["cpu", *([accelerator.type] if accelerator else [])]
    return (
        f"Unknown device {value!r}. This machine has: {', '.join(here)}. Pass one of these names, a"
        " torch.device, or None for the current accelerator. A back end of another package (npu,"
        " mlu) is known after that package is imported."
    )


def _accelerator() -> torch.device | None:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator if accelerator is not None and _device_count(accelerator.type) else None


@cache
def _device_count(_kind: str) -> int:
    # Cached: the number does not change while the process runs. With the index of a single device
    # taken as 0, `hardware()` takes 2.8 µs instead of 15 (H200).
    return torch.accelerator.device_count()


def _current_index(kind: str) -> int:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind or _device_count(kind) <= 1:
        return 0
    return torch.accelerator.current_device_index()


def _module(kind: str) -> ModuleType | None:
    try:
        module: ModuleType = torch.get_device_module(kind)
    except RuntimeError:
        # torch raises this for a device type whose back end is not imported.
        return None
    return module


def _count(module: ModuleType | None) -> int:
    count = _query(module, "device_count")
    return count if isinstance(count, int) else 0


def _query(module: ModuleType | None, name: str, *arguments: Any) -> Any:
    """Call a function that not every back end has; return None if it is missing or fails."""
    function = getattr(module, name, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except (RuntimeError, TypeError, ValueError):
        # Not implemented, without the arguments that other back ends take, or (torch.accelerator)
        # only for the current accelerator.
        return None


def _absent(device: torch.device, count: int) -> DeviceFacts:
    kind = device.type.upper()
    if count:
        why = f"no {kind} device {device.index} is visible, torch sees {count}"
    elif device.type == "cuda" and not (torch.version.cuda or torch.version.hip):
        why = f"no CUDA device is visible: torch {torch.__version__} is built without CUDA"
    else:
        why = (
            f"no {kind} device is visible to torch {torch.__version__}: check the driver, the"
            " container's settings and the build of torch"
        )
    return DeviceFacts(device.type, f"no {kind} device", Backend.OTHER, absent=why)


def _probe_cuda(device: torch.device) -> DeviceFacts:
    major, minor = torch.cuda.get_device_capability(device)
    return DeviceFacts(
        "cuda", torch.cuda.get_device_name(device), Backend.CUDA, capability=f"{major}.{minor}"
    )


def _probe_rocm(device: torch.device) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(device)
    # gcnArchName also has build options: gfx90a:sramecc+:xnack-
    return DeviceFacts(
        "cuda", properties.name, Backend.ROCM, capability=properties.gcnArchName.split(":")[0]
    )


def _probe_xpu(device: torch.device) -> DeviceFacts:
    properties = torch.xpu.get_device_properties(device)
    names = ("has_fp16", "has_bfloat16_conversions", "has_subgroup_matrix_multiply_accumulate")
    features = frozenset(name for name in names if getattr(properties, name, False))
    return DeviceFacts(
        "xpu",
        properties.name,
        Backend.XPU,
        capability=getattr(properties, "version", None),
        features=features,
    )


def _probe_mps() -> DeviceFacts:
    features = (
        frozenset({"macos14"}) if torch.backends.mps.is_macos_or_newer(14, 0) else frozenset()
    )
    return DeviceFacts(
        "mps", _query(torch.backends.mps, "get_name") or "Apple GPU", Backend.MPS, features=features
    )


def _probe_cpu() -> DeviceFacts:
    capabilities: dict[str, Any] = dict(_query(torch.cpu, "get_capabilities") or {})
    features = frozenset(name for name, value in capabilities.items() if value is True)
    name = capabilities.get("cpu_name") or _cpu_name(Path("/proc/cpuinfo"))
    return DeviceFacts(
        "cpu",
        name,
        Backend.CPU,
        capability=torch.backends.cpu.get_cpu_capability().lower(),
        features=features,
    )


def _cpu_name(cpuinfo: Path) -> str:
    """Return the product name: Linux has it in /proc/cpuinfo, other systems in `platform`."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def _probe_other(device: torch.device, module: ModuleType) -> DeviceFacts:
    # Back ends return tuples, strings or dictionaries; only the first two name a generation.
    capability = _query(module, "get_device_capability", device.index)
    if isinstance(capability, tuple):
        capability = ".".join(str(part) for part in capability)
    return DeviceFacts(
        device.type,
        _query(module, "get_device_name", device.index) or device.type.upper(),
        Backend.OTHER,
        capability=capability if isinstance(capability, str) else None,
        autocast=torch.amp.is_autocast_available(device.type),
        dtypes=_listed_dtypes(device, module),
        bfloat16=_query(module, "is_bf16_supported"),
        # The argument is including_emulation, as in torch.cuda; back ends without it raise.
        native_bfloat16=_query(module, "is_bf16_supported", False),
    )


def _listed_dtypes(device: torch.device, module: ModuleType) -> frozenset[torch.dtype] | None:
    listed = _query(module, "get_amp_supported_dtype")
    if listed is None:
        described = _query(torch.accelerator, "get_device_capability", device)
        listed = described.get("supported_dtypes") if isinstance(described, dict) else None
    return None if listed is None else frozenset(listed)
