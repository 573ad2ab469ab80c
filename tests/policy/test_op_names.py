"""One op, one name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.policy.op_names import ALIASES, DUNDERS, NOT_OPS, canonical, is_op
from mezzo.policy.registry import registry


@pytest.mark.parametrize(
    ("word", "name"),
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
def test_every_spelling_leads_to_the_one_name(word, name):
    assert canonical(word) == name


@given(
    st.sampled_from(sorted(ALIASES | DUNDERS)),
    st.sampled_from(["", "_", "__"]),
    st.sampled_from(["", "_"]),
)
def test_the_name_of_a_name_is_itself(word, before, after):
    name = canonical(before + word + after)
    assert canonical(name) == name


@given(st.text(st.characters(categories=["Ll", "Nd"]) | st.just("_"), max_size=12))
def test_naming_any_word_twice_changes_nothing_more(word):
    assert canonical(canonical(word)) == canonical(word)


def test_every_alias_means_an_op_that_is_known():
    assert {name for name in (ALIASES | DUNDERS).values() if name not in registry()} == set()


def test_no_alias_is_an_op_of_its_own():
    assert {alias for alias in ALIASES if alias in registry()} == set()


@pytest.mark.parametrize(
    "name", ["softmax", "add", "linear", "nonzero", "index", "complex", "view"]
)
def test_what_computes_is_an_op(name):
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
def test_what_carries_describes_makes_or_converts_a_tensor_is_no_op(name):
    assert not is_op(name)


def test_nothing_that_is_no_op_is_in_the_registry():
    assert registry().names & NOT_OPS == set()
