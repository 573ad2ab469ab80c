"""`paddle.nn.Layer` and its containers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat import paddle
from mezzo.compat.paddle.nn import initializer


class Net(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.layers = paddle.nn.LayerList([paddle.nn.Linear(4, 4) for _ in range(2)])
        self.norm = paddle.nn.BatchNorm1D(4)
        self.scale = self.create_parameter([4], default_initializer=initializer.Constant(2.0))
        self.register_buffer("steps", paddle.zeros([1]), persistable=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) * self.scale


def test_parameters_and_sublayers_are_lists_with_paddles_names():
    net = Net()
    assert isinstance(net.parameters(), list)
    assert [list(parameter.shape) for parameter in net.parameters(include_sublayers=False)] == [[4]]
    assert len(net.parameters()) == 7 == len(list(net.named_parameters()))
    assert [name for name, _ in net.named_parameters(include_sublayers=False)] == ["scale"]
    assert len(net.buffers()) == 4
    assert len(net.buffers(include_sublayers=False)) == 1
    assert len(net.sublayers()) == 4 == len(net.sublayers(include_self=True)) - 1
    assert [name for name, _ in net.named_sublayers()][:2] == ["layers", "layers.0"]
    assert net.add_sublayer("extra", paddle.nn.ReLU()) is net.extra
    assert net.add_parameter("gain", net.create_parameter([1], is_bias=True)) is net.gain
    assert net.gain.item() == 0.0
    assert net.full_name() == "net"


def test_every_layer_of_paddle_is_a_layer_and_a_module_of_torch():
    for layer, base in [
        (paddle.nn.Linear(2, 2), nn.Linear),
        (paddle.nn.BatchNorm2D(2), nn.BatchNorm2d),
        (paddle.nn.LayerNorm(2), nn.LayerNorm),
        (paddle.nn.Conv2D(1, 1, 1), nn.Conv2d),
        (paddle.nn.Sequential(), nn.Sequential),
        (paddle.nn.LayerList(), nn.ModuleList),
    ]:
        assert isinstance(layer, base)
        assert isinstance(layer, paddle.nn.Layer)


def test_a_state_dict_has_tensors_of_paddle_and_loads_arrays():
    net, other = Net(), Net()
    state = net.state_dict()
    assert {type(value) for value in state.values()} == {paddle.Tensor}
    assert "steps" not in state
    assert state["layers.0.weight"].numpy().shape == (4, 4)
    arrays = {name: value.numpy() for name, value in state.items()}
    assert other.set_state_dict(arrays) == ([], [])
    assert torch.equal(other.layers[1].weight, net.layers[1].weight)
    other.load_state_dict(state)


def test_entries_that_are_missing_or_have_another_shape_are_left_out_with_a_warning():
    layer = paddle.nn.Linear(2, 3)
    before = layer.bias.numpy().copy()
    with pytest.warns(UserWarning, match=r"Skip loading for bias.*shape \[2\].*\[3\]"):
        layer.set_state_dict({"weight": np.ones((2, 3)), "bias": np.ones(2), "more": np.ones(1)})
    assert (layer.weight.numpy() == 1).all()
    assert (layer.bias.numpy() == before).all()
    with pytest.warns(UserWarning, match="Skip loading for bias.*not found"):
        assert layer.set_dict({"weight": np.ones((2, 3))}) == (["bias"], [])


def test_to_takes_paddles_names():
    net = Net()
    assert net.to("cpu") is net is net.to(device=paddle.CPUPlace()) is net.to()
    assert net.to(dtype="float64").scale.dtype is torch.float64
    assert net.astype("float32").scale.dtype is torch.float32
    assert net.float16().scale.dtype is torch.float16
    with pytest.raises(ValueError, match=r"Use paddle.amp.decorate"):
        net.float16(excluded_layers=[nn.Linear])


def test_gradients_are_cleared_and_hooks_called():
    net, seen = Net(), []
    handle = net.register_forward_post_hook(lambda layer, inputs, output: seen.append(output))
    net(paddle.rand([3, 4])).sum().backward()
    assert len(seen) == 1
    handle.remove()
    net.clear_gradients()
    assert {float(parameter.grad.abs().sum()) for parameter in net.parameters()} == {0.0}
    net.clear_gradients(set_to_zero=False)
    assert {parameter.grad for parameter in net.parameters()} == {None}


def test_a_sequential_takes_layers_and_pairs():
    assert [name for name, _ in paddle.nn.Sequential(nn.ReLU(), nn.Tanh()).named_children()] == [
        "0",
        "1",
    ]
    named = paddle.nn.Sequential(("first", paddle.nn.Linear(2, 2)), ("second", paddle.nn.ReLU()))
    assert named.first.weight.shape == [2, 2]
    assert named[1] is named.second
    assert len(paddle.nn.LayerDict({"a": nn.ReLU()})) == 1
    assert len(paddle.nn.ParameterList([named.first.weight]).parameters()) == 1


def test_attributes_choose_initializers_and_leave_parameters_out():
    attr = paddle.ParamAttr(initializer=initializer.Constant(3.0), trainable=False)
    layer = paddle.nn.Linear(2, 2, weight_attr=attr, bias_attr=False)
    assert (layer.weight.numpy() == 3).all()
    assert layer.weight.stop_gradient
    assert layer.bias is None
    assert layer(paddle.ones([1, 2])).numpy().tolist() == [[6.0, 6.0]]
    assert (paddle.nn.Linear(2, 2, initializer.Constant(1.0)).weight.numpy() == 1).all()
    with pytest.raises(ValueError, match="Give the parameter an optimizer of its own"):
        paddle.ParamAttr(need_clip=False)


def test_parameters_have_paddles_names():
    class OwnNet(paddle.nn.Layer):
        pass

    first, second = paddle.nn.Conv2D(1, 1, 1), paddle.nn.Conv2D(1, 1, 1)
    prefix, number = first.weight.name.removesuffix(".w_0").rsplit("_", 1)
    assert prefix == "conv2d"
    assert first.bias.name == f"conv2d_{number}.b_0"
    assert second.weight.name == f"conv2d_{int(number) + 1}.w_0"
    assert paddle.nn.BatchNorm2D(1).bias.name.startswith("batch_norm2d_")
    net = OwnNet()
    names = [net.create_parameter([1]).name for _ in range(2)]
    assert [name.split(".")[1] for name in names] == ["w_0", "w_1"]
    assert net.create_parameter([1], attr="mine").name == "mine"
    assert net.create_parameter([1], attr=paddle.ParamAttr(name="own")).name == "own"


def test_a_copied_parameter_keeps_its_options_under_another_name():
    attr = paddle.ParamAttr(learning_rate=0.1, regularizer=paddle.regularizer.L2Decay(0.5))
    weight = paddle.nn.Linear(1, 1, attr).weight
    copied = copy.deepcopy(weight)
    assert (copied.optimize_attr, copied.regularizer) == (weight.optimize_attr, weight.regularizer)
    assert copied.name.startswith(f"{weight.name}_deepcopy_")


@pytest.mark.parametrize(
    ("made", "low", "high"),
    [
        (initializer.XavierUniform(), -0.3, 0.3),
        (initializer.XavierNormal(fan_in=50, fan_out=150), -0.7, 0.7),
        (initializer.KaimingUniform(), -0.25, 0.25),
        (initializer.KaimingNormal(), -1.0, 1.0),
        (initializer.Normal(std=0.1), -0.7, 0.7),
        (initializer.TruncatedNormal(std=0.1), -0.2, 0.2),
        (initializer.Uniform(0.0, 0.5), 0.0, 0.5),
        (initializer.Assign(np.full((100, 50), 0.1)), 0.0, 0.2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_initializers_stay_in_their_range(made, low, high):
    values = paddle.nn.Linear(100, 50, weight_attr=made).weight.numpy()
    assert low <= values.min()
    assert values.max() <= high
    assert values.std() > 0 or isinstance(made, initializer.Assign)


def test_xavier_takes_the_fans_of_paddles_layouts():
    bound = (6 / (3 * 9 + 8 * 9)) ** 0.5
    weight = paddle.nn.Conv2D(3, 8, 3, weight_attr=initializer.XavierUniform()).weight
    assert bound * 0.9 < weight.abs().max() <= bound
    assert initializer.XavierUniform()(paddle.nn.Linear(1, 1).bias) is None


def test_a_layer_trains_in_a_step_of_mezzo():
    net = Net()
    before = copy.deepcopy(net.layers[0].weight)
    optimizer = paddle.optimizer.SGD(learning_rate=0.5, parameters=net.parameters())

    @mezzo.train_step(models=net, optimizers=optimizer, policy="O1", dtype="bfloat16")
    def step(x, y):
        loss = paddle.nn.functional.mse_loss(net(x), y)
        loss.backward()
        return loss

    x = paddle.rand([8, 4])
    losses = [float(step(x, x)) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert not torch.equal(before, net.layers[0].weight)
    assert step.eval(x, x) is not None if hasattr(step, "eval") else True


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_decorated_layers_train_with_masters_and_a_scaler(level):
    torch.manual_seed(0)
    net = Net()
    optimizer = paddle.optimizer.Momentum(learning_rate=0.1, parameters=net.parameters())
    net, optimizer = paddle.amp.decorate(models=net, optimizers=optimizer, level=level)
    assert net.norm.weight.dtype is torch.float32
    expected = torch.float16 if level == "O2" else torch.float32
    assert {layer.weight.dtype for layer in net.layers} == {expected}
    scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)
    x, losses = paddle.rand([8, 4]), []
    for _ in range(6):
        with paddle.amp.auto_cast(level=level):
            loss = paddle.nn.functional.mse_loss(net(x), x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert set(net.state_dict()) >= {"layers.0.weight", "norm.running_mean", "scale"}


def test_a_step_with_non_finite_gradients_is_skipped():
    layer = paddle.nn.Linear(2, 2)
    before = layer.weight.numpy().copy()
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=layer.parameters())
    scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)
    scaler.scale((layer(paddle.ones([1, 2])) * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (layer.weight.numpy() == before).all()
    assert scaler.state_dict()["scale"].item() == 512.0


def test_excluded_layers_may_be_types_of_paddle():
    net = paddle.nn.Sequential(paddle.nn.Linear(2, 2), paddle.nn.Conv2D(1, 1, 1))
    paddle.amp.decorate(net, level="O2", excluded_layers=[paddle.nn.Conv2D])
    assert (net[0].weight.dtype, net[1].weight.dtype) == (torch.float16, torch.float32)


def test_a_parallel_layer_is_a_layer():
    net = paddle.DataParallel(paddle.nn.Linear(2, 2))
    assert isinstance(net, paddle.nn.Layer)
    assert len(net.parameters()) == 2
    net.set_state_dict(paddle.nn.Linear(2, 2).state_dict())
    with pytest.warns(UserWarning, match="Skip loading"):
        net.set_dict({})
