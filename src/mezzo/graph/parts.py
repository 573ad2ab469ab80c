"""Tables in parts: the graph reads the rows of each, or all of it, and computes with them what those of the table were."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node

from mezzo.graph.budget import BESIDE
from mezzo.graph.nodes import REWRITTEN, Rewritten, bound, values
from mezzo.graph.remainders import LARGEST, PER_BYTE, grid
from mezzo.graph.tables import ROWS, Table, gives_rows
from mezzo.graph.typing_run import ORIGIN, fake_mode, run
from mezzo.graph.weights import Pool

_REASONS = {
    True: "16-bit fixed point: keeps the file small, and loses less than a 16-bit float",
    False: "16 bits for those who read it whole, and a few more for its rows: keeps the file small",
}


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
        readers = [one for one in node.users if gives_rows(one, node)]
        for user in readers:
            _read_rows(_Before(module, user, table), parts)
        if not readers:
            _read_whole(_Before(module, min(node.users), table), node, parts)
        for suffix, part in parts.items():
            state[spec.target + suffix] = tensors[suffix]
            # torch lets no whole numbers be a parameter that moves to another device.
            kind, persistent = (InputKind.BUFFER, True) if suffix or table.fixed else (spec.kind, spec.persistent)
            specs.append(InputSpec(kind, TensorArgument(name=part.name), spec.target + suffix, persistent))
            part.meta[REWRITTEN] = Rewritten("embedding", _REASONS[table.fixed])
    changed = copy.copy(exported)
    changed._state_dict, changed._graph_signature = state, ExportGraphSignature(specs, exported.graph_signature.output_specs)
    return changed


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
        if suffix:
            node.meta[BESIDE] = True
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


def _read_rows(before: _Before, parts: Mapping[str, Node]) -> None:
    """Have a node that reads rows compute them."""
    reader = before.reader
    indices, width = dict(bound(reader))["indices"], reader.meta["val"].shape[-1]
    rows = {suffix: before(suffix.removeprefix("_") or "numbers", ROWS, part, indices) for suffix, part in parts.items()}
    reader.target, reader.args, reader.kwargs = torch.ops.aten.mul.Tensor, _product(before, rows, width), {}
    reader.meta[REWRITTEN] = Rewritten("embedding", _REASONS[before.table.fixed])


def _read_whole(before: _Before, numbers: Node, parts: Mapping[str, Node]) -> None:
    """Have all who read a tensor read what is computed of its parts."""
    readers = list(numbers.users)
    whole = before("whole", torch.ops.aten.mul.Tensor, *_product(before, parts, numbers.meta["val"].shape[-1]))
    for reader in readers:
        reader.replace_input_with(numbers, whole)


def _product(before: _Before, parts: Mapping[str, Node], width: int) -> tuple[Node, Node]:
    """What numbers are the product of: (number + level / levels) / largest and scale in fixed point, else rounded and level * step + start."""
    aten, table = torch.ops.aten, before.table
    step, start = (1 / table.levels, parts[""]) if table.fixed else grid(table.dtype, table.levels)
    if table.levels > 1:
        lost = before("lost", aten.mul.Tensor, _level(before, parts["_rest"], width), step)
        number = before("number", aten.add.Tensor, lost, start)
    else:
        number = _full(before, parts[""])
    return (before("share", aten.mul.Tensor, number, 1 / LARGEST), parts["_scale"]) if table.fixed else (parts[""], number)


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
