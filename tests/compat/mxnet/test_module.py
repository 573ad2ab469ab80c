"""`mxnet.mod`, `mxnet.model`, `mxnet.io` and `mxnet.contrib`."""

import pytest
import torch
from torch import nn

from mezzo import UnsupportedError
from mezzo.compat import mxnet
from mezzo.compat.mxnet import amp, io, model
from mezzo.compat.mxnet.io import DataBatch
from mezzo.compat.mxnet.mod import BucketingModule, Module


def test_each_bucket_creates_its_network_once():
    keys = []

    def sym_gen(key):
        keys.append(key)
        return (lambda x: x * key), ["data"], ["label"]

    module = BucketingModule(sym_gen, default_bucket_key=2, context="cpu")
    assert (module.forward(3), module(3, bucket_key=5), module.forward(1)) == (6, 15, 5)
    module.switch_bucket(2)
    assert module.forward(1) == 2
    assert keys == [2, 5]


def test_map_networks_transforms_existing_and_later_networks():
    module = BucketingModule(lambda key: lambda x: x * key, default_bucket_key=2)
    module.forward(1)
    mapped = module.map_networks(lambda network: lambda x: -network(x))
    assert (mapped.forward(3), mapped.forward(3, bucket_key=4)) == (-6, -12)
    assert module.forward(3) == 6


X = torch.ones(2, 4)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1))


def test_a_converted_network_is_bound_run_and_saved(net, tmp_path):
    symbol, args, aux = amp.convert_model(
        net, dict(net.named_parameters()), {}, cast_optional_params=True
    )
    module = Module(symbol, data_names=["data"], label_names=["softmax_label"], context="cpu")
    module.bind(data_shapes=[["data", (2, 4)]], label_shapes=[["softmax_label", (2,)]])
    module.set_params(args, aux)
    module.forward(io.DataBatch(data=[X], label=[torch.ones(2)]))
    assert torch.allclose(module.get_outputs()[0], net(X), atol=1e-2)
    assert module._arg_params["0.weight"].dtype is torch.float16
    assert module.get_params() == (args, aux)
    module.save_checkpoint(str(tmp_path / "saved"), 0, remove_amp_cast=False)
    loaded, args, aux = model.load_checkpoint(str(tmp_path / "saved"), 0)
    restored = Module(loaded)
    restored.bind([("data", (2, 4))])
    restored.set_params(args, aux)
    restored.forward(io.DataBatch([X]))
    assert torch.equal(restored.get_outputs()[0], module.get_outputs()[0])


def test_a_torch_module_loads_parameters(net):
    other = Module(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)))
    other.bind([("data", (2, 4))])
    other.set_params(dict(net.named_parameters()), {})
    other.forward(io.DataBatch([X]))
    assert torch.equal(other.get_outputs()[0], net(X))
    with pytest.raises(UnsupportedError, match="Convert it first"):
        other.save_checkpoint("prefix", 0)


def test_a_converted_network_rejects_other_parameters(net):
    symbol, args, _ = amp.convert_model(net, dict(net.named_parameters()), {})
    with pytest.raises(
        UnsupportedError, match=r"other values than the network was converted with: 0\.bias"
    ):
        Module(symbol).set_params({**args, "0.bias": args["0.bias"] + 1}, {})


def test_forward_needs_bind_and_bind_needs_a_shape_for_each_name(net):
    with pytest.raises(AssertionError, match="not bound"):
        Module(net).forward(io.DataBatch([X]))
    with pytest.raises(ValueError, match="2 entries for 1 data_names"):
        Module(net).bind([("data", (2, 4)), ("more", (2, 4))])


def test_a_checkpoint_keeps_casts_and_separates_parameters_from_buffers(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).eval()
    converted, args, aux = amp.convert_model(
        net, dict(net.named_parameters()), dict(net.named_buffers()), cast_optional_params=True
    )
    x = torch.randn(3, 4)
    out = converted(x)
    model.save_checkpoint(tmp_path / "model", 7, converted, args, aux)
    loaded, loaded_args, loaded_aux = model.load_checkpoint(tmp_path / "model", 7)
    assert torch.equal(loaded(x), out)
    assert (loaded_args.keys(), loaded_aux.keys()) == (args.keys(), aux.keys())
    assert {name: value.dtype for name, value in loaded_args.items()} == {
        name: value.dtype for name, value in args.items()
    }
    assert loaded_args["0.weight"].dtype is torch.float16


def test_a_batch_has_data_and_labels():
    batch = DataBatch([torch.ones(1)], [torch.zeros(1)])
    assert (batch.data, batch.label, batch.pad) == ([torch.ones(1)], [torch.zeros(1)], None)


def test_contrib_amp_is_amp():
    assert mxnet.contrib.amp is mxnet.amp
