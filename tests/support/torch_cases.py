"""The cases of torch's own autocast tests, checked for dtype and bit-equal values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

import mezzo

CANNOT_RUN = {
    "cudnn_convolution": "calls cuDNN, which a CPU does not have",
    "cudnn_convolution_transpose": "calls cuDNN, which a CPU does not have",
    "einsum": (
        "torch's own entry is malformed (it has the equation in the place of the arguments), and"
        " its own suite skips it as well"
    ),
    "__div__": "torch.Tensor has had no __div__ since Python 2",
}
"""Entries that cannot run on a CPU, with the reason."""

Case = tuple[str, tuple[Any, ...], dict[str, Any], torch.dtype | None, torch.dtype, Any]


def cuda_cases(device: str = "cpu") -> Iterable[Case]:
    lists = AutocastTestLists(device)
    half, full = torch.float16, torch.float32
    for name, kind, module in (
        ("torch_fp16", half, torch),
        ("torch_fp32", full, torch),
        ("torch_need_autocast_promote", full, torch),
        ("nn_fp16", half, torch._C._nn),
        ("nn_fp32", full, torch._C._nn),
        ("linalg_fp16", half, torch._C._linalg),
        ("methods_fp16", half, None),
        ("methods_fp32", full, None),
    ):
        for op, args, *rest in getattr(lists, name):
            kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
            yield op, args, kwargs, kind, kind, module
    for name, module in (
        ("torch_expect_builtin_promote", torch),
        ("methods_expect_builtin_promote", None),
    ):
        for op, args, out in getattr(lists, name):
            yield op, args, {}, full, out, module


def cpu_cases(half: torch.dtype) -> Iterable[Case]:
    lists, full = AutocastCPUTestLists("cpu"), torch.float32
    for name, kind, module in (
        ("torch_16", half, torch),
        ("torch_fp32", full, torch),
        ("nn_16", half, torch._C._nn),
        ("nn_fp32", full, torch._C._nn),
    ):
        for op, args, *rest in getattr(lists, name):
            yield op, args, rest[0] if rest else {}, kind, kind, module
    for name, module in (
        ("torch_expect_builtin_promote", torch),
        ("methods_expect_builtin_promote", None),
    ):
        for op, bfloat16, float16, out in getattr(lists, name):
            yield op, bfloat16 if half is torch.bfloat16 else float16, {}, full, out, module
    for op, bfloat16, float16 in lists.torch_need_autocast_promote:
        yield op, bfloat16 if half is torch.bfloat16 else float16, {}, full, full, torch


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return (
        type(value)(cast(item, dtype) for item in value)
        if isinstance(value, list | tuple)
        else value
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and torch.equal(one.nan_to_num(), other.nan_to_num())
            and torch.equal(one.isnan(), other.isnan())
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def callables(op: str, module: Any) -> list[Any]:
    return [
        getattr(owner, op)
        for owner in (module, torch.Tensor)
        if owner is not None and hasattr(owner, op)
    ]


def identify(case: Case) -> str:
    return f"{case[0]}-{case[3]}"


def check(case: Case, region: mezzo.autocast) -> None:
    op, args, kwargs, kind, out, module = case
    found = callables(op, module)
    assert found, f"{op} was not found"
    for function in found:
        torch.manual_seed(0)
        with region:
            result = function(*args, **kwargs)
        torch.manual_seed(0)
        expected = function(*cast(args, kind), **kwargs)
        if isinstance(result, torch.Tensor):
            assert result.dtype == out
        if isinstance(expected, torch.Tensor) and expected.dtype is not torch.bool:
            expected = expected.to(out)
        assert same(result, expected)
