"""`amp.convert_model` of symbols: where the casts are, dtypes inside, and stored parameters."""

import json

import numpy as np
import pytest
import torch
from support.mxnet_symbols import NETWORKS, SymbolWriter, inception, resnet

from mezzo.compat.mxnet import amp, io, mod, sym
from mezzo.compat.mxnet._ndarray import as_ndarray
from mezzo.compat.mxnet.symbol import _model

CUSTOM = {"target_dtype_ops": ["Convolution"], "fp32_ops": ["SoftmaxOutput", "FullyConnected"]}


def model_of(net, *heads):
    arrays = {name: as_ndarray(torch.tensor(value)) for name, value in net.values().items()}
    args, aux = (
        {name[4:]: value for name, value in arrays.items() if name.startswith(kind)}
        for kind in ("arg", "aux")
    )
    return sym.load_json(json.dumps(net.json(*heads))), args, aux


def converted(network=resnet, **options):
    net, head, shape = network()
    heads = head if isinstance(head, tuple) else (head,)
    symbol, args, aux = model_of(net, *heads)
    return symbol, amp.convert_model(symbol, args, aux, **options), torch.ones(shape)


def dtypes_inside(monkeypatch, model, x):
    """Return the dtype of the first input of each node."""
    found = {}
    run = _model.SymbolModel._run_step

    def recorded(self, step, values):
        entry = step.node.inputs[0]
        found[step.node.name] = values[entry.node][entry.output].dtype
        return run(self, step, values)

    monkeypatch.setattr(_model.SymbolModel, "_run_step", recorded)
    model(x)
    return found


def casts(symbol):
    return [node.name for node in symbol.graph.nodes if node.op == "amp_cast"]


def test_listed_ops_run_in_16_bits_and_the_others_by_the_lists(monkeypatch):
    symbol, (result, args, aux), x = converted()
    inside = dtypes_inside(monkeypatch, result.model(args, aux), x)
    assert {inside[name] for name in ("conv0", "stage2_sc", "fc1", "_plus1", "stage1_bn1")} == {
        torch.float16
    }
    assert {inside[name] for name in ("bn_data", "softmax")} == {torch.float32}
    assert {value.dtype for value in (*args.values(), *aux.values())} == {np.float32}
    assert casts(result)[:2] == ["bn_data_output_amp_cast_float16", "conv0_weight_amp_cast_float16"]
    assert not casts(symbol)


def test_results_are_near_those_of_float32_and_float32_themselves():
    for network in NETWORKS.values():
        for options in ({}, {"target_dtype": "bfloat16"}, {"cast_optional_params": True}):
            symbol, (result, args, aux), x = converted(network, **options)
            outs = result.model(args, aux).run({"data": x})
            net, *_ = network()
            params = {name[4:]: torch.tensor(value) for name, value in net.values().items()}
            expected = symbol.model(params).run({"data": x})
            for out, wanted in zip(outs, expected, strict=True):
                assert out.dtype is torch.float32
                assert torch.allclose(out, wanted, atol=0.05, rtol=0.05)


def test_own_lists_and_stored_parameters(monkeypatch):
    _, (result, args, aux), x = converted(cast_optional_params=True, **CUSTOM)
    assert args["conv0_weight"].dtype == np.float16
    assert args["fc1_bias"].dtype == np.float32
    assert args["stage1_bn1_gamma"].dtype == np.float32
    assert {value.dtype for value in aux.values()} == {np.float32}
    # Parameters need no casts any more, and the variables have MXNet's number of the dtype.
    assert casts(result) == ["bn_data_output_amp_cast_float16", "flatten0_output_amp_cast_float32"]
    assert result.attr_dict()["conv0_weight"] == {"__dtype__": "2"}
    inside = dtypes_inside(monkeypatch, result.model(args, aux), x)
    assert (inside["conv0"], inside["fc1"]) == (torch.float16, torch.float32)


def test_the_passed_dicts_are_not_changed():
    net, head, _ = resnet()
    symbol, args, aux = model_of(net, head)
    amp.convert_model(symbol, args, aux, cast_optional_params=True)
    assert args["conv0_weight"].dtype == np.float32


def test_excluded_nodes_run_in_float32_and_unknown_ones_are_logged(monkeypatch, caplog):
    _, (result, args, aux), x = converted(excluded_sym_names=["fc1", "fc9"])
    inside = dtypes_inside(monkeypatch, result.model(args, aux), x)
    assert (inside["fc1"], inside["conv0"]) == (torch.float32, torch.float16)
    assert "Missing nodes: ['fc9']" in caplog.text


def test_a_parameter_of_a_float32_op_too_stays_float32():
    net = SymbolWriter()
    weight = net.variable("w", "arg", (3, 3))
    data = net.variable("data")
    bias = {"no_bias": True, "num_hidden": 3}
    first = net.op("FullyConnected", "half", [data, weight], **bias)
    second = net.op("FullyConnected", "full", [first, weight], **bias)
    symbol, args, aux = model_of(net, second)
    options = {"excluded_sym_names": ["full"], "cast_optional_params": True}
    result, args, _ = amp.convert_model(symbol, args, aux, **options)
    assert args["w"].dtype == np.float32
    assert result.model(args)(torch.ones(1, 3)).dtype is torch.float32


def test_conditions_depend_on_an_attribute(monkeypatch):
    net = SymbolWriter()
    x = net.conv("conv0", net.variable("data"), 3, 2, 1)
    soft = net.op("Activation", "soft", [x], act_type="softrelu")
    relu = net.op("Activation", "relu", [x], act_type="relu")
    symbol, args, aux = model_of(net, soft, relu)
    result, args, aux = amp.convert_model(symbol, args, aux)
    inside = dtypes_inside(monkeypatch, result.model(args, aux), torch.ones(1, 3, 2, 2))
    assert (inside["soft"], inside["relu"]) == (torch.float32, torch.float16)


def test_ops_of_the_widest_dtype_get_a_multicast_where_the_dtype_of_the_data_decides():
    net = SymbolWriter()
    data = net.variable("data")
    joined = net.op("Concat", "joined", [net.conv("c", data, 3, 3, 1), data], num_args=2)
    symbol, args, aux = model_of(net, joined)
    result, args, aux = amp.convert_model(symbol, args, aux)
    assert [node.name for node in result.graph.nodes if node.op == "amp_multicast"] == [
        "c_output_amp_multicast"
    ]
    assert result.model(args)(torch.ones(1, 3, 2, 2)).shape == (1, 6, 2, 2)


def test_ops_of_the_widest_dtype_are_cast_where_the_dtypes_are_known(monkeypatch):
    net = SymbolWriter()
    x = net.conv("c", net.variable("data"), 3, 3, 1)
    full = net.op("exp", "exp", [x])
    symbol, args, aux = model_of(net, net.op("_Plus", "sum", [x, full]))
    result, args, aux = amp.convert_model(symbol, args, aux)
    assert casts(result)[-1] == "c_output_amp_cast_float32"
    inside = dtypes_inside(monkeypatch, result.model(args, aux), torch.ones(1, 3, 2, 2))
    assert inside["sum"] is torch.float32


def test_indices_are_never_cast():
    _, (result, args, aux), _ = converted(NETWORKS["text_cnn"], cast_optional_params=True)
    tokens = torch.tensor([[3, 19, 0, 1, 2, 3, 4]])
    assert result.model(args, aux)(tokens).shape == (1, 1)
    assert not [name for name in casts(result) if name.startswith("data_")]


def test_a_slope_for_each_channel_is_cast_with_the_data():
    net = SymbolWriter()
    x = net.conv("c", net.variable("data"), 3, 3, 1)
    prelu = net.op(
        "LeakyReLU", "act", [x, net.variable("act_gamma", "arg", (3,))], act_type="prelu"
    )
    symbol, args, aux = model_of(net, prelu)
    result, args, aux = amp.convert_model(symbol, args, aux, cast_optional_params=True)
    assert args["act_gamma"].dtype == np.float16
    assert result.model(args)(torch.ones(1, 3, 2, 2)).dtype is torch.float32


def test_a_converted_symbol_can_be_converted_again_and_lose_its_casts():
    symbol, (result, args, aux), x = converted(inception)
    again, _, _ = amp.convert_model(result, args, aux)
    outs, repeated = result.model(args, aux)(x), again.model(args, aux)(x)
    assert all(torch.equal(*pair) for pair in zip(outs, repeated, strict=True))
    plain = sym.load_json(result.tojson())
    assert plain.graph == symbol.graph
    assert len(casts(sym.load_json(result.tojson(remove_amp_cast=False)))) == len(casts(result))


def test_buckets_of_symbols_are_converted_with_their_parameters():
    net, head, shape = resnet()
    symbol, args, aux = model_of(net, head)
    module = mod.BucketingModule(lambda key: (symbol, ["data"], ["softmax_label"]), 8)
    module.bind([("data", shape)], [("softmax_label", (2,))])
    module.set_params(args, aux)
    result = amp.convert_bucketing_module(module, cast_optional_params=True, **CUSTOM)
    assert result.get_params()[0]["conv0_weight"].dtype == np.float16
    batch = io.DataBatch([torch.ones(shape)], bucket_key=8)
    for one in (module, result):
        one.forward(batch)
    assert torch.allclose(result.get_outputs()[0], module.get_outputs()[0], atol=1e-2)
    result.forward(io.DataBatch([torch.ones(1, 3, 6, 6)], bucket_key=6))
    assert result.get_outputs()[0].shape == (1, 10)


def test_a_symbol_alone_is_converted_as_with_its_parameters():
    for options in ({}, {"cast_optional_params": True}):
        symbol, (result, _, _), _ = converted(**options)
        assert amp.convert_symbol(symbol, **options).graph == result.graph
    with pytest.raises(AssertionError, match="convert_symbol should be Symbol, got int"):
        amp.convert_symbol(3)


def test_wrong_lists_raise_as_in_mxnet():
    net, head, _ = resnet()
    symbol, args, aux = model_of(net, head)
    with pytest.raises(AssertionError, match="Ops cannot be in two or more lists"):
        amp.convert_model(symbol, args, aux, target_dtype_ops=["softmax"])
    with pytest.raises(AssertionError, match="Only target_dtype float16 and bfloat16"):
        amp.convert_model(symbol, args, aux, "int8")
    with pytest.raises(ValueError, match="excluded_sym_names must be a list"):
        amp.convert_model(symbol, args, aux, excluded_sym_names="fc1")
