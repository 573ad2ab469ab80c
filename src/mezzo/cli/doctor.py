"""`mezzo doctor`: what is fast on this machine and why, known traps, and what to do about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mezzo._torch import FIRST, LAST
from mezzo.cli.machine import ISA_LIMIT, WITHOUT_AMX, Machine, version_of

_SLOWER, _FASTER = 0.9, 1.1
"""Speeds relative to float32 below and above which a dtype counts as slower or faster."""


@dataclass(frozen=True)
class Note:
    """Something to change on this machine, or to keep in mind."""

    kind: Literal["problem", "hint"]
    """A problem prevents training in 16 bits; a hint does not."""
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class _Trap:
    """A known trap of torch, in the versions from `first` on and before `fixed`."""

    text: str
    remedy: str
    first: tuple[int, int] = (0, 0)
    fixed: tuple[int, int] = (99, 0)


_TRAPS = (
    _Trap(
        "torch.autocast does not list rms_norm before torch 2.12, so it runs in 16 bits there.",
        "A policy with full={'rms_norm'} runs it in float32, as later versions do.",
        fixed=(2, 12),
    ),
    _Trap(
        "Before torch 2.13, a function that is compiled in a float16 torch.autocast region can get"
        " the code for bfloat16 from the cache on disk.",
        "Regions of mezzo.autocast are not affected.",
        fixed=(2, 13),
    ),
    _Trap(
        "The backward pass of F.huber_loss, before torch 2.13 of F.mse_loss too, raises 'Found"
        " dtype Float but expected' for a 16-bit output of a model and a float32 target.",
        "Compute the loss in the region, or pass output_dtype='float32' to mezzo.decorate.",
    ),
    _Trap(
        "torch.cholesky and torch.qr do not exist from torch 2.14 on.",
        "Call torch.linalg.cholesky and torch.linalg.qr.",
        first=(2, 14),
    ),
    _Trap(
        "Ranks that torchrun restarts can find the addresses of the old ones and fail"
        " (pytorch#135712).",
        "With --max-restarts set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.",
    ),
)


@dataclass(frozen=True)
class Diagnosis:
    """What `mezzo doctor` prints: the machine, the dtypes that are fast on it, and notes."""

    machine: Machine
    notes: tuple[Note, ...]
    traps: tuple[Note, ...]
    """Known traps of this version of torch."""

    @property
    def speeds(self) -> Mapping[str, float]:
        """How many times as fast as float32 a product is, by dtype."""
        times = {
            product.dtype: product.seconds for product in self.machine.products if product.seconds
        }
        return {
            name: times["float32"] / seconds
            for name, seconds in times.items()
            if "float32" in times
        }

    @property
    def has_problem(self) -> bool:
        """Whether something prevents training in 16 bits."""
        return any(note.kind == "problem" for note in self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        extras = [
            {"name": extra.name, "installed": not extra.missing, "missing": list(extra.missing)}
            | {"install": extra.install}
            for extra in self.machine.extras
        ]
        return {
            **asdict(self.machine),
            "extras": extras,
            "speeds": {name: float(f"{speed:.3g}") for name, speed in self.speeds.items()},
            "notes": [asdict(note) for note in self.notes],
            "traps": [asdict(note) for note in self.traps],
        }

    def __str__(self) -> str:
        return "\n".join([*self._facts(), *self._dtypes(), *self._advice(), *self._extras()])

    def _facts(self) -> Iterator[str]:
        machine = self.machine
        yield f"mezzo {machine.mezzo}, torch {machine.torch}, Python {machine.python}"
        yield f"{machine.system}, {machine.threads} threads on {machine.cores} cores"
        yield ""

    def _dtypes(self) -> Iterator[str]:
        yield str(self.machine.device)
        for product in self.machine.products:
            if product.seconds is None:
                yield f"  {product.dtype:9} product failed: {product.failure}"
            else:
                speed = self.speeds.get(product.dtype)
                relative = "" if speed is None else f"  {speed:5.2f} × float32"
                yield f"  {product.dtype:9} product {product.seconds * 1e3:8.3f} ms{relative}"

    def _advice(self) -> Iterator[str]:
        for title, notes in (
            ("What to do", self.notes),
            (f"Known traps of torch {self.machine.torch}", self.traps),
        ):
            if notes:
                yield f"\n{title}"
            for note in notes:
                mark = "!" if note.kind == "problem" else "-"
                yield f"  {mark} {note.text} {note.remedy}".rstrip()

    def _extras(self) -> Iterator[str]:
        if self.machine.extras:
            yield "\nExtras"
        for extra in self.machine.extras:
            yield f"  {extra.name:12} " + (
                f"lacks {', '.join(extra.missing)}: {extra.install}"
                if extra.missing
                else "installed"
            )


def diagnose(machine: Machine) -> Diagnosis:
    """Judge a machine."""
    notes = (
        *_crashes(machine),
        *_no_dtype(machine),
        *_missing_gpu(machine),
        *_slow_dtypes(machine),
        *_cuda_settings(machine),
        *_cpu_settings(machine),
        *_torch_version(machine),
    )
    version = version_of(machine.torch)
    traps = tuple(
        Note("hint", trap.text, trap.remedy)
        for trap in _TRAPS
        if trap.first <= version < trap.fixed
    )
    return Diagnosis(machine, notes, traps)


def _crashes(machine: Machine) -> Iterator[Note]:
    cured = {
        product.dtype for product in machine.products_without_amx if product.seconds is not None
    }
    for product in machine.products:
        if product.seconds is not None:
            continue
        text = f"A product in {product.dtype} failed on {machine.device.name}: {product.failure}."
        if product.failure != "SIGILL":
            yield Note("problem", text, "Check the driver, the free memory and the build of torch.")
            continue
        text += " The CPU reports instructions (AMX) that this virtual machine does not allow."
        works = (
            "with which it runs here" if product.dtype in cured else "which does not cure it here"
        )
        remedy = f"Set {ISA_LIMIT}={WITHOUT_AMX}, {works}."
        if product.dtype not in cured:
            remedy += f" {ISA_LIMIT}=AVX2 emulates 16 bits, slowly."
        yield Note("problem", text, remedy)


def _no_dtype(machine: Machine) -> Iterator[Note]:
    device = machine.device
    if not device.float16.supported and not device.bfloat16.supported:
        yield Note(
            "problem",
            f"Nothing trains in 16 bits here: {device.float16.reason}.",
            "Choose another device with --device, or install a build of torch that supports this"
            " one (https://pytorch.org/get-started).",
        )


def _missing_gpu(machine: Machine) -> Iterator[Note]:
    if machine.nvidia_driver and machine.device.device == "cpu":
        yield Note(
            "hint",
            f"This machine has NVIDIA's driver, and torch {machine.torch} runs on the CPU.",
            "Install a CUDA build of torch (https://pytorch.org/get-started), or check"
            " CUDA_VISIBLE_DEVICES.",
        )


def _slow_dtypes(machine: Machine) -> Iterator[Note]:
    speeds = Diagnosis(machine, (), ()).speeds
    halves = {name: speed for name, speed in speeds.items() if name in {"float16", "bfloat16"}}
    has_fast = bool(halves) and max(halves.values()) > _FASTER
    limit = f"{ISA_LIMIT}={machine.isa_limit} limits the instructions"
    for name, speed in halves.items():
        if _SLOWER <= speed < _FASTER and machine.isa_limit is not None:
            yield Note(
                "hint",
                f"{name} products are no faster than float32 here: {limit}.",
                f"If mezzo doctor reports no failure without {ISA_LIMIT}, unset it.",
            )
        elif speed < _SLOWER:
            why = machine.device.support(name).reason if machine.isa_limit is None else limit
            yield Note(
                "hint",
                f"{name} is {1 / speed:.1f} times slower than float32 here: {why}.",
                f"Do not train in {name} on this device."
                if has_fast
                else "Train in float32 on this device; 16 bits save memory only.",
            )
    if has_fast:
        best = max(halves, key=lambda name: (halves[name] > _FASTER, name == "bfloat16"))
        scaling = "without loss scaling" if best == "bfloat16" else "with a GradScaler"
        yield Note(
            "hint",
            f"{best} products are {halves[best]:.1f} times as fast as float32.",
            f"Train with dtype='{best}', {scaling}.",
        )


def _cuda_settings(machine: Machine) -> Iterator[Note]:
    if machine.device.device != "cuda" or not machine.device.float16.supported:
        return
    if not machine.triton:
        yield Note(
            "hint",
            "Triton is not installed: optimizer steps of O2 and loss scaling run as several torch"
            " kernels instead of fused ones.",
            "Run: pip install triton",
        )
    if not machine.tf32:
        yield Note(
            "hint",
            "float32 products do not use TF32, which is off by default.",
            "torch.set_float32_matmul_precision('high') is faster where ops stay in float32, with"
            " 10 bits of mantissa.",
        )
    if not machine.cudnn_benchmark:
        yield Note(
            "hint",
            "cuDNN does not search for the fastest convolution.",
            "For convolutions of constant size set torch.backends.cudnn.benchmark = True.",
        )


def _cpu_settings(machine: Machine) -> Iterator[Note]:
    if machine.device.device == "cpu" and machine.threads < machine.cores:
        yield Note(
            "hint",
            f"torch uses {machine.threads} of {machine.cores} cores.",
            "Set OMP_NUM_THREADS, or call torch.set_num_threads().",
        )


def _torch_version(machine: Machine) -> Iterator[Note]:
    if machine.is_tested:
        return
    text = f"mezzo is tested on torch {FIRST} to {LAST}, this is {machine.torch}."
    if machine.lacking:
        text += f" It lacks what these need: {', '.join(machine.lacking)}."
    yield Note("hint", text, "Run mezzo's tests on it, or use a version in this range.")
