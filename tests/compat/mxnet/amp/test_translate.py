import pytest
import torch

from mezzo import Policy
from mezzo.compat.mxnet.amp._lists import ops, overrides


def policy(target=None, full=None, conditional=None, dtype=torch.float16):
    return Policy(dtype=dtype, preset="mxnet", **overrides(dtype, target, full, conditional))


def rule(policy, op, **arguments):
    return policy.explain(op, torch.float32, device="cpu", **arguments).rule.value


def test_names_are_translated_and_what_torch_lacks_falls_out():
    assert ops(["Convolution", "SoftmaxOutput", "LinearRegressionOutput", "SVMOutput"]) == {
        "conv1d",
        "conv2d",
        "conv3d",
        "softmax",
    }


def test_without_lists_mxnets_own_hold():
    plain = policy()
    assert plain == Policy(dtype="float16", preset="mxnet")
    assert (rule(plain, "conv2d"), rule(plain, "softmax"), rule(plain, "add")) == (
        "half",
        "full",
        "promote",
    )


def test_a_list_takes_the_place_of_mxnets_own():
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


def test_the_documents_lists():
    lists = policy(target=["Convolution"], full=["SoftmaxOutput", "FullyConnected"])
    assert (rule(lists, "conv2d"), rule(lists, "linear"), rule(lists, "softmax")) == (
        "half",
        "full",
        "full",
    )


def test_conditions_on_kinds_of_activation_are_ops_of_their_own():
    given = policy(
        conditional=[("Activation", "act_type", ["tanh"]), ("LeakyReLU", "act_type", ["elu"])]
    )
    assert [rule(given, op) for op in ("tanh", "elu", "softplus", "selu")] == [
        "full",
        "full",
        "keep",
        "keep",
    ]


def test_other_conditions_look_at_the_argument():
    given = policy(conditional=[("softmax", "axis", ["-1"])], full=[])
    assert given.explain("softmax", torch.float16, device="cpu", dim=-1).rule.value == "full"
    assert given.explain("softmax", torch.float16, device="cpu", dim=0).rule.value == "keep"


def test_an_unknown_op_is_refused_with_what_is_close():
    with pytest.raises(
        AttributeError,
        match=r"MXNet has no op 'Convolutoin' in its lists. Did you mean 'Convolution'",
    ):
        ops(["Convolutoin"])
