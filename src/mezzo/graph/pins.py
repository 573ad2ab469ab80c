"""What is settled before the cut: each op's precision by the words of the conversion and the policy, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import Node

from mezzo._dtypes import dtype_name
from mezzo._errors import RefusedOpError
from mezzo.graph.lists import Words, condition, exclusion, misfit, module_rule
from mezzo.graph.nodes import Role, op_name, said_dtype, values
from mezzo.graph.tidy import REGION
from mezzo.graph.traits import CARRYING, DELICATE, STRUCTURAL
from mezzo.policy.missing_kernels import lacks_kernel
from mezzo.policy.types import Level, Rule


@dataclass(frozen=True)
class Pin:
    """A precision that is settled, or none, and why."""

    half: bool | None
    """True for 16 bits, False for float32, None where the cut may choose."""
    reason: str


FREE = Pin(None, "in no list")
"""Left to the cut."""

FOLLOWS = Pin(False, "reads float32, as under torch.autocast")
"""Not for the cut: it would be less precise than under torch.autocast."""

CARRIES = Pin(False, "carries a state from step to step, in float32 as under torch.autocast")
"""Its weights may be rounded: torch.autocast rounds them too."""

GATHERED = Pin(True, "picks rows of a table that is stored in 16 bits")
"""Its rows are exact copies of the stored ones; what reads them decides in which precision it computes."""


def pin(node: Node, name: str, role: Role, said: Words, modules: Mapping[str, nn.Module]) -> Pin:
    """Settle one op: exclusions first, then the conversion's own lists, then the policy's."""
    if role is not Role.OP:
        return FREE
    found = _by_words(node, name, said) or _by_policy(node, said, modules)
    if found.half is False:
        return found
    return Pin(False, why) if (why := _unfit(node, said)) else found


def _by_words(node: Node, name: str, said: Words) -> Pin | None:
    op = op_name(node) or ""
    if said.idle:
        return Pin(False, said.idle)
    if pattern := exclusion(said, node, name):
        return Pin(False, f"excluded by {pattern!r}")
    if node.meta.get(REGION) == "off":
        return Pin(False, "in a region of the model that switches autocast off")
    if (dtype := said_dtype(node)) is not None and values(node):
        return Pin(dtype is not torch.float32, f"the call says dtype={dtype_name(dtype)}")
    if why := condition(said.conditional, op, node):
        return Pin(False, why)
    if op in said.half:
        return Pin(True, "listed half in the call")
    return Pin(False, "listed full in the call") if op in said.full else None


def _by_policy(node: Node, said: Words, modules: Mapping[str, nn.Module]) -> Pin:
    op = op_name(node) or ""
    if (ruled := module_rule(said, node, modules)) is not None:
        rule, reason = ruled
        return FREE if rule is Rule.KEEP else Pin(rule is Rule.HALF, reason)
    if op in STRUCTURAL:
        return FREE
    if why := condition(said.lists.conditional, op, node):
        return Pin(False, why)
    entry = said.entry(op)
    if op in said.policy.refuse:
        raise RefusedOpError(f"The policy refuses {op}, which the graph calls at {node.name}. Take the op out of the model, or of refuse=.")
    if entry.rule is Rule.HALF and _carries(op, said):
        return CARRIES
    if entry.rule in (Rule.HALF, Rule.FULL, Rule.REFUSE):
        return Pin(entry.rule is Rule.HALF, entry.reason)
    if op not in said.lists.entries and op in DELICATE:
        return Pin(False, DELICATE[op])
    return FREE


def _carries(op: str, said: Words) -> bool:
    """Whether a layer carries a state that torch.autocast would keep in float32, and nobody asks for 16 bits."""
    asked = said.policy.level is Level.O3 or op in said.policy.listed(Rule.HALF)
    return op in CARRYING and said.device == "cpu" and not asked


def _unfit(node: Node, said: Words) -> str | None:
    op = op_name(node) or ""
    if lacks_kernel(op, said.dtype, said.device):
        return f"it has no {dtype_name(said.dtype)} kernel on {said.device}"
    return misfit(node, said.dtype)
