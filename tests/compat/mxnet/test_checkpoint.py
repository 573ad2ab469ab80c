"""`mx.model` with MXNet's own files: round trips, casts, names, and files that are missing."""

import json

import numpy as np
import pytest
import torch
from support.mxnet_symbols import NETWORKS, SymbolWriter, params_bytes, resnet

from mezzo import CheckpointError, UnsupportedError
from mezzo.compat.mxnet import amp, model, sym
from mezzo.compat.mxnet._ndarray import NDArray


def written(tmp_path, network=resnet):
    net, head, shape = network()
    net.write(tmp_path / "net", *(head if isinstance(head, tuple) else (head,)))
    return tmp_path / "net", torch.ones(shape)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_a_checkpoint_round_trips_bit_for_bit(tmp_path, network):
    prefix, x = written(tmp_path, network)
    symbol, args, aux = model.load_checkpoint(prefix, 0)
    model.save_checkpoint(tmp_path / "again", 0, symbol, args, aux)
    again = (tmp_path / "again-0000.params").read_bytes()
    assert again == (tmp_path / "net-0000.params").read_bytes()
    assert json.loads((tmp_path / "again-symbol.json").read_text()) == json.loads(
        (tmp_path / "net-symbol.json").read_text()
    )
    loaded = model.load_checkpoint(str(tmp_path / "again"), 0)
    outs = [one[0].model(*one[1:]).run({"data": x}) for one in ((symbol, args, aux), loaded)]
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))


def test_the_order_of_the_file_is_kept_and_new_arrays_come_last(tmp_path):
    prefix, _ = written(tmp_path)
    symbol, args, aux = model.load_checkpoint(prefix, 0)
    model.save_checkpoint(prefix, 1, symbol, {"new": torch.ones(1), **args}, aux)
    args_again, aux_again = model.load_params(prefix, 1)
    assert list(args_again) == [*args, "new"]
    assert list(aux_again) == list(aux)


def test_arrays_have_mxnets_names_and_numpys_dtypes(tmp_path):
    prefix, _ = written(tmp_path)
    symbol, args, aux = model.load_checkpoint(prefix, 0)
    assert isinstance(args["conv0_weight"], NDArray)
    assert args["conv0_weight"].dtype == np.float32
    assert set(aux) == set(symbol.list_auxiliary_states())
    assert {*args, "data", "softmax_label"} == set(symbol.list_arguments())


def test_casts_are_kept_on_request_and_run_after_loading(tmp_path):
    prefix, x = written(tmp_path)
    result, args, aux = amp.convert_model(*model.load_checkpoint(prefix, 0))
    expected = result.model(args, aux)(x)
    model.save_checkpoint(tmp_path / "amp", 3, result, args, aux, remove_amp_cast=False)
    document = json.loads((tmp_path / "amp-symbol.json").read_text())
    assert "amp_cast" in {node["op"] for node in document["nodes"]}
    assert document["arg_nodes"] == [
        i for i, n in enumerate(document["nodes"]) if n["op"] == "null"
    ]
    loaded, args, aux = model.load_checkpoint(tmp_path / "amp", 3)
    assert torch.equal(loaded.model(args, aux)(x), expected)


def test_by_default_casts_are_removed_as_in_mxnet_and_the_log_has_it(tmp_path, caplog):
    prefix, x = written(tmp_path)
    symbol, args, aux = model.load_checkpoint(prefix, 0)
    result, cast_args, _ = amp.convert_model(symbol, args, aux, cast_optional_params=True)
    model.save_checkpoint(tmp_path / "amp", 0, result, cast_args, aux)
    assert "remove_amp_cast=True removes" in caplog.text
    loaded, stored, aux = model.load_checkpoint(tmp_path / "amp", 0)
    assert not {"amp_cast", "amp_multicast"} & {node.op for node in loaded.graph.nodes}
    # Parameters stay as they are stored, and are cast to the float32 of the data.
    assert stored["conv0_weight"].dtype == np.float16
    out = loaded.model(stored, aux)(x)
    assert torch.allclose(out, symbol.model(args, aux)(x), atol=1e-2)


def test_parameters_alone_can_be_saved(tmp_path):
    model.save_checkpoint(tmp_path / "net", 12, None, {"w": torch.ones(2)}, {})
    args, aux = model.load_params(tmp_path / "net", 12)
    assert (args["w"].asnumpy().tolist(), aux) == ([1.0, 1.0], {})
    assert not (tmp_path / "net-symbol.json").exists()


def test_missing_and_wrong_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither '.*none-symbol.json'.* nor '.*none-0004"):
        model.load_checkpoint(tmp_path / "none", 4)
    prefix, _ = written(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"net-0001.params"):
        model.load_checkpoint(prefix, 1)
    (tmp_path / "net-0001.params").write_bytes(params_bytes({"w": np.ones(1, "float32")}))
    with pytest.raises(CheckpointError, match=r"array 'w', expected names that start with arg: or"):
        model.load_checkpoint(prefix, 1)
    with pytest.raises(TypeError, match="epoch should be an integer, got '0'"):
        model.load_checkpoint(prefix, "0")
    with pytest.raises(TypeError, match="save_checkpoint got a symbol of type Linear"):
        model.save_checkpoint(prefix, 0, torch.nn.Linear(1, 1), {}, {})


def test_a_checkpoint_with_a_missing_op_is_rejected_before_its_parameters_are_read(tmp_path):
    net = SymbolWriter()
    net.write(tmp_path / "net", net.op("ROIPooling", "roi", [net.variable("data")]))
    with pytest.raises(UnsupportedError, match=r"ROIPooling \('roi'\)"):
        model.load_checkpoint(tmp_path / "net", 5)


def test_a_symbol_is_saved_and_loaded_alone(tmp_path):
    prefix, _ = written(tmp_path)
    symbol = sym.load(f"{prefix}-symbol.json")
    symbol.save(tmp_path / "copy.json")
    assert sym.load(tmp_path / "copy.json").graph == symbol.graph


def test_an_epoch_that_is_no_number_is_named():
    with pytest.raises(TypeError, match="epoch should be an integer, got '0'"):
        model.load_checkpoint("nowhere", "0")
