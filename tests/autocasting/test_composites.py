"""Composite functions of torch: the policy applies to each op inside, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.composite_ops import ops_inside
from torch import Tensor, nn

import mezzo
from mezzo.autocasting import composites
from mezzo.autocasting.composites import (
    can_decompose,
    decomposed,
    decomposed_name,
    is_composite,
    is_python_function,
)
from mezzo.policy.registry import registry

HALF, FULL = torch.bfloat16, torch.float32
X = torch.linspace(-1, 1, 12).reshape(3, 4)
IMAGE = torch.linspace(-1, 1, 32).reshape(1, 2, 4, 4)
ATTENTION = nn.MultiheadAttention(4, 2, batch_first=True)
ENCODER = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
LSTM = nn.LSTM(4, 4, batch_first=True)
TABLE = torch.linspace(0, 1, 20).reshape(5, 4)


def region(**fields: Any) -> mezzo.autocast:
    return mezzo.autocast("cpu", dtype=HALF, **fields)


def first(value: Any) -> Tensor:
    return value[0] if isinstance(value, tuple) else value


COMPOSITES: dict[str, tuple[Any, dict[str, Any]]] = {
    "MultiheadAttention": (
        lambda x: first(ATTENTION(x[None], x[None], x[None])),
        {"full": {"softmax", "bmm"}, "half": {"mul"}},
    ),
    "MultiheadAttention full linear": (
        lambda x: first(ATTENTION(x[None], x[None], x[None], need_weights=False)),
        {"full": {"linear"}},
    ),
    "TransformerEncoderLayer": (
        lambda x: ENCODER(x[None]),
        {"full": {"layer_norm"}, "half": {"add"}},
    ),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x, hard=True), {"half": {"add", "softmax"}}),
    "normalize": (lambda x: F.normalize(x), {"half": {"div"}}),
    "normalize full": (lambda x: F.normalize(x.to(HALF)), {"full": {"linalg_vector_norm", "norm"}}),
    "softmin": (lambda x: F.softmin(x, -1), {"half": {"neg", "softmax"}}),
    "tanhshrink": (lambda x: F.tanhshrink(x), {"half": {"tanh", "sub"}}),
    "softsign": (lambda x: F.softsign(x), {"half": {"abs"}, "full": {"div"}}),
    "cosine_similarity": (
        lambda x: F.cosine_similarity(x, x.flip(0)),
        {"half": {"cosine_similarity"}},
    ),
    "interpolate": (
        lambda _: F.interpolate(IMAGE, scale_factor=2.0, mode="bilinear"),
        {"half": {"upsample_bilinear2d"}},
    ),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2])),
        {"half": {"cross_entropy"}},
    ),
    "embedding": (lambda _: F.embedding(torch.tensor([0, 3]), TABLE), {"half": {"embedding"}}),
    "dropout": (lambda x: F.dropout(x, 0.5, training=False), {"half": {"dropout"}}),
    "max_pool2d": (lambda _: F.max_pool2d(IMAGE, 2), {"half": {"max_pool2d"}}),
    "max_pool2d with indices": (
        lambda _: first(F.max_pool2d(IMAGE, 2, return_indices=True)),
        {"half": {"max_pool2d"}},
    ),
    "einsum": (lambda x: torch.einsum("ij,kj->ik", x, x), {"full": {"bmm"}}),
    "tensordot": (lambda x: torch.tensordot(x, x, dims=([1], [1])), {"full": {"mm"}}),
    "norm": (lambda x: torch.norm(x), {"half": {"norm", "linalg_vector_norm"}}),
    "Tensor.norm": (lambda x: x.norm(dim=-1), {"half": {"norm", "linalg_vector_norm"}}),
    "cdist": (lambda x: torch.cdist(x, x), {"full": {"cdist"}}),
    "stft": (
        lambda x: torch.stft(x.flatten(), 4, window=torch.ones(4), return_complex=True).real,
        {"half": {"add"}},
    ),
    "local_response_norm": (lambda _: F.local_response_norm(IMAGE, 2), {"half": {"div", "mul"}}),
    "pairwise_distance": (lambda x: F.pairwise_distance(x, x + 1), {"half": {"sub", "add"}}),
    "triplet_margin_loss": (
        lambda x: F.triplet_margin_loss(x, x + 1, x - 1),
        {"half": {"add"}, "full": {"triplet_margin_loss"}},
    ),
    "smooth_l1_loss": (lambda x: F.smooth_l1_loss(x, x + 1), {"half": {"smooth_l1_loss"}}),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), {"half": {"layer_norm"}}),
    "hardtanh": (lambda x: F.relu6(x), {"half": {"relu6", "hardtanh"}}),
    "glu": (lambda x: F.glu(x), {"half": {"glu"}}),
    "Tensor.split": (lambda x: first(torch.split(x + x, 2)), {"half": {"add"}}),
    "std": (lambda x: x.std(), {"half": {"std"}}),
    "scaled_dot_product_attention": (
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
        {"full": {"scaled_dot_product_attention"}},
    ),
    "one_hot dot": (
        lambda x: F.one_hot(torch.tensor([0, 1, 2]), 3).float() @ x,
        {"full": {"matmul"}},
    ),
}
CASES = pytest.mark.parametrize(("call", "fields"), COMPOSITES.values(), ids=COMPOSITES.keys())


@CASES
def test_eager_equals_compiled(call: Any, fields: dict[str, Any]) -> None:
    torch._dynamo.reset()
    with region(**fields):
        torch.manual_seed(0)
        expected = call(X)
        torch.manual_seed(0)
        found = torch.compile(call, backend="eager", fullgraph=True)(X)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


@CASES
def test_the_policy_changes_the_result_of_its_composite(call: Any, fields: dict[str, Any]) -> None:
    same = {"stft", "Tensor.split", "cdist", "triplet_margin_loss", "layer_norm"}
    with region():
        torch.manual_seed(0)
        plain = call(X)
    with region(**fields):
        torch.manual_seed(0)
        overridden = call(X)
    differs = plain.dtype is not overridden.dtype or not torch.equal(plain, overridden)
    assert differs or call in [COMPOSITES[name][0] for name in same]


@pytest.mark.usefixtures("_fresh_compiler")
def test_eager_equals_ahead_of_time_compiled_in_value_and_gradient() -> None:
    x = X.clone().requires_grad_()
    for name in ("MultiheadAttention", "TransformerEncoderLayer", "normalize", "softmin"):
        call, fields = COMPOSITES[name]
        gradients = []
        for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
            x.grad = None
            with region(**fields):
                result = run(x)
            result.float().sum().backward()
            gradients.append((result.detach(), x.grad))
        (expected, slope), (found, other) = gradients
        assert found.dtype is expected.dtype, name
        assert torch.equal(found, expected), name
        torch.testing.assert_close(other, slope, rtol=0.02, atol=1e-2)


@pytest.mark.parametrize(
    ("call", "fields", "dtype"),
    [
        (lambda x: F.softmin(x, -1), {"half": {"softmax"}}, HALF),
        (lambda x: F.tanhshrink(x), {"half": {"sub"}}, HALF),
        (lambda x: F.softsign(x.to(HALF)), {"full": {"div"}}, FULL),
        (lambda x: F.normalize(x), {"half": {"div"}}, HALF),
        (lambda x: F.gumbel_softmax(x), {"half": {"softmax"}}, HALF),
        (lambda x: first(ATTENTION(x[None], x[None], x[None])), {"full": {"linear"}}, FULL),
        (lambda x: torch.einsum("ij,kj->ik", x, x), {"full": {"bmm"}}, FULL),
        (lambda x: torch.tensordot(x, x, dims=([1], [1])), {"full": {"mm"}}, FULL),
        (lambda x: first(LSTM(x[None])), {"full": {"linear"}}, FULL),
        (lambda x: F.embedding(torch.tensor([0]), x), {"half": {"embedding"}}, HALF),
        (lambda x: F.max_pool1d(x, 2), {"half": {"max_pool1d"}}, HALF),
        (lambda x: F.max_pool1d(x, 2, return_indices=True)[0], {"half": {"max_pool1d"}}, HALF),
    ],
)
def test_ops_inside_a_composite_are_overridden(
    call: Any, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    with region(**fields):
        assert call(X).dtype is dtype


def test_a_listed_composite_is_cast_as_a_whole() -> None:
    with region(full={"normalize"}, half={"div"}):
        assert F.normalize(X.to(HALF)).dtype is FULL


ABOUT_SIZES = {
    "batch_norm": {"add", "mul", "sub"},
    "embedding": {"add", "embedding_renorm", "neg"},
    "embedding_bag": {"embedding_renorm", "reshape"},
    "fractional_max_pool2d": {"mul"},
    "fractional_max_pool3d": {"mul"},
    "group_norm": {"add", "floor_divide", "mul", "sub"},
    "instance_norm": {"mul"},
    "max_unpool2d": {"add", "mul", "neg", "sub"},
    "max_unpool3d": {"add", "mul", "neg", "sub"},
    "split": {"split_with_sizes"},
}
"""Ops in the code of wrappers that compute sizes and indices, or that the wrapper calls for other
types of arguments."""

PYTHON_FUNCTIONS = [
    (op.name, function)
    for op in registry()
    for function in op.functions
    if is_python_function(function)
]


def test_ops_inside_finds_operators_and_calls() -> None:
    assert {"add", "sub", "abs"} & ops_inside(F.softsign) == {"add", "abs"}
    assert {"linear", "softmax", "baddbmm", "bmm"} <= ops_inside(F.multi_head_attention_forward)
    assert ops_inside(torch.mm) == set()
    assert "max_pool2d" in ops_inside(F.max_pool2d)


def test_a_function_that_is_not_decomposed_has_no_other_op_inside() -> None:
    whole = [
        (name, function)
        for name, function in PYTHON_FUNCTIONS
        if can_decompose(name, function) and not is_composite(name, function)
    ]
    missed = {
        name: others
        for name, function in whole
        if (others := ops_inside(function) - {name} - ABOUT_SIZES.get(name, set()))
    }
    assert len(whole) > 50
    assert missed == {}


def test_a_wrapper_of_one_op_is_not_decomposed() -> None:
    """`norm` calls `torch.linalg.vector_norm`, a name that `ops_inside` does not find."""
    wrappers = {
        name
        for name, function in PYTHON_FUNCTIONS
        if is_composite(name, function) and ops_inside(function) <= {name}
    }
    assert wrappers == {"norm"}


def test_builtins_are_not_python_functions() -> None:
    assert is_python_function(F.normalize)
    assert is_python_function(torch.Tensor.norm)
    assert not is_python_function(torch.add)
    assert not is_python_function(F.linear)


def test_a_decomposed_copy_is_cached_equivalent_and_found_by_name() -> None:
    copy = decomposed(F.normalize)
    assert decomposed(F.normalize) is copy
    assert getattr(composites, decomposed_name(F.normalize)) is copy
    assert torch.equal(copy(X, dim=0), F.normalize(X, dim=0))
    assert torch.equal(
        decomposed(F.gaussian_nll_loss)(X, X, X.abs() + 1), F.gaussian_nll_loss(X, X, X.abs() + 1)
    )


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_composite_that_branches_on_values_compiles_with_graph_breaks() -> None:
    with region(half={"log", "sub"}):
        expected = F.gaussian_nll_loss(X, X * 0.5, X.abs() + 1)
        found = torch.compile(
            lambda x: F.gaussian_nll_loss(x, x * 0.5, x.abs() + 1), backend="eager"
        )(X)
    assert found.dtype is expected.dtype


def test_a_composite_that_branches_on_values_is_overridden_in_eager() -> None:
    with region(half={"log", "sub", "add", "mul"}):
        assert F.gaussian_nll_loss(X, X * 0.5, X.abs() + 1).dtype is HALF


VOLUME = torch.linspace(-1, 1, 64).reshape(1, 1, 4, 4, 4)
CHOSEN = {
    "max_pool3d": lambda x: F.max_pool3d(x, 2),
    "max_pool3d with indices": lambda x: first(F.max_pool3d(x, 2, return_indices=True)),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x, 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x[0], 2),
}


@pytest.mark.parametrize("call", CHOSEN.values(), ids=CHOSEN.keys())
def test_a_boolean_dispatch_is_decomposed_once(call: Any) -> None:
    """Its copy must not call the original again, which would recurse."""
    with region(preset="paddle", default_rule="full"):
        assert call(VOLUME.to(HALF)).dtype is FULL


# The others read sizes in a way that dynamo does not trace.
@pytest.mark.parametrize("name", ["max_pool3d", "max_pool3d with indices"])
def test_a_boolean_dispatch_is_decomposed_in_compiled_code(name: str) -> None:
    torch._dynamo.reset()
    with region(preset="paddle", default_rule="full"):
        expected = CHOSEN[name](VOLUME.to(HALF))
        assert torch.equal(
            torch.compile(CHOSEN[name], backend="eager", fullgraph=True)(VOLUME.to(HALF)), expected
        )
