"""Files made to execute code: each does so when torch reads it, and none when mezzo does.

The payload imports a module in the folder of the file; if it was imported, code was executed.
"""

import json
import pickle
import sys
import warnings
from contextlib import suppress
from io import BytesIO
from zipfile import ZipFile

import pytest
import torch
from support.saved_programs import edited, export, linear, one, parts, save, write_parts
from torch import nn
from torch._export.serde import schema, serialize

from mezzo import CheckpointError
from mezzo.conversion import saved_model

PAYLOAD = "__import__('mezzo_hostile_payload')"
CHARACTERS = "+".join(f"chr({ord(character)})" for character in "mezzo_hostile_payload")
DICTIONARY_KEY = f'bias" + str(__import__({CHARACTERS})) + "'
GRAPH = "programs/0/graph.json"


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Return a function that returns whether the payload ran since its last call."""
    (tmp_path / "mezzo_hostile_payload.py").write_text("class Colour: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("mezzo_hostile_payload", None)
    yield lambda: sys.modules.pop("mezzo_hostile_payload", None) is not None
    sys.modules.pop("mezzo_hostile_payload", None)


class Victim(nn.Module):
    """Has every place in which a payload is hidden below."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, word, *, extra, unused):
        self.calls.add_(1)
        return {
            "y": torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.layer(x),)) + extra["bias"]
        }


ARGS, KWARGS = (
    (torch.ones(4, 3), "plain"),
    {
        "extra": {"bias": torch.ones(2)},
        "unused": torch.ones(1),
    },
)
SIZES = {
    "x": {0: torch.export.Dim("batch", max=64)},
    "word": None,
    "extra": {"bias": None},
    "unused": None,
}


@pytest.fixture(scope="module")
def program():
    return export(Victim(), ARGS, KWARGS, dynamic_shapes=SIZES)


def replace_all(graph, old, new):
    """Rename throughout, as a careful attacker would."""
    text = json.dumps(graph).replace(json.dumps(old), json.dumps(new))
    graph.clear()
    graph.update(json.loads(text))


def inner(graph):
    return graph["graph_module"]["graph"]


def signature(graph):
    return graph["graph_module"]["module_call_graph"][0]["signature"]


def in_expression(graph):
    inner(graph)["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] = PAYLOAD


def in_guards(graph):
    graph["guards_code"].append(f"{PAYLOAD} is not None")


def in_body_name(graph):
    replace_all(graph, "true_graph_0", f'true_graph_0" if {PAYLOAD} is None else "true_graph_0')


def in_input_name(graph):
    replace_all(graph, "unused", f"unused={PAYLOAD}")


def in_argument_names(graph):
    signature(graph)["forward_arg_names"].append(f"more={PAYLOAD}")


def in_buffer_name(graph):
    replace_all(graph, "calls", f'calls" if {PAYLOAD} is None else "calls')


def in_constant_input(graph):
    replace_all(graph, "plain", f"other' or {PAYLOAD} or 'plain")


def in_dictionary_key(graph):
    spec = signature(graph)
    protocol, tree = json.loads(spec["in_spec"])
    tree["children_spec"][1]["children_spec"][0]["context"] = json.dumps([DICTIONARY_KEY])
    spec["in_spec"] = json.dumps([protocol, tree])


def in_enum(graph):
    enum = {"__enum__": True, "fqn": "mezzo_hostile_payload:Colour", "name": "RED"}
    leaf = {"type": None, "context": None, "children_spec": []}
    signature(graph)["out_spec"] = json.dumps(
        [1, {"type": "builtins.dict", "context": json.dumps([enum]), "children_spec": [leaf]}]
    )


def in_default_factory(graph):
    context = {
        "default_factory_module": "mezzo_hostile_payload",
        "default_factory_name": "Colour",
        "dict_context": ["y"],
    }
    leaf = {"type": None, "context": None, "children_spec": []}
    signature(graph)["out_spec"] = json.dumps(
        [1, {"type": "collections.defaultdict", "context": context, "children_spec": [leaf]}]
    )


CHANNELS = [
    in_expression,
    in_guards,
    in_body_name,
    in_input_name,
    in_argument_names,
    in_buffer_name,
    in_constant_input,
    in_dictionary_key,
    in_enum,
    in_default_factory,
]


def read_without_care(path):
    """Have torch read a graph without validation, and run it; errors come too late to matter."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        patch.setattr(
            saved_model,
            "validate_program",
            lambda graph, _: serialize._dict_to_dataclass(schema.ExportedProgram, graph),
        )
        program = one(path)
        tensors = {**program.state_dict, **program.constants}
        inputs = [ARGS[0], *ARGS[1:], KWARGS["extra"]["bias"], KWARGS["unused"]]
        with suppress(Exception):
            program.graph_module(
                *[
                    inputs.pop(0) if spec.target is None else tensors[spec.target]
                    for spec in program.graph_signature.input_specs
                ]
            )
        extra = (
            {DICTIONARY_KEY: KWARGS["extra"]["bias"]}
            if DICTIONARY_KEY in str(program.call_spec.in_spec)
            else KWARGS["extra"]
        )
        program.module()(*ARGS, **{**KWARGS, "extra": extra})


@pytest.mark.parametrize("hide", CHANNELS, ids=lambda hide: hide.__name__)
def test_a_graph_that_executes_code_in_torch_is_rejected_and_not_executed(
    hide, program, tmp_path, ran
):
    file = edited(save(tmp_path / "model", program), GRAPH, hide)
    if hide is in_buffer_name:
        edited(file, "contents.json", in_buffer_name)
    read_without_care(file)
    assert ran(), "the payload does not run in torch either: the test proves nothing"
    with pytest.raises(CheckpointError, match="Nothing of it was run"):
        saved_model.load(file)
    assert not ran()


def call(target, **arguments):
    inputs = [{"name": name, "arg": argument, "kind": 1} for name, argument in arguments.items()]
    return {
        "target": target,
        "inputs": inputs,
        "outputs": [{"as_none": True}],
        "metadata": {},
        "is_hop_single_tensor_return": None,
        "name": "payload",
    }


def test_an_op_that_writes_a_file_is_rejected(program, tmp_path):
    victim = tmp_path / "victim"
    node = call(
        "torch.ops.aten.from_file.default",
        filename={"as_string": str(victim)},
        shared={"as_bool": True},
        size={"as_int": 4},
    )
    file = edited(
        save(tmp_path / "model", program),
        GRAPH,
        lambda graph: graph["graph_module"]["graph"]["nodes"].insert(0, node),
    )
    read_without_care(file)
    assert victim.exists()
    victim.unlink()
    with pytest.raises(
        CheckpointError, match="it calls aten::from_file, which is not on the list of ops"
    ):
        saved_model.load(file)
    assert not victim.exists()


def test_an_op_that_reads_beyond_its_buffer_is_rejected(program, tmp_path):
    node = call(
        "torch.ops.aten._reshape_alias.default",
        self={"as_tensor": {"name": "x"}},
        size={"as_ints": [1000]},
        stride={"as_ints": [1]},
    )
    file = edited(
        save(tmp_path / "model", program),
        GRAPH,
        lambda graph: inner(graph)["nodes"].insert(0, node),
    )
    with pytest.raises(
        CheckpointError,
        match=r"it calls aten::_reshape_alias, which is not on the list .* Nothing of it was run",
    ):
        saved_model.load(file)


@pytest.mark.parametrize("size", [2**40, 2**62], ids=["terabytes", "overflow"])
def test_sizes_in_the_graph_allocate_nothing(size, tmp_path):
    """The zeros that replace an example input take one element of memory, whatever their size."""

    def grow(graph):
        inner(graph)["tensor_values"]["input"]["sizes"][0] = {"as_int": size}

    file = edited(save(tmp_path / "model", linear()), GRAPH, grow)
    with suppress(CheckpointError):
        [[zeros], _] = one(file).example_inputs
        assert (zeros.shape[0], zeros.untyped_storage().nbytes()) == (size, 4)


@pytest.mark.parametrize(
    "target",
    [
        "torch.importlib.import_module",
        "torch.hub.load",
        "torch.ops.load_library",
        "builtins.eval",
        "os.system",
        "#mine:op",
        "_operator.attrgetter",
    ],
)
def test_functions_that_are_not_ops_are_rejected(target, program, tmp_path, ran):
    node = call(target, name={"as_string": "mezzo_hostile_payload"})
    file = edited(
        save(tmp_path / "model", program),
        GRAPH,
        lambda graph: graph["graph_module"]["graph"]["nodes"].insert(0, node),
    )
    with pytest.raises(CheckpointError, match=f"it calls '{target}', which is not an op"):
        saved_model.load(file)
    assert not ran()


class Payload:
    def __reduce__(self):
        return __import__, ("mezzo_hostile_payload",)


def rewritten(source, target, change):
    """Return torch's own archive with some parts replaced."""
    with ZipFile(source) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    change(contents)
    write_parts(target, contents)
    return target


def pickled():
    buffer = BytesIO()
    torch.save(Payload(), buffer)
    return buffer.getvalue()


def in_weights(contents):
    config = json.loads(contents["model/data/weights/model_weights_config.json"])
    config["config"]["weight"].update(use_pickle=True, path_name="weight_0")
    contents["model/data/weights/model_weights_config.json"] = json.dumps(config)
    contents["model/data/weights/weight_0"] = pickled()


def in_sample_inputs(contents):
    contents["model/data/sample_inputs/model.pt"] = pickled()


def in_constants(contents):
    config = {
        "config": {
            "odd": {
                "path_name": "opaque_obj_0",
                "is_param": False,
                "use_pickle": True,
                "tensor_meta": None,
            }
        }
    }
    contents["model/data/constants/model_constants_config.json"] = json.dumps(config)
    contents["model/data/constants/opaque_obj_0"] = pickle.dumps(Payload())


@pytest.mark.parametrize(
    "hide", [in_weights, in_sample_inputs, in_constants], ids=lambda hide: hide.__name__
)
def test_a_pickle_that_torch_executes_is_rejected_and_not_executed(hide, tmp_path, ran):
    if hide is in_constants and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 reads no pickled constants")
    torch.export.save(linear(), tmp_path / "model.pt2")
    file = rewritten(tmp_path / "model.pt2", tmp_path / "hostile.pt2", hide)
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        torch.export.load(file)
    assert ran(), "the payload does not run in torch either: the test proves nothing"
    with pytest.raises(CheckpointError, match="invalid name"):
        saved_model.load(file)
    assert not ran()


@pytest.mark.parametrize(
    "part", ["tensors", "programs/0/plan.json", "programs/0/graph.json", "contents.json"]
)
def test_a_pickle_in_place_of_a_part_is_rejected_and_not_executed(part, tmp_path, ran):
    pickle.loads(pickle.dumps(Payload()))
    assert ran()
    file = save(tmp_path / "model", linear())
    write_parts(file, {**parts(file), part: pickled()})
    with pytest.raises(CheckpointError):
        saved_model.load(file)
    assert not ran()


@pytest.mark.parametrize(
    "name",
    [
        "../../escaped",
        "/etc/escaped",
        "tensors/../../escaped",
        "C:\\escaped",
        "tensors/0",
        "sample_inputs.pt",
    ],
)
def test_parts_with_other_names_are_rejected_and_never_written_to_disk(name, tmp_path):
    (tmp_path / "inner").mkdir()
    file = save(tmp_path / "inner" / "model", linear())
    write_parts(file, {**parts(file), name: b"content"})
    with pytest.raises(CheckpointError, match=r"invalid name|is unexpected"):
        saved_model.load(file)
    assert [path.name for path in tmp_path.rglob("*")] == ["inner", "model"]


def test_a_part_that_would_exhaust_the_memory_is_rejected(tmp_path):
    file = save(tmp_path / "model", linear())
    write_parts(file, {**parts(file), "contents.json": b" " * 50_000_000})
    assert file.stat().st_size < 100_000
    with pytest.raises(CheckpointError, match=r"its JSON parts unpack to 5\d+ bytes"):
        saved_model.load(file)


@pytest.mark.parametrize(
    "text",
    [
        "Pow(Integer(10), Integer(10000000000))",
        "Add(" * 100 + "Integer(1)" + ")" * 100,
        "Integer(" + "9" * 5000 + ")",
    ],
    ids=["power", "deep", "long"],
)
def test_expressions_that_would_take_forever_are_rejected(text, program, tmp_path):
    def hide(graph):
        graph["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] = (
            text
        )

    with pytest.raises(CheckpointError, match="expression"):
        saved_model.load(edited(save(tmp_path / "model", program), GRAPH, hide))
