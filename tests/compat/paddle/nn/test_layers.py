"""Layers, losses and functions of `paddle.nn` against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mezzo.compat import paddle
from mezzo.compat.paddle import nn

PF = paddle.nn.functional


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_a_linear_layer_has_paddles_layout_and_first_values():
    layer = nn.Linear(64, 32)
    bound = (6 / (64 + 32)) ** 0.5
    assert layer.weight.shape == [64, 32]
    assert layer.state_dict()["weight"].shape == [64, 32]
    assert 0.9 * bound < layer.weight.abs().max() <= bound
    assert not layer.bias.any()
    assert (layer.in_features, layer.out_features) == (64, 32)
    x = paddle.rand([2, 5, 64])
    layer.bias.set_value(np.arange(32))
    assert torch.allclose(layer(x), x @ layer.weight + layer.bias, atol=1e-5)


def test_a_linear_layer_runs_in_16_bits_at_o1_without_an_extra_cast():
    layer = nn.Linear(8, 8)
    with paddle.amp.auto_cast(dtype="bfloat16"):
        out = layer(paddle.rand([2, 8]))
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert (layer.weight.grad.dtype, layer.weight.grad.shape) == (torch.float32, [8, 8])


def test_a_linear_layer_is_recorded_as_one_op_of_a_static_program():
    program = paddle.static.Program()
    layer = nn.Linear(4, 2)
    with paddle.static.program_guard(program):
        loss = nn.MSELoss()(
            layer(paddle.static.data("x", [-1, 4])), paddle.static.data("y", [-1, 2])
        )
    assert [node.name for node in program.nodes] == ["linear", "mse_loss"]
    assert any(tensor is layer.weight for tensor in program.nodes[0].tensors())
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=layer.parameters())
    optimizer.minimize(loss)
    executor = paddle.static.Executor(paddle.CPUPlace())
    feed = {"x": np.ones((3, 4), "float32"), "y": np.ones((3, 2), "float32")}
    losses = [executor.run(program, feed=feed, fetch_list=[loss])[0] for _ in range(4)]
    assert losses[-1] < losses[0]


def test_a_black_list_keeps_the_linear_layers_of_a_static_program_float32():
    program, layer = paddle.static.Program(), nn.Linear(4, 2)
    with paddle.static.program_guard(program):
        loss = layer(paddle.static.data("x", [2, 4])).mean()
    optimizer = paddle.optimizer.SGD(learning_rate=0.5, parameters=layer.parameters())
    lists = paddle.static.amp.CustomOpLists(custom_black_list=["matmul_v2"])
    optimizer = paddle.static.amp.decorate(
        optimizer, amp_lists=lists, use_pure_fp16=True, use_fp16_guard=False
    )
    optimizer.minimize(loss)
    optimizer.amp_init(paddle.CPUPlace())
    assert layer.weight.dtype is torch.float32


def test_a_convolution_has_paddles_first_values_and_torchs_results():
    layer = nn.Conv2D(3, 8, 3, stride=2, padding=1)
    assert layer.weight.std().item() == pytest.approx((2 / 27) ** 0.5, rel=0.2)
    x = paddle.rand([2, 3, 8, 8])
    assert torch.allclose(layer(x), F.conv2d(x, layer.weight, layer.bias, 2, 1))
    assert nn.Conv2D(3, 8, 3, padding="SAME")(x).shape == [2, 8, 8, 8]
    assert torch.allclose(
        PF.conv2d(x, layer.weight, stride=2, padding="VALID")[0, 0, 0, 0],
        (x[0, :, :3, :3] * layer.weight[0]).sum(),
        atol=1e-5,
    )
    with pytest.raises(ValueError, match="data_format='NHWC' is not supported, only 'NCHW'"):
        nn.Conv2D(3, 8, 3, data_format="NHWC")


def test_the_momentum_of_a_batch_norm_is_the_share_of_the_average_so_far():
    layer = nn.BatchNorm2D(2, momentum=0.75)
    x = paddle.ones([4, 2, 3, 3])
    layer(x)
    assert layer.running_mean.tolist() == [0.25, 0.25]
    layer.eval()
    layer.set_state_dict(
        {
            "weight": np.ones(2),
            "bias": np.ones(2),
            "_mean": np.zeros(2),
            "_variance": np.ones(2),
            "num_batches_tracked": np.array(0),
        }
    )
    assert torch.allclose(layer(x), x + 1, atol=1e-4)
    assert nn.BatchNorm1D(2)(paddle.rand([4, 2])).shape == [4, 2]
    assert nn.BatchNorm3D(2)(paddle.rand([2, 2, 2, 2, 2])).shape == [2] * 5
    assert nn.BatchNorm2D(2, weight_attr=False, bias_attr=False).parameters() == []
    with pytest.raises(ValueError, match=r"Call eval\(\) on the layer"):
        nn.BatchNorm2D(2, use_global_stats=True)
    with pytest.raises(ValueError, match="NHWC"):
        nn.BatchNorm2D(2, data_format="NHWC")


def test_the_older_batch_norm_takes_any_input_and_an_activation():
    layer = nn.BatchNorm(2, act="relu")
    assert layer(paddle.randn([8, 2])).min() >= 0
    assert layer(paddle.randn([8, 2, 3])).shape == [8, 2, 3]
    assert not nn.BatchNorm(2, is_test=True).training


@pytest.mark.parametrize(
    ("layer", "function", "shape"),
    [
        (lambda: nn.ReLU(), F.relu, [2, 3]),
        (lambda: nn.ReLU6(), F.relu6, [2, 3]),
        (lambda: nn.LeakyReLU(0.2), lambda x: F.leaky_relu(x, 0.2), [2, 3]),
        (lambda: nn.Tanh(), torch.tanh, [2, 3]),
        (lambda: nn.Sigmoid(), torch.sigmoid, [2, 3]),
        (lambda: nn.Silu(), F.silu, [2, 3]),
        (lambda: nn.Hardswish(), F.hardswish, [2, 3]),
        (lambda: nn.GELU(), F.gelu, [2, 3]),
        (lambda: nn.GELU(True), lambda x: F.gelu(x, approximate="tanh"), [2, 3]),
        (lambda: nn.Softmax(), lambda x: F.softmax(x, -1), [2, 3]),
        (lambda: nn.Softmax(axis=0), lambda x: F.softmax(x, 0), [2, 3]),
        (lambda: nn.Identity(), lambda x: x, [2, 3]),
        (lambda: nn.Flatten(1), lambda x: x.reshape(2, 12), [2, 3, 4]),
        (lambda: nn.Flatten(0, 1), lambda x: x.reshape(6, 4), [2, 3, 4]),
        (lambda: nn.LayerNorm(4), lambda x: F.layer_norm(x, [4]), [2, 4]),
        (lambda: nn.LayerNorm([3, 4]), lambda x: F.layer_norm(x, [3, 4]), [2, 3, 4]),
        (lambda: nn.GroupNorm(2, 4), lambda x: F.group_norm(x, 2), [2, 4, 3, 3]),
        (lambda: nn.MaxPool2D(2), lambda x: F.max_pool2d(x, 2), [1, 1, 4, 4]),
        (
            lambda: nn.AvgPool2D(3, 1, 1),
            lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
            [1, 1, 4, 4],
        ),
        (lambda: nn.AdaptiveAvgPool2D(1), lambda x: x.mean((2, 3), keepdim=True), [1, 2, 4, 4]),
        (lambda: nn.Dropout(0.0), lambda x: x, [2, 3]),
        (lambda: lambda x: PF.relu6(PF.leaky_relu(PF.relu(x))), F.relu6, [2, 3]),
        (
            lambda: lambda x: PF.gelu(x, approximate=True),
            lambda x: F.gelu(x, approximate="tanh"),
            [2, 3],
        ),
        (
            lambda: lambda x: PF.softmax(x, axis=0, dtype="float64"),
            lambda x: F.softmax(x, 0, dtype=torch.float64),
            [2, 3],
        ),
        (
            lambda: lambda x: PF.log_softmax(PF.swish(PF.tanh(PF.sigmoid(x)))),
            lambda x: F.log_softmax(F.silu(x.sigmoid().tanh()), -1),
            [2, 3],
        ),
        (lambda: lambda x: PF.softplus(x), F.softplus, [2, 3]),
        (lambda: lambda x: PF.layer_norm(x, 3), lambda x: F.layer_norm(x, [3]), [2, 3]),
        (lambda: lambda x: PF.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 2), [1, 1, 4, 4]),
        (lambda: lambda x: PF.avg_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2), [1, 1, 4, 4]),
        (
            lambda: lambda x: PF.adaptive_avg_pool2d(x, 2),
            lambda x: F.adaptive_avg_pool2d(x, 2),
            [1, 1, 4, 4],
        ),
        (lambda: lambda x: PF.pad(x, [1, 2]), lambda x: F.pad(x, [1, 2]), [2, 3, 4]),
        (lambda: lambda x: PF.pad(x, [1, 0, 0, 2]), lambda x: F.pad(x, [0, 2, 1, 0]), [2, 3]),
        (lambda: lambda x: PF.dropout(x, 0.5, training=False), lambda x: x, [2, 3]),
    ],
)
def test_layers_and_functions_compute_what_torchs_do(layer, function, shape):
    x = paddle.randn(shape)
    assert torch.allclose(layer()(x), function(x), atol=1e-6)


def test_forms_of_dropout_that_torch_lacks_are_refused():
    with pytest.raises(ValueError, match=r"dropout\(axis=0\) is not supported"):
        nn.Dropout(0.5, axis=0)
    with pytest.raises(ValueError, match="mode argument should be 'downscale_in_infer' or"):
        PF.dropout(paddle.ones([2]), mode="upscale")


def test_dropout_that_scales_down_for_inference():
    layer = nn.Dropout(0.25, mode="downscale_in_infer")
    assert set(layer(paddle.ones([100])).tolist()) == {0.0, 1.0}
    assert layer.eval()(paddle.ones([1])).item() == 0.75


def test_an_embedding_starts_xavier_uniform_with_a_row_of_zeros():
    layer = nn.Embedding(50, 50, padding_idx=3)
    bound = (6 / 100) ** 0.5
    assert 0.9 * bound < layer.weight.abs().max() <= bound
    indices = paddle.to_tensor([3, 4])
    assert not layer(indices)[0].any()
    assert torch.equal(PF.embedding(indices, layer.weight), layer.weight[[3, 4]])
    assert PF.one_hot(indices, 5).numpy().tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]


def test_losses_compute_what_torchs_do():
    x, y = paddle.rand([4, 3]), paddle.rand([4, 3])
    for loss, function, expected in [
        (nn.MSELoss(), PF.mse_loss, F.mse_loss(x, y)),
        (nn.L1Loss(), PF.l1_loss, F.l1_loss(x, y)),
        (nn.SmoothL1Loss(), PF.smooth_l1_loss, F.huber_loss(x, y)),
        (nn.BCELoss(), PF.binary_cross_entropy, F.binary_cross_entropy(x, y)),
        (
            nn.BCEWithLogitsLoss(),
            PF.binary_cross_entropy_with_logits,
            F.binary_cross_entropy_with_logits(x, y),
        ),
    ]:
        assert loss(x, y).item() == function(x, y).item() == expected.item()
    assert nn.MSELoss(reduction="sum")(x, y).item() == F.mse_loss(x, y, reduction="sum").item()
    assert torch.equal(PF.square_error_cost(x, y), (x - y) ** 2)


LOGITS = torch.linspace(-1, 1, 24).reshape(4, 6)
LABELS = torch.tensor([0, 5, 2, 3])


@pytest.mark.parametrize(
    "labels",
    [LABELS, LABELS[:, None], LABELS.int(), LABELS[:, None].to(torch.uint8)],
    ids=["(N,)", "(N, 1)", "int32", "uint8"],
)
def test_cross_entropy_takes_labels_with_and_without_a_last_axis(labels):
    expected = F.cross_entropy(LOGITS, LABELS)
    assert nn.CrossEntropyLoss()(LOGITS, labels).item() == expected.item()
    unreduced = PF.cross_entropy(LOGITS, labels, reduction="none")
    assert tuple(unreduced.shape) == tuple(labels.shape)


def test_cross_entropy_has_paddles_options():
    soft = LOGITS.softmax(-1)
    expected = F.cross_entropy(LOGITS, soft)
    assert PF.cross_entropy(LOGITS, soft, soft_label=True) == expected
    assert PF.cross_entropy(soft, LABELS, use_softmax=False) == pytest.approx(
        F.cross_entropy(LOGITS, LABELS).item()
    )
    assert PF.cross_entropy(soft, soft, soft_label=True, use_softmax=False) == pytest.approx(
        expected.item()
    )
    assert PF.cross_entropy(LOGITS, LABELS, ignore_index=5) == F.cross_entropy(
        LOGITS[[0, 2, 3]], LABELS[[0, 2, 3]]
    )
    assert nn.CrossEntropyLoss(label_smoothing=0.1)(LOGITS, LABELS) == F.cross_entropy(
        LOGITS, LABELS, label_smoothing=0.1
    )
    weight = torch.arange(1.0, 7.0)
    assert nn.CrossEntropyLoss(weight)(LOGITS, LABELS) == F.cross_entropy(LOGITS, LABELS, weight)
    assert PF.softmax_with_cross_entropy(LOGITS, LABELS[:, None]).shape == (4, 1)
    assert PF.nll_loss(LOGITS.log_softmax(-1), LABELS) == F.cross_entropy(LOGITS, LABELS)


@pytest.mark.parametrize("axis", [-1, 1])
def test_cross_entropy_of_images_has_classes_on_an_axis(axis):
    logits, labels = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    expected = F.cross_entropy(logits, labels)
    moved = logits.movedim(1, axis)
    for target in (labels, labels.unsqueeze(axis)):
        assert torch.allclose(PF.cross_entropy(moved, target, axis=axis), expected)
    soft = torch.rand_like(logits).movedim(1, axis)
    assert torch.allclose(
        PF.cross_entropy(moved, soft, soft_label=True, axis=axis),
        F.cross_entropy(logits, soft.movedim(axis, 1)),
    )


@pytest.mark.parametrize(
    ("layer", "function", "shape"),
    [
        (lambda: nn.Hardsigmoid(), F.hardsigmoid, [2, 3]),
        (lambda: nn.Mish(), F.mish, [2, 3]),
        (lambda: nn.ELU(0.5), lambda x: F.elu(x, 0.5), [2, 3]),
        (lambda: nn.Softplus(2.0), lambda x: F.softplus(x, 2.0), [2, 3]),
        (lambda: nn.LogSoftmax(0), lambda x: F.log_softmax(x, 0), [2, 3]),
        (lambda: nn.Hardtanh(-0.5, 0.5), lambda x: x.clamp(-0.5, 0.5), [2, 3]),
        (lambda: nn.PReLU(3, 0.5), lambda x: F.leaky_relu(x, 0.5), [2, 3, 4]),
        (lambda: nn.InstanceNorm2D(3), F.instance_norm, [2, 3, 4, 4]),
        (lambda: nn.SyncBatchNorm(3).eval(), lambda x: x / (1 + 1e-5) ** 0.5, [2, 3, 4, 4]),
        (lambda: nn.AdaptiveMaxPool2D(2), lambda x: F.adaptive_max_pool2d(x, 2), [2, 3, 4, 4]),
        (
            lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
            lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
            [2, 3, 4, 4],
        ),
        (
            lambda: lambda x: PF.interpolate(x, paddle.to_tensor([2, 6])),
            lambda x: F.interpolate(x, (2, 6)),
            [2, 3, 4, 4],
        ),
        (lambda: lambda x: PF.hardsigmoid(x, 0.25), lambda x: (x / 4 + 0.5).clamp(0, 1), [2, 3]),
        (lambda: lambda x: PF.label_smooth(x, epsilon=0.5), lambda x: x / 2 + 0.125, [2, 4]),
        (lambda: lambda x: PF.normalize(x, axis=0), lambda x: F.normalize(x, dim=0), [2, 4]),
        (lambda: nn.Dropout2D(0.5).eval(), lambda x: x, [2, 3, 4, 4]),
    ],
)
def test_more_layers_and_functions_compute_what_torchs_do(layer, function, shape):
    x = paddle.randn(shape)
    assert torch.allclose(layer()(x), function(x), atol=1e-6)


def test_convolutions_of_other_dimensions_have_torchs_results():
    x = paddle.rand([2, 4, 6])
    layer = nn.Conv1D(4, 2, 3, groups=2)
    assert torch.allclose(layer(x), F.conv1d(x, layer.weight, layer.bias, groups=2))
    layer = nn.Conv3D(1, 2, 2)
    assert layer(paddle.rand([1, 1, 3, 3, 3])).shape == [1, 2, 2, 2, 2]
    image = paddle.rand([2, 4, 3, 3])
    layer = nn.Conv2DTranspose(4, 2, 3, 2, 1, 1, dilation=1, groups=2)
    assert layer(image).shape == [2, 2, 6, 6]
    assert torch.allclose(
        layer(image), F.conv_transpose2d(image, layer.weight, layer.bias, 2, 1, 1, 2)
    )
    with pytest.raises(ValueError, match="data_format='NLC' is not supported, only 'NCL'"):
        nn.Conv1D(1, 1, 1, data_format="NLC")


@pytest.mark.parametrize(("layer", "reference"), [("LSTM", "LSTM"), ("GRU", "GRU")])
def test_recurrent_layers_take_batches_first(layer, reference):
    made = getattr(nn, layer)(3, 4, num_layers=2, direction="bidirectional")
    torchs = getattr(torch.nn, reference)(3, 4, 2, batch_first=True, bidirectional=True)
    torchs.load_state_dict(made.state_dict())
    x = paddle.randn([2, 5, 3])
    output, states = made(x)
    assert output.shape == [2, 5, 8]
    assert torch.allclose(output, torchs(x)[0], atol=1e-6)
    assert len(states) == 2 if layer == "LSTM" else states.shape == [4, 2, 4]
    assert made.weight_ih_l0.name.startswith(layer.lower())
    with pytest.raises(ValueError, match="direction should be forward or bidirect"):
        getattr(nn, layer)(3, 4, direction="both")
    with pytest.raises(ValueError, match="Pack the inputs"):
        made(x, sequence_length=paddle.to_tensor([5, 3]))


@pytest.mark.parametrize("before", [False, True])
def test_a_transformer_encoder_computes_what_torchs_does(before):
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", normalize_before=before)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8)).eval()
    torchs = torch.nn.TransformerEncoderLayer(
        8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=before
    ).eval()
    state = {}
    for name, array in encoder.layers[1].state_dict().items():
        value = torch.as_tensor(array.numpy())
        state[name] = value.t() if value.dim() == 2 else value
    for kind in ("weight", "bias"):
        parts = [state.pop(f"self_attn.{name}_proj.{kind}") for name in "qkv"]
        state[f"self_attn.in_proj_{kind}"] = torch.cat(parts)
    torchs.load_state_dict(state)
    x = torch.randn(2, 5, 8)
    assert torch.allclose(encoder.layers[1](paddle.to_tensor(x)), torchs(x), atol=1e-5)
    keep = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    keep[1, ..., 3:] = False
    masked = encoder(paddle.to_tensor(x), paddle.to_tensor(keep))
    changed = x.clone()
    changed[1, 3:] = 0.0
    assert torch.allclose(
        masked[1, :3], encoder(paddle.to_tensor(changed), paddle.to_tensor(keep))[1, :3], atol=1e-5
    )
    with pytest.raises(ValueError, match="cache= is not supported"):
        encoder(paddle.to_tensor(x), cache=[])


def test_the_ctc_loss_takes_logits():
    logits = paddle.randn([6, 2, 5])
    labels, lengths = (
        paddle.to_tensor([[1, 2], [3, 0]]),
        (
            paddle.to_tensor([6, 6]),
            paddle.to_tensor([2, 1]),
        ),
    )
    expected = F.ctc_loss(logits.log_softmax(-1), labels, *lengths, reduction="none")
    assert torch.allclose(nn.CTCLoss(reduction="none")(logits, labels, *lengths), expected)


def test_softmax_with_cross_entropy_returns_the_softmax_too():
    logits, label = paddle.randn([3, 4]), paddle.to_tensor([[0], [1], [3]])
    loss, probabilities = PF.softmax_with_cross_entropy(logits, label, return_softmax=True)
    assert loss.shape == [3, 1]
    assert torch.allclose(probabilities, F.softmax(logits, -1))


def test_the_accuracy_of_a_batch_counts_the_top_predictions():
    predicted = paddle.to_tensor([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]])
    label = paddle.to_tensor([[1], [2]])
    assert paddle.metric.accuracy(predicted, label).item() == 0.5
    assert paddle.metric.accuracy(predicted, label, k=2).item() == 1.0


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_loss_of_bfloat16_logits_is_float32(level):
    # The oracle's rows `cross_entropy` and `cross_entropy_soft` with bf16 inputs.
    logits, labels = paddle.randn([4, 5]).astype("bfloat16"), paddle.to_tensor([[0], [1], [2], [3]])
    soft = PF.softmax(paddle.randn([4, 5])).astype("bfloat16")
    with paddle.amp.auto_cast(level=level, dtype="bfloat16"):
        losses = [
            nn.CrossEntropyLoss()(logits, labels),
            PF.cross_entropy(logits, soft, soft_label=True),
            PF.softmax_with_cross_entropy(logits, labels),
        ]
    assert {loss.dtype for loss in losses} == {torch.float32}
    with paddle.amp.auto_cast(level="O2", dtype="bfloat16", use_promote=False):
        assert PF.cross_entropy(logits, labels).dtype is torch.bfloat16
    with paddle.amp.auto_cast(level="O2"):
        assert PF.cross_entropy(logits.astype("float16"), labels).dtype is torch.float16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_of_the_norms_only_the_frobenius_norm_is_in_the_black_list(dtype):
    # The oracle's rows `norm_fro` and `normalize`.
    x = paddle.ones([2, 2]).astype(dtype)
    with paddle.amp.auto_cast(dtype=dtype):
        assert PF.normalize(x).dtype is getattr(torch, dtype)
        assert paddle.norm(x, p=2).dtype is getattr(torch, dtype)
        assert paddle.norm(x, p="fro").dtype is torch.float32
        assert paddle.norm(x, p="fro", axis=[0, 1]).dtype is torch.float32
    assert paddle.norm(x, p="fro").item() == paddle.norm(x, "fro", [0, 1]).item() == 2.0
