import pytest
import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls, names, node, planned, relative_error
from torch import nn

import mezzo
from mezzo._events import GraphConverted, listen
from mezzo.conversion.pipeline import apply_plan

X = torch.randn(2, 4)


def test_a_list_of_examples_gives_programs_that_share_their_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    converted = mezzo.convert(model, [(torch.randn(size, 4),) for size in (1, 3, 5)], dtype=HALF)
    for size in (1, 3, 5):
        x = torch.randn(size, 4)
        assert relative_error(converted(x), model(x)) < 0.05
    weights = {
        id(program.exported.state_dict["0.weight"]) for program in converted._converted.programs
    }
    assert len(weights) == 1
    with pytest.raises(
        mezzo.ConversionError,
        match=(
            r"float32\[4, 4\]\. There are programs for: float32\[1, 4\]; float32\[3, 4\];"
            r" float32\[5, 4\]"
        ),
    ):
        converted(torch.randn(4, 4))


def test_keyword_arguments_are_one_mapping_or_one_per_example():
    class Scaled(nn.Module):
        def forward(self, x, *, scale):
            return x * scale

    one = torch.ones(4)
    assert len(mezzo.convert(Scaled(), [(X,), (X[:1],)], {"scale": one}, dtype=HALF).plans) == 2
    assert (
        len(
            mezzo.convert(
                Scaled(), [(X,), (X[:1],)], [{"scale": one}, {"scale": one[:1]}], dtype=HALF
            ).plans
        )
        == 2
    )
    with pytest.raises(mezzo.ConversionError, match="2 example inputs and 1 kwargs"):
        mezzo.convert(Scaled(), [(X,), (X[:1],)], [{"scale": one}], dtype=HALF)
    with pytest.raises(mezzo.ConversionError, match="empty list"):
        mezzo.convert(Scaled(), [])


def test_a_conversion_emits_an_event():
    with listen() as events:
        mezzo.convert(nn.Linear(4, 4), (X,), dtype=HALF)
    event = next(one for one in events if isinstance(one, GraphConverted))
    assert (event.model, event.dtype, event.casts_before, event.casts_after) == (
        "Linear",
        "bfloat16",
        3,
        2,
    )
    assert event.seconds > 0


def test_level_o0_keeps_float32_with_a_reason():
    model = nn.Linear(4, 4)
    converted = mezzo.convert(model, (X,), policy="O0")
    assert torch.equal(converted(X), model(X))
    assert converted.plan.row("linear").reason == "level O0 runs everything in float32"
    assert converted._converted.programs[0].exported.state_dict["weight"].dtype is torch.float32


def test_level_o0_keeps_unread_weights_in_float32_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    model.unread = nn.Parameter(torch.ones(2))
    state = mezzo.convert(model, (X,), policy="O0")._converted.programs[0].exported.state_dict
    assert {one.dtype for one in state.values()} == {torch.float32}


def test_the_options_of_a_conversion_are_kept_as_json_values():
    options = mezzo.convert(
        nn.Linear(4, 4), (X,), dtype=HALF, full={"linear"}, exclude="linear", keep_io_dtypes=False
    )._converted.options
    assert options["policy"] == {"level": "O1", "dtype": "bfloat16"}
    assert (options["full"], options["exclude"], options["keep_io_dtypes"]) == (
        ["linear"],
        ["linear"],
        False,
    )


# Inserted casts


def _applied(model, *args):
    module, plan = planned(model, *args)
    apply_plan(module, plan, {})
    return module


def test_a_value_is_cast_once_for_all_its_readers():
    module = _applied(
        Calls(
            lambda self, x: self.first(x) @ self.second(x).t(),
            first=nn.Linear(4, 4),
            second=nn.Linear(4, 4),
        ),
        X,
    )
    assert names(module).count("aten.to.dtype") == 2
    assert node(module, "args_0_bfloat16").args == (node(module, "args_0"), HALF)


def test_a_value_mutated_between_two_reads_is_cast_for_each():
    def function(self, x):
        buffer = torch.zeros(2, 4)
        view = buffer.view(8)
        before = self.first(buffer)
        view += 1
        return before, self.first(buffer)

    module = _applied(Calls(function, first=nn.Linear(4, 4)), X)
    casts = [
        one
        for one in module.graph.nodes
        if one.target is torch.ops.aten.to.dtype and one.args[0].name == "zeros"
    ]
    assert len(casts) == 2


def test_a_cast_of_the_model_to_float32_is_bypassed_by_16_bit_readers():
    def function(self, x):
        wide = self.first(x).float()
        return self.first(wide), wide.softmax(-1), self.first(self.first(x).float())

    module = _applied(Calls(function, first=nn.Linear(4, 4)), X)
    first, second, third, last = (
        one for one in module.graph.nodes if one.target is torch.ops.aten.linear.default
    )
    assert second.args[0] is first
    # A float32 reader still reads the cast, and an unread cast is gone.
    assert node(module, "softmax").args[0].args[:2] == (first, torch.float32)
    assert last.args[0] is third
    assert names(module).count("aten.to.dtype") == 1 + 1 + 2


def test_a_float32_copy_that_is_mutated_is_not_bypassed():
    def function(self, x):
        wide = self.first(x).float()
        view = wide.view(8)
        view += 1
        return self.first(wide)

    module = _applied(Calls(function, first=nn.Linear(4, 4)), X)
    second = [one for one in module.graph.nodes if one.target is torch.ops.aten.linear.default][1]
    assert second.args[0].target is torch.ops.aten.to.dtype


def test_fake_tensors_get_the_planned_dtypes():
    module = _applied(
        Calls(lambda self, x: F.relu(self.first(x)).chunk(2, -1)[0], first=nn.Linear(4, 4)), X
    )
    assert node(module, "relu").meta["val"].dtype is HALF
    assert [one.dtype for one in node(module, "chunk").meta["val"]] == [HALF, HALF]
    assert node(module, "p_first_weight").meta["val"].dtype is HALF
    assert node(module, "args_0").meta["val"].dtype is torch.float32


def test_a_fill_is_created_in_its_planned_dtype():
    module = _applied(
        Calls(lambda self, x: self.first(torch.zeros(2, 4)), first=nn.Linear(4, 4)), X
    )
    assert node(module, "zeros").kwargs["dtype"] is HALF


def test_a_source_that_is_mutated_after_the_cast_is_not_read_instead():
    def function(self, x):
        narrow = self.first(x)
        wide = narrow.float()
        narrow.zero_()
        return self.second(wide), narrow

    module = _applied(Calls(function, first=nn.Linear(4, 4), second=nn.Linear(4, 4)), X)
    assert node(module, "linear_1").args[0] is not node(module, "linear")
