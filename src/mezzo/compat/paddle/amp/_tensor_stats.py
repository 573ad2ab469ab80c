"""Statistics of a tensor, and the line of Paddle's logs that has them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

_SHORT = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_FLOAT16_MAX = torch.finfo(torch.float16).max
ABORT, OVERFLOW, ALL = 0, 2, 3
"""Values of `DebugMode` with rules of their own."""


@dataclass(frozen=True)
class TensorStats:
    """What Paddle logs of a tensor."""

    where: str
    """Device, op, tensor and dtype, in brackets."""
    is_float32: bool
    is_gpu: int | None
    """The index of the GPU; None on a CPU."""
    numel: int
    nan: int
    inf: int
    zero: int
    max: float
    min: float
    mean: float

    @classmethod
    def of(cls, tensor: torch.Tensor, op: str, name: str) -> TensorStats:
        """Compute the statistics of a floating-point tensor. This synchronizes."""
        values = tensor.detach().as_subclass(torch.Tensor)
        if values.dtype not in _SHORT:
            raise TypeError(
                f"check_numerics() takes a floating-point tensor, got {values.dtype} for {op}."
                " Integers have no NaN and no infinity."
            )
        index = (values.device.index or 0) if values.is_cuda else None
        device = "cpu" if index is None else f"gpu:{index}"
        precise = values if values.dtype == torch.float64 else values.float()
        numbers = precise[~precise.isnan()]
        extremes = (numbers.max(), numbers.min()) if numbers.numel() else (torch.nan, torch.nan)
        return cls(
            f"[device={device}, op={op}, tensor={name}, dtype={_SHORT[values.dtype]}]",
            values.dtype == torch.float32,
            index,
            values.numel(),
            int(values.isnan().sum()),
            int(values.isinf().sum()),
            int((values == 0).sum()),
            float(extremes[0]),
            float(extremes[1]),
            float(precise.mean()),
        )

    def line(self, mode: int) -> str | None:
        """Return the line that a mode logs; None if it logs none."""
        values = f"max={self.max:e}, min={self.min:e}, mean={self.mean:e}"
        if self.nan or self.inf:
            counts = f"num_nan={self.nan}, num_inf={self.inf}, num_zero={self.zero}"
            return f"[PRECISION] [ERROR] in {self.where}, numel={self.numel}, {counts}, {values}"
        exceeds = self.is_float32 and max(abs(self.max), abs(self.min)) > _FLOAT16_MAX
        if mode >= ALL or (mode >= OVERFLOW and exceeds):
            counts = f"num_zero={self.zero}"
            return f"[PRECISION] in {self.where}, numel={self.numel}, {counts}, {values}"
        return None

    def report(self, mode: int, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Print what a mode logs, or append it to a file; raise if the mode aborts."""
        line = self.line(mode)
        if line is not None and output_dir is None:
            print(line)  # noqa: T201 - as Paddle does
        elif line is not None and output_dir is not None:
            folder = Path(output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            name = "worker_cpu" if self.is_gpu is None else f"worker_gpu.{self.is_gpu}"
            with (folder / name).open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        if mode == ABORT and (self.nan or self.inf):
            counts = f"num_nan={self.nan}, num_inf={self.inf}, num_zero={self.zero}"
            raise RuntimeError(
                f"(PreconditionNotMet) There are NAN or INF ({counts}) in {self.where}."
            )
