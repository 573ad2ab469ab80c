import pytest
import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls, node, planned
from torch import nn

import mezzo
from mezzo.conversion.assignment import WeightPool, producer, promoting_input, row_error
from mezzo.conversion.nodes import Read, deciding_reads

X = torch.randn(2, 4)


def test_a_promoting_op_in_float32_takes_a_16_bit_input_without_a_cast():
    module, plan = planned(Calls(lambda self, x: x + self.linear(x), linear=nn.Linear(4, 4)), X)
    add, linear, x = (node(module, name) for name in ("add", "linear", "args_0"))
    assert plan.assignment.dtype_of(linear) is HALF
    assert plan.assignment.input_dtype(add, Read("other", linear)) is None
    assert plan.assignment.input_dtype(add, Read("self", x)) is torch.float32
    assert plan.assignment.input_dtype(linear, Read("input", x)) is HALF


def test_norm_parameters_are_read_in_float32_with_a_16_bit_input():
    module, plan = planned(
        nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)).eval(), torch.randn(2, 4, 3)
    )
    norm, weight = node(module, "batch_norm"), node(module, "p_1_weight")
    assert plan.assignment.dtype_of(norm) is HALF
    assert plan.assignment.input_dtype(norm, Read("weight", weight)) is torch.float32
    assert plan.assignment.stored(weight) == (torch.float32,)


def test_one_result_of_several_has_the_dtype_of_its_op():
    module, plan = planned(
        Calls(
            lambda self, x: F.softmax(self.linear(x).chunk(2, -1)[1], -1), linear=nn.Linear(4, 4)
        ),
        X,
    )
    element = next(one for one in module.graph.nodes if "getitem" in one.name)
    assert producer(element).name == "chunk"
    assert plan.assignment.dtype_of(element) is HALF


def test_a_weight_read_in_both_dtypes_is_assigned_both():
    module, plan = planned(
        Calls(lambda self, x: (self.linear(x), self.linear.weight.exp()), linear=nn.Linear(4, 4)), X
    )
    weight = next(one for one in module.graph.nodes if one.name.endswith("weight"))
    assert plan.assignment.stored(weight) == (torch.float32, HALF)


def test_an_unread_weight_is_stored_in_16_bits():
    module, plan = planned(Calls(lambda self, x: x + 1, linear=nn.Linear(4, 4)), X)
    assert plan.assignment.stored(node(module, "p_linear_weight")) == (HALF,)


def test_a_promoting_op_gets_float32_from_a_weight_rather_than_a_cast():
    module, plan = planned(
        Calls(
            lambda self, x: F.softmax(self.linear(x) + self.linear.bias, -1), linear=nn.Linear(4, 4)
        ),
        X,
    )
    add = node(module, "add")
    assert promoting_input(add, plan.assignment.roles, {}).node.name.endswith("bias")
    assert len(deciding_reads(add)) == 2


def test_a_tensor_read_only_for_its_shape_is_not_cast():
    module, plan = planned(
        Calls(
            lambda self, x: x.sum(-1, keepdim=True).expand_as(self.linear(x)),
            linear=nn.Linear(4, 4),
        ),
        X,
    )
    expand, linear = node(module, "expand_as"), node(module, "linear")
    assert plan.assignment.dtype_of(expand) is torch.float32
    assert plan.assignment.input_dtype(expand, Read("other", linear)) is None


# Stored weights


def _state(model, *args, **options):
    return (
        mezzo.convert(model, args, dtype=HALF, **options)._converted.programs[0].exported.state_dict
    )


def test_weights_are_stored_in_the_dtype_that_they_are_read_in():
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 1)).eval()
    state = _state(model, torch.randn(2, 4, 3))
    assert {
        name: tensor.dtype for name, tensor in state.items() if name.startswith(("0", "2"))
    } == dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"], HALF)
    assert {
        tensor.dtype
        for name, tensor in state.items()
        if name.startswith("1") and tensor.is_floating_point()
    } == {torch.float32}
    assert torch.equal(state["0.weight"], model[0].weight.to(HALF))


def test_a_weight_read_in_both_dtypes_is_stored_twice():
    state = _state(
        Calls(
            lambda self, x: (self.linear(x), torch.cdist(x, self.linear.weight)),
            linear=nn.Linear(4, 4),
        ),
        X,
    )
    assert (state["linear.weight"].dtype, state["linear.weight_bfloat16"].dtype) == (
        torch.float32,
        HALF,
    )


def test_weights_can_be_kept_in_float32():
    assert {tensor.dtype for tensor in _state(nn.Linear(4, 4), X, cast_params=False).values()} == {
        torch.float32
    }


def test_the_program_is_independent_of_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    converted = mezzo.convert(model, (X,), dtype=HALF)
    before = converted(X)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(converted(X), before)


def test_the_program_mutates_copies_of_the_buffers():
    model = nn.BatchNorm1d(4).train()
    converted = mezzo.convert(model, (X,), dtype=HALF)
    converted(X)
    assert int(model.num_batches_tracked) == 0
    assert int(converted._converted.programs[0].exported.state_dict["num_batches_tracked"]) == 1


def test_copies_are_shared_by_tensor_and_dtype():
    pool, tensor = WeightPool(), nn.Parameter(X)
    half = pool.copy_of(tensor, HALF)
    assert pool.copy_of(tensor, HALF) is half
    assert isinstance(half, nn.Parameter)
    assert not half.requires_grad
    assert pool.copy_of(tensor, torch.float32).data_ptr() != tensor.data_ptr()


def test_a_weight_that_the_model_casts_is_stored_in_that_dtype():
    model = Calls(
        lambda self, x: torch.nn.functional.linear(x.to(HALF), self.linear.weight.to(HALF)),
        linear=nn.Linear(4, 4, bias=False),
    )
    converted = mezzo.convert(model, (X,), dtype=HALF)
    assert converted._converted.programs[0].exported.state_dict["linear.weight"].dtype is HALF
    assert converted.casts.after.count == 1
    assert torch.equal(converted(X), model(X))


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ([1.0, 1.25], 0.25),
        ([0.0, 0.0], 0.0),
        ([0.0, torch.inf], 0.0),
        ([1e-30, 1.25e-30], 0.25),
        ([1e30, 1.25e30], 0.25),
    ],
    ids=str,
)
def test_the_error_of_a_row_is_relative_to_its_norm(row, error):
    table = torch.tensor([[3.0, 4.0], row])
    rounded = (
        torch.stack([table[0], table[1] * torch.tensor([1.0, 1.0 + error])])
        if error
        else table.clone()
    )
    expected = error * row[1] / (row[0] ** 2 + row[1] ** 2) ** 0.5 if error else 0.0
    assert row_error(table, rounded) == pytest.approx(expected, rel=1e-5)


def test_tables_without_rows_or_numbers_have_no_error():
    assert row_error(torch.empty(0, 4), torch.empty(0, 4, dtype=HALF)) == 0.0
    assert (
        row_error(torch.empty(2, 4, device="meta"), torch.empty(2, 4, dtype=HALF, device="meta"))
        == 0.0
    )


@pytest.mark.parametrize(
    ("value", "fits"), [(1e5, False), (6e4, True), (float("inf"), True), (float("nan"), True)]
)
def test_only_finite_values_beyond_the_range_forbid_16_bits(value, fits):
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight[0, 0] = value
    assert mezzo.convert(model, (X,), dtype="float16").plan.row("linear").dtype == (
        "float16" if fits else "float32"
    )
