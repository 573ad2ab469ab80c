"""What torch.autocast would do with a graph: the dtype of each value, and the casts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch.fx import Node

from mezzo.graph.nodes import Role, deciding, reads, values
from mezzo.graph.plan import CastBytes
from mezzo.policy.types import Rule


def moved_bytes(value: torch.Tensor, source: torch.dtype, target: torch.dtype) -> int:
    """The bytes that casting a tensor reads and writes; a dynamic size counts as in the example."""
    count = 1
    for size in value.shape:
        count *= size.node.hint if isinstance(size, torch.SymInt) and size.node.hint is not None else 1 if isinstance(size, torch.SymInt) else size
    return count * (source.itemsize + target.itemsize)


def follow(roles: Mapping[Node, Role], half_by: Callable[[Node], bool | None], half: torch.dtype) -> dict[Node, bool]:
    """For each node that makes floating-point values, whether autocast would make them in 16 bits; `half_by` holds what lists say, None follows the inputs."""
    found: dict[Node, bool] = {}
    for node, role in roles.items():
        made = values(node)
        if not made:
            found[node] = _follows(node, half_by(node), found) if role is Role.OP else False
        elif role is Role.ELEMENT and made[0].dtype is torch.float32:
            found[node] = found.get(node.args[0], False)  # type: ignore[arg-type]
        elif role is Role.OP and any(one.dtype is torch.float32 for one in made):
            found[node] = _follows(node, half_by(node), found)
        else:
            found[node] = made[0].dtype is half
    return found


def _follows(node: Node, listed: bool | None, found: Mapping[Node, bool]) -> bool:  # noqa: FBT001
    if listed is not None:
        return listed
    seen = [found.get(read.node, False) for read in deciding(node)]
    return bool(seen) and all(seen)


def autocast_casts(roles: Mapping[Node, Role], rule_of: Callable[[Node], Rule], half: torch.dtype) -> CastBytes:
    """The casts that torch.autocast makes on a graph: each call casts its inputs, and only weights are remembered."""
    rules = {node: rule_of(node) for node, role in roles.items() if role is Role.OP}
    made = follow(roles, lambda node: {Rule.HALF: True, Rule.FULL: False}.get(rules.get(node, Rule.KEEP)), half)
    total, remembered = CastBytes(), set[Node]()
    for node, role in roles.items():
        for read, target in _asked(node, role, rules, made, half):
            source = half if made.get(read) else torch.float32
            if read in remembered or source is target or values(read)[0].dtype not in (torch.float32, half):
                continue
            if roles.get(read) is Role.WEIGHT:
                remembered.add(read)
            total += CastBytes(1, moved_bytes(values(read)[0], source, target))
    return total


def _asked(node: Node, role: Role, rules: Mapping[Node, Rule], made: Mapping[Node, bool], half: torch.dtype) -> Iterable[tuple[Node, torch.dtype]]:
    if role is Role.CAST and values(node) and values(node)[0].dtype in (torch.float32, half):
        return [(read.node, values(node)[0].dtype) for read in reads(node)]
    match rules.get(node):
        case Rule.HALF:
            return [(read.node, half) for read in reads(node)]
        case Rule.FULL:
            return [(read.node, torch.float32) for read in reads(node)]
        case Rule.PROMOTE:
            return [(read.node, half if made[node] else torch.float32) for read in reads(node)]
    return []
