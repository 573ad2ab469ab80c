"""Tables of embeddings in little more than 16 bits: half the size of float32, and closer to it than either 16-bit float.

torch.autocast reads rows in float32 and adds them to what runs through the whole model; rounded to bfloat16 they can be the largest error there is. Whole numbers
beside one scale for each row lose a fiftieth of that: for numbers as a table has them 2e-5 of their size, against 1e-3 in bfloat16 and 1.4e-4 in float16. As many
further bits as the file has room for halve what is lost, each of them, for these tables and for one that is tied to the head and stored as the head reads it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node

from mezzo.graph.budget import REPLACED, room
from mezzo.graph.nodes import REWRITTEN, Rewritten, bound, reads, values
from mezzo.graph.planning import Planned
from mezzo.graph.remainders import BITS, grid
from mezzo.graph.typing_run import ORIGIN, fake_mode, run
from mezzo.graph.weights import NAME, Pool

_REASONS = {
    True: "16-bit fixed point: keeps the file small, and loses less than a 16-bit float",
    False: "16 bits for those who read it whole, and a few more for its rows: keeps the file small",
}
_ROWS = torch.ops.aten.embedding.default
_DIMENSIONS = 2
_BYTE = 8
_NARROWEST = 32
"""Numbers in a row, for which its scale takes no more than a 64th of what the row takes in float32."""


@dataclass(frozen=True)
class Table:
    """How a table is stored."""

    half: torch.dtype | None
    """The 16-bit dtype in which others read it whole; None for fixed point."""
    bits: int
    """Further bits of each number."""


def tables(exported: ExportedProgram, planned: Planned) -> dict[str, Table]:
    """The weights that a plan rounds to keep the file small and that give rows, by name; what is rounded for others too is left if there is no room for more bits."""
    choice = planned.choice
    found = {node: exported.state_dict[name] for node in choice.roles if node in choice.squeezed and (name := node.meta[NAME]) in exported.state_dict}
    found = {node: table for node, table in found.items() if _is_table(table) and any(_gives_rows(user, node) for user in node.users)}
    fixed = {node for node, table in found.items() if all(_gives_rows(user, node) for user in node.users) and _fits(table)}
    free = room(choice) - sum(found[node].shape[0] * torch.bfloat16.itemsize for node in fixed)
    sizes = [(table.numel(), table.shape[1]) for table in found.values()]
    able = (bits for bits in BITS if sum(count * bits / _BYTE for count, _ in sizes) <= free and not any(width * bits % _BYTE for _, width in sizes))
    bits = next(able, 0)
    return {node.meta[NAME]: Table(None if node in fixed else choice.half, bits) for node in found if bits or node in fixed}


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
        tensors = dict(zip(_suffixes(table), pool.parts(state[spec.target], table.bits, table.half), strict=True))
        parts = _placeholders(module, node, tensors)
        for user in [one for one in node.users if _gives_rows(one, node)]:
            _rewrite(_Before(module, user, _REASONS[table.half is None]), table, parts)
        for suffix, part in parts.items():
            state[spec.target + suffix] = tensors[suffix]
            # torch lets no whole numbers be a parameter that moves to another device.
            kind, persistent = (InputKind.BUFFER, True) if suffix or table.half is None else (spec.kind, spec.persistent)
            specs.append(InputSpec(kind, TensorArgument(name=part.name), spec.target + suffix, persistent))
            part.meta[REWRITTEN] = Rewritten("embedding", _REASONS[table.half is None])
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
    return ["", *(["_scale"] if table.half is None else []), *(["_bits"] if table.bits else [])]


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
    reason: str

    def __call__(self, word: str, target: Any, *args: Any) -> Node:
        with self.module.graph.inserting_before(self.reader):
            made = self.module.graph.create_node("call_function", target, args, name=f"{self.reader.name}_{word}")
        made.meta = {key: self.reader.meta[key] for key in ORIGIN if key in self.reader.meta}
        self.note(made)
        if (mode := fake_mode(self.module)) is not None:
            made.meta["val"] = run(made, mode)
        return made

    def note(self, node: Node) -> None:
        node.meta[REWRITTEN] = Rewritten("embedding", self.reason)


def _rewrite(before: _Before, table: Table, parts: Mapping[str, Node]) -> None:
    """Have a node that reads rows compute them: (numbers + levels * step) * scale in fixed point, else numbers * (start + levels * step)."""
    aten, reader = torch.ops.aten, before.reader
    indices = dict(bound(reader))["indices"]
    numbers, *others = (before(suffix.removeprefix("_") or "numbers", _ROWS, part, indices) for suffix, part in parts.items())
    step, start = (2.0**-table.bits, numbers) if table.half is None else grid(table.half, table.bits)
    if table.bits:
        lost = before("lost", aten.mul.Tensor, _full(before, _levels(before, others[-1], table.bits)), step)
        total = before("total", aten.add.Tensor, lost, start)
    else:
        total = _full(before, numbers)
    reader.target, reader.args, reader.kwargs = aten.mul.Tensor, (total, others[0] if table.half is None else numbers), {}
    before.note(reader)


def _levels(before: _Before, packed: Node, bits: int) -> Node:
    """What `mezzo.graph.remainders.pack` put into bytes."""
    aten = torch.ops.aten
    if bits == _BYTE:
        return packed
    shifted = [packed, *(before("shifted", aten.bitwise_right_shift.Tensor_Scalar, packed, shift) for shift in range(bits, _BYTE, bits))]
    return before("levels", aten.bitwise_and.Scalar, before("joined", aten.cat.default, shifted, -1), 2**bits - 1)


def _full(before: _Before, numbers: Node) -> Node:
    # Said, for by itself a product takes the default dtype, or that of the scale.
    return before("full", torch.ops.aten.to.dtype, numbers, torch.float32)
