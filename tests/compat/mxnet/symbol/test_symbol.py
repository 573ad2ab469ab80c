"""Symbols: their JSON of all versions, their names, their parts, and files that are damaged."""

import copy
import json
import pickle
import random

import pytest
import torch
from support.mxnet_symbols import NETWORKS, SymbolWriter, resnet

from mezzo import CheckpointError, UnsupportedError
from mezzo.compat import mxnet
from mezzo.compat.mxnet import sym
from mezzo.compat.mxnet._ndarray import NDArray, as_ndarray


def loaded(network=resnet):
    net, head, shape = network()
    heads = head if isinstance(head, tuple) else (head,)
    params = {name[4:]: torch.tensor(value) for name, value in net.values().items()}
    return sym.load_json(json.dumps(net.json(*heads))), params, torch.ones(shape)


def test_names_of_arguments_auxiliary_states_and_outputs():
    symbol, _, _ = loaded()
    assert symbol.list_arguments()[:4] == ["data", "bn_data_gamma", "bn_data_beta", "conv0_weight"]
    assert symbol.list_auxiliary_states()[:2] == ["bn_data_moving_mean", "bn_data_moving_var"]
    assert symbol.list_outputs() == ["softmax_output"]
    assert symbol.list_arguments()[-1] == "softmax_label"
    assert symbol.name == "softmax"
    assert symbol.attr_dict()["fc1"] == {"num_hidden": "10"}
    assert repr(symbol) == "<Symbol softmax>"
    assert mxnet.symbol is mxnet.sym


def test_a_symbol_with_several_outputs_has_numbered_names():
    symbol, params, x = loaded(NETWORKS["inception"])
    assert symbol.list_outputs() == ["halves_output0", "halves_output1"]
    assert symbol.name is None
    both = symbol.model(params)(x)
    assert len(both) == len(symbol) == 2
    for part, one in zip(symbol, both, strict=True):
        assert torch.equal(part.model(params)(x), one)


def test_an_internal_output_is_a_symbol_of_its_own():
    symbol, params, x = loaded()
    features = symbol.get_internals()["flatten0_output"]
    assert "fc1_weight" not in features.list_arguments()
    assert features.model(params)(x).shape == (2, 4)
    again = sym.load_json(features.tojson())
    assert torch.equal(again.model(params)(x), features.model(params)(x))
    with pytest.raises(ValueError, match=r"no output named 'flaten0_output'. Did you mean 'flatt"):
        symbol.get_internals()["flaten0_output"]
    with pytest.raises(IndexError, match="Output 3 of a symbol that has 1"):
        symbol[3]


def test_the_model_is_a_module_with_mxnets_names():
    symbol, params, x = loaded()
    model = symbol.model(params)
    assert set(model.state_dict()) == set(params)
    assert {name for name, _ in model.named_buffers()} == set(symbol.list_auxiliary_states())
    assert not model.training
    out = model(x)
    assert torch.allclose(out.sum(1), torch.ones(2))
    assert torch.equal(model(x, torch.zeros(2)), out)
    assert torch.equal(model(data=x), out)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), out)
    out.sum().backward()
    assert model.conv0_weight.grad is not None


def test_arrays_give_arrays():
    symbol, params, x = loaded()
    model = symbol.model({name: as_ndarray(value) for name, value in params.items()})
    assert type(model.conv0_weight) is torch.nn.Parameter
    assert isinstance(model(as_ndarray(x)), NDArray)
    assert type(model(x)) is torch.Tensor


def test_training_updates_the_moving_averages():
    symbol, params, x = loaded()
    model = symbol.model(params).train()
    before = model.bn_data_moving_mean.clone()
    model(x)
    assert torch.allclose(model.bn_data_moving_mean, 0.9 * before + 0.1 * x.mean((0, 2, 3)))


def test_names_with_dots_become_modules_and_stay_in_the_state_dict():
    net = SymbolWriter()
    head = net.fc("features.0", net.variable("data"), 3, 2)
    symbol = sym.load_json(json.dumps(net.json(head)))
    params = {"features.0_weight": torch.ones(2, 3), "features.0_bias": torch.zeros(2)}
    model = symbol.model(params)
    assert list(model.state_dict()) == list(params)
    assert model(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]
    clash = SymbolWriter()
    head = clash.op("elemwise_add", "x", [clash.variable("data"), clash.variable("forward")])
    with pytest.raises(UnsupportedError, match="cannot have the name 'forward'"):
        sym.load_json(json.dumps(clash.json(head))).model({"forward": torch.ones(1)})


def test_autocast_has_no_effect_inside():
    symbol, params, x = loaded()
    model = symbol.model(params)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), expected)


def test_errors_name_the_operator_its_inputs_and_missing_data():
    symbol, params, x = loaded()
    model = symbol.model({**params, "fc1_weight": torch.ones(10, 5)})
    message = r"in operator fc1 \(FullyConnected\) on flatten0 \(2, 4\), fc1_weight \(10, 5\)"
    with pytest.raises(RuntimeError, match=message):
        model(x)
    for shape in ((3, 4), (10,)):
        with pytest.raises(
            ValueError, match=r"fc1_weight has shape .*, expected \(10, any\) by the"
        ):
            symbol.model({**params, "fc1_weight": torch.ones(shape)})
    del params["fc1_weight"]
    with pytest.raises(ValueError, match="inputs fc1_weight were not passed"):
        symbol.model(params)(x)
    with pytest.raises(TypeError, match="takes 3 inputs, data, fc1_weight, softmax_label, got 4"):
        symbol.model(params)(x, x, x, x)


# -- files -----------------------------------------------------------------------------------------


def old_version(document):
    """Return a symbol as MXNet 0.8 wrote it: param, two numbers an entry, no moving averages."""
    document = json.loads(json.dumps(document))
    aux = {i for i, node in enumerate(document["nodes"]) if "_moving_" in node["name"]}
    kept = [i for i in range(len(document["nodes"])) if i not in aux]
    place = {old: new for new, old in enumerate(kept)}
    nodes = []
    for index in kept:
        node = document["nodes"][index]
        inputs = [[place[i], out] for i, out, _ in node["inputs"] if i not in aux]
        attr = {"ctx_group": "dev1", "weight_lr_mult": "0.1"}
        old = {"param": node.get("attrs", {}), "inputs": inputs, "attr": attr}
        nodes.append({"op": node["op"], "name": node["name"], **old})
    heads = [[place[i], out] for i, out, _ in document["heads"]]
    return {"nodes": nodes, "arg_nodes": [], "heads": heads}


def test_symbols_of_old_versions_run_and_are_written_back_as_they_were():
    net, head, _ = resnet()
    document = old_version(net.json(head))
    symbol = sym.load_json(json.dumps(document))
    current, params, x = loaded()
    assert symbol.list_auxiliary_states() == current.list_auxiliary_states()
    assert torch.equal(symbol.model(params)(x), current.model(params)(x))
    assert json.loads(symbol.tojson()) == document


def test_all_missing_ops_are_named_at_once(tmp_path):
    net = SymbolWriter()
    x = net.op("RNN", "lstm0", [net.variable("data")], mode="lstm")
    for number in range(5):
        x = net.op("Custom", f"mine{number}", [x])
    path = tmp_path / "net-symbol.json"
    path.write_text(json.dumps(net.json(x)))
    message = (
        r"net-symbol.json' has ops that are not supported here: RNN \('lstm0'\); Custom \('mine0',"
        r" 'mine1', 'mine2' and 2 more\). Supported are: .*Activation.*Convolution"
    )
    with pytest.raises(UnsupportedError, match=message):
        sym.load(path)


NODE = {"op": "null", "name": "x", "inputs": []}


def relu(*inputs):
    return {"op": "relu", "name": "y", "inputs": list(inputs)}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([], "expected an object with a list of nodes"),
        ({"nodes": 3}, "expected an object with a list of nodes"),
        ({"nodes": [3], "heads": [[0, 0]]}, "node 0 is int"),
        ({"nodes": [{"op": 1, "name": "x", "inputs": []}], "heads": []}, "node 0 has op 1"),
        ({"nodes": [{"op": "null", "inputs": []}], "heads": []}, "has name None"),
        ({"nodes": [NODE, relu([1, 0, 0])], "heads": [[1, 0]]}, "with a node before 1"),
        ({"nodes": [relu([1, 0, 0]), NODE], "heads": [[0, 0]]}, "with a node before 0"),
        ({"nodes": [NODE, relu([-1, 0, 0])], "heads": [[1, 0]]}, r"got \[-1, 0, 0\]"),
        ({"nodes": [NODE, relu([0])], "heads": [[1, 0]]}, r"got \[0\]"),
        ({"nodes": [NODE, relu(["0", 0])], "heads": [[1, 0]]}, "expected \\[node, output"),
        ({"nodes": [NODE, relu([0, 7, 0])], "heads": [[1, 0]]}, "takes output 7 of 'x', which"),
        ({"nodes": [NODE], "heads": [[0, 2, 0]]}, "heads takes output 2 of 'x'"),
        ({"nodes": [NODE], "heads": [[1, 0, 0]]}, "heads: got"),
        ({"nodes": [NODE], "heads": []}, "has no heads"),
        ({"nodes": [NODE]}, "heads: expected a list"),
        ({"nodes": [NODE, {**NODE, "inputs": [[0, 0]]}], "heads": [[0, 0]]}, "is a variable"),
        ({"nodes": [NODE, {**relu([0, 0]), "attrs": 3}], "heads": [[0, 0]]}, "has attrs 3"),
        ({"nodes": [NODE], "arg_nodes": [4], "heads": [[0, 0]]}, "arg_nodes has 4"),
        ({"nodes": [NODE, relu()], "heads": [[1, 0]]}, "relu 'y' has 0 inputs"),
    ],
)  # fmt: skip
def test_a_damaged_symbol_is_rejected(tmp_path, document, message):
    path = tmp_path / "net-symbol.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(CheckpointError, match=message):
        sym.load(path)


def test_a_binary_file_is_rejected(tmp_path):
    (tmp_path / "net-symbol.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="not a text file in UTF-8"):
        sym.load(tmp_path / "net-symbol.json")


def test_random_damage_gives_an_error_or_a_symbol():
    choose = random.Random(0)
    net, head, _ = resnet()
    text = json.dumps(net.json(head))
    for _ in range(150):
        damaged = list(text)
        for _ in range(choose.randint(1, 3)):
            damaged[choose.randrange(len(text))] = choose.choice('0129"[]{},-xTL')
        try:
            symbol = sym.load_json("".join(damaged))
        except (CheckpointError, UnsupportedError):
            continue
        assert symbol.list_outputs()
