"""Results of `mezzo compare` as they come from a GPU and from a CPU."""

from __future__ import annotations

from dataclasses import replace

from mezzo.comparing.comparison import Comparison, ModeResult
from mezzo.comparing.workload import Documented

MODES = ("float32", "TF32", "torch.amp", "Apex O1", "Apex O2", "O1", "O2", "O2 captured")
TIMES = (40.0, 22.0, 14.0, 13.5, 12.0, 13.0, 11.0, 9.0)


def gpu_result(workload="cifar", machine="NVIDIA H200", **changes):
    """A result in which O2 captured is the fastest mode."""
    modes = [
        ModeResult(
            name,
            None if number < 2 else "float16",
            time,
            128e3 / time,
            int(2**31 * (1 if number < 2 else 0.62)),
            2**30 >> (number > 1),
            0 if number < 2 else 300 - 30 * number,
            0.412 + 0.002 * number,
            0 if number < 2 else 1,
            0.931 - 0.001 * number,
            tuple(2.0 / (epoch + 1) + 0.01 * number for epoch in range(6)),
            tuple(0.9 - 0.5 / (epoch + 1) for epoch in range(6)),
        )
        for number, (name, time) in enumerate(zip(MODES, TIMES, strict=True))
    ]
    modes.append(ModeResult("converted", "float16", 2.0, 64e3, note="a forward pass"))
    result = Comparison(
        workload,
        "ResNet-50 on images of 32 × 32, batch 128, SGD",
        "full",
        "scikit-learn's digits, 32 × 32 × 3",
        machine,
        "2.11.0+cu130",
        "0.1.0",
        60,
        7,
        tuple(modes),
        (Documented("O1", 4.5, "PaddlePaddle, V100"), Documented("O2", 5.2, "PaddlePaddle, V100")),
    )
    return replace(result, **changes)


def cpu_result(workload="cifar", **changes):
    """A result of a CPU that emulates 16 bits: all other modes are slower than float32."""
    gpu = gpu_result(workload, "Intel Xeon", torch="2.13.0+cpu", preset="small")
    modes = [
        replace(one, milliseconds=10.0 + 3 * number, dtype=one.dtype and "bfloat16", skipped=None)
        for number, one in enumerate(gpu.modes)
        if one.mode not in {"TF32", "O2 captured"}
    ]
    modes.append(ModeResult("TF32", note="needs an NVIDIA GPU of 2020 or later"))
    reason = "this CPU has no AVX512-BF16 instructions"
    return replace(gpu, modes=tuple(modes), **({"emulated": reason} | changes))
