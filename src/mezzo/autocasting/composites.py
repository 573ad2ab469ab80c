"""Run Python functions of torch that are composed of several ops so that each op is seen.

A TorchFunctionMode sees such a composite function as one call, and not the ops inside it. A copy of
the function that does not check for overrides makes its inner calls one by one, and the mode sees
each of them.
"""

from __future__ import annotations

import inspect
import warnings
from functools import cache
from types import FunctionType
from typing import Any, cast

from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from mezzo._torch import boolean_dispatched
from mezzo.policy.registry import Function

_SINGLE_OP = frozenset({"einsum", "stft", "tensordot", "unique", "unique_consecutive"})
"""Ops whose Python function checks and rearranges the arguments of one builtin. The arithmetic in
it is about sizes, and the builtin may check for overrides in the name of the function."""

_WRAPPERS = frozenset(
    """
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d align_tensors alpha_dropout atleast_1d atleast_2d atleast_3d batch_norm
    binary_cross_entropy_with_logits block_diag broadcast_tensors cartesian_prod cdist celu
    chain_matmul cosine_embedding_loss cross_entropy ctc_loss dropout elu embedding embedding_bag
    feature_alpha_dropout floor_divide fractional_max_pool2d fractional_max_pool3d glu grid_sample
    group_norm grouped_mm hardsigmoid hardswish hardtanh hinge_embedding_loss index instance_norm
    istft layer_norm leaky_relu log_softmax margin_ranking_loss matmul max_pool1d max_pool2d
    max_pool3d max_unpool2d max_unpool3d meshgrid mish multi_margin_loss multilabel_margin_loss
    nll_loss pad pow relu relu6 remainder rms_norm rrelu scaled_addmm scaled_grouped_mm scaled_mm
    selu sigmoid silu soft_margin_loss softmax split sub tanh threshold triplet_margin_loss
    unflatten update_names
    """.split()
)
"""Ops whose Python function passes its arguments to builtins of the same op. No other op is inside,
and arithmetic in it is about sizes.

They are listed for speed only: `F.relu` takes 1.5 times as long if it is decomposed.
`tests/autocasting/test_composites.py` reads the functions of the installed torch to check that
nothing else is inside.
"""


@cache
def is_python_function(function: Function) -> bool:
    """Return whether a function is written in Python: not a builtin, nor a wrapper of one."""
    return isinstance(function, FunctionType) and isinstance(inspect.unwrap(function), FunctionType)


def can_decompose(name: str, function: Function) -> bool:
    """Return whether an op's function can be replaced by its `decomposed` copy.

    >>> import torch
    >>> can_decompose("normalize", F.normalize), can_decompose("einsum", torch.einsum)
    (True, False)
    """
    return is_python_function(function) and name not in _SINGLE_OP


def is_composite(name: str, function: Function) -> bool:
    """Return whether an op's function calls other ops.

    >>> is_composite("normalize", F.normalize), is_composite("relu", F.relu)
    (True, False)
    """
    return can_decompose(name, function) and name not in _WRAPPERS


@cache
def decomposed(function: Function) -> Function:
    """Return a copy of a composite function whose inner calls are visible to function modes."""
    inner = _unwrapped(function)
    copy = _boolean_dispatch(inner) if inner in boolean_dispatched else _copy(inner)
    # Compiled code reaches a function only through a global of a module.
    globals()[decomposed_name(function)] = copy
    return copy


def decomposed_name(function: Function) -> str:
    """Return the global of this module under which compiled code finds the copy."""
    qualified = f"{function.__module__}.{function.__qualname__}.{id(function)}"
    return "decomposed_" + qualified.replace(".", "_").replace("<", "").replace(">", "")


def _copy(function: FunctionType) -> Function:
    code = function.__code__
    if function.__module__ != F.__name__:
        # Dynamo decides by file whether to trace, and skips `torch/functional.py` and others. The
        # functions it does trace keep their file for tracebacks.
        code = code.replace(co_filename=__file__)
    copy = FunctionType(
        code, _globals_of(function), function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _boolean_dispatch(function: FunctionType) -> Function:
    """Return a function that chooses between two by a flag, with decomposed copies of both.

    The originals check for overrides in the name of the choosing function, which would recurse for
    ever. Written again here because dynamo does not trace torch's version.
    """
    dispatch: dict[str, Any] = boolean_dispatched[function]
    name, position, default = dispatch["arg_name"], dispatch["index"], dispatch["default"]
    if_true, if_false = decomposed(dispatch["if_true"]), decomposed(dispatch["if_false"])

    def choose(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            flag = kwargs[name]
        else:
            flag = args[position] if position < len(args) else default
        return if_true(*args, **kwargs) if flag else if_false(*args, **kwargs)

    return choose


def _globals_of(function: FunctionType) -> dict[str, Any]:
    scope = dict(function.__globals__)
    scope.update({name: value for name, value in _REPLACED_GLOBALS.items() if name in scope})
    # With a __name__ dynamo would guard on the globals of the real module, which differ.
    scope.pop("__name__", None)
    return scope


def _not_overridden(*_: object) -> bool:
    return False


class _Warnings:
    """Replaces the `warnings` module: dynamo cannot trace a warning, so compiled code has none."""

    @staticmethod
    def warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
        if not is_dynamo_compiling():
            warnings.warn(message, category, stacklevel=stacklevel + 1)


def _check_key_padding_mask(mask: Any, length: int, batch: int) -> None:
    """Check as torch does, but without a tensor in the message, which dynamo cannot trace."""
    if tuple(mask.shape[:2]) != (batch, length):
        raise AssertionError(
            f"Expected key_padding_mask of shape {(batch, length)}, but got {tuple(mask.shape)}"
        )


_REPLACED_GLOBALS = {
    "has_torch_function": _not_overridden,
    "has_torch_function_unary": _not_overridden,
    "has_torch_function_variadic": _not_overridden,
    "warnings": _Warnings,
    "_check_key_padding_mask": _check_key_padding_mask,
}
"""Globals that a copy gets instead of torch's."""


def _unwrapped(function: Function) -> FunctionType:
    # Python methods of Tensor check for overrides in a wrapper around them.
    return cast("FunctionType", inspect.unwrap(function))
