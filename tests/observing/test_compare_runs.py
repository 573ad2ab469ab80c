"""`record_values` and `compare_runs`: the op at which two runs differ."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, h):
        return h * self.factor


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, factor):
        ctx.factor = factor
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class GradientScale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, h):
        return Backward.apply(h, self.factor)


def network(middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), middle, nn.LayerNorm(32), nn.Linear(32, 4))


@pytest.fixture
def record(tmp_path):
    def write(name, model, policy="O0", step=None, **kwargs):
        torch.manual_seed(1)
        batch = torch.randn(8, 16), torch.randn(8, 4)
        path = tmp_path / name
        mezzo.record_values(path, model, batch, F.mse_loss, policy, step=step, **kwargs)
        return path

    return write


def test_equal_runs_do_not_differ(record):
    found = mezzo.compare_runs(record("a", network(nn.GELU())), record("b", network(nn.GELU())))
    assert not found
    assert found.largest == 0.0
    assert str(found).startswith("Rounding explains all differences: ")


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_explains_the_difference_of_two_policies(record, level, dtype):
    one = record("a", network(nn.GELU()))
    found = mezzo.compare_runs(one, record("b", network(nn.GELU()), level, dtype=dtype))
    assert not found, str(found)
    assert found.largest > 1e-5


@pytest.mark.parametrize("kwargs", [{"policy": "O0"}, {"policy": "O1", "dtype": "float16"}])
def test_the_op_that_was_changed_is_named(record, kwargs):
    one = record("a", network(Scale(1.0)), **kwargs)
    found = mezzo.compare_runs(one, record("b", network(Scale(1.05)), **kwargs))
    assert (found.op, found.module, found.direction) == ("mul", "1", "forward")
    assert found.difference == pytest.approx(0.05, rel=0.1)
    assert found.line.startswith("test_compare_runs.py:")
    assert str(found).startswith("mul (test_compare_runs.py:")


def test_a_changed_norm_is_named_and_not_what_follows(record):
    other = network(nn.GELU())
    other[2].eps = 1e-2
    found = mezzo.compare_runs(record("a", network(nn.GELU())), record("b", other))
    assert (found.op, found.module) == ("layer_norm", "2")


def test_a_changed_backward_is_named_by_the_result_whose_gradient_differs(record):
    one = record("a", network(GradientScale(1.0)))
    found = mezzo.compare_runs(one, record("b", network(GradientScale(1.01))))
    assert found.direction == "backward"
    assert (found.op, found.module) == ("linear", "0")


def test_changed_weights_are_named_at_the_layer_that_has_them(record):
    model = network(nn.GELU())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[3].weight[0, 0] += 0.5
    found = mezzo.compare_runs(record("a", model), record("b", other))
    assert (found.op, found.module) == ("linear", "3")


def test_gradients_are_compared_without_their_loss_scale(record):
    model, policy = network(nn.GELU()), {"policy": "O1", "dtype": "float16"}
    one = record("a", model, scaler=1.0, **policy)
    assert not mezzo.compare_runs(one, record("b", model, scaler=1024.0, **policy))


def test_an_op_that_only_one_run_calls_is_listed(record):
    found = mezzo.compare_runs(
        record("a", network(nn.Identity())), record("b", network(Scale(1.0)))
    )
    assert found
    assert found.only_in == ((), ("mul in 1",))
    assert "Only the second run calls mul in 1" in str(found)


def test_the_first_step_that_differs_is_named(record):
    model, other = network(nn.GELU()), network(nn.GELU(approximate="tanh"))
    for step, changed in [(1, model), (2, other)]:
        one = record("a", model, step=step)
        two = record("b", changed, step=step)
    found = mezzo.compare_runs(one, two)
    assert (found.op, found.step) == ("gelu", 2)
    assert " at step 2" in str(found)


def test_the_log_is_json_lines_with_a_header(record):
    path = record("a", network(nn.GELU()), "O1", step=3, dtype="float16")
    header, values = map(json.loads, path.read_text().splitlines())
    assert (header["kind"], header["version"], header["dtype"]) == ("run", 1, "float16")
    assert (values["kind"], values["step"]) == ("values", 3)
    first = values["values"][0]
    assert (first["op"], first["module"], first["dtype"]) == ("linear", "0", "float16")
    assert len(first["sample"]) == 16


def test_values_that_are_not_finite_can_be_read_back(record):
    path = record("a", network(Scale(float("inf"))))
    assert "Infinity" not in path.read_text()
    assert "NaN" not in path.read_text()
    assert not mezzo.compare_runs(path, path)
    found = mezzo.compare_runs(path, record("b", network(Scale(1.0))))
    assert (found.op, found.difference) == ("mul", float("inf"))


def test_nan_in_one_of_the_runs_is_a_difference(record):
    path = record("a", network(Scale(float("nan"))))
    assert not mezzo.compare_runs(path, path)
    for logs in (
        (path, record("b", network(Scale(1.0)))),
        (record("c", network(Scale(1.0))), path),
    ):
        found = mezzo.compare_runs(*logs)
        assert (found.op, found.module, found.difference) == ("mul", "1", float("inf"))


def test_results_of_other_sizes_are_listed_with_their_sizes(tmp_path):
    for name, rows in {"a": 8, "b": 4}.items():
        batch = torch.ones(rows, 16), torch.ones(rows, 4)
        mezzo.record_values(tmp_path / name, network(nn.Identity()), batch, F.mse_loss, "O0")
    found = mezzo.compare_runs(tmp_path / "a", tmp_path / "b")
    assert found.only_in[0][0] == "linear in 0 with 256 values"
    assert found.only_in[1][0] == "linear in 0 with 128 values"


def curve(losses, dtype="bfloat16"):
    header = {"kind": "run", "version": 1, "dtype": dtype}
    return [header, *({"kind": "step", "step": n, "loss": x} for n, x in enumerate(losses, 1))]


def test_loss_curves_are_compared():
    found = mezzo.compare_runs(curve([1.0, 0.9, 0.8]), curve([1.0, 0.9001, 2.5]))
    assert (found.loss_step, found.losses) == (3, (0.8, 2.5))
    assert str(found) == "The loss differs first at step 3: 0.8 and 2.5."
    assert not mezzo.compare_runs(curve([1.0, 0.9]), curve([1.001, 0.9]))


def test_a_damaged_log_is_read_up_to_the_damage(record, tmp_path):
    path = record("a", network(nn.GELU()))
    (tmp_path / "b").write_text(path.read_text() + '{"kind": "values", "st')
    with pytest.warns(UserWarning, match="cut off at line 3"):
        assert not mezzo.compare_runs(path, tmp_path / "b")


def test_logs_without_values_and_losses_raise():
    with pytest.raises(mezzo.PolicyError, match="record_values"):
        mezzo.compare_runs([{"kind": "run"}], [{"kind": "run"}])
