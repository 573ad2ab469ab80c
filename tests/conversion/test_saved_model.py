"""Programs are loaded as they were saved; damaged files and other formats are rejected."""

import contextlib
import json
import random
import re
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from support.saved_programs import (
    batch,
    edited,
    everything,
    export,
    linear,
    one,
    parts,
    same,
    save,
    write_parts,
)
from torch import nn
from torch._higher_order_ops import while_loop
from torch.export import Dim

from mezzo import CheckpointError, UnsupportedError
from mezzo.conversion import saved_model

ONE = torch.tensor(1.0)


@pytest.fixture(scope="module")
def program():
    return everything()


@pytest.fixture
def file(program, tmp_path):
    return save(tmp_path / "model.mezzo", program)


def test_a_loaded_program_gives_the_same_bits_for_every_batch_size(program, file):
    before, after = everything().module(), one(file).module()
    for count in (6, 2, 17):
        args, kwargs = batch(count)
        assert same(before(*args, **kwargs), after(*args, **kwargs))


def test_buffers_of_a_loaded_program_are_mutated_as_before(program, file):
    before, after = everything().module(), one(file).module()
    args, kwargs = batch(6)
    for _ in range(3):
        assert same(before(*args, **kwargs), after(*args, **kwargs))
    assert dict(after.named_buffers())["norm.num_batches_tracked"] == 3
    assert after.calls == 3


def test_guards_on_sizes_are_checked_after_loading(program, file):
    args, kwargs = batch(65)
    for exported in (program, one(file)):
        with pytest.raises(AssertionError, match=r"Guard failed: ids.size\(\)\[0\] <= 64"):
            exported.module()(*args, **kwargs)


def test_plan_and_options_are_loaded(program, tmp_path):
    model = saved_model.SavedModel(
        (
            saved_model.SavedProgram(
                program, {"rows": [["linear", "float16", "½ as large"]], "bytes": 12}
            ),
        ),
        {"policy": {"level": "O1"}, "keep_io_dtypes": True},
    )
    saved_model.save(tmp_path / "model", model)
    loaded = saved_model.load(tmp_path / "model")
    assert (loaded.options, loaded.programs[0].plan) == (
        model.options,
        model.programs[0].plan,
    )


def test_ranges_names_and_source_lines_are_loaded(program, file):
    loaded = one(file)
    assert {str(key): value for key, value in loaded.range_constraints.items()} == {
        str(key): value for key, value in program.range_constraints.items()
    }
    names = [
        [node.name for node in one.graph.nodes if node.op != "get_attr"]
        for one in (program, loaded)
    ]
    assert names[0] == names[1]
    node = next(node for node in loaded.graph.nodes if node.name == "embedding")
    assert re.fullmatch(
        r'File ".*saved_programs.py", line \d+, in forward', node.meta["stack_trace"]
    )
    assert next(reversed(node.meta["nn_module_stack"].values()))[0] == "embed"


def test_a_saved_program_can_be_saved_again_to_equal_bytes(file, tmp_path):
    again = save(tmp_path / "again", one(file))
    assert parts(again) == parts(file)


def test_a_tied_weight_is_stored_once_and_loaded_as_one_tensor(file):
    contents = json.loads(parts(file)["contents.json"])
    state = contents["programs"][0]["state"]
    assert state["embed.weight"]["tensor"] == state["head.weight"]["tensor"]
    loaded = one(file).state_dict
    assert loaded["embed.weight"] is loaded["head.weight"]


def test_programs_of_several_sizes_share_their_weights_in_the_file_and_in_memory(tmp_path):
    model = nn.Linear(64, 64)
    programs = [export(model, (torch.randn(count, 64),)) for count in (1, 8)]
    single, double = save(tmp_path / "one", programs[0]), save(tmp_path / "two", *programs)
    assert double.stat().st_size < 1.3 * single.stat().st_size
    first, second = (stored.exported for stored in saved_model.load(double).programs)
    assert first.state_dict["weight"] is second.state_dict["weight"]
    assert same(first.module()(torch.ones(1, 64)), model(torch.ones(1, 64)))
    assert same(second.module()(torch.ones(8, 64)), model(torch.ones(8, 64)))


def test_a_file_of_16_bit_weights_is_half_as_large(tmp_path):
    sizes = [
        save(
            tmp_path / "model",
            export(nn.Linear(256, 256).to(dtype), (torch.randn(2, 256, dtype=dtype),)),
        )
        .stat()
        .st_size
        for dtype in (torch.float32, torch.float16)
    ]
    assert sizes[1] < 0.55 * sizes[0]


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("weight", torch.arange(6).reshape(2, 3).to(dtype))

    def forward(self, x):
        return x + self.weight.to(torch.float32)


@pytest.mark.parametrize(
    "name",
    "float16 bfloat16 float64 float8_e4m3fn float8_e5m2 bool uint8 int8 int16 int32 int64".split(),
)
def test_every_dtype_can_be_saved_and_loaded(name, tmp_path):
    model = Cast(getattr(torch, name))
    loaded = one(save(tmp_path / "model", export(model, (torch.ones(2, 3),))))
    assert loaded.state_dict["weight"].dtype == getattr(torch, name)
    assert same(loaded.module()(torch.ones(2, 3)), model(torch.ones(2, 3)))


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(8, 3, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(3, 5).t(),
        torch.randn(2, 1).expand(2, 6),
        torch.randn(9)[::2],
        torch.empty(0, 3),
        torch.tensor(2.0),
        torch.randn(30)[7:11],
    ],
    ids=["channels_last", "transposed", "expanded", "strided", "empty", "scalar", "offset"],
)
def test_strides_are_kept(weight, tmp_path):
    model = nn.Module()
    model.register_buffer("weight", weight)
    model.forward = lambda x: model.weight * x
    loaded = one(save(tmp_path / "model", export(model, (ONE,))))
    assert loaded.state_dict["weight"].stride() == weight.stride()
    assert torch.equal(loaded.state_dict["weight"], weight)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


torch.utils._pytree._register_namedtuple(Pair, serialized_type_name="tests.graph.Pair")


class Nested(nn.Module):
    def forward(self, *, pair):
        return Pair(pair.left + 1, OrderedDict(b=[pair.right], a=None)), (pair.left,)


class Loop(nn.Module):
    def forward(self, x):
        return while_loop(
            lambda i, x: i < 5,
            lambda i, x: (i + 1, x * 1.5),
            (torch.zeros((), dtype=torch.int64), x),
        )


class Unbacked(nn.Module):
    def forward(self, x):
        count = x.max().item()
        torch._check(count >= 2)
        torch._check(count < 6)
        return torch.ones(count) * x.float().mean(), x.nonzero()


class Regions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layer(x)
        with torch.no_grad():
            return y.float() + self.layer(x), 2.5, None


class Division(nn.Module):
    def forward(self, x, y):
        return x.reshape(2, -1) + y[::2].reshape(2, -1), x.shape[0] / 2


AUTO = {0: Dim.AUTO}
CASES = {
    "nested": (Nested(), (), {"pair": Pair(torch.ones(2), torch.zeros(1))}, None),
    "while": (Loop(), (torch.randn(2, 4),), {}, None),
    "unbacked": (Unbacked(), (torch.tensor([3, 2]),), {}, None),
    "autocast": (Regions(), (torch.randn(2, 4),), {}, None),
    "derived": (Division(), (torch.randn(8, 4), torch.randn(16, 4)), {}, {"x": AUTO, "y": AUTO}),
}


@pytest.mark.parametrize("name", CASES)
def test_programs_of_many_kinds_can_be_saved_and_loaded(name, tmp_path):
    model, args, kwargs, sizes = CASES[name]
    exported = export(model, args, kwargs, dynamic_shapes=sizes)
    loaded = one(save(tmp_path / "model", exported))
    assert same(loaded.module()(*args, **kwargs), model(*args, **kwargs))
    assert loaded._guards_code == exported._guards_code


def test_guards_that_torch_inferred_are_checked_after_loading(tmp_path):
    model, args, _, sizes = CASES["derived"]
    loaded = one(save(tmp_path / "model", export(model, args, dynamic_shapes=sizes)))
    with pytest.raises(AssertionError, match="Guard failed"):
        loaded.module()(torch.randn(7, 4), torch.randn(14, 4))


def test_options_that_are_not_a_mapping_are_rejected(tmp_path):
    file = edited(
        save(tmp_path / "model", linear()),
        "contents.json",
        lambda contents: contents.update(options=[]),
    )
    with pytest.raises(CheckpointError, match="its options are not a mapping"):
        saved_model.load(file)


def test_example_inputs_are_not_in_the_file(tmp_path):
    secret = torch.full((1, 3), 1234.5)
    file = save(tmp_path / "model", export(nn.Linear(3, 2), (secret,)))
    assert secret.numpy().tobytes() not in file.read_bytes()
    [[zeros], keywords] = one(file).example_inputs
    assert torch.equal(zeros, torch.zeros(1, 3))
    assert keywords == {}


def test_serialize_is_called_as_torch_2_11_allows_and_gets_no_data_to_pickle(tmp_path, monkeypatch):
    whole, serialized = saved_model.serialize.serialize, []

    # The signature of torch 2.11, which pickles all that a program holds into memory.
    def older(exported_program, opset_version=None, pickle_protocol=2):
        serialized.append(whole(exported_program, opset_version, pickle_protocol))
        return serialized[-1]

    monkeypatch.setattr(saved_model.serialize, "serialize", older)
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256)).eval()
    model[0].scale = torch.randn(256, 256)
    model[0].register_forward_pre_hook(lambda module, args: (args[0] @ module.scale,))
    x = torch.randn(1024, 256)
    program = export(model, (x,))
    loaded = one(save(tmp_path / "model", program))
    assert torch.equal(loaded.module()(x), program.module()(x))
    [model] = serialized
    assert max(map(len, (model.state_dict, model.constants, model.example_inputs))) < 10_000


def test_a_model_can_be_loaded_to_another_device(file):
    loaded = one(file, device="meta")
    assert {
        tensor.device.type for tensor in (*loaded.state_dict.values(), *loaded.constants.values())
    } == {"meta"}
    assert {
        node.meta["val"].device.type
        for node in loaded.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
    } == {"meta"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_device_raises_with_the_available_ones(tmp_path):
    file = edited(
        save(tmp_path / "model", linear()),
        "contents.json",
        lambda contents: contents["tensors"][0].update(device="cuda:0"),
    )
    with pytest.raises(UnsupportedError, match=r"saved from 'cuda:0'.* Load it with device='cpu'"):
        saved_model.load(file)
    with pytest.raises(
        UnsupportedError, match=r"There is no device 'cuda' here. Choose one of: cpu, meta"
    ):
        saved_model.load(file, device="cuda")
    assert one(file, device="cpu").state_dict["weight"].device.type == "cpu"


@torch.library.custom_op("mezzo_tests_saved::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


class Custom(nn.Module):
    def forward(self, x):
        return twice(x)


def test_custom_ops_are_rejected_unless_named(tmp_path):
    file = save(tmp_path / "model", export(Custom(), (ONE,)))
    with pytest.raises(
        CheckpointError,
        match=r"custom op mezzo_tests_saved::twice. .* custom_ops=\('mezzo_tests_saved',\)",
    ):
        saved_model.load(file)
    assert one(file, custom_ops=("mezzo_tests_saved",)).module()(ONE) == 2


def test_a_custom_op_that_is_not_registered_is_named(tmp_path):
    def rename(graph):
        graph["graph_module"]["graph"]["nodes"][0]["target"] = (
            "torch.ops.mezzo_tests_saved.thrice.default"
        )

    file = edited(
        save(tmp_path / "model", export(Custom(), (ONE,))), "programs/0/graph.json", rename
    )
    with pytest.raises(
        CheckpointError,
        match=r"mezzo_tests_saved::thrice, which is not registered here. Import the module",
    ):
        saved_model.load(file, custom_ops=("mezzo_tests_saved",))


def test_a_program_that_could_not_be_loaded_is_not_saved(tmp_path):
    class Quoted(nn.Module):
        def forward(self, x, word):
            return x + len(word)

    exported = export(Quoted(), (ONE, "it's"))
    with pytest.raises(
        UnsupportedError, match=r'The program cannot be saved: a name has quotes.*"it\'s"'
    ):
        save(tmp_path / "model", exported)
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_torch_cannot_serialize_raises_with_one_line(tmp_path):
    class Unregistered(NamedTuple):
        value: torch.Tensor

    class Model(nn.Module):
        def forward(self, x):
            return Unregistered(x + 1)

    with pytest.raises(
        UnsupportedError,
        match=(
            r"The program cannot be saved: torch cannot serialize it."
            r" .*Unregistered.*register"
        ),
    ):
        save(tmp_path / "model", export(Model(), (ONE,)))


def test_a_string_among_the_outputs_is_not_saved(tmp_path):
    class Talking(nn.Module):
        def forward(self, x):
            return x + 1, "text"

    with pytest.raises(
        UnsupportedError, match="it has 'text' where only tensors and numbers may be"
    ):
        save(tmp_path / "model", export(Talking(), (ONE,)))


def test_a_sparse_tensor_is_not_saved(tmp_path):
    exported = linear()
    exported.constants["x"] = torch.eye(3).to_sparse()
    with pytest.raises(
        UnsupportedError,
        match=r"'x' is a Tensor of torch.float32 and torch.sparse_coo, which cannot be saved",
    ):
        save(tmp_path / "model", exported)


def test_a_failing_save_keeps_the_old_file(tmp_path):
    file = save(tmp_path / "model", linear())
    before = file.read_bytes()
    with pytest.raises(TypeError):
        saved_model.save(
            file,
            saved_model.SavedModel((saved_model.SavedProgram(linear(), {}),), {"bad": object()}),
        )
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"PK\x03\x04", bytes(100)], ids=["empty", "text", "start", "zeros"]
)
def test_a_file_of_another_format_is_rejected(content, tmp_path):
    (tmp_path / "model").write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=(
            r"'.*model' is not a converted model, or is damaged: .* Pass a file that"
            r" Converted.save wrote"
        ),
    ):
        saved_model.load(tmp_path / "model")


def test_a_missing_file_raises_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        saved_model.load(tmp_path / "model")


def test_files_of_torch_are_rejected(tmp_path):
    torch.save({"weight": ONE}, tmp_path / "weights.pt")
    torch.export.save(linear(), tmp_path / "model.pt2")
    for name in ("weights.pt", "model.pt2"):
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            saved_model.load(tmp_path / name)


def test_a_newer_format_is_rejected(tmp_path):
    file = edited(
        save(tmp_path / "model", linear()),
        "contents.json",
        lambda contents: contents.update(version=2),
    )
    with pytest.raises(
        CheckpointError, match="version 2, and this mezzo reads up to 1; load it with a newer mezzo"
    ):
        saved_model.load(file)


def test_a_graph_of_an_incompatible_torch_is_rejected_with_its_version(tmp_path):
    file = save(tmp_path / "model", linear())
    edited(file, "contents.json", lambda contents: contents.update(torch="9.9.9"))
    edited(file, "programs/0/graph.json", lambda graph: graph["schema_version"].update(major=99))
    with pytest.raises(
        CheckpointError,
        match=r"written by torch 9.9.9, which this torch .* does not read; convert the model again",
    ):
        saved_model.load(file)


def test_another_byte_order_is_rejected(tmp_path):
    file = edited(
        save(tmp_path / "model", linear()),
        "contents.json",
        lambda contents: contents.update(byteorder="big"),
    )
    with pytest.raises(CheckpointError, match="big-endian"):
        saved_model.load(file)


def test_a_weight_that_does_not_fit_the_graph_is_rejected(tmp_path):
    def swap(contents):
        state = contents["programs"][0]["state"]
        state["weight"]["tensor"], state["bias"]["tensor"] = (
            state["bias"]["tensor"],
            state["weight"]["tensor"],
        )

    with pytest.raises(
        CheckpointError,
        match=r"tensor 'weight' is torch.float32 \(2,\), and the graph has torch.float32 \(2, 3\)",
    ):
        saved_model.load(edited(save(tmp_path / "model", linear()), "contents.json", swap))


def test_a_file_without_a_part_is_rejected(tmp_path):
    file = save(tmp_path / "model", linear())
    write_parts(file, {name: content for name, content in parts(file).items() if name != "tensors"})
    with pytest.raises(CheckpointError, match="'tensors' is unexpected or missing"):
        saved_model.load(file)


def loads_equal_or_is_refused(path, expected):
    try:
        loaded = one(path)
    except CheckpointError:
        return False
    assert same(loaded.module()(torch.ones(4, 3)), expected)
    return True


def test_a_flipped_byte_is_rejected_or_harmless(tmp_path):
    file = save(tmp_path / "model", linear())
    content, expected = file.read_bytes(), linear().module()(torch.ones(4, 3))
    chosen = random.Random(0)
    harmless = 0
    for place in chosen.sample(range(len(content)), 150):
        damaged = bytearray(content)
        damaged[place] ^= chosen.randrange(1, 256)
        (tmp_path / "damaged").write_bytes(damaged)
        harmless += loads_equal_or_is_refused(tmp_path / "damaged", expected)
    # Only dates, attributes and little else of a zip are not checked.
    assert harmless < 75


def test_a_truncated_file_is_rejected(tmp_path):
    content = save(tmp_path / "model", linear()).read_bytes()
    for end in random.Random(0).sample(range(len(content)), 60):
        (tmp_path / "damaged").write_bytes(content[:end])
        with pytest.raises(CheckpointError):
            saved_model.load(tmp_path / "damaged")


JUNK = [
    None,
    True,
    -1,
    2**70,
    1.5,
    "",
    "x",
    "__class__",
    "\ud800",
    [],
    {},
    [[]],
    {"as_int": 1},
    {"as_none": True},
]


def places(value, before=()):
    """Iterate over the paths in nested values."""
    for key in (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield (*before, key)
        yield from places(value[key], (*before, key))


@pytest.mark.parametrize("name", ["contents.json", "programs/0/graph.json"])
def test_any_json_in_a_part_loads_or_is_rejected(name, program, tmp_path):
    contents, chosen = parts(save(tmp_path / "model", program)), random.Random(0)
    for _ in range(60):
        value = json.loads(contents[name])
        *path, last = chosen.choice(list(places(value)))
        inner = value
        for key in path:
            inner = inner[key]
        inner[last] = chosen.choice(JUNK)
        write_parts(tmp_path / "model", {**contents, name: json.dumps(value)})
        with contextlib.suppress(CheckpointError, UnsupportedError):
            saved_model.load(tmp_path / "model")
