"""Convert a model: export, normalize, plan, apply, verify."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, OutputSpec, TensorArgument
from torch.fx import GraphModule, Node

from mezzo import _events
from mezzo._casting import map_tensors
from mezzo._dtypes import dtype_name
from mezzo._errors import ConversionError
from mezzo._hardware import hardware
from mezzo._torch import OpOverload, pytree
from mezzo.conversion.assignment import (
    StoredWeights,
    WeightPool,
    output_values,
    rounding_errors,
    store_weights,
    weight_nodes,
)
from mezzo.conversion.converted import Converted, ConvertedProgram, ConvertedPrograms
from mezzo.conversion.dtype_propagation import dtypes_of, fake_mode, insert_cast, set_dtypes, verify
from mezzo.conversion.export import export, unwrapped
from mezzo.conversion.nodes import Read, Role, copied_graph, values
from mezzo.conversion.normalize import normalize
from mezzo.conversion.options import (
    CastCost,
    ConvertOptions,
    bytes_moved,
    check_options,
    read_exclude,
    read_lists,
)
from mezzo.conversion.plan import CastBytes, Casts, GraphPlan
from mezzo.conversion.plan_report import casts_after, casts_before, rows
from mezzo.conversion.planner import PlannedGraph
from mezzo.conversion.rewrites import fold, layers, recurrent_to_float16
from mezzo.conversion.subgraphs import Subgraph, plan_subgraphs
from mezzo.policy.decide import resolve
from mezzo.policy.policy import Policy

_TO = 2
"""Arguments of a cast that does nothing else: what it reads, and the dtype."""

Variants = Mapping[tuple[Node, torch.dtype], Node]
"""Weights that are stored twice: the placeholder of each dtype."""


def apply_plan(module: GraphModule, planned: PlannedGraph, variants: Variants) -> None:
    """Change a graph as planned; `variants` holds the placeholders of weights in other dtypes than the one their own has."""
    made = {node: planned.choice.dtype_of(node) for node in planned.choice.roles if values(node)}
    reader = _CastInserter(module, planned, dict(variants), made)
    for node in list(planned.choice.roles):
        reader.rewrite(node)
    _refresh(module, planned, made)
    for node in sorted(reader.passed_over, reverse=True):
        if not node.users:
            module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()


class _CastInserter:
    """Gives every read the dtype that it wants."""

    def __init__(
        self,
        module: GraphModule,
        planned: PlannedGraph,
        known: dict[tuple[Node, torch.dtype], Node],
        made: Mapping[Node, torch.dtype],
    ) -> None:
        self._module, self._planned, self._known, self._made = module, planned, known, made
        self.passed_over: dict[Node, None] = {}
        """The model's own casts whose results somebody would have cast back."""

    def rewrite(self, node: Node) -> None:
        """Cast a node's inputs as the plan says."""
        if self._planned.choice.roles[node] in (Role.SILENT, Role.ELEMENT):
            return
        names = (
            [argument.name for argument in node.target._schema.arguments]
            if isinstance(node.target, OpOverload)
            else []
        )
        node.args = tuple(
            self._argument(node, names[place] if place < len(names) else "", value)
            for place, value in enumerate(node.args)
        )
        node.kwargs = {
            name: self._argument(node, name, value) for name, value in node.kwargs.items()
        }
        if self._planned.choice.roles[node] is Role.FILL:
            node.kwargs = {**node.kwargs, "dtype": self._made[node]}

    def _argument(self, node: Node, name: str, value: Any) -> Any:
        if isinstance(value, Node):
            return self._read(node, Read(name, value)) if values(value) else value
        if isinstance(value, list | tuple):
            return type(value)(self._argument(node, name, item) for item in value)
        if isinstance(value, dict):
            return {key: self._argument(node, name, item) for key, item in value.items()}
        return value

    def _read(self, node: Node, read: Read) -> Node:
        wanted = self._planned.choice.input_dtype(node, read)
        if (
            wanted is None
            or not isinstance(read.node.meta["val"], torch.Tensor)
            or wanted is self._made[read.node]
        ):
            return read.node
        if (source := self._widened(read.node)) is not None and self._made[source] is wanted:
            self.passed_over[read.node] = None
            return source
        if read.node in self._planned.written:
            # Its numbers change between two reads: each casts anew.
            return insert_cast(self._module, read.node, wanted, node, node)
        if (read.node, wanted) not in self._known:
            self._known[read.node, wanted] = insert_cast(
                self._module, read.node, wanted, node, node
            )
        return self._known[read.node, wanted]

    def _widened(self, node: Node) -> Node | None:
        """What the model itself casts to a wider dtype here: cast back, it would be the same to the bit."""
        if (
            node.target is not torch.ops.aten.to.dtype
            or len(node.args) != _TO
            or node.kwargs
            or not self._planned.written.isdisjoint({node, node.args[0]})
        ):
            return None
        source: Any = node.args[0]
        return (
            source
            if source in self._made and self._made[source].itemsize < self._made[node].itemsize
            else None
        )


def _refresh(module: GraphModule, planned: PlannedGraph, made: Mapping[Node, torch.dtype]) -> None:
    mode = fake_mode(module)
    if mode is None:
        return
    for node, dtype in made.items():
        told = [dtype if one is torch.float32 else one for one in dtypes_of(node.meta["val"])]
        if planned.choice.roles[node] is not Role.FIXED:
            set_dtypes(node, told, mode)


def assemble(
    exported: ExportedProgram,
    said: ConvertOptions,
    modules: Mapping[str, nn.Module],
    pool: WeightPool,
) -> ConvertedProgram:
    """Convert one exported model; the export itself stays as it is."""
    exported, module, sections, before = _planned(exported, said, modules, pool)
    listed = rows(sections, rounding_errors(exported, sections[0].planned.choice, pool))
    for section in sections[1:]:
        apply_plan(section.module, section.planned, {})
    stored = store_weights(exported, module, sections[0].planned.choice, pool)
    apply_plan(module, sections[0].planned, stored.variants)
    verify(module)
    return ConvertedProgram(
        _program(exported, module, stored), GraphPlan(listed, Casts(before, casts_after(module)))
    )


def _planned(
    exported: ExportedProgram,
    said: ConvertOptions,
    modules: Mapping[str, nn.Module],
    pool: WeightPool,
) -> tuple[ExportedProgram, GraphModule, list[Subgraph], CastBytes]:
    """Prepare the graph and plan it; plan again if it has recurrent layers that torch.autocast runs in another dtype."""
    narrowed = frozenset[str]()
    before: CastBytes | None = None
    while True:
        module = copied_graph(exported.graph_module)
        normalize(module, said.dtype, said.device)
        check_options(said, list(_nodes(module)), list(_names(module)))
        ready = (
            fold(exported, module) if said.cast_params and not said.nothing_to_cast else exported
        )
        ready = recurrent_to_float16(ready, module, narrowed, pool, store=said.cast_params)
        sections = plan_subgraphs(module, weight_nodes(ready, module, said.dtype), said, modules)
        # Counted on the model's own graph: what is rewritten below is nothing that torch.autocast
        # would see.
        before = casts_before(sections, said) if before is None else before
        found = layers(ready, sections[0].planned, said)
        if not found:
            return ready, module, sections, before
        narrowed |= found


def _program(
    exported: ExportedProgram, module: GraphModule, stored: StoredWeights
) -> ExportedProgram:
    signature = ExportGraphSignature(
        stored.signature.input_specs, _output_specs(module, stored.signature)
    )
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=signature,
        state_dict=stored.state,
        range_constraints=exported.range_constraints,
        module_call_graph=exported.module_call_graph,
        example_inputs=_cast_examples(exported, module),
        constants=stored.constants,
        verifiers=exported.verifiers,
    )


def _output_specs(module: GraphModule, signature: ExportGraphSignature) -> list[OutputSpec]:
    """The outputs under the names that they have now: a cast has one of its own."""
    found = []
    for value, spec in zip(
        output_values(module.graph.output_node()), signature.output_specs, strict=True
    ):
        arg = (
            TensorArgument(name=value.name)
            if isinstance(value, Node) and isinstance(spec.arg, TensorArgument)
            else spec.arg
        )
        found.append(OutputSpec(spec.kind, arg, spec.target))
    return found


def _cast_examples(exported: ExportedProgram, module: GraphModule) -> Any:
    """The example inputs in the dtypes that the graph takes."""
    inputs = {
        spec.arg.name
        for spec in exported.graph_signature.input_specs
        if spec.target is None and isinstance(spec.arg, TensorArgument)
    }
    taken = [
        values(node)[0].dtype
        for node in module.graph.find_nodes(op="placeholder")
        if node.name in inputs and values(node)
    ]
    wanted = iter(taken)
    return map_tensors(
        exported.example_inputs,
        lambda one: one.to(dtype=next(wanted)) if one.is_floating_point() else one,
    )


def _nodes(module: GraphModule) -> Iterator[Node]:
    for inner in module.modules():
        if isinstance(inner, GraphModule):
            yield from inner.graph.nodes


def _names(module: GraphModule) -> Iterator[str]:
    for path, inner in module.named_modules():
        if isinstance(inner, GraphModule):
            yield from (f"{path}.{node.name}" if path else node.name for node in inner.graph.nodes)


def convert_examples(
    model: nn.Module, args: Any, kwargs: Any, policy: Policy, dynamic_shapes: Any, **words: Any
) -> Converted:
    """Convert a model once for each example."""
    begin = time.perf_counter()
    module, examples = unwrapped(model), _example_calls(args, kwargs)
    said = _read_options(policy, _device(module, examples), **words)
    exported = [export(module, *example, dynamic_shapes) for example in examples]
    pool, modules = WeightPool(), dict(module.named_modules(remove_duplicate=False))
    programs = tuple(assemble(one, said, modules, pool) for one in exported)
    converted = Converted(ConvertedPrograms(programs, _options(said), tuple(exported)))
    if _events.listening():
        casts, taken = converted.casts, time.perf_counter() - begin
        _events.emit(
            _events.GraphConverted(
                type(module).__name__,
                dtype_name(said.dtype),
                casts.before.count,
                casts.after.count,
                taken,
            )
        )
    return converted


def _read_options(
    policy: Policy,
    device: str,
    *,
    half: Collection[str],
    full: Collection[str],
    conditional: Collection[Any],
    exclude: Collection[str] | str,
    cast_params: bool,
    keep_io_dtypes: bool,
    cast_cost: CastCost | None,
) -> ConvertOptions:
    halves, fulls, conditions = read_lists(half, full, conditional)
    resolved = resolve(policy, hardware(device))
    return ConvertOptions(
        policy,
        resolved.dtype or torch.bfloat16,
        device,
        half=halves,
        full=fulls,
        conditional=conditions,
        exclude=read_exclude(exclude),
        cast_params=cast_params,
        keep_io_dtypes=keep_io_dtypes,
        cast_cost=cast_cost or bytes_moved,
        nothing_to_cast=resolved.reason if resolved.dtype is None else "",
    )


def _example_calls(args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """The example calls: one, or a list of them."""
    if not isinstance(args, list) or not all(isinstance(one, tuple) for one in args):
        return [(args, {} if kwargs is None else kwargs)]
    if not args:
        raise ConversionError(
            "convert was given an empty list of example inputs. Pass at least one tuple of the"
            " model's arguments."
        )
    named = (
        [kwargs or {}] * len(args)
        if kwargs is None or isinstance(kwargs, Mapping)
        else list(kwargs)
    )
    if len(named) != len(args):
        raise ConversionError(
            f"There are {len(args)} example inputs and {len(named)} kwargs. Give one mapping for"
            " each, or one for all."
        )
    return list(zip(args, named, strict=True))


def _device(module: nn.Module, examples: list[tuple[Any, Any]]) -> str:
    tensors = [
        *module.parameters(),
        *module.buffers(),
        *(one for one in pytree.tree_leaves(examples) if isinstance(one, torch.Tensor)),
    ]
    return tensors[0].device.type if tensors else "cpu"


def _options(said: ConvertOptions) -> dict[str, Any]:
    return {
        "policy": said.policy.to_dict(),
        "dtype": dtype_name(said.dtype),
        "device": said.device,
        "half": sorted(said.half),
        "full": sorted(said.full),
        "conditional": [
            [one.op, one.argument, list(one.values), one.reason] for one in said.conditional
        ],
        "exclude": list(said.exclude),
        "cast_params": said.cast_params,
        "keep_io_dtypes": said.keep_io_dtypes,
    }
