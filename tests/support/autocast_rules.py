"""What torch's own autocast does with every op that it has a kernel for, as a program that knows nothing of mezzo.

Writes {device: {overload: rule}}, for an argument {device: dispatch key}. The ops are called with
tensors that note how they are cast on their way through autocast and compute nothing, so that no
device is needed, and sizes need not fit: casts come first.
"""

import json
import sys
import warnings
from typing import ClassVar

import torch

HALF, FULL = torch.float16, torch.float32
PLAIN = {"int": 1, "float": 1.0, "bool": False, "number": 1, "str": "none"}


class ReachedError(Exception):
    """The call has come through autocast."""


class Noting(torch.Tensor):
    """A tensor of any device that notes what it is cast to."""

    casts: ClassVar[list] = []

    @staticmethod
    def __new__(cls, dtype, device):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2), dtype=dtype, device=device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Some ops are told the dtype of their result instead, and softmax whether it is float32.
        cls.casts.append(
            FULL if "softmax" in func.name() and args[2:] == (True,) else kwargs.get("dtype")
        )
        if func is torch.ops.aten._to_copy.default:
            return Noting(kwargs["dtype"], args[0].device)
        raise ReachedError


def given(argument, tensors):
    """A value of an argument's type."""
    kind = str(argument.type)
    if argument.has_default_value() or kind.startswith("Optional["):
        return argument.default_value
    if "Tensor" in kind:
        return [next(tensors), next(tensors)] if kind.startswith("List[") else next(tensors)
    return [PLAIN[kind[5:-1]]] * 2 if kind.startswith("List[") else PLAIN[kind]


def casts(overload, device, *dtypes):
    """What tensors of these dtypes, of which the last goes on for ever, are cast to in a call; None where the call is refused."""
    tensors = (Noting(dtypes[min(place, len(dtypes) - 1)], device) for place in range(100))
    arguments = {one.name: given(one, tensors) for one in overload._schema.arguments}
    Noting.casts = []
    try:
        overload(**arguments)
    except Exception as error:  # noqa: BLE001 - sizes may be wrong, in whichever way
        if "unsafe to autocast" in str(error):
            return None
    return Noting.casts


def rule(overload, device):
    """What autocast does with an op."""
    narrowed, widened, promoted = (
        casts(overload, device, FULL),
        casts(overload, device, HALF),
        casts(overload, device, HALF, FULL),
    )
    if narrowed is None:
        return "refuse"
    if HALF in narrowed:
        return "half"
    if FULL in widened:
        return "full"
    return "promote" if FULL in promoted else "keep"


def rules(device, key):
    """What autocast does with every overload of ATen's that it has a kernel for; not with those for named dimensions."""
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, HALF)
    names = (
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
        if name.startswith("aten::")
    )
    overloads = {
        name: getattr(
            getattr(torch.ops.aten, name.partition(".")[0]), name.partition(".")[2] or "default"
        )
        for name in names
    }
    found = {
        name: rule(overload, device)
        for name, overload in overloads.items()
        if not any(word in name.lower() for word in ("dimname", "names"))
    }
    torch.set_autocast_enabled(device, False)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(
        json.dumps({device: rules(device, key) for device, key in json.loads(sys.argv[1]).items()})
    )
