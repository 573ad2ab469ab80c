"""MXNet's layers against computations in NumPy, in float64."""

from math import erf

import numpy as np
import pytest
from support.mxnet_symbols import run_op

random = np.random.default_rng(0)
X = random.standard_normal((2, 3, 7, 5))
GAMMA, BETA, MEAN = (random.standard_normal(3) for _ in range(3))
VAR = random.uniform(0.5, 2, 3)


def channels(values):
    return values.reshape(1, -1, 1, 1)


def check(result, expected):
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-10, atol=1e-12)


def convolve(x, weight, stride, pad, dilate, groups):
    """A convolution by its definition."""
    x = np.pad(x, [(0, 0), (0, 0), (pad[0],) * 2, (pad[1],) * 2])
    filters, depth, *kernel = weight.shape
    sizes = [
        (x.shape[2 + axis] - dilate[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
        for axis in (0, 1)
    ]
    out = np.zeros((len(x), filters, *sizes))
    for f in range(filters):
        first = f // (filters // groups) * depth
        for i in range(sizes[0]):
            for j in range(sizes[1]):
                for k in range(kernel[0]):
                    for m in range(kernel[1]):
                        place = (i * stride[0] + k * dilate[0], j * stride[1] + m * dilate[1])
                        values = x[:, first : first + depth, place[0], place[1]]
                        out[:, f, i, j] += values @ weight[f, :, k, m]
    return out


@pytest.mark.parametrize("groups", [1, 3])
def test_convolution(groups):
    weight, bias = random.standard_normal((6, 3 // groups, 3, 2)), random.standard_normal(6)
    options = {"stride": (2, 1), "pad": (1, 2), "dilate": (1, 2)}
    attrs = {"kernel": (3, 2), "num_filter": 6, "num_group": groups, **options}
    expected = convolve(X, weight, groups=groups, **options)
    check(run_op("Convolution", [X, weight], no_bias=True, **attrs), expected)
    check(run_op("Convolution", [X, weight, bias], **attrs), expected + channels(bias))


def test_one_dimensional_convolution_has_no_strides_by_default():
    x, weight = X[:, :, :, 0], random.standard_normal((2, 3, 2))
    result = run_op("Convolution", [x, weight], kernel=(2,), num_filter=2, no_bias=True)
    windows = np.stack([x[..., :-1], x[..., 1:]])
    check(result, np.einsum("knci,fck->nfi", windows, weight))


def test_deconvolution_is_the_transpose_of_the_convolution():
    weight = random.standard_normal((3, 4, 3, 3))
    attrs = {"kernel": (3, 3), "num_filter": 4, "stride": (2, 2), "pad": (1, 1)}
    result = run_op("Deconvolution", [X, weight], adj=(1, 0), **attrs)
    assert result.shape == (2, 4, 14, 9)
    y = random.standard_normal(result.shape)
    back = convolve(y, weight, (2, 2), (1, 1), (1, 1), 1)
    np.testing.assert_allclose((result * y).sum(), (X * back).sum(), rtol=1e-10)
    sized = run_op("Deconvolution", [X, weight], target_shape=(14, 9), **attrs)
    assert sized.shape == (2, 4, 14, 9)


@pytest.mark.parametrize("flatten", [True, False])
def test_fully_connected(flatten):
    weight, bias = random.standard_normal((4, 105 if flatten else 5)), random.standard_normal(4)
    data = X.reshape(2, -1) if flatten else X
    attrs = {"num_hidden": 4, "flatten": flatten}
    check(run_op("FullyConnected", [X, weight, bias], **attrs), data @ weight.T + bias)
    check(run_op("FullyConnected", [X, weight], no_bias=1, **attrs), data @ weight.T)


@pytest.mark.parametrize("fix_gamma", [None, "True", "False", "0"])
def test_batch_norm_ignores_gamma_unless_fix_gamma_is_false(fix_gamma):
    attrs = {} if fix_gamma is None else {"fix_gamma": fix_gamma}
    gamma = GAMMA if fix_gamma in ("False", "0") else np.ones(3)
    # The default of eps is 1e-3.
    normal = (X - channels(MEAN)) / np.sqrt(channels(VAR) + 1e-3)
    expected = normal * channels(gamma) + channels(BETA)
    check(run_op("BatchNorm", [X, GAMMA, BETA, MEAN, VAR], **attrs), expected)


def test_batch_norm_over_the_last_axis():
    x = X.transpose(0, 2, 3, 1)
    attrs = {"axis": -1, "eps": 0.1, "fix_gamma": False, "cudnn_off": True, "momentum": 0.9}
    check(
        run_op("BatchNorm", [x, GAMMA, BETA, MEAN, VAR], **attrs),
        (x - MEAN) / np.sqrt(VAR + 0.1) * GAMMA + BETA,
    )


def normalize(x, axes, eps):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


def test_instance_layer_and_group_norm():
    instance = normalize(X, (2, 3), 1e-3) * channels(GAMMA) + channels(BETA)
    check(run_op("InstanceNorm", [X, GAMMA, BETA]), instance)
    layer = normalize(X, 1, 0.01) * channels(GAMMA) + channels(BETA)
    check(run_op("LayerNorm", [X, GAMMA, BETA], axis=1, eps=0.01), layer)
    x = random.standard_normal((2, 4, 3, 3))
    groups = normalize(x.reshape(2, 2, 18), 2, 1e-5)
    # MXNet 1 has one value for each group.
    by_group = groups * GAMMA[:2].reshape(1, 2, 1) + BETA[:2].reshape(1, 2, 1)
    check(run_op("GroupNorm", [x, GAMMA[:2], BETA[:2]], num_groups=2), by_group.reshape(x.shape))


@pytest.mark.parametrize("nsize", [3, 4])
def test_local_response_norm(nsize):
    x = random.standard_normal((2, 6, 3, 3))
    sums = np.zeros_like(x)
    for c in range(6):
        window = x[:, max(c - nsize // 2, 0) : c - nsize // 2 + nsize]
        sums[:, c] = (window**2).sum(1)
    result = run_op("LRN", [x], nsize=nsize, alpha=0.3, beta=0.6, knorm=1.5)
    check(result, x * (1.5 + 0.3 / nsize * sums) ** -0.6)


@pytest.mark.parametrize(
    ("mode", "axes"), [("instance", (1, 2, 3)), ("channel", (1,)), ("spatial", (2, 3))]
)
def test_l2_normalization(mode, axes):
    expected = X / np.sqrt((X**2).sum(axes, keepdims=True) + 1e-10)
    check(run_op("L2Normalization", [X], mode=mode), expected)


@pytest.mark.parametrize(
    ("act_type", "function"),
    [
        ("relu", lambda x: np.maximum(x, 0)),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x))),
        ("tanh", np.tanh),
        ("softrelu", lambda x: np.log1p(np.exp(x))),
        ("softsign", lambda x: x / (1 + np.abs(x))),
    ],
)
def test_activations(act_type, function):
    check(run_op("Activation", [X], act_type=act_type), function(X))


SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772


@pytest.mark.parametrize(
    ("attrs", "function"),
    [
        ({}, lambda x: np.where(x > 0, x, 0.25 * x)),
        ({"act_type": "leaky", "slope": 0.1}, lambda x: np.where(x > 0, x, 0.1 * x)),
        ({"act_type": "elu", "slope": 0.3}, lambda x: np.where(x > 0, x, 0.3 * np.expm1(x))),
        (
            {"act_type": "selu"},
            lambda x: SELU_SCALE * np.where(x > 0, x, SELU_ALPHA * np.expm1(x)),
        ),
        ({"act_type": "gelu"}, lambda x: 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))),
        ({"act_type": "rrelu"}, lambda x: np.where(x > 0, x, (0.125 + 0.334) / 2 * x)),
    ],
    ids=["default", "leaky", "elu", "selu", "gelu", "rrelu"],
)
def test_leaky_relu(attrs, function):
    check(run_op("LeakyReLU", [X], **attrs), function(X))


def test_prelu_has_a_slope_for_each_channel_or_one():
    slopes = np.array([0.1, 0.2, 0.3])
    expected = np.where(X > 0, X, channels(slopes) * X)
    check(run_op("LeakyReLU", [X, slopes], act_type="prelu"), expected)
    one = run_op("LeakyReLU", [X, np.array([0.2])], act_type="prelu")
    check(one, np.where(X > 0, X, 0.2 * X))


def softmax(x, axis):
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def test_softmax_and_output_layers():
    rows, label = X[:, :, 0, 0], np.zeros(2)
    check(run_op("SoftmaxOutput", [rows, label], grad_scale=2), softmax(rows, 1))
    check(run_op("SoftmaxOutput", [X, label], multi_output=True), softmax(X, 1))
    check(run_op("SoftmaxOutput", [X, label], preserve_shape=True), softmax(X, 3))
    check(run_op("SoftmaxOutput", [X, label]), softmax(X.reshape(2, -1), 1).reshape(X.shape))
    check(run_op("SoftmaxActivation", [X], mode="channel"), softmax(X, 1))
    check(run_op("softmax", [X], axis=2, temperature=2.0), softmax(X / 2, 2))
    check(run_op("log_softmax", [X]), np.log(softmax(X, 3)))
    check(run_op("LinearRegressionOutput", [X, X]), X)
    check(run_op("MAERegressionOutput", [X, X]), X)
    check(run_op("LogisticRegressionOutput", [X, X]), 1 / (1 + np.exp(-X)))


def test_embedding_takes_numbers_as_indices_and_clips_them():
    weight = random.standard_normal((4, 3))
    tokens = np.array([[0.0, 3.0], [9.0, -2.0]])
    result = run_op("Embedding", [tokens, weight], input_dim=4, output_dim=3)
    check(result, weight[[[0, 3], [3, 0]]])


def test_dropout_has_no_effect_in_inference():
    check(run_op("Dropout", [X], p=0.9), X)


# -- pooling ---------------------------------------------------------------------------------------


def pool(x, kernel, stride, pad, pool_type, convention, include_pad):
    """Pooling window by window, as MXNet's loops do it."""
    sizes = [
        1 + int((np.ceil if convention == "full" else np.floor)((n + 2 * p - k) / s))
        for n, p, k, s in zip(x.shape[2:], pad, kernel, stride, strict=True)
    ]
    out = np.zeros((*x.shape[:2], *sizes))
    for i in range(sizes[0]):
        for j in range(sizes[1]):
            start = [i * stride[0] - pad[0], j * stride[1] - pad[1]]
            end = [min(start[a] + kernel[a], x.shape[2 + a] + pad[a]) for a in (0, 1)]
            counted = (end[0] - start[0]) * (end[1] - start[1])
            window = x[:, :, max(start[0], 0) : end[0], max(start[1], 0) : end[1]]
            if not include_pad:
                counted = window.shape[2] * window.shape[3]
            out[:, :, i, j] = {
                "max": lambda w: w.max((2, 3)),
                "sum": lambda w: w.sum((2, 3)),
                "avg": lambda w, n=counted: w.sum((2, 3)) / n,
                "lp": lambda w: (np.abs(w) ** 3).sum((2, 3)) ** (1 / 3),
            }[pool_type](window)
    return out


WINDOWS = [((3, 2), (2, 2), (0, 0)), ((3, 3), (2, 2), (1, 1)), ((4, 2), (3, 2), (1, 0))]


@pytest.mark.parametrize("include_pad", [True, False])
@pytest.mark.parametrize("convention", ["valid", "full"])
@pytest.mark.parametrize("pool_type", ["max", "avg", "sum", "lp"])
def test_pooling(pool_type, convention, include_pad):
    for kernel, stride, pad in WINDOWS:
        result = run_op(
            "Pooling",
            [X],
            kernel=kernel,
            stride=stride,
            pad=pad,
            pool_type=pool_type,
            pooling_convention=convention,
            count_include_pad=include_pad,
            p_value=3,
        )
        check(result, pool(X, kernel, stride, pad, pool_type, convention, include_pad))


def test_averages_count_the_padding_by_default_and_strides_are_1():
    result = run_op("Pooling", [X], kernel=(3, 3), pad=(1, 1), pool_type="avg")
    check(result, pool(X, (3, 3), (1, 1), (1, 1), "avg", "valid", include_pad=True))


@pytest.mark.parametrize(
    ("pool_type", "function"), [("max", np.max), ("avg", np.mean), ("sum", np.sum)]
)
def test_global_pooling_ignores_the_kernel(pool_type, function):
    result = run_op("Pooling", [X], kernel=(99, 99), global_pool=True, pool_type=pool_type)
    check(result, function(X, axis=(2, 3), keepdims=True))


def test_up_sampling_and_padding():
    check(run_op("UpSampling", [X], scale=2, sample_type="nearest"), X.repeat(2, 2).repeat(2, 3))
    width = "(0, 0, 0, 0, 1, 2, 3, 0)"
    sides = [(0, 0), (0, 0), (1, 2), (3, 0)]
    constant = run_op("Pad", [X], mode="constant", pad_width=width, constant_value=7)
    check(constant, np.pad(X, sides, constant_values=7))
    for mode in ("edge", "reflect"):
        check(run_op("Pad", [X], mode=mode, pad_width=width), np.pad(X, sides, mode=mode))


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "message"),
    [
        ("Convolution", (1, 1), {"kernel": "(3, 3)"}, "lacks the attributes num_filter"),
        ("Convolution", (1, 1), {"kernel": "(3, x)", "num_filter": 1}, "a tuple of integers"),
        ("Convolution", (1, 1), {"kernel": 1, "num_filter": 1, "layout": "NHWC"}, "supported here"),
        ("Activation", (1,), {"act_type": "swish"}, "act_type='swish': supported here: relu"),
        ("Pooling", (1,), {"kernel": "(2,)", "pooling_convention": "same"}, "valid, full"),
        ("BatchNorm", (1,) * 5, {"eps": "small"}, "expected a number"),
        ("BatchNorm", (1,) * 5, {"fix_gamma": "maybe"}, "expected True or False"),
        ("LRN", (1,), {"nsize": "2.5"}, "expected an integer"),
        ("Cast", (1,), {"dtype": "complex64"}, "expected one of float16"),
        ("relu", (1,), {"slope": "0.1"}, "slope='0.1': this attribute is not one of relu's here"),
        ("FullyConnected", (1,), {"num_hidden": 1}, "has 1 inputs, expected 2 or more"),
        ("Pooling", (1, 1), {}, "has 2 inputs"),
        ("SliceChannel", (1,), {"num_outputs": 10**12}, "has 1000000000000 outputs, expected 1 to"),
    ],
)
def test_attributes_that_are_not_valid_raise_when_the_symbol_is_loaded(op, inputs, attrs, message):
    from mezzo import CheckpointError

    with pytest.raises(CheckpointError, match=message):
        run_op(op, [np.ones(1)] * len(inputs), **attrs)
