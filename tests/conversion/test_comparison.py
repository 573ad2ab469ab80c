"""A comparison prints as a table and tells its worst."""

from mezzo.conversion.compare import Comparison, TensorError

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


def test_it_prints_outputs_and_the_worst_nodes():
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


def test_without_a_graph_it_prints_outputs_alone():
    assert len(str(Comparison(OUTPUTS)).splitlines()) == 3


def test_the_worst_is_the_largest_error_of_an_output():
    assert Comparison(OUTPUTS, NODES).worst == 0.5
    assert Comparison(()).worst == 0.0


def test_an_output_that_lost_values_is_infinitely_wrong():
    assert Comparison((TensorError("logits", "float16", 0.0, 0.0, 3),)).worst == float("inf")


def test_lost_values_are_worse_than_any_error():
    lost, wrong = TensorError("a", "float16", 0.0, 0.0, 1), TensorError("b", "float16", 9.0, 9.0, 0)
    assert max(lost, wrong, key=lambda error: error.sort_key) is lost
