"""Convert a model: export, normalize, plan, apply, verify."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, OutputSpec, TensorArgument
from torch.fx import GraphModule, Node

from mezzo import _events
from mezzo._casting import map_tensors
from mezzo._dtypes import dtype_name
from mezzo._errors import ConversionError
from mezzo._torch import OpOverload, pytree
from mezzo.conversion.assignment import (
    StoredWeights,
    WeightPool,
    rounding_errors,
    store_weights,
    weight_nodes,
)
from mezzo.conversion.converted import Converted, ConvertedProgram, ConvertedPrograms
from mezzo.conversion.dtype_propagation import dtypes_of, fake_mode, insert_cast, set_dtypes, verify
from mezzo.conversion.export import export, unwrap_module
from mezzo.conversion.nodes import Read, Role, copied_graph, float_values, output_values
from mezzo.conversion.normalize import normalize
from mezzo.conversion.options import ConvertOptions, check_options, read_options
from mezzo.conversion.plan import CastBytes, Casts, GraphPlan
from mezzo.conversion.plan_report import casts_after, casts_before, plan_rows
from mezzo.conversion.planner import PlannedGraph
from mezzo.conversion.rewrites import (
    find_float16_layers,
    fold_constants,
    recurrent_to_float16,
)
from mezzo.conversion.subgraphs import Subgraph, plan_subgraphs
from mezzo.policy.policy import Policy

_CAST_ARGS = 2
"""Arguments of a cast that does nothing else: the tensor and the dtype."""


def convert_model(
    model: nn.Module, args: Any, kwargs: Any, policy: Policy, dynamic_shapes: Any, **options: Any
) -> Converted:
    """Convert a model, once for each example call; the programs share their weights."""
    begin = time.perf_counter()
    module, calls = unwrap_module(model), _example_calls(args, kwargs)
    checked = read_options(policy, _device_type(module, calls), **options)
    exported = [export(module, *call, dynamic_shapes) for call in calls]
    pool, modules = WeightPool(), dict(module.named_modules(remove_duplicate=False))
    programs = tuple(convert_program(program, checked, modules, pool) for program in exported)
    converted = Converted(ConvertedPrograms(programs, checked.to_dict(), tuple(exported)))
    if _events.listening():
        _emit_event(module, checked, converted, time.perf_counter() - begin)
    return converted


def convert_program(
    exported: ExportedProgram,
    options: ConvertOptions,
    modules: Mapping[str, nn.Module],
    pool: WeightPool,
) -> ConvertedProgram:
    """Normalize, plan, apply and verify one exported program; `exported` itself is not changed."""
    planned = _normalize_and_plan(exported, options, modules, pool)
    exported, (main, *bodies) = planned.exported, planned.subgraphs
    assignment = main.planned.assignment
    rows = plan_rows(planned.subgraphs, rounding_errors(exported, assignment, pool))
    for body in bodies:
        apply_plan(body.module, body.planned, {})
    stored = store_weights(exported, main.module, assignment, pool)
    apply_plan(main.module, main.planned, stored.variants)
    verify(main.module)
    casts = Casts(planned.casts_before, casts_after(main.module))
    return ConvertedProgram(_new_program(exported, main.module, stored), GraphPlan(rows, casts))


# Example calls


def _example_calls(args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """Return the example calls, each as its arguments and keyword arguments."""
    if not isinstance(args, list) or not all(isinstance(arg, tuple) for arg in args):
        return [(args, {} if kwargs is None else kwargs)]
    if not args:
        raise ConversionError(
            "args is an empty list of example inputs. Pass at least one tuple of the model's"
            " arguments."
        )
    if kwargs is None or isinstance(kwargs, Mapping):
        return [(arg, kwargs or {}) for arg in args]
    several = list(kwargs)
    if len(several) != len(args):
        raise ConversionError(
            f"There are {len(args)} example inputs and {len(several)} kwargs. Pass one mapping for"
            " each example, or one for all."
        )
    return list(zip(args, several, strict=True))


def _device_type(module: nn.Module, calls: list[tuple[Any, Any]]) -> str:
    inputs = (leaf for leaf in pytree.tree_leaves(calls) if isinstance(leaf, torch.Tensor))
    tensors = [*module.parameters(), *module.buffers(), *inputs]
    return tensors[0].device.type if tensors else "cpu"


def _emit_event(
    module: nn.Module, options: ConvertOptions, converted: Converted, seconds: float
) -> None:
    casts = converted.casts
    _events.emit(
        _events.GraphConverted(
            type(module).__name__,
            dtype_name(options.dtype),
            casts.before.count,
            casts.after.count,
            seconds,
        )
    )


# Normalize and plan


class _PlannedProgram(NamedTuple):
    """An exported program with the plans of its graphs."""

    exported: ExportedProgram
    """The weights and signature that belong to the graphs."""
    subgraphs: list[Subgraph]
    """The main graph, then the bodies of its branches and loops."""
    casts_before: CastBytes
    """What torch.autocast casts on the same graph."""


def _normalize_and_plan(
    exported: ExportedProgram,
    options: ConvertOptions,
    modules: Mapping[str, nn.Module],
    pool: WeightPool,
) -> _PlannedProgram:
    """Normalize a copy of the graph and plan it.

    Recurrent layers that torch.autocast runs in float16 are known only after planning; they are
    rewritten and the graph is planned again.
    """
    float16_layers = frozenset[str]()
    before: CastBytes | None = None
    while True:
        module = copied_graph(exported.graph_module)
        normalize(module, options.dtype, options.device)
        check_options(options, list(_nodes(module)), list(_node_names(module)))
        folds = options.cast_params and not options.nothing_to_cast
        ready = fold_constants(exported, module) if folds else exported
        ready = recurrent_to_float16(ready, module, float16_layers, pool, store=options.cast_params)
        weights = weight_nodes(ready, module, options.dtype)
        subgraphs = plan_subgraphs(module, weights, options, modules)
        # Counted before recurrent layers are rewritten: torch.autocast sees the model's own graph.
        before = casts_before(subgraphs, options) if before is None else before
        found = find_float16_layers(ready, subgraphs[0].planned, options)
        if not found:
            return _PlannedProgram(ready, subgraphs, before)
        float16_layers |= found


def _nodes(module: GraphModule) -> Iterator[Node]:
    for inner in module.modules():
        if isinstance(inner, GraphModule):
            yield from inner.graph.nodes


def _node_names(module: GraphModule) -> Iterator[str]:
    for path, inner in module.named_modules():
        if isinstance(inner, GraphModule):
            yield from (f"{path}.{node.name}" if path else node.name for node in inner.graph.nodes)


# Apply


def apply_plan(
    module: GraphModule,
    planned: PlannedGraph,
    variants: Mapping[tuple[Node, torch.dtype], Node],
) -> None:
    """Insert the planned casts into a graph, in place.

    `variants` holds, for weights that are stored in two dtypes, the placeholder of the second.
    """
    assignment = planned.assignment
    dtypes = {node: assignment.dtype_of(node) for node in assignment.roles if float_values(node)}
    inserter = _CastInserter(module, planned, dict(variants), dtypes)
    for node in list(assignment.roles):
        inserter.rewrite(node)
    _update_example_dtypes(module, planned, dtypes)
    for node in sorted(inserter.bypassed, reverse=True):
        if not node.users:
            module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()


class _CastInserter:
    """Casts the inputs of nodes to the dtypes in which they read them."""

    def __init__(
        self,
        module: GraphModule,
        planned: PlannedGraph,
        casts: dict[tuple[Node, torch.dtype], Node],
        dtypes: Mapping[Node, torch.dtype],
    ) -> None:
        self._module, self._planned, self._assignment = module, planned, planned.assignment
        self._casts, self._dtypes = casts, dtypes
        self.bypassed: dict[Node, None] = {}
        """Casts of the model to float32 whose source is read instead."""

    def rewrite(self, node: Node) -> None:
        """Cast the inputs of one node as planned."""
        role = self._assignment.roles[node]
        if role in (Role.NO_FLOATS, Role.ELEMENT):
            return
        names = (
            [argument.name for argument in node.target._schema.arguments]
            if isinstance(node.target, OpOverload)
            else []
        )
        node.args = tuple(
            self._argument(node, names[index] if index < len(names) else "", value)
            for index, value in enumerate(node.args)
        )
        node.kwargs = {
            name: self._argument(node, name, value) for name, value in node.kwargs.items()
        }
        if role is Role.FILL:
            node.kwargs = {**node.kwargs, "dtype": self._dtypes[node]}

    def _argument(self, node: Node, name: str, value: Any) -> Any:
        if isinstance(value, Node):
            return self._read(node, Read(name, value)) if float_values(value) else value
        if isinstance(value, list | tuple):
            return type(value)(self._argument(node, name, item) for item in value)
        if isinstance(value, dict):
            return {key: self._argument(node, name, item) for key, item in value.items()}
        return value

    def _read(self, node: Node, read: Read) -> Node:
        value, dtype = read.node, self._assignment.input_dtype(node, read)
        if (
            dtype is None
            or not isinstance(value.meta["val"], torch.Tensor)
            or dtype is self._dtypes[value]
        ):
            return value
        if (source := self._widened_source(value)) is not None and self._dtypes[source] is dtype:
            self.bypassed[value] = None
            return source
        if value in self._planned.mutated:
            # The values change between two reads, so a cast cannot be shared.
            return insert_cast(self._module, value, dtype, node, node)
        if (value, dtype) not in self._casts:
            self._casts[value, dtype] = insert_cast(self._module, value, dtype, node, node)
        return self._casts[value, dtype]

    def _widened_source(self, node: Node) -> Node | None:
        """Return what the model casts to a wider dtype here.

        Casting the result back would give the same bits, so the source can be read instead.
        """
        if (
            node.target is not torch.ops.aten.to.dtype
            or len(node.args) != _CAST_ARGS
            or node.kwargs
            or not self._planned.mutated.isdisjoint({node, node.args[0]})
        ):
            return None
        source: Any = node.args[0]
        if source not in self._dtypes:
            return None
        return source if self._dtypes[source].itemsize < self._dtypes[node].itemsize else None


def _update_example_dtypes(
    module: GraphModule, planned: PlannedGraph, dtypes: Mapping[Node, torch.dtype]
) -> None:
    mode = fake_mode(module)
    if mode is None:
        return
    for node, dtype in dtypes.items():
        if planned.assignment.roles[node] is not Role.FIXED:
            before = dtypes_of(node.meta["val"])
            set_dtypes(
                node,
                [
                    dtype if dtype_before is torch.float32 else dtype_before
                    for dtype_before in before
                ],
                mode,
            )


# The converted program


def _new_program(
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
    """Return the outputs under their current names: an inserted cast has a name of its own."""
    specs = []
    for value, spec in zip(
        output_values(module.graph.output_node()), signature.output_specs, strict=True
    ):
        arg = (
            TensorArgument(name=value.name)
            if isinstance(value, Node) and isinstance(spec.arg, TensorArgument)
            else spec.arg
        )
        specs.append(OutputSpec(spec.kind, arg, spec.target))
    return specs


def _cast_examples(exported: ExportedProgram, module: GraphModule) -> Any:
    """Cast the example inputs to the dtypes that the graph takes."""
    inputs = {
        spec.arg.name
        for spec in exported.graph_signature.input_specs
        if spec.target is None and isinstance(spec.arg, TensorArgument)
    }
    dtypes = iter(
        [
            float_values(node)[0].dtype
            for node in module.graph.find_nodes(op="placeholder")
            if node.name in inputs and float_values(node)
        ]
    )
    return map_tensors(
        exported.example_inputs,
        lambda tensor: tensor.to(dtype=next(dtypes)) if tensor.is_floating_point() else tensor,
    )
