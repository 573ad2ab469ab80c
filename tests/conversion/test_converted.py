import copy
import pickle
from io import BytesIO

import pytest
import torch
from support.graphs import HALF, tensors
from support.saved_programs import edited
from support.zoo import ZOO, LSTMTagger
from torch import nn

import mezzo
from mezzo.conversion.plan import GraphPlan

X = torch.randn(2, 4)


def _converted(**words):
    return mezzo.convert(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), (X,), dtype=HALF, **words)


def test_it_is_called_without_gradients():
    assert not _converted()(X).requires_grad


def test_inputs_of_other_sizes_are_refused():
    with pytest.raises(
        mezzo.ConversionError, match=r"No program was converted for these inputs: float32\[3, 4\]"
    ):
        _converted()(torch.randn(3, 4))
    with pytest.raises(mezzo.ConversionError, match="nothing"):
        _converted()()


def test_a_file_gives_equal_outputs_plan_and_casts(tmp_path):
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


def test_moved_to_another_device_everything_moves_and_this_one_stays():
    converted = _converted()
    moved = converted.to("meta")
    assert {
        tensor.device.type for tensor in moved._converted.programs[0].exported.state_dict.values()
    } == {"meta"}
    assert moved(X.to("meta")).device.type == "meta"
    assert converted(X).device.type == "cpu"


def test_what_a_graph_makes_itself_is_made_on_the_other_device():
    class Placed(nn.Module):
        def forward(self, x):
            return x + torch.arange(4) + torch.zeros(4, device=x.device)

    moved = mezzo.convert(nn.Sequential(nn.Linear(4, 4), Placed()), (X,), dtype=HALF).to("meta")
    assert moved(X.to("meta")).device.type == "meta"


def test_it_compiles_whole():
    converted = _converted()
    for target in (converted, converted.module):
        compiled = torch.compile(target, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), converted(X))


def test_it_prints_its_programs_and_casts():
    assert repr(_converted()).startswith("Converted(1 program, ")


def test_branches_survive_a_file(tmp_path):
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


def test_a_plan_that_is_none_is_told_with_its_file(tmp_path, monkeypatch):
    path = tmp_path / "model.mezzo"
    monkeypatch.setattr(GraphPlan, "to_dict", lambda _: {"rows": 7})
    mezzo.convert(nn.Linear(4, 2), (torch.ones(1, 4),), dtype="float16").save(path)
    with pytest.raises(
        mezzo.CheckpointError, match=r"model\.mezzo' cannot be loaded: This is not the plan"
    ):
        mezzo.Converted.load(path)


def test_a_recurrent_layer_takes_batches_of_every_size(tmp_path):
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


def test_what_a_program_asks_of_sizes_is_asked_after_a_file_and_a_move(tmp_path):
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
def test_a_pickle_is_refused_with_the_way_to_save(write):
    converted = mezzo.convert(nn.Linear(4, 2), (torch.ones(1, 4),), dtype="float16")
    with pytest.raises(
        mezzo.UnsupportedError,
        match=(
            r"cannot be pickled. Write it with converted.save\(path\), and read it with"
            r" mezzo.Converted.load"
        ),
    ):
        write(converted)


def test_copies_run_alike_and_a_deep_one_has_weights_of_its_own():
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


def test_an_error_while_a_loaded_program_is_made_ready_names_the_file(tmp_path):
    """The plan's counts are numbers that no integer holds."""
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
            r"model\.mezzo' is no converted program, or is damaged: cannot convert float infinity"
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


def test_memory_that_runs_out_is_not_taken_for_a_damaged_file(tmp_path, monkeypatch):
    path = tmp_path / "model.mezzo"
    mezzo.convert(nn.Linear(4, 2), (torch.ones(1, 4),), dtype="float16").save(path)
    monkeypatch.setattr("mezzo.conversion.archive._size", lambda _: bytearray(2**62))
    with pytest.raises(MemoryError):
        mezzo.Converted.load(path)
