"""Options of the opt levels, their overrides, the state of amp, and `master_params`."""

import pytest
import torch
from torch import nn

from mezzo.compat.apex import amp
from mezzo.compat.apex.amp import _amp_state
from mezzo.compat.apex.amp._amp_state import OPT_LEVELS, apply_overrides, find_opt_level

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
def test_levels_equal_those_of_apex(level, cast, patch, norms, masters, scale):
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


@pytest.mark.parametrize("name", ["01", "o1", "O4", "", None, 1])
def test_an_unknown_level_is_a_runtime_error_with_the_choices(name):
    with pytest.raises(
        RuntimeError,
        match=(
            r"Unexpected optimization level .*'O0', 'O1', 'O2', 'O3'.*letter O, not the number zero"
        ),
    ):
        find_opt_level(name)


@pytest.mark.parametrize(
    ("level", "overrides", "message"),
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
        ("O0", {"patch_torch_functions": True}, "is allowed with opt_level='O1' only"),
        ("O2", {"patch_torch_functions": True}, "is allowed with opt_level='O1' only"),
        ("O3", {"patch_torch_functions": True}, "is allowed with opt_level='O1' only"),
    ],
)
def test_overrides_that_contradict_the_level_are_runtime_errors(level, overrides, message, capsys):
    with pytest.raises(RuntimeError, match=message):
        apply_overrides(OPT_LEVELS[level].properties, **overrides)
    _amp_state.hard_override = True
    assert apply_overrides(OPT_LEVELS[level].properties, **overrides).opt_level == level
    assert message in capsys.readouterr().out


def test_none_overrides_nothing():
    properties = OPT_LEVELS["O1"].properties
    assert (
        apply_overrides(properties, cast_model_type=None, master_weights=None, loss_scale=None)
        == properties
    )
    assert (
        apply_overrides(properties, cast_model_type=torch.float32).cast_model_type is torch.float32
    )


@pytest.mark.parametrize(
    ("value", "flag"), [("True", True), ("False", False), (True, True), (False, False)]
)
def test_keep_batchnorm_fp32_may_be_a_string(value, flag):
    assert (
        apply_overrides(OPT_LEVELS["O2"].properties, keep_batchnorm_fp32=value).keep_batchnorm_fp32
        is flag
    )


def test_keep_batchnorm_fp32_with_another_string_is_an_assertion_error():
    with pytest.raises(
        AssertionError,
        match="must be True, False, the string 'True' or 'False', or None; got 'yes'",
    ):
        apply_overrides(OPT_LEVELS["O2"].properties, keep_batchnorm_fp32="yes")


@pytest.mark.parametrize(("value", "scale"), [("dynamic", "dynamic"), ("128", 128.0), (4, 4.0)])
def test_loss_scale_is_a_number_or_dynamic(value, scale):
    assert apply_overrides(OPT_LEVELS["O0"].properties, loss_scale=value).loss_scale == scale


@pytest.mark.parametrize("value", ["nonsense", -1, 0.0, float("inf"), "nan", [1]], ids=str)
def test_an_invalid_loss_scale_is_a_value_error(value):
    with pytest.raises(
        ValueError, match=r"a positive number, such a number as a string \('128\.0'\), or 'dynamic'"
    ):
        apply_overrides(OPT_LEVELS["O0"].properties, loss_scale=value)


@pytest.mark.parametrize("dtype", ["half", torch.float64, torch.int8, True])
def test_an_unsupported_model_dtype_is_a_value_error(dtype):
    with pytest.raises(
        ValueError,
        match=r"cast_model_type must be torch\.float16, torch\.bfloat16, torch\.float32, or False",
    ):
        apply_overrides(OPT_LEVELS["O2"].properties, cast_model_type=dtype)


# -- state and masters -----------------------------------------------------------------------------


def make(level):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer


def step(model, optimizer):
    with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_masters_of_float32_parameters_are_the_parameters():
    for level in ("O0", "O1"):
        model, optimizer = make(level)
        assert [
            one is other
            for one, other in zip(amp.master_params(optimizer), model.parameters(), strict=True)
        ] == [True, True]


def test_masters_at_o2_round_to_the_parameters():
    model, optimizer = make("O2")
    step(model, optimizer)
    for master, parameter in zip(amp.master_params(optimizer), model.parameters(), strict=True):
        assert master.dtype is torch.float32
        assert master.requires_grad
        assert torch.equal(master.half(), parameter)
        assert not torch.equal(master, parameter.float())


def test_masters_keep_their_memory_across_steps():
    model, optimizer = make("O2")
    first = [master.data_ptr() for master in amp.master_params(optimizer)]
    step(model, optimizer)
    assert [master.data_ptr() for master in amp.master_params(optimizer)] == first


def test_writing_a_parameter_updates_its_master():
    model, optimizer = make("O2")
    with torch.no_grad():
        model.weight.fill_(0.5)
    assert torch.equal(next(amp.master_params(optimizer)), torch.full((2, 3), 0.5))


def test_the_state_is_importable_from_apexs_path():
    make("O2")
    from mezzo.compat.apex.amp._amp_state import _amp_state, maybe_print

    assert amp._amp_state is _amp_state
    assert _amp_state.opt_properties.loss_scale == "dynamic"
    assert _amp_state.loss_scalers[0].loss_scale() == 65536.0
    maybe_print("silent")
