"""Names that a dialect lacks: attribute access and imports raise with what to use."""

import importlib
import sys

import pytest

DIALECTS = ["apex", "megengine", "mxnet", "oneflow", "paddle", "torch"]


def error_of(statement, expected):
    with pytest.raises(expected) as raised:
        exec(statement, {})
    assert type(raised.value) is expected
    return str(raised.value)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_unknown_name_raises_the_same_text_on_access_and_on_import(dialect):
    place = f"mezzo.compat.{dialect}"
    on_access = error_of(f"import {place} as d; d.no_such_name", AttributeError)
    assert on_access.startswith(f"{place} has no no_such_name. ")
    assert f"docs/coming-from/{dialect}.md" in on_access
    assert error_of(f"from {place} import no_such_name", ImportError) == on_access
    assert error_of(f"import {place}.no_such_name", ModuleNotFoundError) == on_access
    assert error_of(f"from {place}.no_such_name import x", ModuleNotFoundError) == on_access
    assert not hasattr(importlib.import_module(place), "no_such_name")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("apex.amp.handle", "Use amp.scale_loss."),
        ("apex.contrib", "Use torch's own layers"),
        ("apex.fp16_utils.no_such", "docs/coming-from/apex.md"),
        ("apex.normalization.BatchNorm2d", "Use torch.nn.BatchNorm2d."),
        ("apex.optimizers.RMSprop", "Use torch.optim.RMSprop."),
        ("apex.parallel.multiproc", "Use torchrun."),
        ("megengine.amp.autocats", "Did you mean 'autocast'"),
        ("megengine.data", "Use torch.utils.data."),
        ("megengine.device.get_cuda_device_property", "docs/coming-from/megengine.md"),
        ("megengine.functional.interpolate", "Use torch.nn.functional.interpolate."),
        ("megengine.functional.loss.ctc_loss", "Use torch.nn.functional.ctc_loss"),
        ("megengine.functional.nn.sliding_window", "Use torch.nn.functional.unfold."),
        ("megengine.functional.vision", "vision.nms is torchvision.ops.nms"),
        ("megengine.hub.lod", "Did you mean 'load'"),
        ("megengine.jit", "Use torch.compile"),
        ("megengine.module.LSTM", "Use torch.nn.LSTM."),
        ("megengine.module.init.orthogonal_", "Use torch.nn.init.orthogonal_."),
        ("megengine.distributed.launcher", "Use torchrun, and"),
        ("mxnet.amp.LossScaler", "Use amp.init_trainer"),
        ("mxnet.contrib.onnx", "Use Converted.export_onnx"),
        ("mxnet.initializer.Bilinear", "docs/coming-from/mxnet.md"),
        ("mxnet.gluon.data.vision", "Use torchvision.datasets"),
        ("mxnet.random.sed", "Did you mean 'seed'"),
        ("mxnet.test_utils.assert_almost_equal", "docs/coming-from/mxnet.md"),
        ("oneflow.amp.custom_fwd", "Use torch.amp.custom_fwd."),
        ("oneflow.nn.COCOReader", "Use torchvision.datasets.CocoDetection."),
        ("oneflow.nn.functional.sparse_softmax_cross_entropy", "Use nn.functional.cross_entropy."),
        ("oneflow.sbp", "Use torch.distributed.tensor"),
        ("paddle.callbacks.EarlyStopping", "sets self.model.stop_training"),
        ("paddle.distributed.fleet", "Use paddle.DataParallel"),
        ("paddle.io.WeightedRandomSampler", "Use torch.utils.data.WeightedRandomSampler."),
        ("paddle.metric.Acuracy", "Did you mean 'accuracy'"),
        ("paddle.nn.functional.fold", "Use torch.nn.functional.fold."),
        ("paddle.nn.initializer.Orthogonal", "Use torch.nn.init."),
        ("paddle.relu", "Use torch.relu."),
        ("paddle.vision.transforms.RandomCrop", "Use torchvision.transforms."),
        ("torch.custom_fwd", "Use torch.amp.custom_fwd."),
    ],
    ids=lambda value: value if "Use" not in value else "",
)
def test_the_error_names_the_replacement(name, remedy):
    module, _, attribute = f"mezzo.compat.{name}".rpartition(".")
    assert remedy in error_of(f"import {module} as d; d.{attribute}", AttributeError)
    assert remedy in error_of(f"from {module} import {attribute}", ImportError)


def test_an_import_in_a_function_and_among_other_names_has_the_text_too():
    program = (
        "def f():\n    from mezzo.compat.megengine import tensor, jit as j, amp\n    return j\nf()"
    )
    assert "Use torch.compile" in error_of(program, ImportError)


def test_names_that_exist_in_torch_are_oneflows_too():
    from mezzo.compat.oneflow import randn
    from mezzo.compat.oneflow.nn import Linear

    assert (randn, Linear) == (sys.modules["torch"].randn, sys.modules["torch"].nn.Linear)


def test_dunder_names_raise_pythons_own_error():
    import mezzo.compat.oneflow as flow

    with pytest.raises(AttributeError, match="has no attribute '__wrapped__'"):
        _ = flow.__wrapped__


def test_modules_outside_of_the_dialects_are_not_affected():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'mezzo.no_such_module'"):
        importlib.import_module("mezzo.no_such_module")
    assert importlib.util.find_spec("no_such_package") is None
