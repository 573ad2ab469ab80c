"""Canonical op names and aliases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.policy.op_names import ALIASES, DUNDERS, NOT_OPS, canonical, is_op
from mezzo.policy.registry import registry


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("__add__", "add"),
        ("__radd__", "add"),
        ("__iadd__", "add"),
        ("add_", "add"),
        ("rsub", "sub"),
        ("__rtruediv__", "div"),
        ("true_divide_", "div"),
        ("__matmul__", "matmul"),
        ("_softmax", "softmax"),
        ("special_softmax", "softmax"),
        ("cross_entropy_loss", "cross_entropy"),
        ("native_layer_norm", "layer_norm"),
        ("_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention"),
        ("sdpa", "scaled_dot_product_attention"),
        ("concatenate", "cat"),
        ("clip_", "clamp"),
        ("inverse", "linalg_inv"),
        ("special_gammainc", "igamma"),
        ("row_stack", "vstack"),
        ("matrix_exp", "linalg_matrix_exp"),
        ("dsmm", "mm"),
    ],
)
def test_every_spelling_has_its_canonical_name(spelling, name):
    assert canonical(spelling) == name


@given(
    st.sampled_from(sorted(ALIASES | DUNDERS)),
    st.sampled_from(["", "_", "__"]),
    st.sampled_from(["", "_"]),
)
def test_a_canonical_name_is_its_own_canonical_name(spelling, before, after):
    name = canonical(before + spelling + after)
    assert canonical(name) == name


@given(st.text(st.characters(categories=["Ll", "Nd"]) | st.just("_"), max_size=12))
def test_canonical_is_idempotent(spelling):
    assert canonical(canonical(spelling)) == canonical(spelling)


def test_every_alias_belongs_to_a_known_op():
    assert {name for name in (ALIASES | DUNDERS).values() if name not in registry()} == set()


def test_no_alias_is_a_separate_op():
    assert {alias for alias in ALIASES if alias in registry()} == set()


@pytest.mark.parametrize(
    "name", ["softmax", "add", "linear", "nonzero", "index", "complex", "view"]
)
def test_functions_that_compute_are_ops(name):
    assert is_op(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "to",
        "half",
        "clone",
        "item",
        "is_floating_point",
        "get_device",
        "sym_size",
        "softmax_backward_data",
        "to_dense",
        "setitem",
    ],
)
def test_functions_that_carry_describe_create_or_convert_a_tensor_are_not_ops(name):
    assert not is_op(name)


def test_the_registry_has_only_ops():
    assert registry().names & NOT_OPS == set()
