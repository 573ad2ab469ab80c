"""The registry of ops: names, functions, overloads and registered ops."""

import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

from mezzo._errors import PolicyError
from mezzo.policy import registry as module
from mezzo.policy.registry import (
    Registry,
    aten_overloads,
    functional_overloads,
    parameters,
    registry,
)
from mezzo.policy.types import Entry, Rule

ENTRY = Entry(Rule.FULL, "mine")


class Recorder(TorchFunctionMode):
    """Record the ops that a function mode sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(registry().name_of(func))
        return func(*args, **(kwargs or {}))


def seen(call):
    x, y = torch.rand(2, 2) + 1, torch.rand(2, 2) + 1
    with Recorder() as recorder:
        call(x, y)
    return [name for name in recorder.names if name is not None]


@pytest.fixture
def fresh():
    """Return a registry that other tests do not see."""
    return Registry()


def iadd(x, y):
    x += y


def imul(x, y):
    x *= y


def itruediv(x, y):
    x /= y


WAYS = {
    "softmax": [
        lambda x, _: torch.softmax(x, -1),
        lambda x, _: F.softmax(x, dim=-1),
        lambda x, _: x.softmax(-1),
        lambda x, _: nn.Softmax(-1)(x),
        lambda x, _: torch.special.softmax(x, -1),
    ],
    "add": [
        lambda x, y: x + y,
        lambda x, _: 1 + x,
        torch.add,
        lambda x, y: x.add(y),
        lambda x, y: x.add_(y),
        iadd,
    ],
    "sub": [
        lambda x, y: x - y,
        lambda x, _: 1 - x,
        torch.sub,
        lambda x, y: x.subtract_(y),
        torch.rsub,
    ],
    "mul": [lambda x, y: x * y, lambda x, _: 2 * x, torch.multiply, imul],
    "div": [lambda x, y: x / y, lambda x, _: 1 / x, torch.true_divide, itruediv],
    "matmul": [lambda x, y: x @ y, torch.matmul, lambda x, y: x.matmul(y), torch.linalg.matmul],
    "mm": [torch.mm, lambda x, y: x.mm(y), torch.dsmm, torch.spmm],
    "pow": [lambda x, _: x**2, lambda x, _: 2**x, torch.pow, lambda x, y: x.pow_(y)],
    "neg": [lambda x, _: -x, lambda x, _: torch.negative(x), lambda x, _: x.neg_()],
    "abs": [lambda x, _: abs(x), lambda x, _: torch.absolute(x)],
    "lt": [lambda x, y: x < y, torch.less, lambda x, y: x.lt(y)],
    "linear": [F.linear, lambda x, _: nn.Linear(2, 2)(x)],
    "relu": [
        lambda x, _: F.relu(x),
        lambda x, _: torch.relu(x),
        lambda x, _: x.relu_(),
        lambda x, _: nn.ReLU()(x),
    ],
    "gelu": [lambda x, _: F.gelu(x), lambda x, _: nn.GELU()(x)],
    "cat": [lambda x, y: torch.cat([x, y]), lambda x, y: torch.concat([x, y])],
    "layer_norm": [
        lambda x, _: F.layer_norm(x, (2,)),
        lambda x, _: nn.LayerNorm(2)(x),
        lambda x, _: torch.layer_norm(x, (2,)),
    ],
    "batch_norm": [lambda x, _: nn.BatchNorm1d(2)(x), lambda x, y: F.batch_norm(x, y[0], y[1])],
    "cross_entropy": [F.cross_entropy, nn.CrossEntropyLoss()],
    "erf": [lambda x, _: torch.erf(x), lambda x, _: torch.special.erf(x), lambda x, _: x.erf_()],
    "linalg_inv": [
        lambda x, _: torch.linalg.inv(x),
        lambda x, _: torch.inverse(x),
        lambda x, _: x.inverse(),
    ],
}


@pytest.mark.parametrize(
    ("name", "call"),
    [(name, call) for name, calls in WAYS.items() for call in calls],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_an_op_has_one_name_however_it_is_called(name, call):
    assert name in seen(call)


@pytest.mark.parametrize(
    "convert",
    [
        bool,
        float,
        int,
        len,
        str,
        lambda x: x.item(),
        lambda x: x.shape,
        lambda x: x.half(),
        lambda x: x.to(torch.float64),
        lambda x: x.clone(),
    ],
)
def test_python_conversions_of_a_tensor_are_not_ops(convert):
    x = torch.ones(1)
    with Recorder() as recorder:
        convert(x)
    # Printing computes; nothing else does.
    assert {name for name in recorder.names if name is not None} == set() or convert is str


@given(st.sampled_from([(op.name, function) for op in registry() for function in op.functions]))
def test_every_function_has_one_name_that_every_spelling_parses_to(case):
    name, function = case
    assert registry().name_of(function) == name
    spelling = getattr(function, "__name__", name)
    assert registry().parse(spelling) == name


def test_no_function_has_two_names():
    functions = [function for op in registry() for function in op.functions]
    assert len(functions) == len(set(functions))


def test_every_aten_overload_of_an_op_has_its_name():
    assert {
        str(overload)
        for op in registry()
        for overload in registry().overloads(op.name)
        if registry().name_of(overload) != op.name
    } == set()


@pytest.mark.parametrize(
    ("overload", "name"),
    [
        (torch.ops.aten._softmax.default, "softmax"),
        (torch.ops.aten.softmax.int, "softmax"),
        (torch.ops.aten.softmax, "softmax"),
        (torch.ops.aten.add_.Tensor, "add"),
        (torch.ops.aten.add.out, "add"),
        (torch.ops.aten.native_layer_norm.default, "layer_norm"),
        (torch.ops.aten.cross_entropy_loss.default, "cross_entropy"),
        (torch.ops.aten.clone.default, None),
        (torch.ops.aten._softmax_backward_data.default, None),
        (torch.ops.prims.add.default, None),
    ],
)
def test_an_aten_overload_has_the_name_of_its_op_or_none(overload, name):
    assert registry().name_of(overload) == name


@pytest.mark.parametrize(
    "function",
    [
        len,
        print,
        torch.Tensor.clone,
        torch.Tensor.__bool__,
        torch.Tensor.__index__,
        torch.zeros,
        nn.Linear,
    ],
)
def test_functions_that_are_not_ops_have_no_name(function):
    assert registry().name_of(function) is None


def test_overloads_include_in_place_and_out_variants():
    names = {str(overload) for overload in registry().overloads("add")}
    assert {"aten.add.Tensor", "aten.add_.Tensor", "aten.add.out"} <= names


def test_an_op_that_is_not_in_aten_has_no_overloads():
    assert registry().overloads("interpolate") == ()


def test_functional_overloads_exclude_in_place_and_out_variants():
    assert functional_overloads("add") == {"aten::add.Tensor", "aten::add.Scalar"}
    assert functional_overloads("interpolate") == frozenset()


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (F.softmax, ("input", "dim", "_stacklevel", "dtype")),
        (torch.softmax, ("self", "dim", "dtype")),
        (torch.Tensor.softmax, ("self", "dim", "dtype")),
        (torch.add, ("self", "other", "alpha")),
        (torch.Tensor.__add__, ("self", "other", "alpha")),
        (torch.Tensor.__pow__, ("self", "exponent")),
        (torch.ops.aten.softmax.int, ("self", "dim", "dtype")),
        (torch.ops.aten.softmax, ("self", "dim", "dtype")),
        (print, ("args", "sep", "end", "file", "flush")),
        (object(), ()),
    ],
)
def test_parameters_are_in_the_order_of_the_signature_or_the_schema(function, names):
    assert parameters(function) == names


@pytest.mark.parametrize(
    "spelling",
    [
        "softmax",
        "_softmax",
        "softmax_",
        "special_softmax",
        "torch.softmax",
        "F.softmax",
        "functional.softmax",
        "torch.nn.functional.softmax",
        "Tensor.softmax",
        "torch.Tensor.softmax",
        "torch.special.softmax",
        "aten.softmax",
        "aten.softmax.int",
        "aten::softmax",
        "aten::_softmax.out",
        "torch.ops.aten.softmax.int",
    ],
)
def test_parse_accepts_paths_pasted_from_code(spelling):
    assert registry().parse(spelling) == "softmax"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("torch.linalg.qr", "linalg_qr"),
        ("linalg.inv", "linalg_inv"),
        ("torch.fft.fft", "fft_fft"),
        ("fft.rfft", "fft_rfft"),
    ],
)
def test_the_torch_submodule_is_part_of_the_name(spelling, name):
    assert registry().parse(spelling) == name


@pytest.mark.parametrize(
    ("spelling", "meant"),
    [
        ("sofmax", "softmax"),
        ("Softmax", "softmax"),
        ("layernorm", "layer_norm"),
        ("LayerNorm", "layer_norm"),
        ("batchnorm", "batch_norm"),
        ("logsoftmax", "log_softmax"),
        ("attention", "scaled_dot_product_attention"),
        ("conv", "conv2d"),
        ("mse", "mse_loss"),
        ("rnn", "rnn_tanh"),
        ("torch.sofmax", "softmax"),
    ],
)
def test_an_unknown_op_raises_with_close_names(spelling, meant):
    with pytest.raises(PolicyError) as error:
        registry().parse(spelling)
    assert str(error.value).startswith(f"Unknown op {spelling!r}. Did you mean ")
    assert repr(meant) in str(error.value)
    assert "`mezzo.ops()` lists the known ones, `mezzo.register_op` adds your own." in str(
        error.value
    )


@pytest.mark.parametrize("spelling", ["", "+", "zzzzzz", "a.b.c", "ünï"])
def test_an_unknown_op_without_a_close_name_points_to_the_list_of_ops(spelling):
    with pytest.raises(
        PolicyError, match=r"^Unknown op '.*'\. `mezzo.ops\(\)` lists the known ones"
    ):
        registry().parse(spelling)


@pytest.mark.parametrize(
    "spelling", ["clone", "to", "half", "__getitem__", "copy_", "zeros", "torch.Tensor.item"]
)
def test_functions_without_a_rule_raise_with_the_reason(spelling):
    with pytest.raises(
        PolicyError, match=r"^No rule applies to .*carries, describes, makes or converts"
    ):
        registry().parse(spelling)


@pytest.mark.parametrize(
    ("spelling", "example"),
    [
        (torch.add, "add"),
        (F.layer_norm, "layer_norm"),
        (torch.ops.aten.mm.default, "mm"),
        (3, "softmax"),
        (None, "softmax"),
        (len, "softmax"),
    ],
)
def test_a_function_instead_of_a_name_raises_with_its_name(spelling, example):
    with pytest.raises(PolicyError, match=f"^An op is named by a string such as '{example}', got "):
        registry().parse(spelling)


def test_the_registry_is_a_collection_of_ops(fresh):
    assert "softmax" in fresh
    assert "sofmax" not in fresh
    assert fresh["softmax"].name == "softmax"
    assert [op.name for op in fresh] == sorted(fresh.names)


def test_the_op_names_include_those_of_torchs_autocast_lists(fresh):
    assert fresh.names >= {
        "convolution",
        "thnn_fused_lstm_cell",
        "lstm_cell",
        "upsample_nearest2d",
        "scaled_dot_product_attention",
        "conv2d",
        "einsum",
    }


def test_a_registered_op_is_found_by_name_and_by_function(fresh):
    def mine(x):
        return x

    before = fresh.generation
    fresh.register("mine", (mine,), ENTRY)
    assert fresh.parse("mine") == "mine"
    assert fresh.name_of(mine) == "mine"
    assert fresh["mine"].entry == ENTRY
    assert fresh.generation > before


def test_registering_a_name_again_replaces_the_function(fresh):
    def first(x):
        return x

    def second(x):
        return x

    fresh.register("mine", (first,), ENTRY)
    fresh.register("mine", (second,), Entry(Rule.HALF, "changed"))
    assert fresh.name_of(first) is None
    assert fresh.name_of(second) == "mine"
    assert fresh["mine"].entry.rule is Rule.HALF


@pytest.mark.parametrize("name", ["softmax", "add_", "absolute", "__add__", "sdpa"])
def test_registering_any_spelling_of_a_torch_op_raises_and_changes_nothing(fresh, name):
    before = fresh.generation, fresh.names
    with pytest.raises(
        PolicyError,
        match=(
            f"^'{name}'.* is an op of torch and cannot be registered again. Choose another name,"
            " or list it in a policy"
        ),
    ):
        fresh.register(name, (len,), ENTRY)
    assert (fresh.generation, fresh.names) == before
    assert fresh.name_of(len) is None


def test_a_registered_op_can_be_unregistered(fresh):
    fresh.register("mine", (len,), ENTRY)
    before = fresh.generation
    fresh.unregister("mine")
    assert "mine" not in fresh
    assert fresh.name_of(len) is None
    assert fresh.generation > before


@pytest.mark.parametrize("name", ["softmax", "never_registered"])
def test_torch_and_unknown_ops_cannot_be_unregistered(fresh, name):
    with pytest.raises(PolicyError, match=f"^'{name}' was not registered with mezzo.register_op"):
        fresh.unregister(name)


def test_a_custom_operator_is_found_by_all_of_its_overloads(fresh):
    library = torch.library.Library("mezzo_test_registry", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    fresh.register("twice", (torch.ops.mezzo_test_registry.twice,), ENTRY)
    assert fresh.name_of(torch.ops.mezzo_test_registry.twice) == "twice"
    assert fresh.name_of(torch.ops.mezzo_test_registry.twice.default) == "twice"
    assert parameters(torch.ops.mezzo_test_registry.twice.default) == ("x",)
    library._destroy()


def test_concurrent_registrations_are_all_kept(fresh):
    names = [f"mine{number}" for number in range(64)]

    def register(some):
        for name in some:
            fresh.register(name, (), ENTRY)

    threads = [threading.Thread(target=register, args=(names[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(names) <= fresh.names
    assert fresh.generation == len(names)


def test_concurrent_first_calls_return_the_same_registry(monkeypatch):
    monkeypatch.setattr(module, "_created", module.cache(Registry))
    registry_once = module.cache(module.registry.__wrapped__)
    found, barrier = [], threading.Barrier(4)

    def first():
        barrier.wait()
        found.append(registry_once())

    threads = [threading.Thread(target=first) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in found}) == 1


def test_most_ops_are_in_aten():
    assert len(aten_overloads().keys() & registry().names) > 0.9 * len(registry().names)


def test_every_function_of_an_op_has_parameters():
    assert {
        (op.name, function)
        for op in registry()
        for function in op.functions
        if not parameters(function)
    } == set()
