"""MXNet's elementwise, shape and reduction ops against NumPy."""

import json

import numpy as np
import pytest
import torch
from support.mxnet_symbols import SymbolWriter, run_op

from mezzo.compat.mxnet.symbol import load_json
from mezzo.compat.mxnet.symbol._ops import op_names, parse_value

random = np.random.default_rng(0)
X, Y = (random.uniform(0.2, 0.9, (2, 3, 4)) for _ in range(2))
ROW = random.uniform(0.2, 0.9, (1, 3, 1))


def check(result, expected):
    expected = np.asarray(expected)
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-7)


UNARY = {
    name: getattr(np, name)
    for name in (
        "abs ceil floor trunc sign sqrt square exp expm1 log log2 log10 log1p sin cos tan tanh sinh"
        " cosh negative reciprocal arctan arcsin arccos arcsinh arctanh rint fix cbrt zeros_like"
        " ones_like"
    ).split()
} | {
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "_copy": lambda x: x,
    "identity": lambda x: x,
    "BlockGrad": lambda x: x,
    "make_loss": lambda x: x,
    "Flatten": lambda x: x.reshape(2, 12),
    "shape_array": lambda x: np.array(x.shape),
    "hard_sigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "smooth_l1": lambda x: np.where(np.abs(x) < 1, x**2 / 2, np.abs(x) - 0.5),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary_ops(name):
    signed = X - 0.5 if name in ("abs", "relu", "sign", "cbrt", "fix", "smooth_l1") else X
    check(run_op(name, [signed]), UNARY[name](signed))


def test_halves_are_rounded_as_in_mxnet():
    halves = np.array([-1.5, 1.5, -1.9, 1.2, 1.9, 2.0])
    check(run_op("round", [halves]), [-2, 2, -2, 1, 2, 2])
    check(run_op("rint", [halves]), [-2, 1, -2, 1, 2, 2])


BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "mod": np.mod,
    "power": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "hypot": np.hypot,
    "equal": np.equal,
    "greater": np.greater,
    "lesser_equal": np.less_equal,
}


@pytest.mark.parametrize("name", BINARY)
def test_broadcast_ops_have_the_dtype_of_their_inputs(name):
    result = run_op(f"broadcast_{name}", [X, ROW])
    check(result, BINARY[name](X, ROW))
    assert result.dtype == X.dtype


@pytest.mark.parametrize(
    ("names", "function"),
    [
        ("elemwise_add _plus _Plus _grad_add", np.add),
        ("elemwise_sub _minus _Minus", np.subtract),
        ("elemwise_mul _mul _Mul", np.multiply),
        ("elemwise_div _div _Div", np.divide),
        ("_maximum _Maximum", np.maximum),
        ("_power _Power", np.power),
    ],
)
def test_elementwise_ops_and_their_old_names(names, function):
    for name in names.split():
        check(run_op(name, [X, Y]), function(X, Y))


@pytest.mark.parametrize(
    ("names", "function"),
    [
        ("_plus_scalar _PlusScalar", lambda x: x + 2),
        ("_minus_scalar _MinusScalar", lambda x: x - 2),
        ("_rminus_scalar _RMinusScalar", lambda x: 2 - x),
        ("_mul_scalar _MulScalar", lambda x: x * 2),
        ("_div_scalar _DivScalar", lambda x: x / 2),
        ("_rdiv_scalar _RDivScalar", lambda x: 2 / x),
        ("_power_scalar _PowerScalar", lambda x: x**2),
        ("_rpower_scalar _RPowerScalar", lambda x: 2**x),
        ("_maximum_scalar _MaximumScalar", lambda x: np.maximum(x, 2)),
        ("_mod_scalar _ModScalar", lambda x: np.mod(x, 2)),
        ("_greater_scalar _GreaterScalar", lambda x: (x > 2) + 0.0),
    ],
)
def test_ops_with_a_number_and_their_old_names(names, function):
    for name in names.split():
        check(run_op(name, [X * 4], scalar="2.0"), function(X * 4))


@pytest.mark.parametrize(
    ("shape", "reverse", "expected"),
    [
        ("(4, 0, 2)", False, (4, 3, 2)),
        ("(2, -1)", False, (2, 12)),
        ("(-2,)", False, (2, 3, 4)),
        ("(0, -2, 1, 1)", False, (2, 3, 4, 1, 1)),
        ("(-3, 4)", False, (6, 4)),
        ("(-3, 0)", False, (6, 4)),
        ("(-4, 1, 2, -2)", False, (1, 2, 3, 4)),
        ("(2, -4, -1, 3, 4)", False, (2, 1, 3, 4)),
        ("(0, -3)", False, (2, 12)),
        ("(-1, 0)", True, (6, 4)),
        ("(-1, 0)", False, (8, 3)),
        ("(2L, -1L)", False, (2, 12)),
        ("[24]", False, (24,)),
    ],
)
def test_reshape_codes(shape, reverse, expected):
    check(run_op("Reshape", [X], shape=shape, reverse=reverse), X.reshape(expected))


def test_reshape_of_old_files_has_a_target_shape():
    check(run_op("Reshape", [X], target_shape="(0, 12)"), X.reshape(2, 12))
    kept = run_op("Reshape", [X], target_shape="(7, 12)", keep_highest=True)
    check(kept, X.reshape(2, 12))


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "expected"),
    [
        ("sum", [X], {}, X.sum().reshape(1)),
        ("sum", [X], {"axis": "1", "keepdims": "1"}, X.sum(1, keepdims=True)),
        ("mean", [X], {"axis": "(0, 2)"}, X.mean((0, 2))),
        ("mean", [X], {"axis": "1", "exclude": True}, X.mean((0, 2))),
        ("max", [X], {"axis": "-1"}, X.max(-1)),
        ("min", [X], {"axis": "[1]"}, X.min(1)),
        ("norm", [X], {"axis": 1, "ord": 1}, np.abs(X).sum(1)),
        ("argmax", [X], {"axis": 2}, X.argmax(2)),
        ("argmin", [X], {"axis": 1, "keepdims": True}, X.argmin(1)[:, None]),
        ("dot", [X, Y.T], {}, np.tensordot(X, Y.T, 1)),
        ("dot", [X[0], Y[0]], {"transpose_a": True}, X[0].T @ Y[0]),
        ("batch_dot", [X, Y], {"transpose_b": True}, X @ Y.swapaxes(1, 2)),
        ("transpose", [X], {}, X.T),
        ("transpose", [X], {"axes": (0, 2, 1)}, X.transpose(0, 2, 1)),
        ("SwapAxis", [X], {"dim1": 0, "dim2": 2}, X.swapaxes(0, 2)),
        ("expand_dims", [X], {"axis": 1}, X[:, None]),
        ("squeeze", [ROW], {}, ROW.squeeze()),
        ("squeeze", [ROW], {"axis": 0}, ROW[0]),
        ("Concat", [X, Y, X], {"dim": 2, "num_args": 3}, np.concatenate([X, Y, X], 2)),
        ("Concat", [X, Y], {"num_args": 2}, np.concatenate([X, Y], 1)),
        ("stack", [X, Y], {"axis": 1, "num_args": 2}, np.stack([X, Y], 1)),
        ("add_n", [X, Y, X], {"num_args": 3}, X + Y + X),
        ("slice_axis", [X], {"axis": -1, "begin": 1, "end": "None"}, X[..., 1:]),
        ("slice_axis", [X], {"axis": 1, "begin": 0, "end": -1}, X[:, :-1]),
        ("slice", [X], {"begin": "(0, 1)", "end": "(None, 3)"}, X[:, 1:3]),
        ("slice", [X], {"begin": "(None,)", "end": "(None,)", "step": "(-1,)"}, X[::-1]),
        ("slice_like", [X, X[:, :2]], {"axes": (1,)}, X[:, :2]),
        ("reshape_like", [X, X.reshape(6, 4)], {}, X.reshape(6, 4)),
        ("tile", [X], {"reps": (2, 1, 1)}, np.tile(X, (2, 1, 1))),
        ("repeat", [X], {"repeats": 2, "axis": 1}, X.repeat(2, 1)),
        ("broadcast_to", [ROW], {"shape": (2, 0, 4)}, np.broadcast_to(ROW, (2, 3, 4))),
        ("broadcast_axis", [ROW], {"axis": 0, "size": 2}, np.broadcast_to(ROW, (2, 3, 1))),
        ("broadcast_like", [ROW, X], {}, np.broadcast_to(ROW, X.shape)),
        ("clip", [X], {"a_min": 0.3, "a_max": 0.5}, np.clip(X, 0.3, 0.5)),
        ("where", [np.round(X), X, Y], {}, np.where(np.round(X) != 0, X, Y)),
        ("take", [X, np.array([2.0, 9.0])], {"axis": 1}, X[:, [2, 2]]),
        ("pick", [X[0], np.array([1.0, 0.0, 3.0])], {}, X[0][[0, 1, 2], [1, 0, 3]]),
        ("one_hot", [np.array([1.0, 0.0])], {"depth": 3}, np.eye(3)[[1, 0]]),
        ("Cast", [X], {"dtype": "float32"}, X.astype("float32")),
        ("amp_cast", [X], {"dtype": "float16"}, X.astype("float16")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_shapes_reductions_and_products(op, inputs, attrs, expected):
    check(run_op(op, inputs, **attrs), expected)


def outputs_of(op, inputs, count, **attrs):
    net = SymbolWriter()
    names = [f"x{number}" for number in range(len(inputs))]
    node = net.op(op, "node", [net.variable(name) for name in names], **attrs)
    symbol = load_json(json.dumps(net.json(*((node, output) for output in range(count)))))
    return symbol.model({}).run(dict(zip(names, inputs, strict=True)))


def test_a_split_has_several_outputs():
    parts = outputs_of("SliceChannel", [torch.tensor(X)], 3, num_outputs=3, squeeze_axis=True)
    check(np.stack(parts, 1), X)


def test_casts_of_integers_change_nothing():
    tokens = torch.arange(3)
    assert outputs_of("amp_cast", [tokens], 1, dtype="float16")[0] is tokens


@pytest.mark.parametrize(("narrow", "dtype"), [(False, torch.float32), (True, torch.float16)])
def test_a_multicast_has_the_widest_or_the_narrowest_dtype(narrow, dtype):
    inputs = [torch.ones(1), torch.ones(1).half(), torch.ones(1).int()]
    results = outputs_of("amp_multicast", inputs, 3, num_outputs=3, cast_narrow=narrow)
    assert [one.dtype for one in results] == [dtype, dtype, torch.int32]


def test_every_listed_op_can_be_found():
    wanted = "Convolution Deconvolution BatchNorm Activation LeakyReLU Pooling FullyConnected"
    assert set(wanted.split()) < set(op_names())
    assert len(op_names()) > 200


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(3,)", (3,)),
        ("()", ()),
        ("(None, 2L)", (None, 2)),
        ("1e-3", 1e-3),
        ("-1", -1),
        ("None", None),
        ("__import__('os')", "__import__('os')"),
        ("(1,(2,3))", (1, "(2", "3)")),
        ("(" * 5000, "(" * 5000),
    ],
)
def test_values_are_parsed_without_evaluating_them(text, value):
    assert parse_value(text) == value
