"""MXNet's op lists: the `list_*` functions, checks of user lists, translation to a policy."""

import numpy as np
import pytest
import torch

from mezzo import Policy
from mezzo.compat.mxnet import amp
from mezzo.compat.mxnet.amp._lists import (
    check_excluded_names,
    check_lists,
    policy_fields,
    translate_ops,
)

FLOAT16 = ["float16", np.float16, np.dtype("float16"), torch.float16]


@pytest.mark.parametrize("dtype", FLOAT16, ids=repr)
def test_a_dtype_may_be_a_name_or_of_numpy_or_torch(dtype):
    assert amp.list_lp16_ops(dtype) == [
        "_linalg_gemm",
        "_linalg_gemm2",
        "_npi_einsum",
        "_npi_matmul",
        "Convolution",
        "Deconvolution",
        "FullyConnected",
        "RNN",
    ]


@pytest.mark.parametrize(("dtype", "key"), [("float16", "mxnet_fp16"), ("bfloat16", "mxnet_bf16")])
def test_lists_equal_those_of_mxnet(dtype, key, system_lists):
    expected, half = system_lists[key], "FP16" if dtype == "float16" else "BF16"
    assert amp.list_lp16_ops(dtype) == expected[f"{half}_FUNCS"].split()
    assert amp.list_lp16_fp32_ops(dtype) == expected[f"{half}_FP32_FUNCS"].split()
    assert amp.list_fp32_ops(dtype) == expected["FP32_FUNCS"].split()
    assert amp.list_widest_type_cast(dtype) == expected["WIDEST_TYPE_CASTS"].split()
    assert [list(entry) for entry in amp.list_conditional_fp32_ops(dtype)] == expected[
        "CONDITIONAL_FP32_FUNCS"
    ]
    assert amp.list_loss_output_functions(dtype) == expected["LOSS_OUTPUT_FUNCTIONS"].split()
    assert amp.list_lp16_use_fp32_params(dtype) == expected.get("BF16_USE_FP32_PARAMS")


def test_returned_lists_are_copies():
    amp.list_lp16_ops("float16").clear()
    amp.list_conditional_fp32_ops("float16")[0][2].clear()
    assert amp.list_lp16_ops("float16")
    assert amp.list_conditional_fp32_ops("float16")[0][2] == ["softrelu"]


@pytest.mark.parametrize("dtype", ["float32", np.float32, None, "fp16"], ids=repr)
def test_another_dtype_raises_as_in_mxnet(dtype):
    with pytest.raises(AssertionError, match="not supported type, got"):
        amp.list_fp32_ops(dtype)


# -- checks ----------------------------------------------------------------------------------------


def check(target=None, full=None, conditional=None):
    check_lists(torch.float16, target, full, conditional)


def test_lists_from_mxnets_documentation_are_accepted():
    check()
    check(["Convolution"], ["SoftmaxOutput", "FullyConnected"])
    check(["Convolution"], ["softmax"], [("Activation", "act_type", ["softrelu"])])


@pytest.mark.parametrize("name", ["target_dtype_ops", "fp32_ops", "conditional_fp32_ops"])
def test_a_list_of_another_type_is_rejected(name):
    lists = {"target_dtype_ops": None, "fp32_ops": None, "conditional_fp32_ops": None} | {
        name: "Convolution"
    }
    with pytest.raises(AssertionError, match=f"{name} should be a list of .*str.*, got str"):
        check(*lists.values())
    with pytest.raises(AssertionError, match=r"should be a list of strs, got list of int"):
        check([1], None)


def test_an_op_in_two_lists_is_rejected():
    with pytest.raises(
        AssertionError,
        match=(
            r"Ops cannot be in two or more lists. Common ops in target_dtype_ops and fp32_ops:"
            r" \['Convolution'\]"
        ),
    ):
        check(["Convolution"], ["Convolution"])
    with pytest.raises(
        AssertionError,
        match=r"fp32_ops: \['FullyConnected'\]. A list that is not passed is MXNet's default",
    ):
        check(None, ["FullyConnected"])
    with pytest.raises(
        AssertionError, match=r"fp32_ops and conditional_fp32_ops: \['Activation'\]"
    ):
        check(["Convolution"], ["Activation"])


def test_unlisted_ops_are_rejected():
    with pytest.raises(
        AssertionError,
        match=r"Can only choose ops from one of the four lists.*Op \['Conv'\] not in any of them",
    ):
        check(["Conv"])
    with pytest.raises(AssertionError, match=r"Op \['broadcast_add'\] not in any"):
        check(["broadcast_add"])


@pytest.mark.parametrize(
    "entry",
    ["Activation", ("Activation", "act_type", "relu"), ("Activation", "act_type")],
    ids=repr,
)
def test_an_invalid_condition_is_rejected(entry):
    with pytest.raises(AssertionError, match=r"should be a list of \(str, str, list of str\), got"):
        check(conditional=[entry])


def test_excluded_names_must_be_a_list():
    assert check_excluded_names(None) == []
    assert check_excluded_names(["conv0"]) == ["conv0"]
    with pytest.raises(
        ValueError,
        match=r"excluded_sym_names must be a list of strings .* while received type <class 'str'>",
    ):
        check_excluded_names("conv0")
    with pytest.raises(ValueError, match=r"must be a list of strings .*: \[0\]"):
        check_excluded_names([0])


# -- translation -----------------------------------------------------------------------------------


def policy(target=None, full=None, conditional=None, dtype=torch.float16):
    return Policy(dtype=dtype, preset="mxnet", **policy_fields(dtype, target, full, conditional))


def rule(policy, op, **arguments):
    return policy.explain(op, torch.float32, device="cpu", **arguments).rule.value


def test_names_are_translated_and_ops_missing_in_torch_are_left_out():
    assert translate_ops(
        ["Convolution", "SoftmaxOutput", "LinearRegressionOutput", "SVMOutput"]
    ) == {
        "conv1d",
        "conv2d",
        "conv3d",
        "softmax",
    }


def test_without_lists_mxnets_apply():
    plain = policy()
    assert plain == Policy(dtype="float16", preset="mxnet")
    assert (rule(plain, "conv2d"), rule(plain, "softmax"), rule(plain, "add")) == (
        "half",
        "full",
        "promote",
    )


def test_a_list_replaces_mxnets():
    only = policy(target=["Convolution"])
    assert (rule(only, "conv2d"), rule(only, "linear"), rule(only, "softmax")) == (
        "half",
        "keep",
        "full",
    )
    other = policy(full=["Convolution"])
    assert (
        rule(other, "conv2d"),
        rule(other, "linear"),
        rule(other, "softmax"),
        rule(other, "softplus"),
    ) == ("full", "half", "keep", "full")


def test_lists_from_mxnets_documentation_are_translated():
    lists = policy(target=["Convolution"], full=["SoftmaxOutput", "FullyConnected"])
    assert (rule(lists, "conv2d"), rule(lists, "linear"), rule(lists, "softmax")) == (
        "half",
        "full",
        "full",
    )


def test_conditions_on_activation_types_become_op_rules():
    conditional = policy(
        conditional=[("Activation", "act_type", ["tanh"]), ("LeakyReLU", "act_type", ["elu"])]
    )
    assert [rule(conditional, op) for op in ("tanh", "elu", "softplus", "selu")] == [
        "full",
        "full",
        "keep",
        "keep",
    ]


def test_other_conditions_check_the_argument():
    conditional = policy(conditional=[("softmax", "axis", ["-1"])], full=[])
    assert conditional.explain("softmax", torch.float16, device="cpu", dim=-1).rule.value == "full"
    assert conditional.explain("softmax", torch.float16, device="cpu", dim=0).rule.value == "keep"


def test_an_unknown_op_is_rejected_with_a_suggestion():
    with pytest.raises(
        AttributeError,
        match=r"MXNet has no op 'Convolutoin' in its lists. Did you mean 'Convolution'",
    ):
        translate_ops(["Convolutoin"])
