"""`mezzo.check_numerics`: the op that makes a non-finite value."""

import gc
import math
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo

X = torch.ones(2, 4)
OVERFLOW = torch.full((2, 4), 300.0, dtype=torch.float16)
NEGATIVE = torch.tensor(-1.0)


class Attention(nn.Module):
    def forward(self, x):
        mask = torch.full((4, 4), -math.inf).triu(1)
        return (x @ x.mT + mask).softmax(-1) @ x


class Log(nn.Module):
    def forward(self, x):
        return (x * 0).log()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Log()))


def checked(run, **options):
    check = mezzo.check_numerics(mode="record", **options)
    with check:
        run()
    return [(found.op, found.read) for found in check.findings]


# -- what is reported ------------------------------------------------------------------------------


def test_abort_names_op_module_line_and_input_ranges():
    network = model()
    with pytest.raises(mezzo.NumericsError) as caught, mezzo.check_numerics(network):
        network(X)
    found = caught.value.finding
    assert (found.op, found.module, found.backward, found.step) == ("log", "1.1", False, 1)
    assert found.source.startswith("test_check_numerics.py:")
    assert str(found.output) == "float32[2, 4], 8 inf"
    assert [str(one) for one in found.inputs] == ["float32[2, 4] from 0 to 0"]
    assert str(caught.value).startswith(
        "log made a non-finite value, in the forward pass of module '1.1' at test_check_numerics"
    )
    assert isinstance(caught.value, FloatingPointError)


def test_a_backward_op_has_module_and_line_of_its_forward_op():
    network = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Root()))
    with pytest.raises(mezzo.NumericsError) as caught, mezzo.check_numerics(network):
        (network(X)).sum().backward()
    found = caught.value.finding
    assert (found.op, found.module, found.backward) == ("sqrt", "1.1", True)
    assert found.source.startswith("test_check_numerics.py:")


class Root(nn.Module):
    def forward(self, x):
        return (x * 0).sqrt()


def test_overflow_in_float16_is_reported_at_its_op():
    assert checked(lambda: (OVERFLOW * OVERFLOW + 1).float().sum()) == [("mul", False)]


def test_a_cast_that_overflows_is_reported():
    check = mezzo.check_numerics(mode="record")
    with check:
        torch.full((2,), 1e6).half()
    assert [found.aten for found in check.findings] == ["_to_copy"]


def test_masks_of_infinity_are_not_reported():
    x = torch.ones(1, 4, 4)
    with mezzo.check_numerics():
        Attention()(x)
        x.masked_fill(torch.ones(4, dtype=torch.bool), -math.inf)
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
        x + torch.zeros(4).fill_(-math.inf)


def test_alignments_that_are_not_possible_are_not_reported():
    logits = torch.randn(8, 1, 4, requires_grad=True)
    target, lengths, size = torch.tensor([[1, 2]]), torch.tensor([8]), torch.tensor([2])
    with mezzo.check_numerics():
        F.ctc_loss(logits.log_softmax(-1), target, lengths, size).backward()
    too_long = torch.ones(1, 9, dtype=torch.long), lengths, torch.tensor([9])
    assert ("ctc_loss", False) in checked(lambda: F.ctc_loss(logits.log_softmax(-1), *too_long))


def test_a_fully_masked_row_is_reported_at_the_softmax():
    masked = torch.full((2, 4), -math.inf)
    assert checked(lambda: masked.softmax(-1).sum()) == [("softmax", False)]


def test_an_op_that_reads_bad_data_or_parameters_is_reported_once():
    network = model()[0]
    with torch.no_grad():
        network.weight[0, 0] = math.nan
    assert checked(lambda: network(network(X))) == [("linear", True)]
    assert checked(lambda: torch.tensor([1.0, math.inf]) + 1) == [("add", True)]


def test_ops_that_write_to_their_inputs_are_judged_by_the_values_before():
    def run():
        x = torch.ones(3)
        x.div_(0)
        x.add_(1)

    assert checked(run) == [("div", False)]
    x = torch.ones(3)
    with pytest.raises(mezzo.NumericsError, match=r"Inputs: 0: .* 1 to 1"), mezzo.check_numerics():
        x.div_(0)


def test_ops_on_lists_of_tensors_are_checked():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 1e38)
    optimizer = torch.optim.SGD([parameter], lr=1e38, foreach=True)
    check = mezzo.check_numerics(mode="record")
    with check:
        optimizer.step()
    assert [found.aten for found in check.findings] == ["_foreach_add_"]


def test_uninitialised_memory_is_not_checked():
    with mezzo.check_numerics():
        torch.empty(1000).normal_()
        torch.zeros(4).copy_(torch.ones(4))


def test_infinite_values_inside_a_formula_of_gradients_are_not_reported():
    x = torch.tensor([1.0, 0.0, 0.0], requires_grad=True)
    y = torch.tensor([0.0, 0.0, 1.0])
    with mezzo.check_numerics() as check:
        x.pow(y).sum().backward()
        torch.linalg.vector_norm(x * 0).backward()
    assert check.findings == ()
    assert checked(lambda: x.pow(y).sum().backward()) == []


def test_an_overflow_in_accumulated_gradients_is_reported():
    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    x.grad = torch.full((2,), 6e4, dtype=torch.float16)
    check = mezzo.check_numerics(mode="record")
    with check:
        (x * 3e4).sum().backward()
    assert [(found.aten, found.backward) for found in check.findings] == [("add_", True)]


# -- modes -----------------------------------------------------------------------------------------


def test_warn_warns_once_for_an_op_and_module():
    network = model()
    check = mezzo.check_numerics(network, "warn", backward=False)
    with warnings.catch_warnings(record=True) as caught, check:
        warnings.simplefilter("always")
        network(X)
        network(X)
    assert str(caught[0].message).startswith("log made a non-finite value")
    assert caught[0].filename == __file__
    assert len(caught) == len(check.findings) == 1


def test_record_counts_calls_in_the_order_of_the_first():
    check = mezzo.check_numerics(mode="record")
    x = torch.zeros(2)
    with check:
        for call in (x.abs, x.log, x.reciprocal, x.log):
            call()
    assert [(one.op, one.calls) for one in check.findings] == [("log", 2), ("reciprocal", 1)]
    assert check.findings[0].output is None
    assert len(str(check).splitlines()) == 2


def test_record_names_the_line_that_failed_where_the_op_ran_before():
    class Twice(nn.Module):
        def forward(self, h):
            h = h * 2.0
            return h * 1e30 * 1e30

    check = mezzo.check_numerics(model := Twice(), "record")
    with check:
        model(torch.ones(3))
    line = Twice.forward.__code__.co_firstlineno + 2
    assert [one.source for one in check.findings] == [f"test_check_numerics.py:{line}"]


def test_a_clean_run_has_no_findings():
    check = mezzo.check_numerics(mode="record")
    with check:
        model()[0](X).sum().backward()
    assert check.findings == ()
    assert str(check) == "No op made a non-finite value."


# -- filters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ops": ["log"]}, ["log"]),
        ({"ops": "sq*"}, ["sqrt"]),
        ({"skip_ops": ["log"]}, ["sqrt"]),
        ({"ops": ["softmax"]}, []),
    ],
)
def test_ops_are_chosen_by_name(options, expected):
    def run():
        torch.zeros(2).log()
        torch.full((2,), -1.0).sqrt()

    assert [op for op, _ in checked(run, **options)] == expected


def test_an_op_has_the_name_of_its_function_and_of_aten():
    x = OVERFLOW.clone()
    for name in ("linear", "mm", "*mm"):
        assert checked(lambda: F.linear(x, x), ops=[name]) == [("linear", False)]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"modules": ["1"]}, True),
        ({"modules": "1.*"}, True),
        ({"modules": ["0"]}, False),
        ({"skip_modules": ["1"]}, False),
        ({"skip_modules": ["1.0"]}, True),
    ],
)
def test_modules_are_chosen_with_all_that_is_in_them(options, found):
    network = model()
    check = mezzo.check_numerics(network, "record", **options)
    with check:
        network(X)
    assert bool(check.findings) is found


def test_backward_ops_are_left_out_on_request():
    network = nn.Sequential(nn.Linear(4, 4), Root())
    with mezzo.check_numerics(network, backward=False):
        network(X).sum().backward()


# -- steps -----------------------------------------------------------------------------------------


def test_each_block_is_a_step():
    check = mezzo.check_numerics(mode="record", steps=range(2, 4))
    for _ in range(5):
        with check:
            NEGATIVE.sqrt()
    (found,) = check.findings
    assert (found.calls, found.step) == (2, 2)


def test_steps_of_a_block_around_a_loop_are_counted_by_next_step():
    check = mezzo.check_numerics(mode="record")
    with check:
        for number in range(3):
            (NEGATIVE * (number - 0.5)).sqrt()
            check.next_step()
    (found,) = check.findings
    assert (found.calls, found.step) == (2, 2)


def test_steps_outside_the_range_are_not_checked_in_a_block_around_a_loop():
    check = mezzo.check_numerics(mode="record", steps={1, 3})
    with check:
        for _ in range(4):
            NEGATIVE.sqrt()
            check.next_step()
    assert check.findings[0].calls == 2


# -- compiled code, steps, state -------------------------------------------------------------------


def test_compiled_code_is_checked_and_compiled_again_afterwards():
    torch._dynamo.reset()
    network = model()
    compiled = torch.compile(network, backend="eager")
    compiled(X)
    with pytest.raises(mezzo.NumericsError) as caught, mezzo.check_numerics(compiled):
        compiled(X)
    assert (caught.value.finding.op, caught.value.finding.module) == ("log", "1.1")
    assert compiled(X).isinf().all()


def test_a_training_step_is_checked():
    network = nn.Sequential(nn.Linear(4, 4), Root())
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    step = mezzo.TrainStep(network, F.mse_loss, optimizer, dtype="bfloat16")
    check = mezzo.check_numerics(step, "record")
    with check:
        step(X, X)
    first = check.findings[0]
    assert (first.op, first.module, first.backward) == ("sqrt", "1", True)


@pytest.mark.parametrize("mode", ["warn", "record"])
def test_results_and_random_numbers_are_those_without_the_check(mode):
    network = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    torch.manual_seed(1)
    plain, after = network(X), torch.rand(1)
    torch.manual_seed(1)
    with mezzo.check_numerics(network, mode):
        found = network(X)
    assert torch.equal(found, plain)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("mode", ["warn", "record"])
@pytest.mark.filterwarnings("ignore:.*non-finite value")
def test_the_tensors_of_a_backward_pass_are_released(mode):
    network, x = nn.Sequential(nn.Linear(4, 4), Root()), torch.randn(8, 4)
    with mezzo.check_numerics(network, mode):
        network(x).sum().backward()
    of_x = weakref.ref(x)
    del x
    gc.collect()
    assert of_x() is None


def test_nothing_is_checked_after_an_exception():
    network = model()
    with pytest.raises(mezzo.NumericsError), mezzo.check_numerics(network):
        network(X)
    assert all(not one._forward_hooks and not one._forward_pre_hooks for one in network.modules())
    assert network(X).isinf().all()


def test_a_check_is_not_stopped_inside_a_region_that_was_entered_after_it():
    check = mezzo.check_numerics()
    check.start()
    region = mezzo.autocast("cpu", half={"add"}, dtype="bfloat16")
    with region, pytest.raises(RuntimeError, match="Stop the observation in the block"):
        check.stop()
    check.stop()


def test_a_check_that_runs_cannot_be_started_again():
    check = mezzo.check_numerics()
    with check, pytest.raises(RuntimeError, match="Call stop"):
        check.start()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "stop"}, "mode='stop' is not a mode of check_numerics. Choose one of: abort"),
        ({"steps": 5}, r"steps=5 is no range of steps. Pass range\(1, 11\)"),
        ({"ops": [torch.log]}, "ops takes names as strings"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with warnings.catch_warnings(), pytest.raises(mezzo.PolicyError, match=message):
        mezzo.check_numerics(**options)


def test_collectives_are_not_judged_since_their_results_may_not_be_there_yet(process_group):
    values = torch.tensor([math.inf, 1.0])
    with mezzo.check_numerics() as check:
        torch.distributed.all_reduce(values)
    assert not check.findings
