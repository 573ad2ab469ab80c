"""The table of levels, and what may be overridden in it."""

import pytest
import torch

from mezzo.compat.apex.amp import _amp_state
from mezzo.compat.apex.amp._amp_state import OPT_LEVELS, level_of, overridden

HALF, FULL = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("level", "cast", "patch", "norms", "masters", "scale"),
    [
        ("O0", FULL, False, None, False, 1.0),
        ("O1", None, True, None, None, "dynamic"),
        ("O2", HALF, False, True, True, "dynamic"),
        ("O3", HALF, False, False, False, 1.0),
    ],
)
def test_the_table_is_apexs(level, cast, patch, norms, masters, scale):
    options = OPT_LEVELS[level].properties.options
    assert options == {
        "enabled": True,
        "opt_level": level,
        "cast_model_type": cast,
        "patch_torch_functions": patch,
        "keep_batchnorm_fp32": norms,
        "master_weights": masters,
        "loss_scale": scale,
    }


@pytest.mark.parametrize("word", ["01", "o1", "O4", "", None, 1])
def test_an_unknown_level_is_a_runtime_error_that_names_the_letter(word):
    with pytest.raises(
        RuntimeError,
        match=(
            r"Unexpected optimization level .*'O0', 'O1', 'O2', 'O3'.*letter O, not the number zero"
        ),
    ):
        level_of(word)


@pytest.mark.parametrize(
    ("level", "words", "said"),
    [
        ("O1", {"cast_model_type": torch.float16}, "cast_model_type"),
        ("O1", {"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32 should be None"),
        ("O1", {"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32 should be None"),
        (
            "O1",
            {"master_weights": True},
            "makes no sense with opt_level='O1', whose parameters are FP32",
        ),
        (
            "O1",
            {"master_weights": False},
            "makes no sense with opt_level='O1', whose parameters are FP32",
        ),
        ("O0", {"patch_torch_functions": True}, "belongs to opt_level='O1'"),
        ("O2", {"patch_torch_functions": True}, "belongs to opt_level='O1'"),
        ("O3", {"patch_torch_functions": True}, "belongs to opt_level='O1'"),
    ],
)
def test_overrides_that_contradict_the_level_are_runtime_errors(level, words, said, capsys):
    with pytest.raises(RuntimeError, match=said):
        overridden(OPT_LEVELS[level].properties, **words)
    _amp_state.hard_override = True
    assert overridden(OPT_LEVELS[level].properties, **words).opt_level == level
    assert said in capsys.readouterr().out


def test_what_is_none_overrides_nothing():
    properties = OPT_LEVELS["O1"].properties
    assert (
        overridden(properties, cast_model_type=None, master_weights=None, loss_scale=None)
        == properties
    )
    assert overridden(properties, cast_model_type=torch.float32).cast_model_type is torch.float32


@pytest.mark.parametrize(
    ("word", "flag"), [("True", True), ("False", False), (True, True), (False, False)]
)
def test_flags_may_be_strings(word, flag):
    assert (
        overridden(OPT_LEVELS["O2"].properties, keep_batchnorm_fp32=word).keep_batchnorm_fp32
        is flag
    )


def test_another_string_is_an_assertion_error():
    with pytest.raises(
        AssertionError,
        match="keep_batchnorm_fp32='yes': it is True, False, the string 'True' or 'False', or None",
    ):
        overridden(OPT_LEVELS["O2"].properties, keep_batchnorm_fp32="yes")


@pytest.mark.parametrize(("word", "scale"), [("dynamic", "dynamic"), ("128", 128.0), (4, 4.0)])
def test_scales_are_numbers_or_dynamic(word, scale):
    assert overridden(OPT_LEVELS["O0"].properties, loss_scale=word).loss_scale == scale


@pytest.mark.parametrize("word", ["nonsense", -1, 0.0, float("inf"), "nan", [1]], ids=str)
def test_what_is_no_scale_is_a_value_error(word):
    with pytest.raises(
        ValueError, match=r"it is a positive number, a string of one such as '128\.0', or 'dynamic'"
    ):
        overridden(OPT_LEVELS["O0"].properties, loss_scale=word)


@pytest.mark.parametrize("word", ["half", torch.float64, torch.int8, True])
def test_a_model_is_cast_to_a_dtype_that_amp_knows(word):
    with pytest.raises(
        ValueError,
        match=r"cast_model_type=.*torch\.float16, torch\.bfloat16, torch\.float32, or False",
    ):
        overridden(OPT_LEVELS["O2"].properties, cast_model_type=word)
