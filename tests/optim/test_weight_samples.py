"""A remainder or a compensation counts only while its parameter has the value that it belongs to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.kernel_cases import fresh_seed
from support.patterns import same_bits
from torch import nn

from mezzo.optim.master_weights import SAMPLES, MasterWeights, belongs, sampled, spacing

HALF = torch.bfloat16
SHAPES = [(), (0,), (1,), (10,), (129,), (300, 7)]
WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "data.fill_": lambda parameter: parameter.data.fill_(2.0),
    "data.copy_": lambda parameter: parameter.data.copy_(torch.rand(parameter.shape) + 3.0),
    "init of data": lambda parameter: nn.init.uniform_(parameter.data, 3.0, 4.0),
    "data =": lambda parameter: setattr(parameter, "data", torch.full_like(parameter.data, 3.0)),
    "detach().fill_": lambda parameter: parameter.detach().fill_(2.0),
}


def adopted(
    master: str, shape: tuple[int, ...] = (300, 7)
) -> tuple[MasterWeights, nn.Parameter, torch.Tensor]:
    value = torch.rand(shape, generator=torch.Generator().manual_seed(fresh_seed())) + 0.5
    masters, parameter = MasterWeights(master), nn.Parameter(value.clone())
    masters.adopt(parameter, HALF)
    return masters, parameter, value


@pytest.mark.parametrize("numel", [1, 2, 127, 128, 129, 4096, 100_000])
def test_a_sample_spans_the_parameter_and_is_never_too_long(numel: int):
    taken = sampled(torch.arange(numel))
    assert numel <= len(taken) << spacing(numel)
    assert min(numel, SAMPLES // 2 + 1) <= len(taken) <= SAMPLES


def test_a_sample_is_taken_in_the_order_of_memory():
    value = torch.arange(1000.0).view(10, 100)
    assert torch.equal(sampled(value.T), sampled(value))
    assert len(sampled(value[:, ::2])) == len(sampled(torch.ones(500)))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("master", ["float32", "split", "kahan", "stochastic", "none"])
def test_a_write_through_data_to_a_whole_parameter_is_followed(
    master: str, write: Callable[[nn.Parameter], object]
):
    masters, parameter, _ = adopted(master)
    write(parameter)
    assert torch.equal(masters.read(parameter), parameter.detach().float())
    masters.write(parameter, masters.read(parameter))
    assert torch.equal(masters.read(parameter), parameter.detach().float())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("master", ["split", "kahan"])
def test_parameters_of_every_size_have_a_sample(master: str, shape: tuple[int, ...]):
    masters, parameter, value = adopted(master, shape)
    if master == "split":
        assert same_bits(masters.read(parameter), value)
    assert bool(belongs(parameter, masters.sample(parameter)))
    parameter.data.fill_(4.0)
    assert torch.equal(masters.read(parameter), torch.full(shape, 4.0))


def test_weights_that_are_put_back_have_their_remainder_again():
    masters, parameter, value = adopted("split")
    backup = parameter.detach().clone()
    parameter.data.fill_(7.0)
    assert torch.equal(masters.read(parameter), torch.full_like(value, 7.0))
    parameter.data.copy_(backup)
    assert same_bits(masters.read(parameter), value)


def test_a_mask_through_data_leaves_the_others_exact_and_no_nan():
    masters, parameter, value = adopted("split")
    mask = torch.rand(value.shape) < 0.3
    parameter.data.mul_(mask)
    read = masters.read(parameter)
    assert same_bits(read[mask], value[mask])
    assert bool((read[~mask].abs() < 2.0**-130).all())


def test_a_few_elements_written_through_data_do_not_cost_the_others_their_remainder():
    masters, parameter, value = adopted("split")
    parameter.data[0, :] = 2.0
    assert same_bits(masters.read(parameter)[1:], value[1:])


def test_the_sample_belongs_to_the_value_that_was_written_last():
    masters, parameter, value = adopted("split")
    masters.write(parameter, value * 3)
    assert same_bits(masters.read(parameter), value * 3)
    with torch.no_grad():
        parameter.mul_(2)
    masters.resync(parameter)
    assert bool(belongs(parameter, masters.sample(parameter)))
