"""Programs of MXNet's AMP tutorial, one test per code block, on a small detector."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mezzo.compat.mxnet import autograd, gluon, io, mod, model
from mezzo.compat.mxnet.contrib import amp

CLASSES, BOXES = 4, 16
LR, WD, MOMENTUM = 0.05, 0.0005, 0.9


@pytest.fixture(autouse=True)
def disable_amp_afterwards():
    yield
    amp.uninit()


class SyntheticDataLoader:
    """Random images, classes and boxes; the same batch at every step."""

    def __init__(self, data_shape, batch_size, epoch_size):
        generator = torch.Generator().manual_seed(0)
        self.counter, self.epoch_size = 0, epoch_size
        self.data = torch.rand(batch_size, 3, data_shape, data_shape, generator=generator) * 2 - 1
        self.cls_targets = torch.randint(CLASSES, (batch_size, BOXES), generator=generator)
        self.box_targets = torch.rand(batch_size, BOXES, 4, generator=generator)

    def __iter__(self):
        return self

    def __next__(self):
        if self.counter >= self.epoch_size:
            self.counter = self.counter % self.epoch_size
            raise StopIteration
        self.counter += 1
        return [self.data, self.cls_targets, self.box_targets]


class Detector(nn.Module):
    """A backbone with one head for classes and one for boxes; anchors are the last output."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.classes, self.boxes = nn.Conv2d(16, CLASSES, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        features = self.backbone(x)
        classes, boxes = (
            head(features).flatten(2).transpose(1, 2) for head in (self.classes, self.boxes)
        )
        return classes, boxes, torch.arange(BOXES)


def get_network():
    torch.manual_seed(0)
    return Detector()


def mbox_loss(cls_preds, box_preds, cls_targets, box_targets):
    """Return summed, class and box losses, each a list over devices as in MXNet."""
    cls_loss = [
        F.cross_entropy(pred.flatten(0, 1), target.flatten())
        for pred, target in zip(cls_preds, cls_targets, strict=True)
    ]
    box_loss = [
        F.smooth_l1_loss(pred, target) for pred, target in zip(box_preds, box_targets, strict=True)
    ]
    sum_loss = [classes + boxes for classes, boxes in zip(cls_loss, box_loss, strict=True)]
    return sum_loss, cls_loss, box_loss


def train(net, trainer, backward, epoch_size=30):
    """Train for one epoch; `backward` is where the two halves of the tutorial differ."""
    losses, dtypes = [], set()
    for batch in SyntheticDataLoader(16, 4, epoch_size):
        data, cls_targets, box_targets = ([part] for part in batch)
        with autograd.record():
            cls_preds, box_preds = [], []
            for x in data:
                cls_pred, box_pred, _ = net(x)
                cls_preds.append(cls_pred)
                box_preds.append(box_pred)
            sum_loss, cls_loss, box_loss = mbox_loss(cls_preds, box_preds, cls_targets, box_targets)
            backward(sum_loss)
        trainer.step(1)
        dtypes.add(cls_preds[0].dtype)
        losses.append((cls_loss[0].item(), box_loss[0].item()))
    return losses, dtypes


def make_trainer(net, **kwargs):
    return gluon.Trainer(
        dict(net.named_parameters()),
        "sgd",
        {"learning_rate": LR, "wd": WD, "momentum": MOMENTUM},
        **kwargs,
    )


def train_in_float32():
    net = get_network()
    return train(net, make_trainer(net), autograd.backward)


def test_the_loader_yields_an_epoch_and_restarts():
    loader = SyntheticDataLoader(16, 4, epoch_size=3)
    assert [len(list(loader)) for _ in range(2)] == [3, 3]


def test_the_network_returns_classes_boxes_and_anchors():
    classes, boxes, anchors = get_network()(torch.zeros(2, 3, 16, 16))
    assert (classes.shape, boxes.shape, len(anchors)) == ((2, BOXES, CLASSES), (2, BOXES, 4), BOXES)


def test_a_trainer_takes_the_name_of_its_optimizer():
    trainer = make_trainer(get_network())
    group = trainer.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (LR, WD, MOMENTUM)


def test_training_in_float32_lowers_the_loss():
    losses, dtypes = train_in_float32()
    assert dtypes == {torch.float32}
    assert losses[-1][0] < 0.9 * losses[0][0]


def test_initialization_logs_that_amp_is_used(caplog):
    with caplog.at_level(logging.INFO):
        amp.init()
    (record,) = caplog.records
    assert f"{record.levelname}:{record.name}:{record.getMessage()}" == "INFO:root:Using AMP"


def test_a_network_constructed_after_initialization_computes_in_float16():
    amp.init()
    classes, boxes, _ = get_network()(torch.zeros(2, 3, 16, 16))
    assert (classes.dtype, boxes.dtype) == (torch.float16, torch.float16)


def test_a_trainer_is_initialized_for_dynamic_scaling():
    amp.init()
    trainer = make_trainer(get_network(), update_on_kvstore=False)
    amp.init_trainer(trainer)
    assert trainer.amp_loss_scale == 2.0**16


def test_training_with_amp_reaches_the_losses_of_float32():
    expected, _ = train_in_float32()
    amp.init()
    net = get_network()
    trainer = make_trainer(net, update_on_kvstore=False)
    amp.init_trainer(trainer)

    def backward(sum_loss):
        with amp.scale_loss(sum_loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)

    losses, dtypes = train(net, trainer, backward)
    assert dtypes == {torch.float16}
    # The tutorial's two logs differ by 2 % at most.
    assert np.allclose(losses[-1], expected[-1], rtol=0.05)
    assert losses[-1][0] < 0.9 * losses[0][0]
    assert all(parameter.dtype is torch.float32 for parameter in net.parameters())


class Classifier(nn.Sequential):
    """A network with a convolution `conv0` and a linear layer `fc1`, named as in the tutorial."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        for name, module in {
            "conv0": nn.Conv2d(3, 8, 3),
            "bn0": nn.BatchNorm2d(8),
            "relu0": nn.ReLU(),
            "pool0": nn.AdaptiveAvgPool2d(1),
            "flatten0": nn.Flatten(),
            "fc1": nn.Linear(8, 10),
            "softmax": nn.Softmax(-1),
        }.items():
            self.add_module(name, module)
        self.eval()


IMAGES = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def load_checkpoint():
    sym = Classifier()
    return sym, dict(sym.named_parameters()), dict(sym.named_buffers())


def bind_module(sym, arg_params, aux_params):
    module = mod.Module(sym, data_names=["data"], label_names=["softmax_label"], context="cpu")
    module.bind(data_shapes=[["data", (1, 3, 16, 16)]], label_shapes=[["softmax_label", (1,)]])
    module.set_params(arg_params, aux_params)
    return module


def test_a_block_and_a_symbol_are_converted_for_inference():
    block = Classifier()
    converted_model = amp.convert_hybrid_block(block)
    result = converted_model.forward(IMAGES)
    assert result.dtype is torch.float32
    assert torch.allclose(result, block(IMAGES), atol=1e-3)

    sym, arg_params, aux_params = load_checkpoint()
    result_sym, result_arg_params, result_aux_params = amp.convert_model(
        sym, arg_params, aux_params
    )
    module = bind_module(result_sym, result_arg_params, result_aux_params)
    module.forward(io.DataBatch(data=[IMAGES], label=[torch.ones(1)]))
    assert torch.allclose(module.get_outputs()[0], sym(IMAGES), atol=1e-3)
    assert result_sym.converted.casts.after.count > 0
    assert (result_arg_params.keys(), result_aux_params.keys()) == (
        arg_params.keys(),
        aux_params.keys(),
    )


def test_lists_and_stored_parameters_are_customized_and_saved_with_their_casts(tmp_path):
    sym, arg_params, aux_params = load_checkpoint()
    result_sym, result_arg_params, result_aux_params = amp.convert_model(
        sym,
        arg_params,
        aux_params,
        target_dtype_ops=["Convolution"],
        fp32_ops=["SoftmaxOutput", "FullyConnected"],
        cast_optional_params=True,
    )
    module = bind_module(result_sym, result_arg_params, result_aux_params)
    module.forward(io.DataBatch(data=[IMAGES], label=[torch.ones(1)]))
    result = module.get_outputs()[0]
    assert torch.allclose(result, sym(IMAGES), atol=1e-3)
    # Parameters of convolutions are float16; those of the linear layer stay float32.
    assert module._arg_params["conv0.weight"].dtype is torch.float16
    assert module._arg_params["fc1.bias"].dtype is torch.float32
    assert {value.dtype for value in result_aux_params.values() if value.is_floating_point()} == {
        torch.float32
    }

    prefix = tmp_path / "amp_tutorial_model"
    module.save_checkpoint(prefix, 0, remove_amp_cast=False)
    loaded, loaded_arg_params, _ = model.load_checkpoint(prefix, 0)
    assert torch.equal(loaded(IMAGES), result)
    assert loaded_arg_params["conv0.weight"].dtype is torch.float16


def test_output_layers_work_with_several_trainers():
    from mezzo.compat.mxnet import nd

    amp.init()
    nets = [nn.Linear(4, 2) for _ in range(2)]
    trainers = [
        gluon.Trainer(
            dict(net.named_parameters()), "sgd", {"learning_rate": 0.5}, update_on_kvstore=on
        )
        for net, on in zip(nets, (True, False), strict=True)
    ]
    for trainer in trainers:
        amp.init_trainer(trainer)
    x, label = torch.rand(8, 4) / 16, torch.tensor([0, 1] * 4)
    before = [F.cross_entropy(net(x).float(), label).item() for net in nets]
    for _ in range(20):
        outputs = [nd.SoftmaxOutput(net(x), label) for net in nets]
        with amp.scale_loss(outputs, trainers) as scaled:
            autograd.backward(scaled)
        for trainer in trainers:
            trainer.step(8)
    assert all(
        F.cross_entropy(net(x).float(), label).item() < old
        for net, old in zip(nets, before, strict=True)
    )
