"""Ops that a saved program may call do not crash the process, whatever their arguments.

Each allowed overload is called once in a forked child; `MEZZO_FUZZ_OPS=1000` calls each a thousand
times.
"""

import os
import random
from collections import Counter

import pytest
import torch
from support.forked import SUPPORTED, in_children

from mezzo.conversion.allowed_ops import is_allowed
from mezzo.conversion.checked_ops import CHECKED

CALLS = int(os.environ.get("MEZZO_FUZZ_OPS", "1"))
pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs fork and Linux's /proc")

SHAPES = [
    (),
    (0,),
    (1,),
    (3,),
    (2, 3),
    (4, 4),
    (0, 3),
    (2, 3, 4),
    (2, 4, 5, 5),
    (1, 2, 0, 3),
    (2, 3, 4, 4, 4),
]
DTYPES = [
    torch.float32,
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
INTEGERS = [0, 1, 2, 3, -1, -2, 7, 100, 2**31 - 1, 2**31, -(2**31) - 1, 2**62, 2**63 - 1, -(2**63)]
INDICES = [0, 1, 2, -1, 5, 100, -100, 2**31, -(2**40), 2**62, -(2**63)]
FLOATS = [0.0, 1.0, -1.0, 0.5, 1e-30, 1e308, float("nan"), float("inf")]
STRINGS = [
    "mean",
    "sum",
    "none",
    "reflect",
    "constant",
    "circular",
    "bilinear",
    "tanh",
    "fro",
    "nuc",
    "floor",
    "trunc",
    "ij",
    "linear",
    "amax",
    "valid",
    "i,j->ij",
]


def _tensor(rng, shape=None):
    shape, dtype = rng.choice(SHAPES) if shape is None else shape, rng.choice(DTYPES)
    if dtype in {torch.int64, torch.int32} and rng.random() < 0.5:
        return torch.full(shape, rng.choice(INDICES), dtype=torch.int64).to(dtype)
    if rng.random() < 0.1:
        return torch.full(shape, rng.choice(FLOATS)).to(dtype)
    tensor = torch.randn(shape).abs().to(dtype)
    return tensor.transpose(0, -1) if tensor.dim() and rng.random() < 0.2 else tensor


def _value(rng, kind, name, shape):
    if kind.startswith("Optional["):
        return None if rng.random() < 0.5 else _value(rng, kind[9:-1], name, shape)
    if kind.startswith("List["):
        return [_value(rng, kind[5:-1], name, shape) for _ in range(rng.choice([0, 1, 1, 2, 2, 3]))]
    plain = {
        "dtype": lambda: rng.choice(DTYPES),
        "layout": lambda: torch.strided,
        "device": lambda: torch.device("cpu"),
        "memory_format": lambda: rng.choice([torch.contiguous_format, torch.channels_last]),
    }
    kinds = {
        "Tensor": lambda: _tensor(rng, shape if rng.random() < 0.7 else None),
        "int": lambda: rng.choice(INTEGERS),
        "SymInt": lambda: rng.choice(INTEGERS),
        "float": lambda: rng.choice(FLOATS),
        "number": lambda: rng.choice([*INTEGERS, *FLOATS, True, 1j]),
        "bool": lambda: rng.random() < 0.5,
        "str": lambda: rng.choice(STRINGS),
        "Generator": lambda: None,
    }
    return plain.get(name, kinds.get(kind))()


def _overloads():
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        op, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and is_allowed(op, overload or "default"):
            found = getattr(getattr(torch.ops.aten, op), overload or "default")
            if not any(one.is_out for one in found._schema.arguments) and "Dimname" not in str(
                found._schema
            ):
                yield found


def _call(op, number):
    rng = random.Random(f"{op} {number}")
    torch.manual_seed(number)
    shape = rng.choice(SHAPES)
    needed = [
        one for one in op._schema.arguments if not one.has_default_value() or rng.random() < 0.5
    ]
    try:
        kwargs = {one.name: _value(rng, str(one.type), one.name, shape) for one in needed}
        first = [kwargs.pop("self")] if "self" in kwargs else []
        with torch.no_grad():
            CHECKED.get(op, op)(*first, **kwargs)
    except Exception:  # noqa: BLE001
        return "raised"
    return "called"


def test_no_arguments_of_an_allowed_op_crash_the_process():
    calls = [(op, number) for op in _overloads() for number in range(CALLS)]
    found = in_children(len(calls), lambda index: _call(*calls[index]), seconds=5)
    outcomes = Counter(found.values())
    print(outcomes)  # noqa: T201 - shown with -s
    assert {
        str(calls[index][0]): outcome
        for index, outcome in found.items()
        if outcome not in {"called", "raised", "too slow"}
    } == {}
    # Not all calls fail for a reason unrelated to their sizes.
    assert outcomes["called"] > len(calls) / 10
