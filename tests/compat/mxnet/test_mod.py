import pytest
import torch
from torch import nn

from mezzo import UnsupportedError
from mezzo.compat.mxnet import amp, io, model
from mezzo.compat.mxnet.mod import BucketingModule, Module


def test_networks_are_made_once_for_each_bucket():
    made = []

    def sym_gen(key):
        made.append(key)
        return (lambda x: x * key), ["data"], ["label"]

    module = BucketingModule(sym_gen, default_bucket_key=2, context="cpu")
    assert (module.forward(3), module(3, bucket_key=5), module.forward(1)) == (6, 15, 5)
    module.switch_bucket(2)
    assert module.forward(1) == 2
    assert made == [2, 5]


def test_mapped_networks_are_changed_now_and_later():
    module = BucketingModule(lambda key: lambda x: x * key, default_bucket_key=2)
    module.forward(1)
    mapped = module.mapped(lambda network: lambda x: -network(x))
    assert (mapped.forward(3), mapped.forward(3, bucket_key=4)) == (-6, -12)
    assert module.forward(3) == 6


X = torch.ones(2, 4)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1))


def test_a_converted_network_is_bound_fed_and_saved(net, tmp_path):
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
    again = Module(loaded)
    again.bind([("data", (2, 4))])
    again.set_params(args, aux)
    again.forward(io.DataBatch([X]))
    assert torch.equal(again.get_outputs()[0], module.get_outputs()[0])


def test_a_torch_module_takes_the_parameters_that_it_is_given(net):
    other = Module(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)))
    other.bind([("data", (2, 4))])
    other.set_params(dict(net.named_parameters()), {})
    other.forward(io.DataBatch([X]))
    assert torch.equal(other.get_outputs()[0], net(X))
    with pytest.raises(UnsupportedError, match="Convert it first"):
        other.save_checkpoint("somewhere", 0)


def test_a_converted_network_takes_no_other_parameters(net):
    symbol, args, _ = amp.convert_model(net, dict(net.named_parameters()), {})
    with pytest.raises(UnsupportedError, match=r"not what the network was converted with: 0\.bias"):
        Module(symbol).set_params({**args, "0.bias": args["0.bias"] + 1}, {})


def test_a_module_is_bound_before_it_runs_and_with_a_shape_for_each_name(net):
    with pytest.raises(AssertionError, match="not bound"):
        Module(net).forward(io.DataBatch([X]))
    with pytest.raises(ValueError, match="2 entries for 1 data_names"):
        Module(net).bind([("data", (2, 4)), ("more", (2, 4))])
