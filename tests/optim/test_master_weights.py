"""Master weights: 16-bit parameters and their companions make up float32 values."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from support.kernel_cases import fresh_seed
from support.patterns import any_bits, edges, same_bits
from torch import nn

from mezzo import PolicyError
from mezzo.optim.companion import SAMPLES, matches_sample, sample_spacing, sampled
from mezzo.optim.master_formats import RandomDraw
from mezzo.optim.master_weights import MasterWeights

HALF = torch.bfloat16
EXACT = ["float32", "split"]
WITH_COMPANION = [*EXACT, "kahan"]
EVERY = [*WITH_COMPANION, "stochastic", "none"]

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
def test_parameter_companion_and_value_have_the_strides_of_the_parameter(
    master: str, layout: Callable[[torch.Tensor], torch.Tensor]
):
    value = layout(weight())
    masters, parameter = adopted(master, value)
    companion, wanted = masters.companion_tensor(parameter), nn.Parameter(value.clone()).stride()
    assert parameter.stride() == wanted
    assert companion is None or companion.stride() == wanted
    masters.write(parameter, torch.ones_like(value), RandomDraw(0, 0, 0))
    assert masters.read(parameter).stride() == parameter.stride() == wanted
    assert parameter.eq(1.0).all()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("master", EXACT)
def test_a_released_parameter_gets_its_bits_and_strides_back(
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
def test_scalars_and_empty_parameters_are_adopted(master: str, shape: tuple[int, ...]):
    masters, parameter = adopted(master, torch.full(shape, 1.5))
    assert masters.read(parameter).shape == parameter.shape == shape
    masters.write(parameter, torch.full(shape, 2.5), RandomDraw(0, 0, 0))
    masters.release(parameter)
    assert torch.equal(parameter, torch.full(shape, 2.5))


@pytest.mark.parametrize("master", ["stochastic", "none"])
def test_without_a_companion_the_value_is_rounded(master: str):
    value = weight()
    masters, parameter = adopted(master, value)
    assert masters.companion_tensor(parameter) is None
    assert torch.equal(masters.read(parameter), value.to(HALF).float())


def test_adoption_rounds_to_nearest_with_stochastic_masters_too():
    value = weight()
    _, parameter = adopted("stochastic", value)
    assert torch.equal(parameter, value.to(HALF))


def test_a_master_does_not_share_memory_with_the_original():
    value = weight()
    parameter = nn.Parameter(value)
    masters = MasterWeights("float32")
    masters.adopt(parameter, HALF)
    value.zero_()
    assert masters.read(parameter).abs().sum() > 0


def test_every_adoption_and_release_increases_the_generation():
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
def test_writing_is_in_place(master: str):
    masters, parameter = adopted(master, weight())
    addresses = (
        parameter.data_ptr(),
        (
            None
            if (companion := masters.companion_tensor(parameter)) is None
            else companion.data_ptr()
        ),
    )
    value = weight()
    masters.write(parameter, value, RandomDraw(0, 0, 0))
    companion = masters.companion_tensor(parameter)
    assert (parameter.data_ptr(), None if companion is None else companion.data_ptr()) == addresses
    if master in EXACT:
        assert same_bits(masters.read(parameter), value)


@pytest.mark.parametrize("master", EVERY)
def test_reading_returns_a_new_tensor(master: str):
    masters, parameter = adopted(master, weight())
    first = masters.read(parameter)
    before = first.clone()
    first.zero_()
    assert torch.equal(masters.read(parameter), before)
    assert not masters.read(parameter).requires_grad


def test_writing_uses_the_random_draw():
    masters, parameter = adopted("stochastic", torch.ones(1000))
    masters.write(parameter, torch.full((1000,), 1.0 + 2.0**-8), RandomDraw(1, 2, 3))
    first = parameter.detach().clone()
    assert len(set(first.tolist())) == 2
    masters.write(parameter, torch.full((1000,), 1.0 + 2.0**-8), RandomDraw(1, 2, 3))
    assert torch.equal(parameter, first)
    masters.write(parameter, torch.full((1000,), 1.0 + 2.0**-8), RandomDraw(1, 2, 4))
    assert not torch.equal(parameter, first)


# -- writes by other code --------------------------------------------------------------------------

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
def test_the_value_follows_a_write_by_other_code(
    master: str, write: Callable[[nn.Parameter], object]
):
    masters, parameter = adopted(master, weight())
    before = masters.read(parameter)
    old = parameter.detach().clone()
    with torch.no_grad():
        write(parameter)
    after, touched = masters.read(parameter), parameter.detach() != old
    assert bool(touched.any())
    assert torch.equal(after[touched], parameter.detach()[touched].float())
    # Unchanged elements keep their exact value only if values are compared.
    rest = before if master == "float32" else parameter.detach().float()
    assert torch.equal(after[~touched], rest[~touched])


@pytest.mark.parametrize("master", WITH_COMPANION)
def test_resync_returns_whether_other_code_wrote(master: str):
    masters, parameter = adopted(master, weight())
    assert masters.resync(parameter) is False
    with torch.no_grad():
        parameter.mul_(2)
    assert masters.resync(parameter) is True
    assert masters.resync(parameter) is False


@pytest.mark.parametrize("master", WITH_COMPANION)
def test_a_write_that_is_marked_is_not_one_by_other_code(master: str):
    masters, parameter = adopted(master, weight())
    with torch.no_grad():
        # As a kernel that writes parameter and companion, and increments the version.
        parameter.add_(0.0)
    masters.mark_written([parameter])
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
def test_a_write_through_data_sets_the_value(
    master: str, write: Callable[[nn.Parameter, torch.Tensor], object]
):
    # `.data` does not change the version. Float32 masters compare values, so that one which rounds
    # to what was written stays; the others compare a sample.
    value = torch.rand(1000, generator=torch.Generator().manual_seed(seed := fresh_seed())) + 1.0
    masters, parameter = adopted(master, value)
    new = (torch.rand(1000) + 1.0).to(HALF)
    write(parameter, new)
    read = masters.read(parameter)
    changed = new != value.to(HALF) if master == "float32" else torch.ones(1000, dtype=torch.bool)
    assert torch.equal(read[changed], new.float()[changed]), seed


# -- loading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order", [("parameter", "companion"), ("companion", "parameter")], ids=" then ".join
)
@pytest.mark.parametrize("master", WITH_COMPANION)
def test_parameter_and_companion_are_loaded_in_either_order(master: str, order: tuple[str, str]):
    source, saved = adopted(master, weight())
    masters, parameter = adopted(master, weight())
    for part in order:
        if part == "companion":
            masters.load(parameter, source.companion(saved))
        else:
            _load(parameter, saved.detach().clone())
    assert same_bits(masters.read(parameter), source.read(saved))


FAR = 64.0
"""Far from all random weights: a master that rounds to what is written may stay as it is."""


@pytest.mark.parametrize("master", WITH_COMPANION)
def test_writes_by_other_code_count_again_after_loading(master: str):
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


@pytest.mark.parametrize("master", WITH_COMPANION)
def test_writes_by_other_code_count_after_a_write_if_only_a_companion_was_loaded(master: str):
    masters, parameter = adopted(master, weight())
    masters.load(parameter, masters.companion(parameter))
    masters.write(parameter, weight())
    with torch.no_grad():
        parameter.fill_(FAR)
    assert torch.equal(
        masters.read(parameter), torch.full_like(parameter, FAR, dtype=torch.float32)
    )


@pytest.mark.parametrize("master", WITH_COMPANION)
def test_a_companion_is_loaded_in_place(master: str):
    masters, parameter = adopted(master, weight())
    address = masters.companion_tensor(parameter).data_ptr()
    masters.load(parameter, masters.companion(parameter))
    assert masters.companion_tensor(parameter).data_ptr() == address


def test_loading_a_companion_into_a_format_without_one_does_nothing():
    masters, parameter = adopted("none", weight())
    source, saved = adopted("float32", weight())
    masters.load(parameter, source.companion(saved))
    assert masters.companion_tensor(parameter) is None


# -- several at a time, and backups ----------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed"])
@pytest.mark.parametrize("master", EVERY)
def test_a_reader_returns_what_reading_one_by_one_returns(master: str, layout: str):
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
        # A write by other code between two reads.
        with torch.no_grad():
            parameters[1][0, 0] = 0.25


def test_a_reader_merges_every_bit_pattern_of_split_masters():
    masters, parameter = adopted(
        "split",
        torch.cat([edges(), any_bits(10_000, torch.Generator().manual_seed(fresh_seed() % 2**31))]),
    )
    (value,) = masters.reader([parameter])()
    assert same_bits(value, masters.read(parameter))


def test_a_reader_returns_zero_where_a_mask_was_written_through_data():
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
        parameter.fill_(FAR)
    assert bool((masters.current(parameter) == FAR).all())


@pytest.mark.parametrize("master", EVERY)
def test_a_backup_is_restored_to_the_bit_and_is_not_a_write_by_other_code(master: str):
    masters, parameter = adopted(master, weight())
    companion, before, address = (
        masters.companion_tensor(parameter),
        masters.read(parameter),
        parameter.data_ptr(),
    )
    restore = masters.backup(parameter)
    masters.write(parameter, weight())
    restore()
    assert not masters.resync(parameter)
    assert same_bits(masters.read(parameter), before)
    assert masters.companion_tensor(parameter) is companion
    assert parameter.data_ptr() == address


@pytest.mark.parametrize(
    ("master", "warns"), [("split", True), ("kahan", True), ("float32", False)]
)
def test_repeated_writes_that_lose_small_updates_give_one_warning(master, warns):
    weight = torch.nn.Parameter(torch.ones(300))
    masters = MasterWeights(master)
    masters.adopt(weight, torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            # As SAM does: a step away and back.
            with torch.no_grad():
                weight.add_(1.0).sub_(1.0)
            masters.write(weight, masters.read(weight) + 1e-4)
    assert [str(one.message).partition(" (clamp_")[0] for one in caught] == [
        "A parameter of shape (300,) was written 3 times between steps"
    ] * warns


# -- samples ---------------------------------------------------------------------------------------

SAMPLED_SHAPES = [(), (0,), (1,), (10,), (129,), (300, 7)]
WRITES_THROUGH_DATA: dict[str, Callable[[nn.Parameter], object]] = {
    "data.fill_": lambda parameter: parameter.data.fill_(2.0),
    "data.copy_": lambda parameter: parameter.data.copy_(torch.rand(parameter.shape) + 3.0),
    "init of data": lambda parameter: nn.init.uniform_(parameter.data, 3.0, 4.0),
    "data =": lambda parameter: setattr(parameter, "data", torch.full_like(parameter.data, 3.0)),
    "detach().fill_": lambda parameter: parameter.detach().fill_(2.0),
}


def adopted_at_random(
    master: str, shape: tuple[int, ...] = (300, 7)
) -> tuple[MasterWeights, nn.Parameter, torch.Tensor]:
    value = torch.rand(shape, generator=torch.Generator().manual_seed(fresh_seed())) + 0.5
    masters, parameter = MasterWeights(master), nn.Parameter(value.clone())
    masters.adopt(parameter, HALF)
    return masters, parameter, value


@pytest.mark.parametrize("numel", [1, 2, 127, 128, 129, 4096, 100_000])
def test_a_sample_spans_the_parameter_and_has_a_maximum_size(numel: int):
    sample = sampled(torch.arange(numel))
    assert numel <= len(sample) << sample_spacing(numel)
    assert min(numel, SAMPLES // 2 + 1) <= len(sample) <= SAMPLES


def test_a_sample_is_taken_in_memory_order():
    value = torch.arange(1000.0).view(10, 100)
    assert torch.equal(sampled(value.T), sampled(value))
    assert len(sampled(value[:, ::2])) == len(sampled(torch.ones(500)))


@pytest.mark.parametrize("write", WRITES_THROUGH_DATA.values(), ids=WRITES_THROUGH_DATA)
@pytest.mark.parametrize("master", ["float32", "split", "kahan", "stochastic", "none"])
def test_a_write_through_data_to_a_whole_parameter_sets_its_value(
    master: str, write: Callable[[nn.Parameter], object]
):
    masters, parameter, _ = adopted_at_random(master)
    write(parameter)
    assert torch.equal(masters.read(parameter), parameter.detach().float())
    masters.write(parameter, masters.read(parameter))
    assert torch.equal(masters.read(parameter), parameter.detach().float())


@pytest.mark.parametrize("shape", SAMPLED_SHAPES, ids=str)
@pytest.mark.parametrize("master", ["split", "kahan"])
def test_parameters_of_every_size_have_a_sample(master: str, shape: tuple[int, ...]):
    masters, parameter, value = adopted_at_random(master, shape)
    if master == "split":
        assert same_bits(masters.read(parameter), value)
    assert bool(matches_sample(parameter, masters.sample(parameter)))
    parameter.data.fill_(4.0)
    assert torch.equal(masters.read(parameter), torch.full(shape, 4.0))


def test_weights_that_are_restored_through_data_use_their_remainder_again():
    masters, parameter, value = adopted_at_random("split")
    backup = parameter.detach().clone()
    parameter.data.fill_(7.0)
    assert torch.equal(masters.read(parameter), torch.full_like(value, 7.0))
    parameter.data.copy_(backup)
    assert same_bits(masters.read(parameter), value)


def test_a_mask_through_data_leaves_other_elements_exact_and_gives_no_nan():
    masters, parameter, value = adopted_at_random("split")
    mask = torch.rand(value.shape) < 0.3
    parameter.data.mul_(mask)
    read = masters.read(parameter)
    assert same_bits(read[mask], value[mask])
    assert bool((read[~mask].abs() < 2.0**-130).all())


def test_a_few_elements_written_through_data_leave_the_others_exact():
    masters, parameter, value = adopted_at_random("split")
    parameter.data[0, :] = 2.0
    assert same_bits(masters.read(parameter)[1:], value[1:])


def test_the_sample_is_of_the_value_that_was_written_last():
    masters, parameter, value = adopted_at_random("split")
    masters.write(parameter, value * 3)
    assert same_bits(masters.read(parameter), value * 3)
    with torch.no_grad():
        parameter.mul_(2)
    masters.resync(parameter)
    assert bool(matches_sample(parameter, masters.sample(parameter)))
