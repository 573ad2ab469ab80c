import pytest
import torch
from support.graphs import HALF, relative_error
from torch import nn

import mezzo
from mezzo._events import GraphConverted, listen

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
        match=r"float32\[4, 4\]\. There is: float32\[1, 4\]; float32\[3, 4\]; float32\[5, 4\]",
    ):
        converted(torch.randn(4, 4))


def test_examples_may_have_keywords_one_for_all_or_one_each():
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


def test_a_conversion_is_told_to_who_listens():
    with listen() as heard:
        mezzo.convert(nn.Linear(4, 4), (X,), dtype=HALF)
    event = next(one for one in heard if isinstance(one, GraphConverted))
    assert (event.model, event.dtype, event.casts_before, event.casts_after) == (
        "Linear",
        "bfloat16",
        3,
        2,
    )
    assert event.seconds > 0


def test_level_o0_lowers_nothing_and_says_so():
    model = nn.Linear(4, 4)
    converted = mezzo.convert(model, (X,), policy="O0")
    assert torch.equal(converted(X), model(X))
    assert converted.plan.row("linear").reason == "level O0 runs everything in float32"
    assert converted._converted.programs[0].exported.state_dict["weight"].dtype is torch.float32


def test_level_o0_keeps_what_nobody_reads_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    model.unread = nn.Parameter(torch.ones(2))
    state = mezzo.convert(model, (X,), policy="O0")._converted.programs[0].exported.state_dict
    assert {one.dtype for one in state.values()} == {torch.float32}


def test_the_words_of_a_conversion_are_kept_as_plain_data():
    options = mezzo.convert(
        nn.Linear(4, 4), (X,), dtype=HALF, full={"linear"}, exclude="linear", keep_io_dtypes=False
    )._converted.options
    assert options["policy"] == {"level": "O1", "dtype": "bfloat16"}
    assert (options["full"], options["exclude"], options["keep_io_dtypes"]) == (
        ["linear"],
        ["linear"],
        False,
    )
