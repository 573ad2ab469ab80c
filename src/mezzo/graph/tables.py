"""Tables of embeddings in 16-bit fixed point: half the size of float32, and closer to it than either 16-bit float.

torch.autocast reads rows in float32 and adds them to what runs through the whole model; rounded to bfloat16 they can be the largest error there is. Whole numbers
beside one scale for each row lose a fiftieth of that: for numbers as a table has them 2e-5 of their size, against 1e-3 in bfloat16 and 1.4e-4 in float16.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node

from mezzo.graph.nodes import REWRITTEN, Rewritten, bound, reads, values
from mezzo.graph.planning import Planned
from mezzo.graph.typing_run import ORIGIN, fake_mode, run, set_dtypes
from mezzo.graph.weights import NAME, Pool

_FIXED = Rewritten("embedding", "16-bit fixed point: keeps the file small, and loses less than a 16-bit float")
_ROWS = torch.ops.aten.embedding.default
_DIMENSIONS = 2
_NARROWEST = 32
"""Numbers in a row, for which its scale takes no more than a 32nd of what the row takes in float32."""


def tables(exported: ExportedProgram, planned: Planned) -> frozenset[str]:
    """The weights that a plan rounds to keep the file small and that only give rows: by name."""
    found = {str(node.meta[NAME]) for node in planned.choice.squeezed if all(_gives_rows(user, node) for user in node.users)}
    return frozenset(name for name in found if name in exported.state_dict and _fits(exported.state_dict[name]))


def fix(exported: ExportedProgram, module: GraphModule, names: Collection[str], pool: Pool) -> ExportedProgram:
    """Replace tables by whole numbers and scales, and what reads their rows by a product, which kernels compute in float32. The export itself stays as it is."""
    if not names:
        return exported
    placeholders = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    specs: list[InputSpec] = []
    state = dict(exported.state_dict)
    for spec in exported.graph_signature.input_specs:
        if spec.target not in names:
            specs.append(spec)
            continue
        name = f"{spec.target}_scale"
        state[spec.target], state[name] = pool.fix(state[spec.target])
        scale = _second(module, placeholders[spec.arg.name])
        # A buffer: torch lets no whole numbers be a parameter that moves to another device.
        specs += [
            InputSpec(InputKind.BUFFER, TensorArgument(name=node), target, persistent=True) for node, target in ((spec.arg.name, spec.target), (scale, name))
        ]
    changed = copy.copy(exported)
    changed._state_dict, changed._graph_signature = state, ExportGraphSignature(specs, exported.graph_signature.output_specs)
    return changed


def _gives_rows(user: Node, table: Node) -> bool:
    return user.target is _ROWS and all(read.node is not table or read.argument == "weight" for read in reads(user))


def _fits(table: torch.Tensor) -> bool:
    return table.dim() == _DIMENSIONS and table.shape[1] >= _NARROWEST and not table.is_meta and bool(table.isfinite().all())


def _second(module: GraphModule, table: Node) -> str:
    """Make a placeholder one of whole numbers, put one of scales behind it, and let those who read rows read both. Gives the second's name."""
    mode = fake_mode(module)
    with module.graph.inserting_after(table):
        scale = module.graph.placeholder(f"{table.name}_scale")
    full = values(table)[0]
    scale.target, scale.meta = scale.name, dict(table.meta)
    if mode is not None:
        with mode:
            scale.meta["val"] = torch.empty((full.shape[0], 1), device=full.device)
        set_dtypes(table, [torch.int16], mode)
    for node in list(table.users):
        numbers, factors = (_rows(module, node, one, f"{node.name}_{word}") for one, word in ((table, "numbers"), (scale, "scale")))
        node.target, node.args, node.kwargs = torch.ops.aten.mul.Tensor, (numbers, factors), {}
        node.meta[REWRITTEN] = _FIXED
    table.meta[REWRITTEN] = _FIXED
    return scale.name


def _rows(module: GraphModule, node: Node, table: Node, name: str) -> Node:
    with module.graph.inserting_before(node):
        made = module.graph.create_node("call_function", _ROWS, (table, dict(bound(node))["indices"]), name=name)
    made.meta = {key: node.meta[key] for key in ORIGIN if key in node.meta} | {REWRITTEN: _FIXED}
    mode = fake_mode(module)
    if mode is not None:
        made.meta["val"] = run(made, mode)
    return made
