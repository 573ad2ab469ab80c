"""`megengine.Tensor`, `tensor` and `Parameter`, on torch's tensors and parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import nn

from mezzo._errors import PolicyError, unknown
from mezzo._torch import pytree
from mezzo.compat.megengine.device import default_device, parse_device, warn_once

_DTYPE_NAMES = tuple("bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split())


class Tensor(torch.Tensor):
    """`megengine.Tensor`: copy an array, a list or a number into a tensor on the default device.

    float64 data become float32 unless `dtype` is passed, since MegEngine has no float64. Results
    of ops on such a tensor are such tensors, so `loss.numpy()` works. `is_const`, `no_cache`,
    `name` and `format` have no effect.

    >>> Tensor([0.0, 1.0], dtype="int32", device="cpu0")
    Tensor([0, 1], dtype=torch.int32)
    """

    def __new__(
        cls,
        data: Any,
        dtype: Any = None,
        device: str | torch.device | None = None,
        **_: Any,
    ) -> Self:
        return make_tensor(data, dtype, device).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RuntimeError:
            # A network of torch's layers is on the CPU unless its program moves it.
            device = _network_device(args, kwargs)
            if device is None:
                raise
        args, kwargs = _move_data((args, kwargs), device)
        return super().__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # torch's own needs a new_empty() that returns this class, with or without functions of it.
        if id(self) not in memo:
            copied = self.detach().clone()
            memo[id(self)] = copied.requires_grad_(self.is_leaf and self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def numpy(self, *, force: bool = True) -> Any:
        """Return the values as a NumPy array, of tensors with gradients or on a GPU too.

        bfloat16, which NumPy lacks, becomes float32.
        """
        plain = self.detach().as_subclass(torch.Tensor)
        return (plain.float() if plain.dtype is torch.bfloat16 else plain).numpy(force=force)

    def astype(self, dtype: Any) -> torch.Tensor:
        """Return the tensor in another dtype: a name, NumPy's or torch's."""
        return torch.Tensor.to(self, parse_dtype(dtype))

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Accept MegEngine's device names ("gpu0", "cpu0"), and all that `torch.Tensor.to` does."""
        if args and isinstance(args[0], str) and args[0][:1] in "cgx" and args[0][1:3] == "pu":
            args = (args[0] if args[0] == "cpu" else parse_device(args[0]), *args[1:])
        return super().to(*args, **kwargs)

    def transpose(self, *axes: Any) -> torch.Tensor:
        """Permute all axes, as MegEngine does; two axes of more are swapped, as in torch."""
        pattern = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        if len(pattern) == self.dim():
            return self.permute(*pattern)
        return super().transpose(*pattern)


tensor = Tensor


class _ParameterType(type(nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, nn.Parameter)


class Parameter(nn.Parameter, metaclass=_ParameterType):
    """`megengine.Parameter`: a `torch.nn.Parameter` on the default device.

    >>> weight = Parameter([1.0, 2.0], device="cpu0")
    >>> type(weight) is nn.Parameter and isinstance(weight, Parameter)
    True
    """

    def __new__(  # type: ignore[misc]
        cls, data: Any, dtype: Any = None, device: str | torch.device | None = None
    ) -> nn.Parameter:
        return nn.Parameter(make_tensor(data, dtype, device))


def make_tensor(
    data: Any, dtype: Any = None, device: str | torch.device | None = None
) -> torch.Tensor:
    """Copy data into a plain torch tensor on a device, the default device if it is None."""
    target = data.device if device is None and isinstance(data, torch.Tensor) else device
    try:
        result = torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"megengine.tensor takes an array, a list of numbers, a number or a tensor, got"
            f" {type(data).__name__}: {error}"
        ) from None
    wanted = parse_dtype(dtype) if dtype is not None else result.dtype
    if dtype is None and wanted is torch.float64:
        wanted = torch.float32
    copied = result.detach().to(parse_device(target), wanted, copy=True)
    return copied.as_subclass(torch.Tensor)


def parse_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype of a name, a NumPy dtype or a torch dtype.

    >>> parse_dtype("int32")
    torch.int32
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
    if name not in _DTYPE_NAMES:
        raise PolicyError(unknown("dtype", name, _DTYPE_NAMES))
    parsed: torch.dtype = getattr(torch, name)
    return parsed


def _may_move(value: torch.Tensor) -> bool:
    """Return whether a tensor is data on the default device, without gradients."""
    return (
        isinstance(value, Tensor) and not value.requires_grad and value.device == default_device()
    )


def _network_device(*arguments: Any) -> torch.device | None:
    """Return the device of the tensors that may not move, if it is one, and not the default."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    devices = {leaf.device for leaf in tensors if leaf.dim() > 0 and not _may_move(leaf)}
    return devices.pop() if len(devices) == 1 and devices != {default_device()} else None


def _move_data(arguments: Any, device: torch.device) -> Any:
    """Move data from the default device to that of the network; the first time, warn."""
    warn_once(
        "network",
        f"The network is on {device} and MegEngine's default device is {default_device()}: data"
        f" are copied to {device} at each call. Call net.to('{default_device()}'), or"
        " megengine.set_default_device('cpux') to place new tensors on the CPU.",
    )
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf.to(device) if _may_move(leaf) else leaf, arguments
    )
