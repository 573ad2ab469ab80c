"""Tables of embeddings in little more than 16 bits: half the size of float32, and closer to it than either 16-bit float.

torch.autocast reads rows in float32 and adds them to what runs through the whole model; rounded to bfloat16 they can be the largest error there is. Whole numbers
beside one scale for each row lose a fiftieth of that: for numbers as a table has them 2e-5 of their size, against 1e-3 in bfloat16 and 1.4e-4 in float16. A
further part of each number, as fine as the file has room for, holds what is lost of them and of a table that is tied to the head and stored as the head reads it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node

from mezzo.graph.budget import REPLACED, room
from mezzo.graph.nodes import REWRITTEN, Rewritten, bound, reads, values
from mezzo.graph.planning import Planned
from mezzo.graph.remainders import LARGEST, PER_BYTE, grid
from mezzo.graph.typing_run import ORIGIN, fake_mode, run
from mezzo.graph.weights import NAME, Pool

_REASONS = {
    True: "16-bit fixed point: keeps the file small, and loses less than a 16-bit float",
    False: "16 bits for those who read it whole, and a few more for its rows: keeps the file small",
}
_ROWS = torch.ops.aten.embedding.default
_DIMENSIONS = 2
_NARROWEST = 32
"""Numbers in a row, for which its scale takes no more than a 64th of what the row takes in float32."""


@dataclass(frozen=True)
class Table:
    """How a table is stored."""

    dtype: torch.dtype
    """The 16-bit dtype of the program: that of its scales, or of the table itself."""
    levels: int
    """How finely each number is told beyond its 16 bits; 1 for no further."""
    fixed: bool
    """Whether it is in fixed point; else others read it whole."""


def tables(exported: ExportedProgram, planned: Planned) -> dict[str, Table]:
    """The weights that a plan rounds to keep the file small and that give rows, by name; what is rounded for others too is left if there is no room for more."""
    choice = planned.choice
    found = {node: exported.state_dict[name] for node in choice.roles if node in choice.squeezed and (name := node.meta[NAME]) in exported.state_dict}
    found = {node: table for node, table in found.items() if _is_table(table) and any(_gives_rows(user, node) for user in node.users)}
    fixed = {node for node, table in found.items() if all(_gives_rows(user, node) for user in node.users) and _fits(table)}
    free = room(choice) - sum(found[node].shape[0] * choice.half.itemsize for node in fixed)
    able = (levels for levels, count in PER_BYTE.items() if sum(one.shape[0] * ceil(one.shape[1] / count) for one in found.values()) <= free)
    levels = next(able, 1)
    return {node.meta[NAME]: Table(choice.half, levels, node in fixed) for node in found if levels > 1 or node in fixed}


def split(exported: ExportedProgram, module: GraphModule, named: Mapping[str, Table], pool: Pool) -> ExportedProgram:
    """Replace tables by their parts, and what reads their rows by arithmetic that kernels do in float32. The export itself stays as it is."""
    if not named:
        return exported
    placeholders = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    specs: list[InputSpec] = []
    state = dict(exported.state_dict)
    for spec in exported.graph_signature.input_specs:
        if spec.target not in named:
            specs.append(spec)
            continue
        table, node = named[spec.target], placeholders[spec.arg.name]
        tensors = dict(zip(_suffixes(table), pool.parts(state[spec.target], table.dtype, table.levels, fixed=table.fixed), strict=True))
        parts = _placeholders(module, node, tensors)
        for user in [one for one in node.users if _gives_rows(one, node)]:
            _rewrite(_Before(module, user, table), parts)
        for suffix, part in parts.items():
            state[spec.target + suffix] = tensors[suffix]
            # torch lets no whole numbers be a parameter that moves to another device.
            kind, persistent = (InputKind.BUFFER, True) if suffix or table.fixed else (spec.kind, spec.persistent)
            specs.append(InputSpec(kind, TensorArgument(name=part.name), spec.target + suffix, persistent))
            part.meta[REWRITTEN] = Rewritten("embedding", _REASONS[table.fixed])
    changed = copy.copy(exported)
    changed._state_dict, changed._graph_signature = state, ExportGraphSignature(specs, exported.graph_signature.output_specs)
    return changed


def _is_table(tensor: torch.Tensor) -> bool:
    return tensor.dim() == _DIMENSIONS and not tensor.is_meta


def _fits(table: torch.Tensor) -> bool:
    return table.shape[1] >= _NARROWEST and bool(table.isfinite().all())


def _gives_rows(user: Node, table: Node) -> bool:
    return user.target is _ROWS and all(read.node is not table or read.argument == "weight" for read in reads(user))


def _suffixes(table: Table) -> list[str]:
    """What stands behind a table's name in those of its parts."""
    return ["", *(["_scale"] if table.fixed else []), *(["_rest"] if table.levels > 1 else [])]


def _placeholders(module: GraphModule, table: Node, tensors: Mapping[str, torch.Tensor]) -> dict[str, Node]:
    """Make a table's placeholder one of its first part, and put those of the others behind it."""
    mode, whole, found = fake_mode(module), values(table)[0], {"": table}
    for suffix in reversed([one for one in tensors if one]):
        with module.graph.inserting_after(table):
            found[suffix] = module.graph.placeholder(table.name + suffix)
        found[suffix].target, found[suffix].meta = found[suffix].name, dict(table.meta)
    for suffix, node in found.items():
        node.meta[REPLACED] = 0 if suffix else whole.nbytes
        if mode is not None:
            with mode:
                node.meta["val"] = torch.empty(tensors[suffix].shape, dtype=tensors[suffix].dtype, device=whole.device)
            node.meta.pop("tensor_meta", None)
    return {suffix: found[suffix] for suffix in tensors}


@dataclass(frozen=True)
class _Before:
    """Puts calls before the node that reads rows, and has them come from where it does."""

    module: GraphModule
    reader: Node
    table: Table

    def __call__(self, word: str, target: Any, *args: Any) -> Node:
        with self.module.graph.inserting_before(self.reader):
            made = self.module.graph.create_node("call_function", target, args, name=f"{self.reader.name}_{word}")
        made.meta = {key: self.reader.meta[key] for key in ORIGIN if key in self.reader.meta} | {REWRITTEN: Rewritten("", _REASONS[self.table.fixed])}
        if (mode := fake_mode(self.module)) is not None:
            made.meta["val"] = run(made, mode)
        return made


def _rewrite(before: _Before, parts: Mapping[str, Node]) -> None:
    """Have a node that reads rows compute them: (numbers + level / levels) / largest * scale in fixed point, else rounded * (level * step + start)."""
    aten, reader, table = torch.ops.aten, before.reader, before.table
    indices = dict(bound(reader))["indices"]
    rows = {suffix: before(suffix.removeprefix("_") or "numbers", _ROWS, part, indices) for suffix, part in parts.items()}
    step, start = (1 / table.levels, rows[""]) if table.fixed else grid(table.dtype, table.levels)
    if table.levels > 1:
        level = _level(before, rows["_rest"], reader.meta["val"].shape[-1])
        whole = before("whole", aten.add.Tensor, before("lost", aten.mul.Tensor, level, step), start)
    else:
        whole = _full(before, rows[""])
    args = (before("share", aten.mul.Tensor, whole, 1 / LARGEST), rows["_scale"]) if table.fixed else (rows[""], whole)
    reader.target, reader.args, reader.kwargs = aten.mul.Tensor, args, {}
    reader.meta[REWRITTEN] = Rewritten("embedding", _REASONS[table.fixed])


def _level(before: _Before, packed: Node, width: int) -> Node:
    """What `mezzo.graph.remainders.pack` put into bytes. By float32 arithmetic: not every runtime that reads ONNX divides bytes."""
    aten, levels, level = torch.ops.aten, before.table.levels, _full(before, packed)
    count = PER_BYTE[levels]
    if count > 1:
        # Half of one keeps away from whole numbers, just below which a quotient could be rounded.
        middle = before("middle", aten.add.Tensor, level, 0.5)
        shifted = [middle, *(before("shifted", aten.mul.Tensor, middle, float(levels) ** -place) for place in range(1, count))]
        level = before("level", aten.fmod.Scalar, before("floor", aten.floor.default, before("joined", aten.cat.default, shifted, -1)), levels)
    return before("filled", aten.slice.Tensor, level, -1, 0, width) if width % count else level


def _full(before: _Before, numbers: Node) -> Node:
    # Said, for by itself a product takes the default dtype, or that of the scale.
    return before("full", torch.ops.aten.to.dtype, numbers, torch.float32)
