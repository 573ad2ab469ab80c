import copy
import pickle
from io import BytesIO

import pytest
import torch
from support.graphs import HALF, Calls, tensors
from support.saved_programs import edited
from support.zoo import ZOO, LSTMTagger
from torch import nn

import mezzo
from mezzo.conversion import program_runner
from mezzo.conversion.plan import GraphPlan
from mezzo.conversion.program_runner import ProgramRunner

X = torch.randn(2, 4)


def _converted(**options):
    return mezzo.convert(
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), (X,), dtype=HALF, **options
    )


def test_calling_records_no_gradients():
    assert not _converted()(X).requires_grad


def test_inputs_of_other_sizes_raise():
    with pytest.raises(
        mezzo.ConversionError, match=r"No program was converted for these inputs: float32\[3, 4\]"
    ):
        _converted()(torch.randn(3, 4))
    with pytest.raises(mezzo.ConversionError, match="nothing"):
        _converted()()


def test_a_loaded_model_has_equal_outputs_plan_and_casts(tmp_path):
    converted = _converted()
    converted.save(tmp_path / "model.pt2")
    loaded = mezzo.Converted.load(tmp_path / "model.pt2")
    assert torch.equal(loaded(X), converted(X))
    assert loaded.plan == converted.plan
    assert loaded.casts == converted.casts
    assert loaded._converted.options == converted._converted.options


def test_several_programs_go_into_one_file(tmp_path):
    model = nn.Linear(4, 4)
    converted = mezzo.convert(model, [(X,), (X[:1],)], dtype=HALF)
    converted.save(tmp_path / "model.pt2")
    loaded = mezzo.Converted.load(tmp_path / "model.pt2")
    assert torch.equal(loaded(X), converted(X))
    assert torch.equal(loaded(X[:1]), converted(X[:1]))


def test_a_fresh_conversion_is_compared_with_float32_and_a_loaded_one_needs_the_model(tmp_path):
    model = nn.Linear(4, 4)
    converted = mezzo.convert(model, (X,), dtype=HALF)
    assert str(converted.compare(X))
    converted.save(tmp_path / "model.pt2")
    loaded = mezzo.Converted.load(tmp_path / "model.pt2")
    with pytest.raises(mezzo.ConversionError, match="against=model"):
        loaded.compare(X)
    assert str(loaded.compare(X, against=model))


def test_to_moves_a_copy_to_another_device():
    converted = _converted()
    moved = converted.to("meta")
    assert {
        tensor.device.type for tensor in moved._converted.programs[0].exported.state_dict.values()
    } == {"meta"}
    assert moved(X.to("meta")).device.type == "meta"
    assert converted(X).device.type == "cpu"


def test_tensors_created_in_the_graph_move_too():
    class Placed(nn.Module):
        def forward(self, x):
            return x + torch.arange(4) + torch.zeros(4, device=x.device)

    moved = mezzo.convert(nn.Sequential(nn.Linear(4, 4), Placed()), (X,), dtype=HALF).to("meta")
    assert moved(X.to("meta")).device.type == "meta"


def test_a_converted_model_compiles_as_one_graph():
    converted = _converted()
    for target in (converted, converted.module):
        compiled = torch.compile(target, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), converted(X))


def test_repr_shows_programs_and_casts():
    assert repr(_converted()).startswith("Converted(1 program, ")


def test_branches_can_be_saved_and_loaded(tmp_path):
    animal = ZOO["branching"]()
    converted = mezzo.convert(animal.model, animal.args, dtype=HALF)
    converted.save(tmp_path / "model.pt2")
    loaded = mezzo.Converted.load(tmp_path / "model.pt2")
    assert all(map(torch.equal, tensors(loaded(*animal.args)), tensors(converted(*animal.args))))


def test_programs_for_several_sizes_become_an_onnx_file_each(tmp_path):
    pytest.importorskip("onnx")
    converted = mezzo.convert(
        nn.Linear(4, 2), [(torch.ones(1, 4),), (torch.ones(3, 4),)], dtype="float16"
    )
    assert [path.name for path in converted.export_onnx(tmp_path / "model.onnx")] == [
        "model.0.onnx",
        "model.1.onnx",
    ]
    alone = mezzo.convert(nn.Linear(4, 2), (torch.ones(1, 4),), dtype="float16")
    assert alone.export_onnx(tmp_path / "model.onnx") == (tmp_path / "model.onnx",)


def test_an_invalid_plan_raises_with_the_name_of_the_file(tmp_path, monkeypatch):
    path = tmp_path / "model.mezzo"
    monkeypatch.setattr(GraphPlan, "to_dict", lambda _: {"rows": 7})
    mezzo.convert(nn.Linear(4, 2), (torch.ones(1, 4),), dtype="float16").save(path)
    with pytest.raises(
        mezzo.CheckpointError, match=r"model\.mezzo' cannot be loaded: This is not the plan"
    ):
        mezzo.Converted.load(path)


def test_a_recurrent_layer_takes_dynamic_batch_sizes(tmp_path):
    model = LSTMTagger().eval()
    converted = mezzo.convert(
        model,
        (torch.randn(2, 3, 64),),
        dtype=HALF,
        dynamic_shapes=({0: torch.export.Dim("batch", max=9)},),
    )
    converted.save(tmp_path / "model")
    for size in (1, 5):
        x = torch.randn(size, 3, 64)
        assert all(map(torch.equal, converted(x), mezzo.Converted.load(tmp_path / "model")(x)))


def test_guards_on_sizes_are_checked_after_loading_and_moving(tmp_path):
    class Pairs(nn.Linear):
        def forward(self, x):
            return (
                super().forward(x).reshape(-1, 2, 4).sum(1)
                if x.shape[0] % 2 == 0
                else super().forward(x)
            )

    converted = mezzo.convert(
        Pairs(4, 4),
        (torch.ones(6, 4),),
        dtype=HALF,
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
    )
    converted.save(tmp_path / "model")
    loaded = mezzo.Converted.load(tmp_path / "model")
    for one in (converted, loaded, converted.to("cpu"), loaded.to("cpu")):
        assert one(torch.ones(8, 4)).shape == (4, 4)
        with pytest.raises(mezzo.ConversionError, match="not what the program was converted for"):
            one(torch.ones(7, 4))


@pytest.mark.parametrize(
    "write", [pickle.dumps, lambda one: torch.save(one, BytesIO())], ids=["pickle", "torch.save"]
)
def test_pickling_raises_and_recommends_save(write):
    converted = mezzo.convert(nn.Linear(4, 2), (torch.ones(1, 4),), dtype="float16")
    with pytest.raises(
        mezzo.UnsupportedError,
        match=(
            r"cannot be pickled. Write it with converted.save\(path\), and read it with"
            r" mezzo.Converted.load"
        ),
    ):
        write(converted)


def test_copies_compute_the_same_and_a_deep_copy_has_its_own_weights():
    converted, x = (
        mezzo.convert(nn.Linear(4, 2), (torch.ones(1, 4),), dtype="float16"),
        torch.randn(1, 4),
    )
    shallow, deep = copy.copy(converted), copy.deepcopy(converted)
    assert torch.equal(shallow(x), converted(x))
    assert torch.equal(deep(x), converted(x))
    weights = [
        one._converted.programs[0].exported.state_dict["weight"]
        for one in (converted, shallow, deep)
    ]
    assert weights[0] is weights[1]
    assert weights[0].data_ptr() != weights[2].data_ptr()
    assert deep.compare(x).outputs[0].relative == converted.compare(x).outputs[0].relative


def test_an_unexpected_error_while_loading_names_the_file(tmp_path):
    """The counts of the plan are infinite."""
    path = tmp_path / "model.mezzo"
    mezzo.convert(nn.Linear(4, 2), (torch.ones(1, 4),), dtype="float16").save(path)
    edited(
        path,
        "programs/0/plan.json",
        lambda plan: plan["casts"]["before"].update(count=float("inf")),
    )
    with pytest.raises(
        mezzo.CheckpointError,
        match=(
            r"model\.mezzo' is not a converted model, or is damaged: cannot convert float infinity"
        ),
    ):
        mezzo.Converted.load(path)


def test_a_program_that_calls_an_op_outside_the_list_is_not_saved(tmp_path):
    class Normed(nn.Module):
        def forward(self, x):
            return torch.ops.aten.native_layer_norm.default(x, [4], None, None, 1e-5)[0]

    converted = mezzo.convert(Normed(), (torch.ones(1, 4),), dtype="bfloat16")
    with pytest.raises(
        mezzo.UnsupportedError,
        match=(
            r"The program cannot be saved: it calls aten::native_layer_norm, which is not on the"
            r" list .*custom op"
        ),
    ):
        converted.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_running_out_of_memory_is_not_reported_as_a_damaged_file(tmp_path, monkeypatch):
    path = tmp_path / "model.mezzo"
    mezzo.convert(nn.Linear(4, 2), (torch.ones(1, 4),), dtype="float16").save(path)
    monkeypatch.setattr("mezzo.conversion.archive._size", lambda _: bytearray(2**62))
    with pytest.raises(MemoryError):
        mezzo.Converted.load(path)


# Direct calls of the graph


BATCH = torch.randn(3, 4)


class Scaled(nn.Linear):
    def forward(self, x, factor):
        return super().forward(x) * factor


def _runner(model, args, kwargs=None, **options):
    converted = mezzo.convert(model, args, kwargs, dtype=HALF, **options)
    return converted, converted._runners[0]


def _refuse(*_, **__):
    pytest.fail("the module was called")


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("name", ["mobilenet", "bert", "lstm", "branching"])
def test_a_direct_call_of_the_graph_equals_the_module(name, monkeypatch):
    animal = ZOO[name]()
    converted, runner = _runner(animal.model, animal.args)
    with torch.no_grad():
        expected = runner.module(*animal.args)
    monkeypatch.setattr(runner.module, "forward", _refuse)
    assert all(map(torch.equal, tensors(converted(*animal.args)), tensors(expected)))


def test_a_mapping_may_have_its_entries_in_any_order():
    model = Calls(lambda self, x: self.linear(x["a"]) - x["b"][0], linear=nn.Linear(4, 4))
    inputs = {"a": BATCH, "b": [torch.ones(4)]}
    converted, _ = _runner(model, (inputs,))
    assert torch.equal(converted({"b": [torch.ones(4)], "a": BATCH}), converted(inputs))
    assert converted({"b": [torch.ones(4).half()], "a": BATCH.half()}).dtype is torch.float32
    with pytest.raises(mezzo.ConversionError, match="No program"):
        converted({"c": [torch.ones(4)], "a": torch.ones(4)})


def test_a_positional_input_may_be_passed_by_keyword():
    model = nn.Linear(4, 2)
    converted, _ = _runner(model, (BATCH,))
    assert torch.equal(converted(input=BATCH), converted(BATCH))


def test_mutated_buffers_are_those_of_the_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    converted, runner = _runner(model, (BATCH,))
    converted(BATCH)
    converted(BATCH)
    assert dict(runner.module.named_buffers())["1.num_batches_tracked"] == 2


def test_guards_are_checked():
    converted, _ = _runner(
        Scaled(4, 4),
        (BATCH, 2),
        dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=8)}, None),
    )
    assert converted(BATCH[:2], 2).shape == (2, 4)
    for invalid in ((BATCH, 3), (torch.randn(9, 4), 2)):
        with pytest.raises(mezzo.ConversionError, match="not what the program was converted for"):
            converted(*invalid)


def test_no_weight_is_looked_up_while_it_runs(monkeypatch):
    animal = ZOO["mlp"]()
    converted, runner = _runner(animal.model, animal.args)
    converted(*animal.args)
    monkeypatch.setattr(nn.Module, "__getattr__", _refuse)
    converted(*animal.args)
    assert isinstance(runner, ProgramRunner)


# Recurrent weights in one buffer for cuDNN


LAYERS = {
    "lstm": lambda: nn.LSTM(6, 4, 2, batch_first=True),
    "lstm-projected": lambda: nn.LSTM(6, 4, 2, proj_size=3, bidirectional=True),
    "gru": lambda: nn.GRU(6, 4, 1, bias=False, bidirectional=True),
    "rnn-tanh": lambda: nn.RNN(6, 4, 3),
    "rnn-relu": lambda: nn.RNN(6, 4, 1, nonlinearity="relu"),
}


@pytest.fixture
def flattened(monkeypatch):
    """Record the calls that flatten weights, as if cuDNN were available."""
    found = []
    monkeypatch.setattr(program_runner, "_can_flatten", lambda weights: True)
    monkeypatch.setattr(
        program_runner, "flatten_cudnn_weights", lambda *arguments: found.append(arguments)
    )
    monkeypatch.setattr(torch.backends.cudnn.rnn, "get_cudnn_mode", lambda mode: mode)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_the_cudnn_layout_is_that_of_torchs_own_module(name, flattened):
    layer = LAYERS[name]()
    # A GRU on a CPU reads its weights in float32 unless it is listed.
    half = ["gru"] if isinstance(layer, nn.GRU) else ()
    converted = mezzo.convert(
        Calls(lambda self, x: self.layer(x)[0], layer=layer),
        (torch.randn(3, 5, 6),),
        dtype="bfloat16",
        half=half,
    )
    [(weights, each, inputs, mode, hidden, projection, layers, batch_first, bidirectional)] = (
        flattened
    )
    assert [one.shape for one in weights] == [one.shape for one in layer._flat_weights]
    assert {id(one) for one in weights} <= {
        id(one) for one in converted._converted.programs[0].exported.state_dict.values()
    }
    assert (each, inputs, hidden, projection) == (
        2 * (1 + layer.bias) + (layer.proj_size > 0),
        6,
        4,
        layer.proj_size,
    )
    assert (mode, layers, batch_first, bidirectional) == (
        layer.mode,
        layer.num_layers,
        layer.batch_first,
        layer.bidirectional,
    )


def test_weights_are_flattened_again_after_moving_and_loading(flattened, tmp_path):
    converted = mezzo.convert(
        Calls(lambda self, x: self.layer(x)[0], layer=LAYERS["lstm"]()),
        (torch.randn(3, 5, 6),),
        dtype="bfloat16",
    )
    converted.to("cpu")
    converted.save(tmp_path / "model")
    mezzo.Converted.load(tmp_path / "model")
    assert len(flattened) == 3


def test_no_weights_are_flattened_on_a_cpu(monkeypatch):
    monkeypatch.setattr(
        program_runner,
        "flatten_cudnn_weights",
        lambda *arguments: pytest.fail("there is no cuDNN here"),
    )
    mezzo.convert(
        Calls(lambda self, x: self.layer(x)[0], layer=LAYERS["lstm"]()),
        (torch.randn(3, 5, 6),),
        dtype="bfloat16",
    )
