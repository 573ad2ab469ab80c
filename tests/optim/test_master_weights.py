"""16-bit parameters and what lies beside them make up float32 values, whoever writes the parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from support.kernel_cases import fresh_seed
from support.patterns import any_bits, edges, same_bits
from torch import nn

from mezzo import PolicyError
from mezzo.optim.master_formats import RandomDraw
from mezzo.optim.master_weights import MasterWeights

HALF = torch.bfloat16
EXACT = ["float32", "split"]
BESIDE = [*EXACT, "kahan"]
EVERY = [*BESIDE, "stochastic", "none"]

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda value: value,
    "channels last": lambda value: value.to(memory_format=torch.channels_last),
    "transposed": lambda value: value.transpose(0, 3),
    "permuted": lambda value: value.permute(2, 0, 3, 1),
    "of one channel": lambda value: value[:, :1].contiguous().to(memory_format=torch.channels_last),
    "a matrix on its side": lambda value: value.flatten(1).T,
}


def weight(
    shape: tuple[int, ...] = (2, 3, 4, 5), generator: torch.Generator | None = None
) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def adopted(
    master: str, value: torch.Tensor, half: torch.dtype = HALF
) -> tuple[MasterWeights, nn.Parameter]:
    masters, parameter = MasterWeights(master), nn.Parameter(value.clone())
    masters.adopt(parameter, half)
    return masters, parameter


# -- adopting and releasing ------------------------------------------------------------------------


@pytest.mark.parametrize("master", EVERY)
def test_an_adopted_parameter_is_the_same_object_in_16_bits(master: str):
    parameter = nn.Parameter(weight())
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    masters = MasterWeights(master)
    masters.adopt(parameter, HALF)
    assert optimizer.param_groups[0]["params"][0] is parameter
    assert (parameter.dtype, parameter.requires_grad, parameter.is_leaf) == (HALF, True, True)
    assert parameter in masters
    assert list(masters) == [parameter]
    parameter.float().sum().backward()
    assert parameter.grad.dtype is HALF


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("master", EVERY)
def test_parameter_neighbour_and_value_are_laid_out_as_the_parameter_was(
    master: str, layout: Callable[[torch.Tensor], torch.Tensor]
):
    value = layout(weight())
    masters, parameter = adopted(master, value)
    beside, wanted = masters.companion_tensor(parameter), nn.Parameter(value.clone()).stride()
    assert parameter.stride() == wanted
    assert beside is None or beside.stride() == wanted
    masters.write(parameter, torch.ones_like(value), RandomDraw(0, 0, 0))
    assert masters.read(parameter).stride() == parameter.stride() == wanted
    assert parameter.eq(1.0).all()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("master", EXACT)
def test_a_released_parameter_has_its_bits_and_strides_back(
    master: str, layout: Callable[[torch.Tensor], torch.Tensor]
):
    value = layout(weight(generator=torch.Generator().manual_seed(seed := fresh_seed())))
    masters, parameter = adopted(master, value)
    masters.release(parameter)
    assert same_bits(parameter.detach(), value), seed
    assert parameter.stride() == nn.Parameter(value.clone()).stride()
    assert parameter not in masters
    assert list(masters) == []


@pytest.mark.parametrize("master", EXACT)
def test_every_float32_number_survives_adoption(master: str):
    value = torch.cat(
        [edges(), any_bits(100_000, torch.Generator().manual_seed(seed := fresh_seed()))]
    )
    masters, parameter = adopted(master, value)
    assert same_bits(masters.read(parameter), value), seed
    masters.release(parameter)
    assert same_bits(parameter.detach(), value), seed


@pytest.mark.parametrize("master", EVERY)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_single_and_empty_parameters_are_adopted(master: str, shape: tuple[int, ...]):
    masters, parameter = adopted(master, torch.full(shape, 1.5))
    assert masters.read(parameter).shape == parameter.shape == shape
    masters.write(parameter, torch.full(shape, 2.5), RandomDraw(0, 0, 0))
    masters.release(parameter)
    assert torch.equal(parameter, torch.full(shape, 2.5))


@pytest.mark.parametrize("master", ["stochastic", "none"])
def test_without_a_neighbour_the_rounded_value_is_all_there_is(master: str):
    value = weight()
    masters, parameter = adopted(master, value)
    assert masters.companion_tensor(parameter) is None
    assert torch.equal(masters.read(parameter), value.to(HALF).float())


def test_adoption_rounds_to_nearest_also_where_updates_are_drawn():
    value = weight()
    _, parameter = adopted("stochastic", value)
    assert torch.equal(parameter, value.to(HALF))


def test_the_original_is_not_kept_alive_by_its_master():
    value = weight()
    parameter = nn.Parameter(value)
    masters = MasterWeights("float32")
    masters.adopt(parameter, HALF)
    value.zero_()
    assert masters.read(parameter).abs().sum() > 0


def test_every_adoption_and_release_is_a_new_generation():
    masters, first, second = MasterWeights(), nn.Parameter(weight()), nn.Parameter(weight())
    seen = [masters.generation]
    for change in (
        lambda: masters.adopt(first, HALF),
        lambda: masters.adopt(second, HALF),
        lambda: masters.release(first),
    ):
        change()
        seen.append(masters.generation)
    assert len(set(seen)) == 4
    masters.write(second, torch.ones(2, 3, 4, 5))
    assert masters.generation == seen[-1]


def test_an_unknown_master_is_refused_with_the_choices():
    with pytest.raises(PolicyError, match="float32, split, kahan"):
        MasterWeights("float64")


def test_a_split_master_in_float16_leaves_the_parameter_as_it_was():
    parameter, masters = nn.Parameter(torch.ones(2)), MasterWeights("split")
    with pytest.raises(PolicyError, match="bfloat16"):
        masters.adopt(parameter, torch.float16)
    assert parameter.dtype is torch.float32
    assert parameter not in masters


# -- reading and writing ---------------------------------------------------------------------------


@pytest.mark.parametrize("master", EVERY)
def test_what_is_written_is_written_in_place(master: str):
    masters, parameter = adopted(master, weight())
    addresses = (
        parameter.data_ptr(),
        (None if (beside := masters.companion_tensor(parameter)) is None else beside.data_ptr()),
    )
    value = weight()
    masters.write(parameter, value, RandomDraw(0, 0, 0))
    beside = masters.companion_tensor(parameter)
    assert (parameter.data_ptr(), None if beside is None else beside.data_ptr()) == addresses
    if master in EXACT:
        assert same_bits(masters.read(parameter), value)


@pytest.mark.parametrize("master", EVERY)
def test_reading_changes_nothing_and_gives_a_tensor_of_its_own(master: str):
    masters, parameter = adopted(master, weight())
    first = masters.read(parameter)
    before = first.clone()
    first.zero_()
    assert torch.equal(masters.read(parameter), before)
    assert not masters.read(parameter).requires_grad


def test_writing_draws_from_the_draw():
    masters, parameter = adopted("stochastic", torch.ones(1000))
    masters.write(parameter, torch.full((1000,), 1.0 + 2.0**-8), RandomDraw(1, 2, 3))
    first = parameter.detach().clone()
    assert len(set(first.tolist())) == 2
    masters.write(parameter, torch.full((1000,), 1.0 + 2.0**-8), RandomDraw(1, 2, 3))
    assert torch.equal(parameter, first)
    masters.write(parameter, torch.full((1000,), 1.0 + 2.0**-8), RandomDraw(1, 2, 4))
    assert not torch.equal(parameter, first)


# -- what others write -----------------------------------------------------------------------------

WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "clamp": lambda parameter: parameter.clamp_(-0.5, 0.5),
    "copy": lambda parameter: parameter.copy_(torch.full_like(parameter, 0.3)),
    "an element": lambda parameter: parameter[0].fill_(7.0),
    "load_state_dict": lambda parameter: _load(parameter, torch.full_like(parameter, -0.7)),
    "init": lambda parameter: nn.init.uniform_(parameter),
}


def _load(parameter: nn.Parameter, value: torch.Tensor) -> None:
    module = nn.Module()
    module.weight = parameter
    module.load_state_dict({"weight": value})


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("master", EVERY)
def test_the_value_follows_what_others_wrote(master: str, write: Callable[[nn.Parameter], object]):
    masters, parameter = adopted(master, weight())
    before = masters.read(parameter)
    old = parameter.detach().clone()
    with torch.no_grad():
        write(parameter)
    after, touched = masters.read(parameter), parameter.detach() != old
    assert bool(touched.any())
    assert torch.equal(after[touched], parameter.detach()[touched].float())
    # What others left as it was keeps its exact value only where values are compared.
    kept = before if master == "float32" else parameter.detach().float()
    assert torch.equal(after[~touched], kept[~touched])


@pytest.mark.parametrize("master", BESIDE)
def test_follow_says_whether_others_wrote(master: str):
    masters, parameter = adopted(master, weight())
    assert masters.resync(parameter) is False
    with torch.no_grad():
        parameter.mul_(2)
    assert masters.resync(parameter) is True
    assert masters.resync(parameter) is False


@pytest.mark.parametrize("master", BESIDE)
def test_what_is_noted_is_not_taken_for_a_strangers_writing(master: str):
    masters, parameter = adopted(master, weight())
    with torch.no_grad():
        # As a kernel does that writes both sides, and then tells torch.
        parameter.add_(0.0)
    masters.noted([parameter])
    assert masters.resync(parameter) is False


@pytest.mark.parametrize(
    "write",
    [
        lambda parameter, new: parameter.data.copy_(new),
        lambda parameter, new: setattr(parameter, "data", new),
    ],
    ids=["written", "set"],
)
@pytest.mark.parametrize("master", EVERY)
def test_data_that_is_written_behind_autograds_back_counts(
    master: str, write: Callable[[nn.Parameter, torch.Tensor], object]
):
    """`.data` moves no version. A float32 master compares values, so that one which rounds to what was written stays; the others compare a sample."""
    value = torch.rand(1000, generator=torch.Generator().manual_seed(seed := fresh_seed())) + 1.0
    masters, parameter = adopted(master, value)
    new = (torch.rand(1000) + 1.0).to(HALF)
    write(parameter, new)
    read = masters.read(parameter)
    changed = new != value.to(HALF) if master == "float32" else torch.ones(1000, dtype=torch.bool)
    assert torch.equal(read[changed], new.float()[changed]), seed


# -- loading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order", [("parameter", "beside"), ("beside", "parameter")], ids=" then ".join
)
@pytest.mark.parametrize("master", BESIDE)
def test_a_saved_pair_is_loaded_in_either_order(master: str, order: tuple[str, str]):
    source, saved = adopted(master, weight())
    masters, parameter = adopted(master, weight())
    for part in order:
        if part == "beside":
            masters.load(parameter, source.companion(saved))
        else:
            _load(parameter, saved.detach().clone())
    assert same_bits(masters.read(parameter), source.read(saved))


FAR = 64.0
"""No weight is drawn so far out: a master that rounds to what is written may stay as it is."""


@pytest.mark.parametrize("master", BESIDE)
def test_after_loading_others_are_followed_again(master: str):
    source, saved = adopted(master, weight())
    masters, parameter = adopted(master, weight())
    masters.load(parameter, source.companion(saved))
    _load(parameter, saved.detach().clone())
    masters.read(parameter)
    with torch.no_grad():
        parameter.fill_(FAR)
    assert torch.equal(
        masters.read(parameter), torch.full_like(parameter, FAR, dtype=torch.float32)
    )


@pytest.mark.parametrize("master", BESIDE)
def test_after_a_write_others_are_followed_again_though_only_a_neighbour_was_loaded(master: str):
    masters, parameter = adopted(master, weight())
    masters.load(parameter, masters.companion(parameter))
    masters.write(parameter, weight())
    with torch.no_grad():
        parameter.fill_(FAR)
    assert torch.equal(
        masters.read(parameter), torch.full_like(parameter, FAR, dtype=torch.float32)
    )


@pytest.mark.parametrize("master", BESIDE)
def test_a_neighbour_is_loaded_into_the_memory_it_has(master: str):
    masters, parameter = adopted(master, weight())
    address = masters.companion_tensor(parameter).data_ptr()
    masters.load(parameter, masters.companion(parameter))
    assert masters.companion_tensor(parameter).data_ptr() == address


def test_without_a_neighbour_there_is_nothing_to_load():
    masters, parameter = adopted("none", weight())
    source, saved = adopted("float32", weight())
    masters.load(parameter, source.companion(saved))
    assert masters.companion_tensor(parameter) is None


# -- several at a time, and on loan ----------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed"])
@pytest.mark.parametrize("master", EVERY)
def test_a_reader_gives_what_reading_one_by_one_gives(master: str, layout: str):
    generator = torch.Generator().manual_seed(fresh_seed() % 2**31)
    masters, parameters = (
        MasterWeights(master),
        [nn.Parameter(LAYOUTS[layout](weight(generator=generator))) for _ in range(3)],
    )
    for parameter in parameters:
        masters.adopt(parameter, HALF)
    read = masters.reader(parameters)
    for _ in range(2):
        values = read()
        assert all(
            same_bits(value, masters.read(parameter))
            for value, parameter in zip(values, parameters, strict=True)
        )
        assert all(
            (value is masters.companion_tensor(parameter)) is (master == "float32")
            for value, parameter in zip(values, parameters, strict=True)
        )
        # What others write is followed, also in between.
        with torch.no_grad():
            parameters[1][0, 0] = 0.25


def test_a_reader_joins_every_bit_pattern_of_split_masters():
    masters, parameter = adopted(
        "split",
        torch.cat([edges(), any_bits(10_000, torch.Generator().manual_seed(fresh_seed() % 2**31))]),
    )
    (value,) = masters.reader([parameter])()
    assert same_bits(value, masters.read(parameter))


def test_a_reader_gives_zero_where_a_mask_was_written_past_the_version_counter():
    masters, parameter = adopted(
        "split", torch.tensor([1.0 - 2.0**-12, -1.0 + 2.0**-12, 1.0 + 2.0**-12])
    )
    read = masters.reader([parameter])
    read()
    parameter.data.mul_(torch.tensor([0.0, 0.0, 1.0], dtype=HALF))
    assert read()[0].tolist() == [0.0, 0.0, 1.0 + 2.0**-12]


@pytest.mark.parametrize("master", EVERY)
def test_the_current_value_is_the_live_master_or_a_copy(master: str):
    masters, parameter = adopted(master, weight())
    value = masters.current(parameter)
    assert same_bits(value, masters.read(parameter))
    assert (value is masters.companion_tensor(parameter)) is (master == "float32")
    with torch.no_grad():
        parameter.fill_(64.0)  # no weight is near it, whose master would stay
    assert bool((masters.current(parameter) == 64.0).all())


@pytest.mark.parametrize("master", EVERY)
def test_what_is_held_comes_back_to_the_bit_and_is_not_taken_for_a_write_of_others(master: str):
    masters, parameter = adopted(master, weight())
    beside, before, address = (
        masters.companion_tensor(parameter),
        masters.read(parameter),
        parameter.data_ptr(),
    )
    restore = masters.hold(parameter)
    masters.write(parameter, weight())
    restore()
    assert not masters.resync(parameter)
    assert same_bits(masters.read(parameter), before)
    assert masters.companion_tensor(parameter) is beside
    assert parameter.data_ptr() == address


@pytest.mark.parametrize(("kind", "warns"), [("split", True), ("kahan", True), ("float32", False)])
def test_writes_between_steps_that_cost_small_updates_are_reported_once(kind, warns):
    weight = torch.nn.Parameter(torch.ones(300))
    masters = MasterWeights(kind)
    masters.adopt(weight, torch.bfloat16)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(5):
            # As SAM does: a step to another place and back.
            with torch.no_grad():
                weight.add_(1.0).sub_(1.0)
            masters.write(weight, masters.read(weight) + 1e-4)
    assert [str(one.message).partition(" (clamp_")[0] for one in heard] == [
        "A parameter of shape (300,) was written 3 times between steps"
    ] * warns
