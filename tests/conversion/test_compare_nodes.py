"""Compare a program with its reference, output by output and node by node."""

import math
from copy import deepcopy

import pytest
import torch
from support.saved_programs import Everything, batch, everything, export
from torch import nn

import mezzo
from mezzo import ConversionError
from mezzo.conversion.compare_nodes import Comparison, TensorError, compare, tensor_error

INF, NAN = float("inf"), float("nan")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.first(x).relu()
        return {"logits": self.second(hidden), "best": [hidden.argmax(-1), hidden]}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Block().eval()


X = torch.linspace(-1, 1, 40).reshape(5, 8)


def by_hand(model, dtype):
    """Export the model with all weights and inputs cast to a dtype."""

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = deepcopy(model)

        def forward(self, x):
            return self.inner(x.to(dtype))

    return export(Cast().to(dtype), (X,))


def test_output_errors_have_names_and_relative_norms(model):
    converted = mezzo.convert(model, (X,), dtype="bfloat16")
    found = converted.compare(X)
    assert [error.name for error in found.outputs] == ["logits", "best_0", "best_1"]
    expected, result = model(X)["logits"].detach(), converted(X)["logits"]
    assert found.outputs[0].relative == pytest.approx(
        float((result - expected).norm() / expected.norm()), rel=1e-4
    )
    assert found.outputs[0].largest == pytest.approx(
        float((result - expected).abs().max()), rel=1e-4
    )
    assert 1e-4 < found.worst < 2e-2


def test_node_errors_are_sorted_worst_first_with_module_and_source(model):
    found = mezzo.convert(model, (X,), dtype="bfloat16").compare(X)
    errors = {error.name: error for error in found.nodes}
    assert [error.relative for error in found.nodes] == sorted(
        (error.relative for error in found.nodes), reverse=True
    )
    assert {"linear", "linear_1", "relu"} <= errors.keys()
    second = errors["linear_1"]
    assert (second.op, second.module, second.dtype) == ("linear", "second", "bfloat16")
    assert second.source.startswith("test_compare_nodes.py:")


def test_a_program_compared_with_itself_has_no_error(model):
    reference = export(model, (X,))
    found = compare(reference, export(model, (X,)), (X,), {})
    assert found.worst == 0
    assert {error.relative for error in found.nodes} == {0.0}


def test_the_node_that_overflows_is_the_worst_and_its_nonfinite_values_are_counted():
    class Overflow(nn.Module):
        def forward(self, x):
            return (x * 1000).exp().log() / 1000

    class Half(nn.Module):
        def forward(self, x):
            return ((x.half() * 1000).exp().log() / 1000).float()

    x = torch.tensor([1e-3, 1.2e-2])
    found = compare(export(Overflow(), (x,)), export(Half(), (x,)), (x,), {})
    assert (found.nodes[-1].name, found.nodes[-1].nonfinite) == ("mul", 0)
    assert {error.name: error.nonfinite for error in found.nodes} == {
        "mul": 0,
        "exp": 1,
        "log": 1,
        "div": 1,
    }
    assert found.outputs[0].nonfinite == 1
    assert found.worst == INF


def test_programs_with_branches_dynamic_sizes_and_state_are_compared(model):
    args, kwargs = batch(9)
    found = compare(everything(), everything(), args, kwargs)
    assert [error.name for error in found.outputs] == ["logits", "rest_0", "rest_1_0"]
    assert found.worst == 0
    assert "getitem" in {error.name for error in found.nodes}  # what the branch gives


def test_comparing_mutates_neither_buffers_nor_inputs():
    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            x.add_(self.calls)
            return x + 1

    model, x = Writer(), torch.ones(2)
    reference, program = export(model, (x.clone(),)), export(model, (x.clone(),))
    for against in (reference, model, lambda x: x + 2):
        assert compare(against, program, (x,), {}).worst == 0
        assert (
            x.tolist(),
            model.calls,
            reference.state_dict["calls"],
            program.state_dict["calls"],
        ) == ([1, 1], 0, 0, 0)


def test_random_ops_draw_the_same_numbers_and_the_generator_state_is_restored():
    class Drop(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.5, training=True) + torch.rand(64)

    x, state = torch.ones(64), torch.get_rng_state()
    found = compare(export(Drop(), (x,)), export(Drop(), (x,)), (x,), {})
    assert found.worst == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_against_a_model_or_function_only_outputs_are_compared(model):
    converted = mezzo.convert(model, (X,), dtype="float16")
    by_nodes = converted.compare(X)
    for against in (model, lambda x: model(x)):
        found = converted.compare(X, against=against)
        assert found.nodes == ()
        assert found.worst == pytest.approx(by_nodes.worst, rel=1e-2)


def test_keyword_arguments_are_passed_on():
    args, kwargs = batch(4)
    torch.manual_seed(0)
    model = Everything()
    assert (
        compare(lambda *args, **kwargs: model(*args, **kwargs), everything(), args, kwargs).worst
        < 1e-6
    )


def test_a_different_output_structure_raises(model):
    program = export(model, (X,))
    with pytest.raises(
        ConversionError,
        match=(
            r"The program returns logits, best_0, best_1, and the reference returns output."
            r" Compare it with the model"
        ),
    ):
        compare(lambda x: x, program, (X,), {})


def test_a_different_output_shape_raises():
    program = export(nn.Linear(8, 4), (X,))
    with pytest.raises(
        ConversionError, match=r"'output' has shape \(5, 4\), and in the reference \(5, 8\)"
    ):
        compare(lambda x: x, program, (X,), {})


def test_nodes_that_only_one_program_has_are_not_compared(model):
    found = compare(export(model, (X,)), by_hand(model, torch.bfloat16), (X,), {})
    assert not any("to" in error.name.split("_") for error in found.nodes)
    assert 0 < found.worst < 1


def test_views_are_not_compared():
    class Views(nn.Module):
        def forward(self, x):
            left, right = x.sin().t().chunk(2)
            return left.reshape(-1) + right.flatten()

    program = export(Views(), (X,))
    assert {error.name for error in compare(program, program, (X,), {}).nodes} == {"sin", "add"}


@pytest.mark.parametrize(
    ("expected", "found", "relative", "lost"),
    [
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), 0.1, 0),
        (torch.tensor([3.0, 4.0, -INF]), torch.tensor([3.0, 4.5, -INF]), 0.1, 0),
        (torch.tensor([3.0, 4.0, 9.0]), torch.tensor([3.0, 4.5, NAN]), 0.1, 1),
        (torch.zeros(2), torch.zeros(2), 0.0, 0),
        (torch.zeros(2), torch.ones(2), INF, 0),
        (torch.zeros(0), torch.zeros(0), 0.0, 0),
        (torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5]), 0.25, 0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 0.5, 0),
        (torch.tensor([3 + 4j]), torch.tensor([3 + 4.5j]), 0.1, 0),
        (torch.tensor([4.0]), torch.tensor([4.0]).to(torch.float8_e4m3fn), 0.0, 0),
        (
            torch.tensor([1e200], dtype=torch.float64),
            torch.tensor([1.1e200], dtype=torch.float64),
            0.1,
            0,
        ),
        (torch.tensor([INF]), torch.tensor([1.0]), 0.0, 0),
    ],
    ids=(
        "plain mask lost zeros nothing empty integers booleans complex float8 float64"
        " infinite".split()
    ),
)
def test_tensor_error(expected, found, relative, lost):
    error = tensor_error(expected, found, "x")
    assert error.relative == relative or math.isclose(error.relative, relative, rel_tol=1e-6)
    assert error.nonfinite == lost


# Printed comparisons


OUTPUTS = (
    TensorError("logits", "float32", 3.24e-4, 0.01, 0),
    TensorError("ids", "int64", 0.5, 1.0, 0),
)
NODES = tuple(
    TensorError(
        f"linear_{number}",
        "float16",
        1e-3 / (number + 1),
        0.5,
        0,
        op="linear",
        module="head",
        source="model.py:7",
    )
    for number in range(12)
)


def test_a_comparison_prints_outputs_and_the_worst_nodes():
    assert str(Comparison(OUTPUTS, NODES)).splitlines()[:7] == [
        "output  dtype    relative error  largest  non-finite",
        "logits  float32         3.2e-04  1.0e-02           0",
        "ids     int64           5.0e-01  1.0e+00           0",
        "",
        "the worst 10 of 12 nodes",
        "node      dtype    relative error  largest  non-finite  op      where",
        "linear_0  float16         1.0e-03  5.0e-01           0  linear  head model.py:7",
    ]
    assert len(str(Comparison(OUTPUTS, NODES)).splitlines()) == 16


def test_a_comparison_without_nodes_prints_only_outputs():
    assert len(str(Comparison(OUTPUTS)).splitlines()) == 3


def test_the_worst_is_the_largest_error_of_an_output():
    assert Comparison(OUTPUTS, NODES).worst == 0.5
    assert Comparison(()).worst == 0.0


def test_an_output_with_nonfinite_values_has_infinite_error():
    assert Comparison((TensorError("logits", "float16", 0.0, 0.0, 3),)).worst == float("inf")


def test_nonfinite_values_are_worse_than_any_relative_error():
    lost, wrong = TensorError("a", "float16", 0.0, 0.0, 1), TensorError("b", "float16", 9.0, 9.0, 0)
    assert max(lost, wrong, key=lambda error: error.sort_key) is lost
