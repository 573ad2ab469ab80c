"""PaddlePaddle's mixed precision, layers and data loading on torch and mezzo.

Write `from mezzo.compat import paddle`, and a program's calls stay as they are. Tensors and layers
are subclasses of torch's; docs/coming-from/paddle.md has the differences, and what to use for names
that are not here.
"""

import torch as _torch
from torch import (
    bfloat16,
    bool,
    complex64,
    complex128,
    enable_grad,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    is_grad_enabled,
    no_grad,
    set_grad_enabled,
    uint8,
)

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle import (
    _creation,
    _manipulation,
    _math,
    amp,
    callbacks,
    device,
    distributed,
    io,
    jit,
    metric,
    nn,
    optimizer,
    regularizer,
    static,
    vision,
)
from mezzo.compat.paddle._creation import *  # noqa: F403 - its __all__
from mezzo.compat.paddle._dtypes import parse_dtype
from mezzo.compat.paddle._files import load, save
from mezzo.compat.paddle._manipulation import *  # noqa: F403 - its __all__
from mezzo.compat.paddle._math import *  # noqa: F403 - its __all__
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle._tensor import Tensor, to_tensor
from mezzo.compat.paddle.device import (
    CPUPlace,
    CUDAPinnedPlace,
    CUDAPlace,
    CustomPlace,
    IPUPlace,
    MLUPlace,
    NPUPlace,
    XPUPlace,
    get_cudnn_version,
    get_device,
    is_compiled_with_cinn,
    is_compiled_with_cuda,
    is_compiled_with_custom_device,
    is_compiled_with_distribute,
    is_compiled_with_ipu,
    is_compiled_with_mlu,
    is_compiled_with_npu,
    is_compiled_with_rocm,
    is_compiled_with_xpu,
    set_device,
)
from mezzo.compat.paddle.hapi import Model
from mezzo.compat.paddle.nn import ParamAttr
from mezzo.compat.paddle.parallel import DataParallel
from mezzo.compat.paddle.static._program import disable_static, enable_static, in_dynamic_mode

__all__ = [  # noqa: PLE0604 - strings
    *_creation.__all__,
    *_manipulation.__all__,
    *_math.__all__,
    "CPUPlace",
    "CUDAPinnedPlace",
    "CUDAPlace",
    "CustomPlace",
    "DataParallel",
    "IPUPlace",
    "MLUPlace",
    "Model",
    "NPUPlace",
    "ParamAttr",
    "Tensor",
    "XPUPlace",
    "amp",
    "bfloat16",
    "bool",
    "callbacks",
    "complex128",
    "complex64",
    "device",
    "disable_static",
    "distributed",
    "enable_grad",
    "enable_static",
    "float16",
    "float32",
    "float64",
    "get_cudnn_version",
    "get_default_dtype",
    "get_device",
    "get_flags",
    "in_dynamic_mode",
    "int16",
    "int32",
    "int64",
    "int8",
    "io",
    "is_compiled_with_cinn",
    "is_compiled_with_cuda",
    "is_compiled_with_custom_device",
    "is_compiled_with_distribute",
    "is_compiled_with_ipu",
    "is_compiled_with_mlu",
    "is_compiled_with_npu",
    "is_compiled_with_rocm",
    "is_compiled_with_xpu",
    "is_grad_enabled",
    "jit",
    "load",
    "metric",
    "nn",
    "no_grad",
    "optimizer",
    "regularizer",
    "save",
    "set_default_dtype",
    "set_device",
    "set_flags",
    "set_grad_enabled",
    "static",
    "to_tensor",
    "uint8",
    "vision",
]


def get_default_dtype() -> str:
    """Return the dtype of new floating-point tensors."""
    return "float32"


_flags: dict[str, object] = {}


def set_flags(flags: dict[str, object]) -> None:
    """Store Paddle's flags for `get_flags`; they tune Paddle's kernels and have no effect here."""
    if not isinstance(flags, dict):
        raise TypeError("flags in set_flags should be a dict")
    _flags.update(flags)


def get_flags(flags: str | list[str] | tuple[str, ...]) -> dict[str, object]:
    """Return flags by name as they were set; a flag that was not set raises."""
    names = [flags] if isinstance(flags, str) else list(flags)
    if missing := [name for name in names if name not in _flags]:
        raise ValueError(f"Flag {missing[0]} cannot get its value: set_flags did not set it.")
    return {name: _flags[name] for name in names}


def set_default_dtype(d: object) -> None:
    """Accept float32, the only default dtype here."""
    if parse_dtype(d) is not float32:
        raise ValueError(
            f"set_default_dtype({d!r}) is not supported: new tensors and layers are float32. Use"
            " paddle.amp.decorate(level='O2') or layer.to(dtype=...)."
        )


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=_torch)
