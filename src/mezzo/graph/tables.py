"""Tables of embeddings in little more than 16 bits: half the size of float32, and closer to it than either 16-bit float.

torch.autocast reads rows in float32 and adds them to what runs through the whole model; rounded to bfloat16 they can be the largest error there is. Whole numbers
beside one scale for each row lose a fiftieth of that: for numbers as a table has them 2e-5 of their size, against 1e-3 in bfloat16 and 1.4e-4 in float16. A
further part of each number, as fine as the file has room for, holds what is lost of them and of a table that is tied to the head and stored as the head reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from mezzo.graph.budget import room
from mezzo.graph.nodes import reads
from mezzo.graph.planning import Planned
from mezzo.graph.remainders import PER_BYTE, fits
from mezzo.graph.weights import FITS, NAME, Pool

ROWS = torch.ops.aten.embedding.default
"""What gives rows of a table."""
_DIMENSIONS = 2
"""Of a table that gives rows."""


@dataclass(frozen=True)
class Table:
    """How a table is stored."""

    dtype: torch.dtype
    """The 16-bit dtype of the program: that of its scales, or of the table itself."""
    levels: int
    """How finely each number is told beyond its 16 bits; 1 for no further."""
    fixed: bool
    """Whether it is in fixed point; else others read it whole."""


def tables(exported: ExportedProgram, planned: Planned, pool: Pool) -> dict[str, Table]:
    """The weights that a plan rounds to keep the file small and that give rows or are added, by name; what others read too is left if there is no room for more."""
    choice = planned.choice
    found = {node: exported.state_dict[name] for node in choice.roles if node in choice.squeezed and (name := node.meta[NAME]) in exported.state_dict}
    found = {node: table for node, table in found.items() if node.meta.get(FITS) or (_is_table(table) and any(gives_rows(user, node) for user in node.users))}
    fixed = {node for node, table in found.items() if node.meta.get(FITS) or (all(gives_rows(user, node) for user in node.users) and fits(table))}
    free = room(choice) - sum(_rows(found[node]) * choice.half.itemsize for node in fixed)
    able = (levels for levels, count in PER_BYTE.items() if sum(_rows(one) * ceil(one.shape[-1] / count) for one in found.values()) <= free)
    levels = next(able, 1)
    # Programs of several sizes share their tables, whichever of them has room for more.
    agreed = {node: pool.levels.setdefault(id(table), levels) for node, table in found.items()}
    return {node.meta[NAME]: Table(choice.half, agreed[node], node in fixed) for node in found if agreed[node] > 1 or node in fixed}


def gives_rows(user: Node, table: Node) -> bool:
    """Whether a node reads rows of a table, and nothing else of it."""
    return user.target is ROWS and all(read.node is not table or read.argument == "weight" for read in reads(user))


def _is_table(tensor: torch.Tensor) -> bool:
    return tensor.dim() == _DIMENSIONS and not tensor.is_meta


def _rows(table: torch.Tensor) -> int:
    return table.numel() // table.shape[-1]
