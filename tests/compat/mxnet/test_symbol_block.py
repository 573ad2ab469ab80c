"""`gluon.SymbolBlock`: networks from MXNet's exported files."""

import pytest
import torch
from support.mxnet_symbols import resnet

import mezzo.compat.mxnet as mx
from mezzo.compat.mxnet import gluon


def test_exported_files_become_a_block(tmp_path):
    net, head, shape = resnet()
    net.write(tmp_path / "net", head)
    files = tmp_path / "net-symbol.json", tmp_path / "net-0000.params"
    block = gluon.SymbolBlock.imports(files[0], ["data"], files[1], ctx=mx.cpu())
    assert isinstance(block, gluon.HybridBlock)
    assert {*block.collect_params()} == {name[4:] for name in net.shapes}
    block.hybridize()
    symbol, args, aux = mx.model.load_checkpoint(tmp_path / "net", 0)
    x = mx.nd.ones(shape)
    assert torch.equal(block(x), symbol.model(args, aux)(x))
    features = symbol.get_internals()["flatten0_output"]
    assert gluon.SymbolBlock(features, "data", {**args, **aux})(x).shape == (2, 4)
    with pytest.raises(RuntimeError, match=r"variables .*conv0_weight.* have no parameters"):
        gluon.SymbolBlock.imports(files[0], "data")


@pytest.mark.parametrize(
    ("module", "name", "use"),
    [
        (mx.sym, "Variable", "mx.sym.load"),
        (mx.io, "NDArrayIter", "DataLoader"),
        (mx.model, "FeedForward", "mx.mod.Module"),
        (mx.mod, "SequentialModule", "torch.nn.Sequential"),
    ],
)
def test_names_that_are_missing_name_the_replacement(module, name, use):
    with pytest.raises(AttributeError, match=rf"has no {name}. Use .*{use}"):
        getattr(module, name)
