"""`mxnet.mod`, `mxnet.model`, `mxnet.io` and `mxnet.contrib`."""

import numpy as np
import pytest
import torch
from support.mxnet_symbols import resnet
from torch import nn

from mezzo import UnsupportedError
from mezzo.compat import mxnet
from mezzo.compat.mxnet import amp, io, model
from mezzo.compat.mxnet._ndarray import NDArray, as_ndarray
from mezzo.compat.mxnet.io import DataBatch, DataDesc
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
    with pytest.raises(ValueError, match=r"data_names \(\['data', 'more'\] vs. \['data'\]\)"):
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


# -- symbols ---------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    net, head, _ = resnet()
    net.write(tmp_path / "net", head)
    return model.load_checkpoint(tmp_path / "net", 0)


SHAPES = [("data", (2, 3, 8, 8))]
IMAGES = torch.ones(2, 3, 8, 8)


def bound(symbol, **kwargs):
    module = Module(symbol, context=mxnet._context.cpu(), **kwargs)
    module.bind(SHAPES, [("softmax_label", (2,))])
    return module


def test_a_symbol_is_bound_run_and_saved_with_its_stored_dtypes(checkpoint, tmp_path):
    symbol, args, aux = amp.convert_model(*checkpoint, cast_optional_params=True)
    module = bound(symbol)
    module.set_params(args, aux)
    module.forward(DataBatch([as_ndarray(IMAGES)], [torch.ones(2)]))
    (out,) = module.get_outputs()
    assert isinstance(out, NDArray)
    assert torch.allclose(out.sum(1), torch.ones(2))
    assert module._arg_params["conv0_weight"].dtype == np.float16
    assert module._aux_params["bn_data_moving_var"].dtype == np.float32
    assert module.output_names == ["softmax_output"]
    assert (module.data_shapes, module.label_shapes) == (
        [DataDesc("data", (2, 3, 8, 8))],
        [DataDesc("softmax_label", (2,))],
    )
    module.save_checkpoint(str(tmp_path / "amp"), 0, remove_amp_cast=False)
    restored = Module.load(str(tmp_path / "amp"), 0)
    restored.bind(SHAPES)
    restored.forward(DataBatch([IMAGES]))
    assert torch.equal(restored.get_outputs()[0], out)


def test_batches_of_other_sizes_arrays_of_numpy_and_predict(checkpoint):
    symbol, args, aux = checkpoint
    module = bound(symbol)
    module.set_params(args, aux)
    module.forward(DataBatch([IMAGES[:1].numpy()]))
    assert module.get_outputs()[0].shape == (1, 10)
    whole = module.predict(IMAGES)
    batches = [DataBatch([IMAGES]), DataBatch([IMAGES], pad=1)]
    assert module.predict(batches).shape == (3, 10)
    assert torch.equal(module.predict(batches, num_batch=1), whole)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([("data", 8)], r"\('data', 8\), expected a string and a tuple of sizes"),
        ([("data", (2, "3"))], "expected a string and a tuple of sizes"),
        ([("data", (2, -3))], "expected a string and a tuple of sizes"),
        ([(2, 3, 8, 8)], "expected a name and a shape"),
        (["data"], "has 'data', expected a name and a shape"),
        (("data", (2, 3)), "has 'data', expected a name and a shape"),
        (None, "should be a list of names and shapes, got None"),
        ([("image", (2, 3, 8, 8))], r"\(\['image'\] vs. \['data'\]\)"),
        ([], r"\(\[\] vs. \['data'\]\)"),
    ],
)
def test_wrong_shapes_are_rejected_in_mxnets_words(checkpoint, shapes, message):
    with pytest.raises(ValueError, match=message):
        Module(checkpoint[0]).bind(shapes)


def test_shapes_are_pairs_lists_or_descriptions(checkpoint):
    for shape in (("data", (2, 3, 8, 8)), ["data", [2, 3, 8, 8]], DataDesc("data", (2, 3, 8, 8))):
        module = Module(checkpoint[0])
        module.bind([shape], for_training=False)
        assert module.data_shapes == [DataDesc("data", (2, 3, 8, 8))]


def test_binding_twice_is_ignored_unless_forced(checkpoint, caplog):
    module = bound(checkpoint[0])
    module.bind([("data", (1, 3, 8, 8))])
    assert "Already bound, ignoring bind()" in caplog.text
    assert module.data_shapes[0].shape == (2, 3, 8, 8)
    module.bind([("data", (1, 3, 8, 8))], force_rebind=True)
    assert module.data_shapes[0].shape == (1, 3, 8, 8)


def test_parameters_are_checked_by_name_and_shape_before_any_is_set(checkpoint):
    symbol, args, aux = checkpoint
    with pytest.raises(AssertionError, match="call bind before"):
        Module(symbol).set_params(args, aux)
    module = bound(symbol)
    with pytest.raises(AssertionError, match=r"has no parameters. Call set_params"):
        module.forward(DataBatch([IMAGES]))
    without = {name: value for name, value in args.items() if name != "fc1_bias"}
    with pytest.raises(RuntimeError, match="fc1_bias is not presented"):
        module.set_params(without, aux)
    with pytest.raises(ValueError, match="Find name more that is not in the arguments"):
        module.set_params({**args, "more": IMAGES}, aux)
    with pytest.raises(ValueError, match=r"fc1_weight has shape \(1, 4\), expected \(10, any\)"):
        module.set_params({**args, "fc1_weight": torch.ones(1, 4)}, aux)
    assert not module.params_initialized
    module.set_params({**args, "more": IMAGES}, aux, allow_extra=True)
    module.set_params(without, aux, allow_missing=True)
    with pytest.raises(ValueError, match="fc1_bias were not passed"):
        module.forward(DataBatch([IMAGES]))


def test_init_params_sets_what_is_passed_once(checkpoint):
    symbol, args, aux = checkpoint
    module = bound(symbol)
    with pytest.raises(UnsupportedError, match="init_params needs arg_params"):
        module.init_params()
    module.init_params(arg_params=args, aux_params=aux)
    zeros = {name: torch.zeros(value.shape) for name, value in args.items()}
    module.init_params(arg_params=zeros, aux_params=aux)
    assert module.get_params()[0]["conv0_weight"].asnumpy().any()
    module.init_params(arg_params=zeros, aux_params=aux, force_init=True)
    assert not module.get_params()[0]["conv0_weight"].asnumpy().any()


def test_names_that_the_symbol_lacks_and_wrong_batches_are_rejected(checkpoint):
    symbol, args, aux = checkpoint
    with pytest.raises(
        ValueError, match=r"data_names=\['dta'\]\) but input with name 'dta'.*'data'"
    ):
        Module(symbol, data_names=["dta"])
    module = bound(symbol)
    module.set_params(args, aux)
    for batch in (DataBatch(["x"]), [IMAGES]):
        with pytest.raises(TypeError, match=r"expected (an array|a DataBatch)"):
            module.forward(batch)
    with pytest.raises(ValueError, match=r"2 arrays of data for \['data'\]"):
        module.forward(DataBatch([IMAGES, IMAGES]))
    with pytest.raises(RuntimeError, match=r"Error in operator .* \(BatchNorm\) on data \(2, 4"):
        module.forward(DataBatch([torch.ones(2, 4, 8, 8)]))
    with pytest.raises(TypeError, match="Module needs a Symbol or a torch network, got str"):
        Module("net")
    with pytest.raises(ValueError, match="Unknown device type 'npu'"):
        Module(symbol, context="npu")
    with pytest.raises(AttributeError, match=r"Module.fit is not supported.*gluon.Trainer"):
        module.fit()
    assert not hasattr(module, "other")


def test_labels_that_do_not_match_are_logged_only(checkpoint, caplog):
    module = Module(checkpoint[0], label_names=None)
    module.bind(SHAPES, [("softmax_label", (2,))])
    assert "don't match names specified by label_names" in caplog.text


def test_a_bucketing_module_binds_sets_parameters_and_runs_batches(checkpoint):
    symbol, args, aux = checkpoint
    module = BucketingModule(lambda key: (symbol, ("data",), ("softmax_label",)), 8)
    with pytest.raises(AssertionError, match="not bound"):
        module.forward(DataBatch([IMAGES]))
    with pytest.raises(AssertionError, match="call bind before"):
        module.set_params(args, aux)
    module.bind(SHAPES)
    module.set_params(args, aux)
    module.forward(DataBatch([IMAGES]))
    whole = module.get_outputs()[0]
    small = [("data", (2, 3, 4, 4))]
    module.forward(DataBatch([IMAGES[..., :4, :4]], bucket_key=4, provide_data=small))
    assert module.get_outputs()[0].shape == (2, 10)
    assert list(module.buckets) == [8, 4]
    module.forward(DataBatch([IMAGES], bucket_key=8))
    assert torch.equal(module.get_outputs()[0], whole)
    assert list(module.get_params()[0]) == list(args)


def test_a_torch_network_in_buckets_runs_batches(net):
    module = BucketingModule(lambda _: net, default_bucket_key=2)
    module.bind([("data", (2, 4))])
    module.set_params(dict(net.named_parameters()), {})
    module.forward(DataBatch([X], bucket_key=1))
    assert torch.equal(module.get_outputs()[0], net(X))
