"""A graph is valid if every value has its type and every string follows its rule."""

import dataclasses
import json
import typing
from collections import Counter

import pytest
import torch
from support.saved_programs import everything
from torch._export.serde import schema, serialize
from torch._export.serde.serialize import _SYM_OPS

from mezzo import CheckpointError
from mezzo.conversion import allowed_ops, validate_graph
from mezzo.conversion.allowed_ops import ALLOWED, is_allowed
from mezzo.conversion.checked_ops import CHECKED
from mezzo.conversion.validate_graph import strip_metadata, validate_program
from mezzo.policy.op_names import is_removed


@pytest.fixture(scope="module")
def text():
    artifact = serialize.serialize(everything())
    return artifact.exported_program.decode()


@pytest.fixture
def graph(text):
    return strip_metadata(json.loads(text))


def test_what_torch_writes_is_valid_without_its_metadata(text, graph):
    validate_program(graph)
    with pytest.raises(CheckpointError, match="a source line has control characters"):
        validate_program(json.loads(text))


def test_a_stack_trace_is_reduced_to_file_and_line(text, graph):
    traces = [node["metadata"]["stack_trace"] for node in graph["graph_module"]["graph"]["nodes"]]
    assert all("\n" not in trace for trace in traces)
    assert any("saved_programs.py" in trace for trace in traces)
    assert "self.calls.add_(1)" in text
    assert "self.calls.add_(1)" not in json.dumps(graph)


def test_other_metadata_is_stripped():
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
        "ExportedProgram has the unknown field 'more'",
    ),
    "dictionary for a name": (
        lambda graph: first_node(graph).update(name={"a": 1}),
        "Node.name has type dict and should have type str",
    ),
    "list for a dictionary": (
        lambda graph: graph.update(range_constraints=[]),
        "ExportedProgram.range_constraints has type list and should have type dict",
    ),
    "number for a list": (
        lambda graph: first_node(graph).update(inputs=3),
        "Node.inputs has type int and should have type list",
    ),
    "two kinds at once": (
        lambda graph: first_node(graph)["inputs"][0]["arg"].update(as_int=1),
        "NamedArgument.arg has 2 values, and a union has one",
    ),
    "no kind": (
        lambda graph: first_node(graph)["inputs"][0].update(arg={}),
        "NamedArgument.arg has 0 values, and a union has one",
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
        "Argument.as_layout is '1', and a saved program may have dense tensors only",
    ),
    "operator": (
        lambda graph: first_node(graph)["inputs"][0].update(arg={"as_operator": "torch.hub.load"}),
        "it calls 'torch.hub.load', which is not an op",
    ),
    "true for a number": (
        lambda graph: graph["schema_version"].update(major=True),
        "SchemaVersion.major is 'True', which is not of type int",
    ),
    "one for true": (
        lambda graph: graph["graph_module"]["graph"].update(is_single_tensor_return=1),
        "which is not of type bool",
    ),
    "huge number": (
        lambda graph: graph["schema_version"].update(major=10**30),
        "which is not of type int",
    ),
    "text for a float": (
        lambda graph: first_node(graph)["inputs"][0].update(arg={"as_float": "1.0"}),
        "which is not of type float",
    ),
    "unknown dtype": (
        lambda graph: graph["graph_module"]["graph"]["tensor_values"]["ids"].update(dtype=99),
        "which is not of type ScalarType",
    ),
    "notes on the module": (
        lambda graph: graph["graph_module"].update(metadata={"custom": "{}"}),
        r"GraphModule.metadata\[\], which a saved program never has",
    ),
    "notes of another kind": (
        lambda graph: first_node(graph)["metadata"].update(source_fn_stack="x"),
        "it has 'source_fn_stack' where only 'stack_trace'",
    ),
    "other verifier": (
        lambda graph: graph.update(verifiers=["MINE"]),
        "it has 'MINE' where only 'TRAINING', 'ATEN'",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_torch_does_not_write_is_rejected(name, graph):
    change, message = CHANGES[name]
    change(graph)
    with pytest.raises(CheckpointError, match=message):
        validate_program(graph)


def test_the_validated_program_equals_what_torch_reads(graph):
    assert validate_program(graph) == serialize._dict_to_dataclass(schema.ExportedProgram, graph)


def test_infinities_are_accepted_as_torch_writes_them(graph):
    first_node(graph)["inputs"][0]["arg"] = {"as_floats": ["Infinity", "-Infinity", 1, 0.5]}
    assert validate_program(graph).graph_module.graph.nodes[0].inputs[0].arg.as_floats == [
        float("inf"),
        float("-inf"),
        1.0,
        0.5,
    ]


def test_every_rule_belongs_to_a_field_of_the_schema():
    """A rule for a field that torch has renamed would have no effect."""
    fields = {
        f"{kind.__name__}.{field.name}"
        for kind in vars(schema).values()
        if dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
    }
    fields |= {
        f"{kind.__name__}.{name}"
        for kind in vars(schema).values()
        if isinstance(kind, type) and issubclass(kind, validate_graph._Union)
        for name in typing.get_type_hints(kind)
    }
    assert {rule.removesuffix("[]").rpartition(">")[2] for rule in validate_graph._RULES} <= fields


# Called functions


@pytest.mark.parametrize(
    "name",
    [
        "torch.ops.aten.linear.default",
        "torch.ops.aten.add.Tensor",
        "torch.ops.aten.gelu.default",
        "torch.ops.aten.relu_.default",
        "torch.ops.aten.lstm.input",
        "torch.ops.aten.einsum.default",
        "torch.ops.aten.sym_size.int",
        "torch.ops.higher_order.cond",
        "_operator.mul",
    ],
)
def test_ops_size_functions_and_control_flow_are_accepted(name):
    validate_graph.check(name, ())


def test_every_size_function_that_torch_writes_is_accepted():
    for function in _SYM_OPS:
        validate_graph.check(f"{function.__module__}.{function.__name__}", ())


@pytest.mark.parametrize(
    "name",
    [
        "",
        "os.system",
        "torch.load",
        "torch.hub.load",
        "torch.ops.load_library",
        "torch.ops.aten",
        "torch.ops.aten.add",
        "torch.ops.aten.add.Tensor.__class__",
        "torch.ops.aten.add.Tensor\n",
        "torch.ops.higher_order.aoti_call_delegate",
        "torch.ops.higher_order.call_torchbind",
        "torch.ops.higher_order.print",
        "_operator.call",
        "_operator.methodcaller",
        "math.factorial",
        "#extension:op",
    ],
)
def test_other_functions_are_rejected(name):
    with pytest.raises(CheckpointError, match="which is not an op"):
        validate_graph.check(name, ())


UNLISTED = [
    "_reshape_alias.default",
    "_unsafe_index.Tensor",
    "native_batch_norm.default",
    "_fft_r2c.default",
    "_pad_packed_sequence.default",
    "segment_reduce.default",
    "lu_unpack.default",
    "lstm.data",
    "resize_.default",
    "set_.source_Tensor",
    "to_sparse.default",
    "_foreach_add.Scalar",
    "mkldnn_rnn_layer.default",
    "from_file.default",
    "save.default",
    "__class__.default",
]


@pytest.mark.parametrize("name", UNLISTED)
def test_aten_ops_that_are_not_on_the_list_are_rejected_by_name(name):
    qualified = f"aten::{name.removesuffix('.default')}"
    with pytest.raises(
        CheckpointError,
        match=(
            rf"it calls {qualified}, which is not on the list of ops that check their arguments"
            r" .*wrap it in a custom op"
        ),
    ):
        validate_graph.check(f"torch.ops.aten.{name}", ("aten",))


def test_an_unregistered_overload_is_rejected():
    with pytest.raises(CheckpointError, match="which is not registered here"):
        validate_graph.check("torch.ops.aten.add.nothing", ())


@pytest.mark.parametrize("name", ["add.out", "topk.values", "sort.values_stable"])
def test_calls_that_write_to_out_are_rejected(name):
    with pytest.raises(CheckpointError, match="which writes to out="):
        validate_graph.check(f"torch.ops.aten.{name}", ())


def test_ops_of_other_namespaces_are_rejected_unless_named():
    name = "torch.ops.prims.sin.default"
    with pytest.raises(
        CheckpointError,
        match=(
            r"custom op prims::sin. If you trust the file, name the op's namespace:"
            r" custom_ops=\('prims',\)"
        ),
    ):
        validate_graph.check(name, ())
    validate_graph.check(name, ("prims",))


def test_an_op_that_is_registered_later_is_found():
    name = "torch.ops.mezzo_tests_targets.late.default"
    with pytest.raises(CheckpointError, match="not registered"):
        validate_graph.check(name, ("mezzo_tests_targets",))
    library = torch.library.Library("mezzo_tests_targets", "DEF")
    library.define("late(Tensor x) -> Tensor")
    validate_graph.check(name, ("mezzo_tests_targets",))
    library._destroy()


# Allowed ops


def test_no_op_is_listed_twice():
    groups = [
        value
        for name, value in vars(allowed_ops).items()
        if isinstance(value, str) and name.strip("_").isupper()
    ]
    assert [name for name, count in Counter(" ".join(groups).split()).items() if count > 1] == []


def test_every_listed_name_is_an_op():
    """A misspelt name would allow nothing."""
    known = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    unknown = {
        name for name in ALLOWED if name.partition(".")[0] not in known and not is_removed(name)
    }
    assert unknown == set()


@pytest.mark.parametrize(
    "name",
    [
        "as_strided_",
        "resize_",
        "set_",
        "copy_backward",
        "native_batch_norm",
        "_unsafe_index",
        "embedding_dense_backward",
    ],
)
def test_ops_that_do_not_check_their_arguments_are_not_allowed(name):
    assert not is_allowed(name, "default")


def test_backward_and_sparse_ops_are_not_allowed():
    assert not [
        name
        for name in ALLOWED
        if "backward" in name or "sparse" in name or "mkldnn" in name or "cudnn" in name
    ]


def test_ops_with_added_checks_are_allowed():
    assert all(
        is_allowed(op._schema.name.removeprefix("aten::"), op._overloadname) for op in CHECKED
    )
