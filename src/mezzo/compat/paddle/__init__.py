"""PaddlePaddle's mixed precision on torch and mezzo.

Write `from mezzo.compat import paddle`, and a program's calls of `paddle.amp`, `paddle.static.amp`,
`paddle.Model` and `paddle.optimizer` stay as they are. Layers, tensors and data loaders are
torch's; docs/coming-from/paddle.md has the table of substitutions and the differences.
"""

from typing import NoReturn

from mezzo.compat.paddle import amp, callbacks, metric, nn, optimizer, static
from mezzo.compat.paddle._places import (
    CPUPlace,
    CUDAPlace,
    XPUPlace,
    get_device,
    is_compiled_with_cuda,
    set_device,
)
from mezzo.compat.paddle.hapi import Model
from mezzo.compat.paddle.nn import raise_missing
from mezzo.compat.paddle.parallel import DataParallel
from mezzo.compat.paddle.static._program import disable_static, enable_static, in_dynamic_mode

__all__ = [
    "CPUPlace",
    "CUDAPlace",
    "DataParallel",
    "Model",
    "XPUPlace",
    "amp",
    "callbacks",
    "disable_static",
    "enable_static",
    "get_device",
    "in_dynamic_mode",
    "is_compiled_with_cuda",
    "metric",
    "nn",
    "optimizer",
    "set_device",
    "static",
]


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise_missing("", name)
