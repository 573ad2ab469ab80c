"""Static programs: recording calls, variables, guards and default programs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle import static
from mezzo.compat.paddle.static._program import UNKNOWN_SIZES, Variable


def node_names(program):
    return [node.name for node in program.nodes]


def test_layers_and_operators_are_recorded_in_order(program):
    x = static.data("x", [3, 4])
    y = nn.ReLU()(nn.Linear(4, 2)(x)) * 2 + 1
    assert node_names(program) == ["linear", "relu", "mul", "add"]
    assert (type(y), y.shape, y.dtype) == (Variable, (3, 2), torch.float32)


def test_attributes_of_a_variable_are_read_without_recording(program):
    x = static.data("x", [3, 4], "int64")
    assert (x.dim(), x.shape, x.size(0), len(x), x.dtype, x.device) == (
        2,
        (3, 4),
        3,
        3,
        torch.int64,
        torch.device("cpu"),
    )
    assert program.nodes == []


def test_variable_names_are_like_paddles_and_can_be_looked_up(program):
    x = static.data("x", [1])
    first, second = x + 1, x + 2
    assert [variable.name for variable in (x, first, second)] == ["x", "add_0.tmp_0", "add_1.tmp_0"]
    assert program.variable("add_1.tmp_0") is second


def test_an_unknown_variable_name_raises(program):
    static.data("x", [1])
    with pytest.raises(ValueError, match=r"The program has no variable 'y'. Its feeds are x"):
        program.variable("y")


def test_an_unknown_size_has_a_placeholder():
    assert static.data("x", [None, 2, -1]).shape == (UNKNOWN_SIZES[0], 2, UNKNOWN_SIZES[2])


def test_a_tensor_created_from_an_unknown_size_raises():
    x = static.data("x", [None, 2])
    with pytest.raises(
        ValueError, match="was created from a size that is unknown until the program runs"
    ):
        x + torch.ones(x.shape[0], 1)


def test_several_outputs_are_several_variables(program):
    values, indices = static.data("x", [3, 4]).max(dim=1)
    assert (values.dtype, indices.dtype) == (torch.float32, torch.int64)
    assert len(program.nodes[0].outputs) == 2


def test_only_nodes_that_a_variable_depends_on_are_needed(program):
    x = static.data("x", [2])
    _, target = x * 3, x + 1
    assert [node.name for node in program.needed_for([target])] == ["add"]


def test_in_place_ops_on_a_needed_variable_are_needed(program):
    y = static.data("x", [2]) + 1
    y.mul_(2)
    y[0] = 5.0
    assert [node.name for node in program.needed_for([y])] == ["add", "mul_", "__setitem__"]


def test_auto_cast_around_a_program_being_recorded_raises():
    x = static.data("x", [1, 2])
    with (
        paddle.amp.auto_cast(),
        pytest.raises(
            RuntimeError, match=r"amp.auto_cast is around a static program.*static.amp.decorate"
        ),
    ):
        nn.Linear(2, 2)(x)


def test_a_variable_has_no_value():
    with pytest.raises(RuntimeError, match="meta"):
        static.data("x", [1]).item()


def test_a_clone_is_independent(program):
    x = static.data("x", [1])
    clone = program.clone(for_test=True)
    _ = x + 1
    assert (len(program.nodes), len(clone.nodes), clone.for_test, program.for_test) == (
        1,
        0,
        True,
        False,
    )


def test_fp16_guard_marks_the_calls_inside(program):
    x = static.data("x", [1])
    with static.amp.fp16_guard():
        x = x + 1
    _ = x + 2
    assert [node.guarded for node in program.nodes] == [True, False]


def test_program_guards_nest(program):
    inner = static.Program()
    with static.program_guard(inner):
        static.data("x", [1])
    assert (list(inner.feeds), list(program.feeds), static.default_main_program() is program) == (
        ["x"],
        [],
        True,
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: static.data(3, [1]),
            TypeError,
            "The type of 'name' in data must be str, but received int",
        ),
        (
            lambda: static.data("x", [1], "floaty"),
            TypeError,
            "The data type of 'x' is 'floaty'. Use one such as 'float32'",
        ),
        (
            lambda: static.program_guard("main").__enter__(),
            TypeError,
            "The type of programs in program_guard must be Program, but received str",
        ),
    ],
    ids=["name", "dtype", "program"],
)
def test_invalid_arguments_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_outer_program_is_restored_when_the_body_raises(program):
    with pytest.raises(ZeroDivisionError), static.program_guard(static.Program()):
        1 / 0  # noqa: B018
    assert static.default_main_program() is program


def test_a_variable_prints_its_name_shape_and_dtype():
    assert repr(static.data("x", [-1, 2], torch.float16)) == "var x : shape[-1, 2], dtype float16"


def test_static_mode_changes_in_dynamic_mode_only():
    paddle.enable_static()
    assert not paddle.in_dynamic_mode()
    paddle.disable_static()
    assert paddle.in_dynamic_mode()


def test_declaring_a_name_again_replaces_the_feed(program):
    static.data("x", [1])
    assert static.data("x", [2]) is program.feeds["x"]
