import torch
from torch import nn

from mezzo.compat.mxnet import amp, model


def test_a_checkpoint_keeps_the_casts_and_tells_parameters_from_buffers(tmp_path):
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
