"""Copy models whose modules keep results of a forward pass, as of the old `weight_norm`."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

_T = TypeVar("_T")


def copy_with_results(value: _T, memo: dict[int, Any] | None = None) -> _T:
    """Return what `deepcopy` returns; tensors with a history, which it refuses, are detached.

    >>> from torch import nn
    >>> model = nn.Linear(2, 1)
    >>> model.kept = [model.weight * 2]
    >>> bool(copy_with_results(model).kept[0].requires_grad)
    False
    """
    with _DetachedCopies():
        return deepcopy(value, memo)


class _DetachedCopies(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            result, memo = args
            return memo.setdefault(id(result), result.detach().clone())
        return func(*args, **(kwargs or {}))
