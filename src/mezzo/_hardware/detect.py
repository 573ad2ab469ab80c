"""Ask torch what a device is."""

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
    """The families whose abilities mezzo knows by itself, and the rest."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    """AMD GPUs, which torch also calls `cuda`."""
    XPU = "xpu"
    MPS = "mps"
    OTHER = "other"
    """NPU, MLU, HPU, MTIA and whatever comes: judged by what the back end says of itself."""


@dataclass(frozen=True)
class DeviceFacts:
    """What is known of one device before anything is concluded from it."""

    device: str
    """The device type, as torch spells it."""
    name: str
    """What its maker calls it."""
    backend: Backend
    capability: str | None = None
    """The generation, in its maker's notation: `9.0`, `gfx90a`, `avx2`."""
    absent: str | None = None
    """Why there is no such device here; None when there is one."""
    features: frozenset[str] = frozenset()
    """Abilities by name: instruction sets of a CPU, properties of an XPU, `macos14` for MPS."""
    autocast: bool = True
    """Whether torch has an autocast for this device type."""
    dtypes: frozenset[torch.dtype] | None = None
    """The dtypes that the back end lists as supported; None when it lists none."""
    bfloat16: bool | None = None
    """What the back end answers when asked for bfloat16; None when it cannot be asked."""
    native_bfloat16: bool | None = None
    """The same, emulation not counted; None when the back end draws no such line."""


def find_device(word: str | torch.device | None) -> torch.device:
    """Read a device from its name, with the index that is current; None is the current accelerator, or the CPU where there is none."""
    if word is None:
        device = _accelerator() or torch.device("cpu")
    elif isinstance(word, torch.device):
        device = word
    else:
        device = _parse(word)
    if device.type == "cpu":
        return torch.device("cpu")
    return (
        torch.device(device.type, _current_index(device.type)) if device.index is None else device
    )


def probe(device: torch.device) -> DeviceFacts:
    """Read what torch knows of a device. Only this device is asked: a question about the CPU must not wake a GPU."""
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


def _parse(word: object) -> torch.device:
    if isinstance(word, str):
        try:
            return torch.device(word)
        except RuntimeError as error:
            raise PolicyError(_unknown(word)) from error
    raise PolicyError(_unknown(word))


def _unknown(word: object) -> str:
    accelerator = _accelerator()
    here = ["cpu", *([accelerator.type] if accelerator else [])]
    return (
        f"Unknown device {word!r}. This machine has: {', '.join(here)}. Pass one of these names or"
        " a torch.device, or None for the current accelerator; a back end of another package (npu,"
        " mlu) is known once that package is imported."
    )


def _accelerator() -> torch.device | None:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator if accelerator is not None and _visible(accelerator.type) else None


@cache
def _visible(_kind: str) -> int:
    # Counted once, for none comes or goes while the process runs. With the index of a lone device
    # taken as 0, a question takes 2.8 µs instead of 15 (H200).
    return torch.accelerator.device_count()


def _current_index(kind: str) -> int:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind or _visible(kind) <= 1:
        return 0
    return torch.accelerator.current_device_index()


def _module(kind: str) -> ModuleType | None:
    try:
        module: ModuleType = torch.get_device_module(kind)
    except RuntimeError:
        # The answer of torch to a device type whose back end is not imported.
        return None
    return module


def _count(module: ModuleType | None) -> int:
    counted = _ask(module, "device_count")
    return counted if isinstance(counted, int) else 0


def _ask(module: ModuleType | None, question: str, *arguments: Any) -> Any:
    """Put a question that not every back end understands; None when it does not, or cannot answer."""
    function = getattr(module, question, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except (RuntimeError, TypeError, ValueError):
        # Not implemented there, without the arguments that others take, or (torch.accelerator) only
        # for the current accelerator.
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
    # gcnArchName also carries switches of the build: gfx90a:sramecc+:xnack-
    return DeviceFacts(
        "cuda", properties.name, Backend.ROCM, capability=properties.gcnArchName.split(":")[0]
    )


def _probe_xpu(device: torch.device) -> DeviceFacts:
    properties = torch.xpu.get_device_properties(device)
    asked = ("has_fp16", "has_bfloat16_conversions", "has_subgroup_matrix_multiply_accumulate")
    features = frozenset(feature for feature in asked if getattr(properties, feature, False))
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
        "mps", _ask(torch.backends.mps, "get_name") or "Apple GPU", Backend.MPS, features=features
    )


def _probe_cpu() -> DeviceFacts:
    abilities: dict[str, Any] = dict(_ask(torch.cpu, "get_capabilities") or {})
    features = frozenset(ability for ability, value in abilities.items() if value is True)
    name = abilities.get("cpu_name") or _cpu_name(Path("/proc/cpuinfo"))
    return DeviceFacts(
        "cpu",
        name,
        Backend.CPU,
        capability=torch.backends.cpu.get_cpu_capability().lower(),
        features=features,
    )


def _cpu_name(cpuinfo: Path) -> str:
    """The name on the chip: Linux keeps it in a file, other systems answer through `platform`."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def _probe_other(device: torch.device, module: ModuleType) -> DeviceFacts:
    # The back ends answer with tuples, strings or dictionaries; only the first two name a
    # generation.
    capability = _ask(module, "get_device_capability", device.index)
    if isinstance(capability, tuple):
        capability = ".".join(str(part) for part in capability)
    return DeviceFacts(
        device.type,
        _ask(module, "get_device_name", device.index) or device.type.upper(),
        Backend.OTHER,
        capability=capability if isinstance(capability, str) else None,
        autocast=torch.amp.is_autocast_available(device.type),
        dtypes=_listed_dtypes(device, module),
        bfloat16=_ask(module, "is_bf16_supported"),
        # The argument is including_emulation, as torch.cuda has it; back ends that take none draw
        # no such line.
        native_bfloat16=_ask(module, "is_bf16_supported", False),
    )


def _listed_dtypes(device: torch.device, module: ModuleType) -> frozenset[torch.dtype] | None:
    listed = _ask(module, "get_amp_supported_dtype")
    if listed is None:
        described = _ask(torch.accelerator, "get_device_capability", device)
        listed = described.get("supported_dtypes") if isinstance(described, dict) else None
    return None if listed is None else frozenset(listed)
