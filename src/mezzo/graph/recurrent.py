"""Recurrent layers of a bfloat16 program on CUDA: in float16, as torch.autocast runs them.

torch's autocast casts what goes into them to float16 whatever dtype its region has (`policy.kernels.RECURRENT`): in bfloat16 the same layer is less exact, and cuDNN
takes it only since 9.13. The layer is rewritten as if the model itself cast to float16 before it and to float32 behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from mezzo.graph.lists import Words
from mezzo.graph.nodes import REWRITTEN, Rewritten, Role, base, reads, values
from mezzo.graph.planning import Planned
from mezzo.graph.traits import FILLS
from mezzo.graph.typing_run import dtypes_of, fake_mode, insert_cast, set_dtypes
from mezzo.graph.weights import NAME, Pool, exceeds
from mezzo.policy.missing_kernels import RECURRENT

_NARROW = torch.float16
_REASON = "torch.autocast runs cuDNN's recurrent layers in float16"


def layers(exported: ExportedProgram, planned: Planned, said: Words) -> frozenset[str]:
    """The recurrent layers that torch.autocast would run in another 16-bit dtype than the plan, by name; one that the call lists is left as it says."""
    if said.device != "cuda" or said.dtype is not torch.bfloat16 or torch.version.hip is not None:
        return frozenset()
    choice = planned.choice
    open_ended = [
        node for node, role in choice.roles.items() if role is Role.OP and base(node) in RECURRENT and choice.halves[node] and base(node) not in said.half
    ]
    return frozenset(node.name for node in open_ended if not any(exceeds(tensor, _NARROW) for tensor in _tensors(exported, node)))


def narrow(exported: ExportedProgram, module: GraphModule, names: Collection[str], pool: Pool, *, store: bool) -> ExportedProgram:
    """Put layers into float16: their weights are stored so if `store` allows, other inputs are cast, and results are cast to float32. The export itself stays as it is."""
    if not names:
        return exported
    state = dict(exported.state_dict)
    stored = {spec.arg.name: spec.target for spec in exported.graph_signature.input_specs if store and spec.target in state}
    found = [node for node in module.graph.nodes if node.name in names]
    for node in found:
        for value in dict.fromkeys(read.node for read in reads(node)):
            if values(value)[0].dtype is torch.float32:
                if all(user in found for user in value.users) and (value.name in stored or base(value) in FILLS):
                    _store(module, value, stored.get(value.name), state, pool)
                else:
                    node.replace_input_with(value, _cast(module, value, _NARROW, node))
        _narrow_results(module, node)
    changed = copy.copy(exported)
    changed._state_dict = state
    return changed


def _tensors(exported: ExportedProgram, node: Node) -> Iterator[torch.Tensor]:
    for read in reads(node):
        if (name := read.node.meta.get(NAME)) in exported.state_dict:
            yield exported.state_dict[name]


def _store(module: GraphModule, value: Node, name: str | None, state: dict[str, torch.Tensor], pool: Pool) -> None:
    """Make a weight, or a state of zeros, float16."""
    if name is None:
        value.kwargs = {**value.kwargs, "dtype": _NARROW}
    else:
        state[name] = pool.take(state[name], _NARROW)
    value.meta[REWRITTEN] = Rewritten(base(value), _REASON)
    set_dtypes(value, [_NARROW], fake_mode(module))


def _narrow_results(module: GraphModule, node: Node) -> None:
    mode = fake_mode(module)
    for one in (node, *node.users):
        set_dtypes(one, [_NARROW if dtype is torch.float32 else dtype for dtype in dtypes_of(one.meta["val"])], mode)
    for element in [one for one in node.users if one.users]:
        wide = _cast(module, element, torch.float32, element.next)
        element.replace_all_uses_with(wide, lambda user, wide=wide: user is not wide)  # type: ignore[misc]
    node.meta[REWRITTEN] = Rewritten(base(node), _REASON)


def _cast(module: GraphModule, value: Node, dtype: torch.dtype, before: Node) -> Node:
    made = insert_cast(module, value, dtype, before, value)
    made.meta[REWRITTEN] = Rewritten("cast", _REASON)
    return made
