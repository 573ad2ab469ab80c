"""ONNX files have the dtypes of the program, and compute the same in onnxruntime."""

import logging
import sys
import warnings
from collections import Counter

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from support.saved_programs import export
from torch import nn
from torch.utils import _pytree as pytree

import mezzo
from mezzo import UnsupportedError
from mezzo.conversion import onnx_export

IGNORE_BFLOAT16 = "ignore:The program computes in bfloat16:UserWarning"
pytestmark = [
    pytest.mark.usefixtures("one_registry"),
    pytest.mark.filterwarnings(IGNORE_BFLOAT16),
]

HALF = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}
FLOATS = {onnx.TensorProto.FLOAT, *HALF.values()}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        batch, length, width = x.shape
        query, key, value = (
            self.project(self.norm(x))
            .reshape(batch, length, 3, 2, 8)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.cond(
            x.sum() > 0, lambda x: self.layer(x).relu(), lambda x: self.layer(x).sin(), (x,)
        )


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def tied():
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11, bias=False))
    model[1].weight = model[0].weight
    return model


MODELS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), nn.Softmax(-1)),
        (2, 8),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        ),
        (2, 3, 8, 8),
    ),
    "attention": (Attention, (2, 5, 16)),
    "lstm": (Recurrent, (2, 5, 8)),
    "branch": (Branch, (2, 8)),
    "tied": (tied, None),
}


def converted(name, dtype):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randint(0, 11, (2, 3)) if shape is None else torch.randn(shape)
    for one in model.modules():
        if isinstance(one, nn.BatchNorm2d):
            one.running_mean.normal_()
    return mezzo.convert(model, (x,), dtype=dtype), x


def written(program, path):
    program.export_onnx(path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return model


def assert_runs_like(program, path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), program(x), rtol=5e-3, atol=5e-3)


def graphs(graph):
    """Iterate over a graph and its subgraphs."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs(attribute.g)


def float_casts(model):
    """Count the casts between float dtypes of values that are not constants, by target dtype."""
    inferred = onnx.shape_inference.infer_shapes(model)
    kinds, casts = {}, Counter()
    for graph in graphs(inferred.graph):
        kinds |= {
            one.name: one.type.tensor_type.elem_type
            for one in (*graph.input, *graph.value_info, *graph.output)
        }
        casts.update(
            node.attribute[0].i
            for node in graph.node
            if node.op_type == "Cast" and {kinds.get(node.input[0]), node.attribute[0].i} <= FLOATS
        )
    return casts


def program_casts(exported):
    """Count the casts of a program, and the promotions of additions, which ONNX writes as casts."""
    kinds = {
        torch.float32: onnx.TensorProto.FLOAT,
        torch.float16: HALF["float16"],
        torch.bfloat16: HALF["bfloat16"],
    }
    casts = Counter()
    for one in exported.graph_module.modules():
        for node in one.graph.nodes if isinstance(one, torch.fx.GraphModule) else ():
            if node.target in {torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype}:
                casts[kinds[node.meta["val"].dtype]] += 1
            elif node.target is torch.ops.aten.add.Tensor:
                casts[kinds[node.meta["val"].dtype]] += sum(
                    other.meta["val"].dtype != node.meta["val"].dtype
                    for other in node.all_input_nodes
                )
    return +casts


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in MODELS for dtype in HALF])
def test_onnx_has_the_dtypes_of_the_program_and_float16_computes_the_same(name, dtype, tmp_path):
    program, x = converted(name, dtype)
    exported = program._converted.programs[0].exported
    model = written(program, tmp_path / "model.onnx")
    stored = {one.name: one.data_type for one in model.graph.initializer}
    matrices = [parameter for parameter, tensor in exported.state_dict.items() if tensor.ndim > 1]
    assert {stored[one] for one in matrices if one in stored} == {HALF[dtype]}
    assert float_casts(model) == program_casts(exported)
    assert float_casts(model)
    if dtype == "float16":  # onnxruntime computes nothing in bfloat16 on a CPU
        assert_runs_like(program, tmp_path / "model.onnx", x)


def test_a_tied_weight_is_written_once(tmp_path):
    program, _ = converted("tied", "float16")
    model = written(program, tmp_path / "model.onnx")
    assert [tuple(one.dims) for one in model.graph.initializer].count((11, 8)) == 1
    assert not any(tuple(one.dims) == (8, 11) for one in model.graph.initializer)


def test_dynamic_sizes_stay_dynamic(tmp_path):
    model = Attention().eval()
    sizes = {
        "x": {
            0: torch.export.Dim("batch", min=1, max=64),
            1: torch.export.Dim("length", min=2, max=64),
        }
    }
    program = mezzo.convert(model, (torch.randn(2, 5, 16),), dynamic_shapes=sizes, dtype="float16")
    program.export_onnx(tmp_path / "model.onnx")
    for x in (torch.randn(1, 3, 16), torch.randn(7, 9, 16)):
        assert_runs_like(program, tmp_path / "model.onnx", x)


def test_shapes_are_folded_and_layers_are_not_fused(tmp_path):
    program, _ = converted("convolutions", "float16")
    assert Counter(
        node.op_type for node in written(program, tmp_path / "model.onnx").graph.node
    ) == Counter(
        [
            "Cast",
            "Conv",
            "BatchNormalization",
            "Relu",
            "MaxPool",
            "ReduceMean",
            "Reshape",
            "Gemm",
            "Cast",
        ]
    )


def test_splits_of_bfloat16_are_written_as_split(tmp_path):
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 12)

        def forward(self, x):
            left, right = self.layer(x).split(6, dim=-1)
            return left * right

    model = written(
        mezzo.convert(Split(), (torch.randn(2, 8),), dtype="bfloat16"), tmp_path / "model.onnx"
    )
    assert "Split" in {node.op_type for node in model.graph.node}


def test_float32_weights_stay_float32(tmp_path):
    program = mezzo.convert(
        nn.Linear(8, 8), (torch.randn(2, 8),), dtype="float16", cast_params=False
    )
    model = written(program, tmp_path / "model.onnx")
    assert {one.data_type for one in model.graph.initializer if one.name in {"weight", "bias"}} == {
        onnx.TensorProto.FLOAT
    }


def test_a_loaded_program_is_exported_to_the_same_graph(tmp_path):
    program, _ = converted("mlp", "float16")
    program.save(tmp_path / "model.mezzo")
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    program.export_onnx(first)
    mezzo.Converted.load(tmp_path / "model.mezzo").export_onnx(second)
    nodes = [
        [(node.op_type, list(node.input), list(node.output)) for node in onnx.load(path).graph.node]
        for path in (first, second)
    ]
    assert nodes[0] == nodes[1]


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x, flag=True, *, extra):
        y = x + extra["k"]
        return {
            "x": x,
            "y": (y, [y]),
            "weight": self.weight,
            "none": None,
            "size": x.shape[0],
            "add": y * 2,
        }


def test_inputs_and_outputs_are_named_by_their_paths_and_none_is_left_out(tmp_path):
    exported = export(
        Nested(),
        (torch.randn(2), True),
        {"extra": {"k": torch.ones(1)}},
        dynamic_shapes={"x": {0: torch.export.Dim.AUTO}, "flag": None, "extra": {"k": None}},
    )
    onnx_export.export(exported, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "model.onnx", providers=["CPUExecutionProvider"]
    )
    assert [one.name for one in session.get_inputs()] == ["x", "extra_k"]
    assert [one.name for one in session.get_outputs()] == [
        "x_out",
        "y_0",
        "y_1_0",
        "weight_out",
        "size",
        "add_out",
    ]
    x, extra = torch.tensor([1.0, 2.0, 3.0]), {"k": torch.tensor([0.5])}
    expected = [one for one in pytree.tree_leaves(Nested()(x, extra=extra)) if one is not None]
    found = session.run(None, {"x": x.numpy(), "extra_k": extra["k"].numpy()})
    for left, right in zip(found, expected, strict=True):
        assert (
            torch.equal(torch.from_numpy(left), torch.as_tensor(right).detach())
            if left.ndim
            else left == right
        )


def test_a_single_output_is_named_output():
    assert onnx_export.output_names(export(nn.Linear(2, 2), (torch.ones(1, 2),))) == ["output"]
    assert onnx_export.output_names(export(nn.LSTM(2, 2), (torch.ones(1, 1, 2),))) == [
        "output_0",
        "output_1_0",
        "output_1_1",
    ]


class Output(dict):
    """Outputs of a model, registered as diffusers registers them: without names."""


pytree.register_pytree_node(
    Output,
    lambda one: (list(one.values()), list(one)),
    lambda values, keys: Output(zip(keys, values, strict=True)),
    serialized_type_name="tests.onnx_export.Output",
)


def test_outputs_of_a_mapping_that_is_registered_without_names_have_its_keys(tmp_path):
    class Denoiser(nn.Module):
        def forward(self, x):
            return Output(sample=x @ x)

    converted = mezzo.convert(Denoiser(), (torch.randn(4, 4),), dtype="float16")
    converted.export_onnx(tmp_path / "model.onnx")
    assert [one.name for one in onnx.load(tmp_path / "model.onnx").graph.output] == ["sample"]
    assert str(converted.compare(torch.randn(4, 4))).splitlines()[1].startswith("sample ")


def test_a_constant_number_among_the_outputs_raises(tmp_path):
    class Number(nn.Module):
        def forward(self, x):
            return {"y": x + 1, "answer": 42}

    with pytest.raises(
        UnsupportedError,
        match="The model returns 42 as 'answer', and an ONNX graph returns tensors",
    ):
        onnx_export.export(export(Number(), (torch.ones(1),)), tmp_path / "model.onnx")


def test_an_op_without_onnx_counterpart_raises_and_nothing_is_written(tmp_path):
    class Airy(nn.Module):
        def forward(self, x):
            return torch.special.airy_ai(x)

    with pytest.raises(
        UnsupportedError,
        match=(
            r"cannot be written as ONNX: No ONNX function found for .*special_airy_ai.* Save it"
            r" with Converted.save"
        ),
    ):
        onnx_export.export(export(Airy(), (torch.ones(1),)), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_mutated_buffers_raise_a_warning(tmp_path):
    exported = export(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (torch.randn(3, 4),))
    with pytest.warns(
        UserWarning,
        match=(
            r"The program mutates 1.num_batches_tracked, 1.running_mean, 1.running_var when it"
            r" runs, and an ONNX graph has no state"
        ),
    ):
        onnx_export.export(exported, tmp_path / "model.onnx")


def test_a_graph_that_onnx_rejects_is_not_written(tmp_path):
    program, _ = converted("convolutions", "bfloat16")
    with pytest.raises(
        UnsupportedError, match=r"ONNX itself rejects: .*Conv.*bfloat16.* Try another opset="
    ):
        onnx_export.export(
            program._converted.programs[0].exported, tmp_path / "model.onnx", opset=20
        )
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_changed_its_dtype_raises():
    exported = export(nn.Linear(2, 2).bfloat16(), (torch.ones(1, 2).bfloat16(),))
    program = onnx_export._translated(exported, None)
    onnx_export._check_weights(program.model, exported)
    exported.state_dict["weight"] = exported.state_dict["weight"].half()
    with pytest.raises(
        UnsupportedError,
        match=r"the weight 'weight' as BFLOAT16, and in the program it is torch.float16",
    ):
        onnx_export._check_weights(program.model, exported)


def test_large_weights_are_written_to_a_second_file(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "_LARGEST", 0)
    program, x = converted("mlp", "float16")
    program.export_onnx(tmp_path / "model.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert_runs_like(program, tmp_path / "model.onnx", x)


def test_a_rejected_graph_with_large_weights_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "_LARGEST", 0)
    program, _ = converted("convolutions", "bfloat16")
    with pytest.raises(UnsupportedError, match="ONNX itself rejects"):
        onnx_export.export(
            program._converted.programs[0].exported, tmp_path / "model.onnx", opset=20
        )
    assert list(tmp_path.iterdir()) == []


def test_several_programs_become_one_file_each(tmp_path):
    programs = [export(nn.Linear(2, 2), (torch.ones(count, 2),)) for count in (1, 3)]
    paths = onnx_export.export_each(programs, tmp_path / "model.onnx")
    assert [path.name for path in paths] == ["model.0.onnx", "model.1.onnx"]
    assert [
        onnx.load(path).graph.input[0].type.tensor_type.shape.dim[0].dim_value for path in paths
    ] == [1, 3]
    assert onnx_export.export_each(programs[:1], tmp_path / "one.onnx") == (tmp_path / "one.onnx",)


def test_exporting_prints_and_logs_nothing(tmp_path, capfd, caplog):
    program, _ = converted("mlp", "float16")
    with caplog.at_level(logging.WARNING):
        program.export_onnx(tmp_path / "model.onnx")
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_missing_package_raises_with_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    program, _ = converted("mlp", "float16")
    with pytest.raises(
        UnsupportedError,
        match=(
            r"needs a package that is not installed: onnxscript. Install it with: pip install"
            r" 'mezzo\[onnx\]'"
        ),
    ):
        program.export_onnx(tmp_path / "model.onnx")


# Translations of norms


@pytest.mark.thinned(2)
@pytest.mark.filterwarnings("ignore:The program mutates")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm2d(3), (4, 3, 5, 5)),
        (nn.BatchNorm1d(3, affine=False), (6, 3)),
        (nn.BatchNorm1d(3, track_running_stats=False), (4, 3, 5)),
    ],
    ids=["images", "plain", "untracked"],
)
def test_batch_norm_in_training_uses_the_statistics_of_the_batch(norm, shape, dtype, tmp_path):
    torch.manual_seed(0)
    x = (3 + 2 * torch.randn(shape)).to(dtype)
    onnx_export.export(export(norm.train(), (x,)), tmp_path / "model.onnx")
    [found] = onnxruntime.InferenceSession(
        tmp_path / "model.onnx", providers=["CPUExecutionProvider"]
    ).run(None, {"input": x.numpy()})
    expected = norm(x).detach()
    assert expected.abs().mean() > 0.1
    torch.testing.assert_close(torch.from_numpy(found), expected)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "norm",
    [
        nn.InstanceNorm2d(3, affine=True),
        nn.InstanceNorm2d(3),
        nn.InstanceNorm2d(3, track_running_stats=True).eval(),
    ],
    ids=str,
)
def test_instance_norm_takes_float32_parameters_with_16_bit_inputs(norm, dtype, tmp_path):
    torch.manual_seed(0)
    x = 3 + 2 * torch.randn(4, 3, 5, 5)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), norm)
    converted = mezzo.convert(
        model, (x,), dtype=torch.float16, exclude=() if dtype is torch.float16 else ("0", "1")
    )
    converted.export_onnx(tmp_path / "model.onnx")
    [found] = onnxruntime.InferenceSession(
        tmp_path / "model.onnx", providers=["CPUExecutionProvider"]
    ).run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), converted(x), rtol=5e-3, atol=5e-3)


def test_export_in_bfloat16_warns_that_no_cpu_runs_it_and_how_to_export_float16(tmp_path):
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    path = tmp_path / "model.onnx"
    remedy = r"no kernels on a CPU.*mezzo\.convert\(model, args, dtype='float16'\)\.export_onnx"
    with pytest.warns(UserWarning, match=remedy) as caught:
        mezzo.convert(model, (x,), dtype="bfloat16").export_onnx(path)
    assert caught[0].filename == __file__
    # The day that onnxruntime loads it, the warning has to go.
    with pytest.raises(Exception, match="Could not find an implementation"):
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    with warnings.catch_warnings(action="error"):
        mezzo.convert(model, (x,), dtype="float16").export_onnx(path)
    onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
