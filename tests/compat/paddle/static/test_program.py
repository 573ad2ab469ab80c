"""What layers do with variables is noted, not done."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle import static
from mezzo.compat.paddle.static._program import UNKNOWN_SIZES, Variable


def names(program):
    return [node.name for node in program.nodes]


def test_layers_and_operators_are_noted_in_order(program):
    x = static.data("x", [3, 4])
    y = nn.ReLU()(nn.Linear(4, 2)(x)) * 2 + 1
    assert names(program) == ["linear", "relu", "mul", "add"]
    assert (type(y), y.shape, y.dtype) == (Variable, (3, 2), torch.float32)


def test_questions_are_answered_and_not_noted(program):
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


def test_names_are_like_paddles_and_find_their_variable(program):
    x = static.data("x", [1])
    first, second = x + 1, x + 2
    assert [one.name for one in (x, first, second)] == ["x", "add_0.tmp_0", "add_1.tmp_0"]
    assert program.variable("add_1.tmp_0") is second


def test_an_unknown_variable_is_refused(program):
    static.data("x", [1])
    with pytest.raises(ValueError, match=r"The program has no variable 'y'. It was fed x"):
        program.variable("y")


def test_a_size_that_is_not_known_has_a_number_that_stands_for_it():
    assert static.data("x", [None, 2, -1]).shape == (UNKNOWN_SIZES[0], 2, UNKNOWN_SIZES[2])


def test_a_tensor_made_from_a_size_that_is_not_known_is_refused():
    x = static.data("x", [None, 2])
    with pytest.raises(
        ValueError, match="was made from a size that is not known before the program runs"
    ):
        x + torch.ones(x.shape[0], 1)


def test_several_outputs_are_several_variables(program):
    values, places = static.data("x", [3, 4]).max(dim=1)
    assert (values.dtype, places.dtype) == (torch.float32, torch.int64)
    assert len(program.nodes[0].outputs) == 2


def test_only_what_is_needed_is_needed(program):
    x = static.data("x", [2])
    _, wanted = x * 3, x + 1
    assert [node.name for node in program.needed_for([wanted])] == ["add"]


def test_a_write_in_place_is_needed_with_what_it_writes_to(program):
    y = static.data("x", [2]) + 1
    y.mul_(2)
    y[0] = 5.0
    assert [node.name for node in program.needed_for([y])] == ["add", "mul_", "__setitem__"]


def test_auto_cast_around_a_program_that_is_written_is_refused():
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


def test_a_clone_goes_its_own_way(program):
    x = static.data("x", [1])
    clone = program.clone(for_test=True)
    _ = x + 1
    assert (len(program.nodes), len(clone.nodes), clone.for_test, program.for_test) == (
        1,
        0,
        True,
        False,
    )


def test_the_guard_marks_what_is_inside_it(program):
    x = static.data("x", [1])
    with static.amp.fp16_guard():
        x = x + 1
    _ = x + 2
    assert [node.guarded for node in program.nodes] == [True, False]
