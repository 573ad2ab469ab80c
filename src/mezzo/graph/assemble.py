"""From an exported model to a converted program: tidied, planned, applied, verified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, OutputSpec, TensorArgument
from torch.fx import GraphModule, Node

from mezzo._casting import map_tensors
from mezzo.graph.apply import apply_plan
from mezzo.graph.choice import output_values
from mezzo.graph.counting import casts_after, casts_before
from mezzo.graph.fold import fold
from mezzo.graph.lists import Words, check_words
from mezzo.graph.nodes import values
from mezzo.graph.plan import CastBytes, Casts, GraphPlan
from mezzo.graph.program import Program, copied
from mezzo.graph.recurrent import layers, narrow
from mezzo.graph.rows import rows
from mezzo.graph.sections import Section, plan_sections
from mezzo.graph.tidy import tidy
from mezzo.graph.verify import verify
from mezzo.graph.weights import Pool, Stored, rounding_errors, store, weight_nodes


def assemble(exported: ExportedProgram, said: Words, modules: Mapping[str, nn.Module], pool: Pool) -> Program:
    """Convert one exported model; the export itself stays as it is."""
    exported, module, sections, before = _planned(exported, said, modules, pool)
    listed = rows(sections, rounding_errors(exported, sections[0].planned.choice, pool))
    for section in sections[1:]:
        apply_plan(section.module, section.planned, {})
    stored = store(exported, module, sections[0].planned.choice, pool)
    apply_plan(module, sections[0].planned, stored.variants)
    verify(module)
    return Program(_program(exported, module, stored), GraphPlan(listed, Casts(before, casts_after(module))))


def _planned(
    exported: ExportedProgram, said: Words, modules: Mapping[str, nn.Module], pool: Pool
) -> tuple[ExportedProgram, GraphModule, list[Section], CastBytes]:
    """Prepare the graph and plan it; plan again if it has recurrent layers that torch.autocast runs in another dtype."""
    narrowed = frozenset[str]()
    before: CastBytes | None = None
    while True:
        module = copied(exported.graph_module)
        tidy(module, said.dtype, said.device)
        check_words(said, list(_nodes(module)), list(_names(module)))
        ready = fold(exported, module) if said.cast_params and not said.idle else exported
        ready = narrow(ready, module, narrowed, pool, store=said.cast_params)
        sections = plan_sections(module, weight_nodes(ready, module, said.dtype), said, modules)
        # Counted on the model's own graph: what is rewritten below is nothing that torch.autocast would see.
        before = casts_before(sections, said) if before is None else before
        found = layers(ready, sections[0].planned, said)
        if not found:
            return ready, module, sections, before
        narrowed |= found


def _program(exported: ExportedProgram, module: GraphModule, stored: Stored) -> ExportedProgram:
    signature = ExportGraphSignature(stored.signature.input_specs, _output_specs(module, stored.signature))
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=signature,
        state_dict=stored.state,
        range_constraints=exported.range_constraints,
        module_call_graph=exported.module_call_graph,
        example_inputs=_examples(exported, module),
        constants=stored.constants,
        verifiers=exported.verifiers,
    )


def _output_specs(module: GraphModule, signature: ExportGraphSignature) -> list[OutputSpec]:
    """The outputs under the names that they have now: a cast has one of its own."""
    found = []
    for value, spec in zip(output_values(module.graph.output_node()), signature.output_specs, strict=True):
        arg = TensorArgument(name=value.name) if isinstance(value, Node) and isinstance(spec.arg, TensorArgument) else spec.arg
        found.append(OutputSpec(spec.kind, arg, spec.target))
    return found


def _examples(exported: ExportedProgram, module: GraphModule) -> Any:
    """The example inputs in the dtypes that the graph takes."""
    inputs = {spec.arg.name for spec in exported.graph_signature.input_specs if spec.target is None and isinstance(spec.arg, TensorArgument)}
    taken = [values(node)[0].dtype for node in module.graph.find_nodes(op="placeholder") if node.name in inputs and values(node)]
    wanted = iter(taken)
    return map_tensors(exported.example_inputs, lambda one: one.to(dtype=next(wanted)) if one.is_floating_point() else one)


def _nodes(module: GraphModule) -> Iterator[Node]:
    for inner in module.modules():
        if isinstance(inner, GraphModule):
            yield from inner.graph.nodes


def _names(module: GraphModule) -> Iterator[str]:
    for path, inner in module.named_modules():
        if isinstance(inner, GraphModule):
            yield from (f"{path}.{node.name}" if path else node.name for node in inner.graph.nodes)
