"""Python functions of torch that are made of several ops, and how to run them so that each op is seen.

Under a TorchFunctionMode such a function arrives as one call, and the ops inside escape. Its body,
run with the question "does anybody override this?" answered no, makes its inner calls one by one,
and the mode sees each.
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
from mezzo.autocasting import composite_bodies
from mezzo.policy.registry import Function

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_SINGLE_OP = frozenset({"einsum", "stft", "tensordot", "unique", "unique_consecutive"})
"""Ops whose Python function checks and rearranges what it passes on. The arithmetic in them is
about sizes, and the function inside may ask in their name."""
_WRAPPERS = frozenset(
    """
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d align_tensors alpha_dropout atleast_1d atleast_2d atleast_3d
    batch_norm binary_cross_entropy_with_logits block_diag broadcast_tensors cartesian_prod cdist celu chain_matmul cosine_embedding_loss cross_entropy
    ctc_loss dropout elu embedding embedding_bag feature_alpha_dropout floor_divide fractional_max_pool2d fractional_max_pool3d glu grid_sample
    group_norm grouped_mm hardsigmoid hardswish hardtanh hinge_embedding_loss index instance_norm istft layer_norm leaky_relu log_softmax
    margin_ranking_loss matmul max_pool1d max_pool2d max_pool3d max_unpool2d max_unpool3d meshgrid mish multi_margin_loss multilabel_margin_loss nll_loss
    pad pow relu relu6 remainder rms_norm rrelu scaled_addmm scaled_grouped_mm scaled_mm selu sigmoid silu soft_margin_loss softmax split sub tanh threshold
    triplet_margin_loss unflatten update_names
    """.split()
)
"""Ops whose Python function passes its arguments on to builtins of the same op: no other op is
inside, and arithmetic in it is about sizes.

They are here for speed alone: `F.relu` takes 1.5 times as long if it is opened.
`tests/autocasting/test_composites.py` reads the functions of the installed torch to see that
nothing else is inside.
"""


def has_body(function: Function) -> bool:
    """Whether a function is written in Python, and not a builtin or a thin wrapper around one."""
    return isinstance(function, FunctionType) and isinstance(inspect.unwrap(function), FunctionType)


def can_open(name: str, function: Function) -> bool:
    """Return whether the body of an op's function can be run in its place.

    >>> import torch
    >>> can_open("normalize", torch.nn.functional.normalize), can_open("einsum", torch.einsum), can_open("add", torch.add)
    (True, False, False)
    """
    return has_body(function) and name not in _SINGLE_OP


def is_composite(name: str, function: Function) -> bool:
    """Return whether an op's function has other ops inside.

    >>> is_composite("normalize", F.normalize), is_composite("relu", F.relu)
    (True, False)
    """
    return can_open(name, function) and name not in _WRAPPERS


@cache
def opened(function: Function) -> Function:
    """A copy of a composite that no longer asks whether somebody overrides it, so that its inner calls can be seen."""
    inner = _unwrapped(function)
    made = _choice(inner) if inner in boolean_dispatched else _copy(inner)
    setattr(composite_bodies, body_name(function), made)
    return made


def _copy(function: FunctionType) -> Function:
    code = function.__code__
    if function.__module__ != F.__name__:
        # Dynamo goes by files, and traces nothing of `torch/functional.py` and others. Elsewhere a
        # traceback is worth more.
        code = code.replace(co_filename=__file__)
    copy = FunctionType(
        code, _globals_of(function), function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def body_name(function: Function) -> str:
    """The name under which compiled code finds the body."""
    return (
        f"{function.__module__}.{function.__qualname__}.{id(function)}".replace(".", "_")
        .replace("<", "")
        .replace(">", "")
    )


def _choice(function: FunctionType) -> Function:
    """What chooses between two functions by a flag, with the bodies of these: they ask in its name, and would come back to it for ever.

    Written anew, for dynamo does not trace torch's own.
    """
    choice: dict[str, Any] = boolean_dispatched[function]
    name, place, default = choice["arg_name"], choice["index"], choice["default"]
    chosen, other = opened(choice["if_true"]), opened(choice["if_false"])

    def choose(*args: Any, **kwargs: Any) -> Any:
        flag = kwargs[name] if name in kwargs else args[place] if place < len(args) else default
        return chosen(*args, **kwargs) if flag else other(*args, **kwargs)

    return choose


def _globals_of(function: FunctionType) -> dict[str, Any]:
    scope = dict(function.__globals__)
    scope.update({name: one for name, one in _INSTEAD.items() if name in scope})
    # With a __name__ dynamo would guard on the real module's globals, which say something else.
    scope.pop("__name__", None)
    return scope


def _never(*_: object) -> bool:
    return False


class _Warnings:
    """Warns where somebody hears it: dynamo cannot trace a warning."""

    @staticmethod
    def warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
        if not is_dynamo_compiling():
            warnings.warn(message, category, stacklevel=stacklevel + 1)


def _check_key_padding_mask(mask: Any, length: int, batch: int) -> None:
    """torch's own check without a message that refers to a tensor, which dynamo cannot trace."""
    if tuple(mask.shape[:2]) != (batch, length):
        raise AssertionError(
            f"Expected key_padding_mask of shape {(batch, length)}, but got {tuple(mask.shape)}"
        )


_INSTEAD = dict.fromkeys(_QUESTIONS, _never) | {
    "warnings": _Warnings,
    "_check_key_padding_mask": _check_key_padding_mask,
}
"""What a body finds by these names."""


def _unwrapped(function: Function) -> FunctionType:
    # Tensor's Python methods ask in a wrapper around them.
    return cast("FunctionType", inspect.unwrap(function))
