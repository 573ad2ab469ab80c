"""Which functions a saved graph may call.

torch's loader resolves any dotted name below `torch`, `math` and `operator`, and calls it when the program runs: `torch.hub.load` would do. Here a name is an aten op
of the allow-list, a custom op that the caller trusts, a function of sizes, or control flow.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache

from mezzo._errors import CheckpointError
from mezzo._torch import all_op_names, get_schema
from mezzo.graph.allowed_ops import is_allowed

_OP = re.compile(r"torch\.ops\.([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)")

_SIZES = frozenset(
    [f"_operator.{name}" for name in "eq ne le ge lt gt neg pos mul add sub floordiv mod pow truediv and_ or_ lshift rshift".split()]
    + [f"torch.sym_{name}" for name in "not int float ite max min sum".split()]
    + ["math.trunc", "torch._sym_sqrt"]
)
"""Functions of sizes, which know no tensors."""

_BODIES = frozenset(
    f"torch.ops.higher_order.{name}" for name in "cond while_loop scan associative_scan map_impl wrap_with_autocast wrap_with_set_grad_enabled".split()
)
"""Control flow and regions: each runs graphs of the same file. Others load libraries (`aoti_call_delegate`) or call Python objects."""


def check(name: str, custom_ops: Collection[str]) -> None:
    """Refuse a function that is not on the lists. Ops outside `aten` run only if the caller names their namespace."""
    if name in _SIZES or name in _BODIES:
        return
    match = _OP.fullmatch(name)
    if match is None:
        raise CheckpointError(f"it calls {name[:200]!r}, which is no op")
    namespace, op, overload = match.groups()
    qualified = f"{namespace}::{op}" if overload == "default" else f"{namespace}::{op}.{overload}"
    if namespace == "aten" and not is_allowed(op, overload):
        raise CheckpointError(
            f"it calls {qualified}, which is not on the list of ops that check their arguments (mezzo.graph.allowed_ops). "
            "Use another op in the model, or wrap it in a custom op (torch.library.custom_op) and load with custom_ops="
        )
    if namespace != "aten" and namespace not in custom_ops:
        raise CheckpointError(f"it calls the custom op {qualified}. If you trust the file, name the op's namespace: custom_ops=({namespace!r},)")
    if qualified not in _registered():
        # Asked again, for the user may have imported the op since.
        _registered.cache_clear()
        if qualified not in _registered():
            raise CheckpointError(f"it calls the op {qualified}, which is not registered here. Import the module that defines it first")
    if namespace == "aten" and any(one.is_out for one in get_schema(f"aten::{op}", "" if overload == "default" else overload).arguments):
        raise CheckpointError(f"it calls {qualified}, which writes to out=; torch.export never writes such a call")


@cache
def _registered() -> frozenset[str]:
    # The dispatcher's ops alone: `torch.ops.aten` also gives the built-in functions of TorchScript, which write files among other things.
    return frozenset(all_op_names())
