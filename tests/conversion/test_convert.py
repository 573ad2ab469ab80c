import pytest
import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls
from torch import nn

import mezzo

X = torch.randn(2, 4)


def _dtypes(converted):
    return {row.node: row.dtype for row in converted.plan if row.op not in ("weight", "input")}


def _model():
    return Calls(
        lambda self, x: F.softmax(F.gelu(self.body(x)) @ self.body.weight, -1), body=nn.Linear(4, 4)
    )


def test_the_callers_lists_beat_the_policys():
    policy = mezzo.Policy("O1", "bfloat16", full={"gelu"})
    assert _dtypes(mezzo.convert(_model(), (X,), policy=policy))["gelu"] == "float32"
    converted = mezzo.convert(
        _model(), (X,), policy=policy, half={"gelu", "softmax"}, full={"matmul"}
    )
    assert _dtypes(converted) == {
        "linear": "bfloat16",
        "gelu": "bfloat16",
        "matmul": "float32",
        "softmax": "bfloat16",
    }


def test_exclusions_beat_everything():
    converted = mezzo.convert(_model(), (X,), dtype=HALF, half={"gelu"}, exclude={"body", "gelu"})
    assert _dtypes(converted)["linear"] == "float32"
    assert _dtypes(converted)["gelu"] == "float32"


def test_conditions_look_at_arguments():
    converted = mezzo.convert(
        nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.GELU("tanh"), nn.Linear(4, 4)),
        (X,),
        dtype=HALF,
        conditional=[("gelu", "approximate", ["tanh"])],
    )
    assert (_dtypes(converted)["gelu"], _dtypes(converted)["gelu_1"]) == ("bfloat16", "float32")


def test_a_policy_from_a_file(tmp_path):
    mezzo.Policy("O1", "float16", full={"linear"}).save(tmp_path / "policy.toml")
    converted = mezzo.convert(_model(), (X,), policy=tmp_path / "policy.toml")
    assert _dtypes(converted)["linear"] == "float32"
    assert _dtypes(converted)["matmul"] == "float16"


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "OD"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_level_converts_in_both_dtypes(level, dtype):
    model = nn.Sequential(
        nn.Conv1d(4, 8, 3),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 6, 4),
        nn.LayerNorm(4),
    ).eval()
    x = torch.randn(2, 4, 8)
    converted = mezzo.convert(model, (x,), policy=level, dtype=dtype)
    assert (converted(x) - model(x)).abs().max() < 0.1
    assert converted.plan.row("conv1d").dtype == dtype
    assert converted.plan.row("layer_norm").dtype == ("float32" if level != "O3" else dtype)


def test_inputs_and_outputs_may_be_16_bit():
    converted = mezzo.convert(nn.Linear(4, 4), (X,), dtype=HALF, keep_io_dtypes=False)
    assert converted.casts.after.count == 0
    assert converted(X.to(HALF)).dtype is HALF
    assert converted(X).dtype is HALF


def test_bad_words_are_refused():
    with pytest.raises(mezzo.PolicyError, match="both list 'linear'"):
        mezzo.convert(_model(), (X,), half={"linear"}, full={"linear"})
    with pytest.raises(
        mezzo.PolicyError, match="half= lists 'conv2d', and no such op is in the graph"
    ):
        mezzo.convert(_model(), (X,), half={"conv2d"})
    with pytest.raises(mezzo.PolicyError, match="Unknown level"):
        mezzo.convert(_model(), (X,), policy="O9")
    with pytest.raises(mezzo.PolicyError, match="Unknown op 'linaer'"):
        mezzo.convert(_model(), (X,), full={"linaer"})
