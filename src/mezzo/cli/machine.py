"""Read what `mezzo doctor` judges: versions, the device, product times, settings, extras."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import metadata

import torch

import mezzo
from mezzo._hardware import Hardware, hardware
from mezzo._launch import has_triton
from mezzo._torch import FEATURES, FIRST, LAST, lacks
from mezzo.cli.product_times import ProductTime, time_products

ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_FP16"
"""A value of `ISA_LIMIT` with which oneDNN uses no AMX, whose tiles some virtual machines trap."""

_REQUIREMENT = re.compile(r"([\w.-]+).*;.*extra == ['\"]([\w-]+)['\"]")
_FOR_DEVELOPERS = "dev"
_SAME = {"lightning": "pytorch-lightning"}
"""Packages, and others that are used in their place if they are installed."""


@dataclass(frozen=True)
class Extra:
    """An extra of mezzo, and which of its packages are not installed."""

    name: str
    missing: tuple[str, ...]

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install 'mezzo[{self.name}]'"


@dataclass(frozen=True)
class Machine:
    """What `mezzo doctor` found on a machine."""

    mezzo: str
    torch: str
    python: str
    system: str
    device: Hardware
    products: tuple[ProductTime, ...] = ()
    """Times of matrix products; empty if they were not measured."""
    products_without_amx: tuple[ProductTime, ...] = ()
    """The dtypes whose products killed the process, with oneDNN limited to AVX-512."""
    isa_limit: str | None = None
    """The value of `ONEDNN_MAX_CPU_ISA`."""
    triton: bool = False
    """Whether Triton kernels run on the device."""
    tf32: bool = False
    """Whether float32 products may use TF32."""
    cudnn_benchmark: bool = False
    nvidia_driver: bool = False
    """Whether the driver of an NVIDIA GPU is installed."""
    threads: int = 1
    cores: int = 1
    extras: tuple[Extra, ...] = ()
    lacking: tuple[str, ...] = ()
    """Features of mezzo that this torch has no means for; looked up on untested versions only."""

    @property
    def is_tested(self) -> bool:
        """Whether mezzo's tests run on this version of torch."""
        return version_of(FIRST) <= version_of(self.torch) <= version_of(LAST)


def version_of(text: str) -> tuple[int, int]:
    """Return the major and minor number of a version.

    >>> version_of("2.13.0+cpu")
    (2, 13)
    """
    major, minor = text.split(".")[:2]
    return int(major), int(re.sub(r"\D.*", "", minor))


def read_machine(device: str | None = None, *, measure: bool = True) -> Machine:
    """Read the versions, settings and extras of this machine, and time products on a device."""
    device_hardware = hardware(device)
    machine = Machine(
        mezzo=mezzo.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        system=platform.platform(terse=True),
        device=device_hardware,
        isa_limit=os.environ.get(ISA_LIMIT),
        triton=has_triton(torch.device(device_hardware.device)),
        tf32=torch.get_float32_matmul_precision() != "highest",
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        nvidia_driver=shutil.which("nvidia-smi") is not None,
        threads=torch.get_num_threads(),
        cores=_cores(),
        extras=_extras(metadata.distributions(name="mezzo")),
    )
    if not machine.is_tested:
        machine = replace(machine, lacking=tuple(name for name in FEATURES if lacks(name)))
    if not measure or not (device_hardware.float16.supported or device_hardware.bfloat16.supported):
        return machine
    dtypes = ["float32", *(["tf32"] if device_hardware.device == "cuda" else [])]
    dtypes += [name for name in ("float16", "bfloat16") if device_hardware.support(name).supported]
    products = time_products(device_hardware.device, dtypes)
    killed = [product.dtype for product in products if product.failure == "SIGILL"]
    again = time_products(device_hardware.device, killed, {ISA_LIMIT: WITHOUT_AMX})
    return replace(machine, products=products, products_without_amx=again)


def _cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _extras(distributions: Iterable[metadata.Distribution]) -> tuple[Extra, ...]:
    """Return the extras that the metadata of the package list; none without a package."""
    packages: dict[str, list[str]] = {}
    for distribution in distributions:
        for requirement in distribution.requires or ():
            if match := _REQUIREMENT.match(requirement):
                packages.setdefault(match[2], []).append(match[1])
        break
    return tuple(
        Extra(name, tuple(package for package in needed if not _is_installed(package)))
        for name, needed in packages.items()
        if name != _FOR_DEVELOPERS
    )


def _is_installed(package: str) -> bool:
    names = filter(None, (package, _SAME.get(package)))
    return any(True for name in names for _ in metadata.distributions(name=name))
