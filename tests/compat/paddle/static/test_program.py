"""Static programs: recording calls, variables, guards and default programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle import static
from mezzo.compat.paddle._places import device_of
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
        device_of(None),
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


@pytest.mark.parametrize(
    ("read", "call"),
    [
        (float, r"float\(Variable\)"),
        (int, r"int\(Variable\)"),
        (bool, r"bool\(Variable\)"),
        (np.asarray, r"numpy.array\(Variable\)"),
        (lambda x: x.item(), r"Variable.item\(\)"),
        (lambda x: x.numpy(), r"Variable.numpy\(\)"),
        (lambda x: x.detach().cpu().numpy(), r"Variable.numpy\(\)"),
        (lambda x: x.tolist(), r"Variable.tolist\(\)"),
        (lambda x: f"{x:.3f}", r"format\(Variable\)"),
        (lambda x: x.backward(), r"Variable.backward\(\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reading_a_variables_value_raises(read, call):
    message = rf"{call} is not supported in static graph mode: '.*' has no value until its program"
    with pytest.raises(TypeError, match=message):
        read(static.data("x", [1]))


def test_a_variable_prints_itself_in_an_f_string():
    assert f"{static.data('x', [1])}" == "var x : shape[1], dtype float32"


def test_moving_a_variable_has_no_effect(program):
    x = static.data("x", [1])
    assert x.cpu() is x.cuda() is x._to(paddle.CUDAPlace(0)) is x.to("cpu") is x
    assert program.nodes == []


def test_a_variable_has_the_methods_of_paddles_tensors(program):
    x = static.data("x", [-1, 2, 3])
    y = x.transpose([1, 0, 2]).astype("float16").to("float32").max(axis=2)
    assert (y.dtype, static._program.paddle_shape(y)) == (torch.float32, [2, -1])
    assert node_names(program) == ["permute", "to", "to", "amax"]


def test_errors_of_torch_name_the_op_and_have_no_placeholders():
    with pytest.raises(RuntimeError, match=r"^linear in a static program: .*\[-1, 4\]"):
        nn.Linear(5, 2)(static.data("x", [-1, 4]))
    with pytest.raises(NotImplementedError, match=r"^nonzero cannot be part of a static program"):
        static.data("x", [4]).nonzero()


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
            "dtype must be one of bool, .*float32.*, but got 'floaty'",
        ),
        (
            lambda: static.data("x", 4),
            TypeError,
            r"The type of 'shape' in data must be list or tuple.*received 4 for 'x'",
        ),
        (
            lambda: static.data("x", [-1] * 9),
            TypeError,
            "at most 8 sizes",
        ),
        (
            lambda: static.data("x", [1.5]),
            TypeError,
            "Its sizes should be ints, with -1 or None.*but received 1.5",
        ),
        (
            lambda: static.data("x", [-2]),
            TypeError,
            "but received -2",
        ),
        (
            lambda: static.data("x", [1], ["float32"]),
            TypeError,
            r"dtype must be one of .*, but got \['float32'\]",
        ),
        (
            lambda: static.program_guard("main").__enter__(),
            TypeError,
            "The type of programs in program_guard must be Program, but received str",
        ),
    ],
    ids=["name", "dtype", "int", "long", "float", "negative", "list", "program"],
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


def test_a_dtype_may_be_numpys():
    assert static.data("x", [1], np.float16).dtype is torch.float16
    assert static.data("y", [1], np.dtype("int64")).dtype is torch.int64


def test_declaring_a_name_again_replaces_the_feed(program):
    static.data("x", [1])
    assert static.data("x", [2]) is program.feeds["x"]
