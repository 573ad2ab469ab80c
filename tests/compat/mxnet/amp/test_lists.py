import numpy as np
import pytest
import torch

from mezzo.compat.mxnet import amp

FLOAT16 = ["float16", np.float16, np.dtype("float16"), torch.float16]


@pytest.mark.parametrize("word", FLOAT16, ids=repr)
def test_a_dtype_may_be_said_in_any_words(word):
    assert amp.list_lp16_ops(word) == [
        "_linalg_gemm",
        "_linalg_gemm2",
        "_npi_einsum",
        "_npi_matmul",
        "Convolution",
        "Deconvolution",
        "FullyConnected",
        "RNN",
    ]


@pytest.mark.parametrize(("word", "facts"), [("float16", "mxnet_fp16"), ("bfloat16", "mxnet_bf16")])
def test_the_lists_are_mxnets(word, facts, system_lists):
    their, half = system_lists[facts], "FP16" if word == "float16" else "BF16"
    assert amp.list_lp16_ops(word) == their[f"{half}_FUNCS"].split()
    assert amp.list_lp16_fp32_ops(word) == their[f"{half}_FP32_FUNCS"].split()
    assert amp.list_fp32_ops(word) == their["FP32_FUNCS"].split()
    assert amp.list_widest_type_cast(word) == their["WIDEST_TYPE_CASTS"].split()
    assert [list(entry) for entry in amp.list_conditional_fp32_ops(word)] == their[
        "CONDITIONAL_FP32_FUNCS"
    ]
    assert amp.list_loss_output_functions(word) == their["LOSS_OUTPUT_FUNCTIONS"].split()
    assert amp.list_lp16_use_fp32_params(word) == their.get("BF16_USE_FP32_PARAMS")


def test_a_list_is_the_callers_own():
    amp.list_lp16_ops("float16").clear()
    amp.list_conditional_fp32_ops("float16")[0][2].clear()
    assert amp.list_lp16_ops("float16")
    assert amp.list_conditional_fp32_ops("float16")[0][2] == ["softrelu"]


@pytest.mark.parametrize("word", ["float32", np.float32, None, "fp16"], ids=repr)
def test_another_dtype_is_refused_as_there(word):
    with pytest.raises(AssertionError, match="not supported type, got"):
        amp.list_fp32_ops(word)
