"""`amp.convert_model`, `convert_hybrid_block`, `convert_bucketing_module`, and their options."""

import pytest
import torch
from torch import nn

from mezzo import Policy
from mezzo.compat.mxnet import amp, mod
from mezzo.compat.mxnet._block import ConvertRequest, expected_params

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
        nn.Softmax(-1),
    ).eval()


def params(net):
    return dict(net.named_parameters()), dict(net.named_buffers())


def dtypes(plan):
    return {row.op: row.dtype for row in plan if row.op in ("conv2d", "linear", "softmax")}


def test_convert_model_returns_a_callable_and_its_parameters(net):
    converted, args, aux = amp.convert_model(net, *params(net))
    assert torch.allclose(converted(X), net(X), atol=1e-2)
    assert dtypes(converted.converted.plan) == {
        "conv2d": "float16",
        "linear": "float16",
        "softmax": "float32",
    }
    assert {value.dtype for value in args.values()} == {torch.float32}
    assert (args.keys(), aux.keys()) == tuple(tensors.keys() for tensors in params(net))


def test_the_passed_parameters_are_used(net):
    args, aux = params(net)
    zeros = {name: torch.zeros_like(value) for name, value in args.items()}
    converted, stored, _ = amp.convert_model(net, zeros, aux)
    assert torch.allclose(converted(X), torch.full((2, 5), 0.2), atol=1e-3)
    assert not stored["0.weight"].any()
    assert net[0].weight.any()


def test_lists_from_mxnets_documentation_decide_stored_dtypes(net):
    options = {
        "target_dtype_ops": ["Convolution"],
        "fp32_ops": ["SoftmaxOutput", "FullyConnected"],
        "cast_optional_params": True,
    }
    converted, args, _ = amp.convert_model(net, *params(net), **options)
    for stored in (args, converted.params):
        assert (stored["0.weight"].dtype, stored["5.bias"].dtype) == (torch.float16, torch.float32)
        converted(X)
    assert dtypes(converted.converted.plan) == {
        "conv2d": "float16",
        "linear": "float32",
        "softmax": "float32",
    }


def test_convert_model_accepts_both_signatures(net):
    old, _, _ = amp.convert_model(
        net, *params(net), "bfloat16", None, None, None, ["5"], True, data_example=X
    )
    new, args, _ = amp.convert_model(
        net,
        *params(net),
        {"data": "float32"},
        "bfloat16",
        None,
        None,
        None,
        ["5"],
        True,
        data_example=X,
    )
    named, _, _ = amp.convert_model(
        net,
        *params(net),
        input_dtypes={"data": "float32"},
        target_dtype="bfloat16",
        excluded_sym_names=["5"],
        cast_params_offline=True,
        data_example=[X],
    )
    for converted in (old, new, named):
        planned = dtypes(converted.converted.plan)
        assert (planned["conv2d"], planned["linear"]) == ("bfloat16", "float32")
        assert converted.params["0.weight"].dtype is torch.bfloat16
    assert args["5.weight"].dtype is torch.float32


def test_convert_hybrid_block_accepts_both_signatures(net):
    old = amp.convert_hybrid_block(net, "bfloat16", None, None, None, ["5"], "cpu", True)
    assert old.converted is None
    new = amp.convert_hybrid_block(net, X, "bfloat16", None, None, None, ["5"], "cpu", True)
    assert new.converted is not None
    from_list = amp.convert_hybrid_block(
        net,
        [X],
        target_dtype="bfloat16",
        excluded_sym_names=["5"],
        device="cpu",
        cast_params_offline=True,
    )
    assert torch.equal(old.forward(X), new(X))
    assert torch.equal(from_list(X), new(X))
    assert new.params["0.weight"].dtype is torch.bfloat16


def test_a_block_is_converted_on_its_first_call_by_default(net):
    converted = amp.convert_hybrid_block(net)
    assert converted.converted is None
    assert converted.forward(X).dtype is torch.float32
    assert dtypes(converted.converted.plan)["linear"] == "float16"


def test_conditions_apply_to_a_conversion():
    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Softmax(-1)).eval()
    options = {
        "fp32_ops": [],
        "conditional_fp32_ops": [("Activation", "act_type", ["tanh"]), ("softmax", "axis", ["-1"])],
    }
    converted = amp.convert_hybrid_block(network, torch.ones(2, 4), "float16", **options)
    assert {
        row.op: row.dtype for row in converted.converted.plan if row.op in ("tanh", "softmax")
    } == {"tanh": "float32", "softmax": "float32"}
    unconditional = amp.convert_hybrid_block(
        network,
        torch.ones(2, 4),
        "float16",
        fp32_ops=[],
        conditional_fp32_ops=[("softmax", "axis", ["0"])],
    )
    assert "float32" not in {row.dtype for row in unconditional.converted.plan if row.op == "tanh"}


def test_a_conversion_is_not_affected_by_init(net):
    converted = amp.convert_hybrid_block(
        net, X, "float16", ["Convolution"], ["FullyConnected", "softmax"]
    )
    expected, plan = converted(X), str(converted.converted.plan)
    amp.init()
    assert torch.equal(converted(X), expected)
    again = amp.convert_hybrid_block(
        net, X, "float16", ["Convolution"], ["FullyConnected", "softmax"]
    )
    assert str(again.converted.plan) == plan
    assert torch.equal(again(X), expected)


def test_buckets_are_converted_for_their_shapes(net):
    module = mod.BucketingModule(
        lambda key: (net, ["data"], ["softmax_label"]), default_bucket_key=8
    )
    expected = module.forward(X)
    converted = amp.convert_bucketing_module(module, cast_optional_params=True)
    assert torch.allclose(converted.forward(X), expected, atol=1e-2)
    assert converted.forward(X[:, :, :6, :6], bucket_key=6).shape == (2, 5)
    assert converted.buckets[8] is converted.buckets[6]
    assert converted.buckets[8].params["0.weight"].dtype is torch.float16
    assert list(module.buckets) == [8]


def test_invalid_calls_raise_as_in_mxnet(net):
    args, aux = params(net)
    with pytest.raises(
        AssertionError,
        match=r"First argument to convert_model should be Symbol: here also a .*Module, got str",
    ):
        amp.convert_model("model", args, aux)
    with pytest.raises(
        AssertionError,
        match="Second argument to convert_model should be a dict of name to ndarray, got list",
    ):
        amp.convert_model(net, list(args), aux)
    with pytest.raises(AssertionError, match="Third argument to convert_model"):
        amp.convert_model(net, args, None)
    with pytest.raises(AssertionError, match="block input should be a HybridBlock"):
        amp.convert_hybrid_block(args)
    with pytest.raises(
        AssertionError,
        match="Only target_dtype float16 and bfloat16 are supported currently, got 'float32'",
    ):
        amp.convert_hybrid_block(net, "float32")
    with pytest.raises(
        AssertionError, match="module should be instance of bucketing module, got Sequential"
    ):
        amp.convert_bucketing_module(net)
    with pytest.raises(AssertionError, match="Bucketing Module should not be empty"):
        amp.convert_bucketing_module(mod.BucketingModule(lambda _: net))
    with pytest.raises(AssertionError, match=r"no parameters or buffers \['conv0_weight'\]"):
        amp.convert_model(net, {"conv0_weight": torch.ones(1)}, aux)
    for value, shape in ((torch.ones(1), r"\(1,\)"), (3, "int")):
        with pytest.raises(
            AssertionError, match=rf"'0.weight' of the network has shape .*, got {shape}"
        ):
            amp.convert_model(net, args | {"0.weight": value}, aux)
    with pytest.raises(TypeError, match="target_precision_ops"):
        amp.convert_hybrid_block(net, target_precision_ops=["Convolution"])


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (),
            {"foo": 1},
            r"convert_model\(\) got an unexpected keyword argument 'foo'.*target_dtype",
        ),
        (("float16",), {"target_dtype": "float16"}, r"convert_model\(\) got 'target_dtype' twice"),
        ((None,) * 9, {}, r"convert_model\(\) got 2 arguments too many"),
    ],
)
def test_wrong_arguments_raise_in_the_name_of_the_call(net, args, kwargs, message):
    with pytest.raises(TypeError, match=message):
        amp.convert_model(net, *params(net), *args, **kwargs)


# -- expected dtypes of stored parameters ----------------------------------------------------------


def network():
    return nn.ModuleDict(
        {
            "conv": nn.Conv1d(2, 2, 1),
            "norm": nn.BatchNorm1d(2),
            "head": nn.ModuleDict({"fc": nn.Linear(2, 2)}),
        }
    )


def stored_in_16_bits(**options):
    request = ConvertRequest(Policy("O1", "float16", preset="mxnet"), **options)
    return sorted(
        name
        for name, value in expected_params(network(), request).items()
        if value.dtype is torch.float16
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, []),
        ({"cast_params": True}, ["conv.bias", "conv.weight", "head.fc.bias", "head.fc.weight"]),
        ({"cast_params": True, "excluded": ["head"]}, ["conv.bias", "conv.weight"]),
        ({"cast_params": True, "excluded": ["*.fc", "conv"]}, []),
    ],
    ids=["not cast", "by the lists", "a child excluded", "by globs"],
)
def test_parameters_of_listed_layers_are_expected_in_16_bits(options, names):
    assert stored_in_16_bits(**options) == names


def test_expected_dtypes_equal_those_of_a_conversion():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)
    ).eval()
    block = amp.convert_hybrid_block(net, cast_optional_params=True, excluded_sym_names=["3"])
    before = {name: value.dtype for name, value in block.params.items()}
    block(torch.ones(1, 3, 4, 4))
    assert {name: value.dtype for name, value in block.params.items()} == before


def test_attention_layers_are_expected_in_16_bits():
    attention = nn.TransformerEncoderLayer(4, 2, 8)
    names = {
        name
        for name, value in expected_params(
            attention, ConvertRequest(Policy("O1", "float16", preset="mxnet"), cast_params=True)
        ).items()
        if value.dtype is torch.float16
    }
    assert names == {name for name, _ in attention.named_parameters() if "norm" not in name}
