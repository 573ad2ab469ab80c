"""A graph is admitted if every value has its type and every string its rule."""

import dataclasses
import json
import typing

import pytest
from support.saved_programs import everything
from torch._export.serde import schema, serialize

from mezzo import CheckpointError
from mezzo.conversion import validate_graph as module
from mezzo.conversion.validate_graph import strip_metadata, validate_program


@pytest.fixture(scope="module")
def text():
    artifact = serialize.serialize(everything())
    return artifact.exported_program.decode()


@pytest.fixture
def graph(text):
    return strip_metadata(json.loads(text))


def test_what_torch_writes_is_admitted_without_its_notes(text, graph):
    validate_program(graph)
    with pytest.raises(CheckpointError, match="a source line is not one"):
        validate_program(json.loads(text))


def test_of_a_traceback_the_place_of_the_call_is_kept_without_source_text(text, graph):
    traces = [node["metadata"]["stack_trace"] for node in graph["graph_module"]["graph"]["nodes"]]
    assert all("\n" not in trace for trace in traces)
    assert any("saved_programs.py" in trace for trace in traces)
    assert "self.calls.add_(1)" in text
    assert "self.calls.add_(1)" not in json.dumps(graph)


def test_notes_of_other_kinds_are_left_out():
    node = {
        "metadata": {
            "custom": "{}",
            "from_node": "[]",
            "source_fn_stack": "a,torch.hub.load",
            "torch_fn": "a;b",
            "stack_trace": "",
        }
    }
    assert strip_metadata([node]) == [{"metadata": {"torch_fn": "a;b", "stack_trace": ""}}]


def first_node(graph):
    return graph["graph_module"]["graph"]["nodes"][0]


CHANGES = {
    "unknown field": (
        lambda graph: graph.update(more=1),
        "ExportedProgram has 'more', which this torch does not know",
    ),
    "dictionary for a name": (
        lambda graph: first_node(graph).update(name={"a": 1}),
        "Node.name is a dict and should be a str",
    ),
    "list for a dictionary": (
        lambda graph: graph.update(range_constraints=[]),
        "ExportedProgram.range_constraints is a list and should be a dict",
    ),
    "number for a list": (
        lambda graph: first_node(graph).update(inputs=3),
        "Node.inputs is a int and should be a list",
    ),
    "two kinds at once": (
        lambda graph: first_node(graph)["inputs"][0]["arg"].update(as_int=1),
        "NamedArgument.arg is 2 things at once",
    ),
    "no kind": (
        lambda graph: first_node(graph)["inputs"][0].update(arg={}),
        "NamedArgument.arg is 0 things at once",
    ),
    "custom object": (
        lambda graph: first_node(graph)["inputs"][0].update(
            arg={"as_custom_obj": {"name": "a", "class_fqn": "b"}}
        ),
        "CustomObjArgument.name, which a saved program never has",
    ),
    "token": (
        lambda graph: graph["graph_module"]["signature"]["input_specs"].append(
            {"token": {"arg": {"name": "a"}}}
        ),
        "TokenArgument.name, which a saved program never has",
    ),
    "sparse layout": (
        lambda graph: first_node(graph)["inputs"][0].update(arg={"as_layout": 1}),
        "Argument.as_layout is '1', and a saved program has dense tensors only",
    ),
    "operator": (
        lambda graph: first_node(graph)["inputs"][0].update(arg={"as_operator": "torch.hub.load"}),
        "it calls 'torch.hub.load', which is no op",
    ),
    "true for a number": (
        lambda graph: graph["schema_version"].update(major=True),
        "SchemaVersion.major is 'True', which is no int",
    ),
    "one for true": (
        lambda graph: graph["graph_module"]["graph"].update(is_single_tensor_return=1),
        "which is no bool",
    ),
    "huge number": (lambda graph: graph["schema_version"].update(major=10**30), "which is no int"),
    "text for a float": (
        lambda graph: first_node(graph)["inputs"][0].update(arg={"as_float": "1.0"}),
        "which is no float",
    ),
    "unknown dtype": (
        lambda graph: graph["graph_module"]["graph"]["tensor_values"]["ids"].update(dtype=99),
        "which is no ScalarType",
    ),
    "notes on the module": (
        lambda graph: graph["graph_module"].update(metadata={"custom": "{}"}),
        r"GraphModule.metadata\[\], which a saved program never has",
    ),
    "notes of another kind": (
        lambda graph: first_node(graph)["metadata"].update(source_fn_stack="x"),
        "it says 'source_fn_stack' where only 'stack_trace'",
    ),
    "other verifier": (
        lambda graph: graph.update(verifiers=["MINE"]),
        "it says 'MINE' where only 'TRAINING', 'ATEN'",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_torch_does_not_write_is_refused(name, graph):
    change, message = CHANGES[name]
    change(graph)
    with pytest.raises(CheckpointError, match=message):
        validate_program(graph)


def test_what_is_admitted_is_what_torch_would_have_read(graph):
    assert validate_program(graph) == serialize._dict_to_dataclass(schema.ExportedProgram, graph)


def test_infinities_are_admitted_as_torch_spells_them(graph):
    first_node(graph)["inputs"][0]["arg"] = {"as_floats": ["Infinity", "-Infinity", 1, 0.5]}
    assert validate_program(graph).graph_module.graph.nodes[0].inputs[0].arg.as_floats == [
        float("inf"),
        float("-inf"),
        1.0,
        0.5,
    ]


def test_every_rule_belongs_to_a_field_of_the_schema():
    """A rule for a field that torch has renamed would stand there for nothing."""
    fields = {
        f"{kind.__name__}.{field.name}"
        for kind in vars(schema).values()
        if dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
    }
    fields |= {
        f"{kind.__name__}.{name}"
        for kind in vars(schema).values()
        if isinstance(kind, type) and issubclass(kind, module._Union)
        for name in typing.get_type_hints(kind)
    }
    assert {rule.removesuffix("[]").rpartition(">")[2] for rule in module._RULES} <= fields
