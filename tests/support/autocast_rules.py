"""A program without mezzo that prints what torch's own autocast does with each of its ops.

Prints {device: {overload: rule}}; its argument is {device: dispatch key}. The ops are called with
tensors that record how autocast casts them and compute nothing. So no device is needed, and sizes
need not fit: casts come first.
"""

import json
import sys
import warnings
from typing import ClassVar

import torch

HALF, FULL = torch.float16, torch.float32
PLAIN = {"int": 1, "float": 1.0, "bool": False, "number": 1, "str": "none"}


class ReachedError(Exception):
    """The call has passed autocast."""


class Recording(torch.Tensor):
    """A tensor of any device that records the dtypes it is cast to."""

    casts: ClassVar[list] = []

    @staticmethod
    def __new__(cls, dtype, device):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2), dtype=dtype, device=device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Some ops take the dtype of their result instead, and softmax a flag for float32.
        cls.casts.append(
            FULL if "softmax" in func.name() and args[2:] == (True,) else kwargs.get("dtype")
        )
        if func is torch.ops.aten._to_copy.default:
            return Recording(kwargs["dtype"], args[0].device)
        raise ReachedError


def value_for(argument, tensors):
    """Return a value of an argument's type."""
    kind = str(argument.type)
    if argument.has_default_value() or kind.startswith("Optional["):
        return argument.default_value
    if "Tensor" in kind:
        return [next(tensors), next(tensors)] if kind.startswith("List[") else next(tensors)
    return [PLAIN[kind[5:-1]]] * 2 if kind.startswith("List[") else PLAIN[kind]


def casts(overload, device, *dtypes):
    """Return the dtypes that tensors are cast to in a call; None if autocast refuses the call.

    The last of `dtypes` is used for all further tensors.
    """
    tensors = (Recording(dtypes[min(place, len(dtypes) - 1)], device) for place in range(100))
    arguments = {one.name: value_for(one, tensors) for one in overload._schema.arguments}
    Recording.casts = []
    try:
        overload(**arguments)
    except Exception as error:  # noqa: BLE001 - wrong sizes raise errors of many types
        if "unsafe to autocast" in str(error):
            return None
    return Recording.casts


def rule(overload, device):
    """Return the rule by which autocast casts an op."""
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
    """Return the rule of every ATen overload with an autocast kernel, without named dimensions."""
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
        if not any(part in name.lower() for part in ("dimname", "names"))
    }
    torch.set_autocast_enabled(device, False)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(
        json.dumps({device: rules(device, key) for device, key in json.loads(sys.argv[1]).items()})
    )
