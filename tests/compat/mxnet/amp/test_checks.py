import pytest
import torch

from mezzo.compat.mxnet.amp._lists import check_lists, check_names


def check(target=None, full=None, conditional=None):
    check_lists(torch.float16, target, full, conditional)


def test_the_documents_lists_are_taken():
    check()
    check(["Convolution"], ["SoftmaxOutput", "FullyConnected"])
    check(["Convolution"], ["softmax"], [("Activation", "act_type", ["softrelu"])])


@pytest.mark.parametrize("name", ["target_dtype_ops", "fp32_ops", "conditional_fp32_ops"])
def test_a_list_is_a_list(name):
    words = {"target_dtype_ops": None, "fp32_ops": None, "conditional_fp32_ops": None} | {
        name: "Convolution"
    }
    with pytest.raises(AssertionError, match=f"{name} should be a list of strs, got str"):
        check(*words.values())


def test_an_op_has_one_list():
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
        match=r"fp32_ops: \['FullyConnected'\]. A list that is not given is MXNet's own: give both",
    ):
        check(None, ["FullyConnected"])
    with pytest.raises(
        AssertionError, match=r"fp32_ops and conditional_fp32_ops: \['Activation'\]"
    ):
        check(["Convolution"], ["Activation"])


def test_ops_come_from_the_lists():
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
def test_a_condition_is_an_op_a_parameter_and_values(entry):
    with pytest.raises(AssertionError, match=r"should be a list of \(str, str, list of str\), got"):
        check(conditional=[entry])


def test_excluded_names_are_a_list():
    assert check_names(None) == []
    assert check_names(["conv0"]) == ["conv0"]
    with pytest.raises(
        ValueError,
        match=r"excluded_sym_names must be a list of strings .* while received type <class 'str'>",
    ):
        check_names("conv0")
