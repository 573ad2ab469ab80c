"""The result of a step, and the name of the first parameter with a non-finite gradient."""

from __future__ import annotations

import gc

import torch

from mezzo.scaling.step_result import (
    NO_SOURCE,
    FlaggedSource,
    KnownSource,
    ParameterNames,
    StepResult,
)


def test_the_flag_is_read_once_and_only_when_skipped_is_read(host_reads):
    with host_reads() as reads:
        result = StepResult(3, torch.tensor(1.0), KnownSource("weight"))
        assert result.value == 3
        assert repr(result) == "StepResult(not read yet, value=3)"
        assert reads.count == 0
        assert result.skipped
        assert result.skipped
        assert reads.count == 1
    assert result.first_nonfinite == "weight"
    assert repr(result) == "StepResult(skipped, value=3)"


def test_a_successful_step_has_no_nonfinite_parameter():
    assert StepResult(None, torch.tensor(0.0), KnownSource("weight")).first_nonfinite is None
    assert StepResult.known(None, skipped=True).first_nonfinite is None


def test_the_name_in_a_registered_model_comes_before_that_in_the_optimizer(net):
    optimizer = torch.optim.SGD(
        [(f"optimizer.{name}", parameter) for name, parameter in net.named_parameters()], lr=0.1
    )
    names = ParameterNames()
    assert names.name_of(net.second.weight, optimizer) == "optimizer.second.weight"
    names.register(net)
    assert names.name_of(net.second.weight, optimizer) == "second.weight"


def test_without_names_a_parameter_is_named_by_its_position_over_all_groups(net):
    optimizer = torch.optim.SGD(
        [{"params": net.first.parameters()}, {"params": net.second.parameters(), "lr": 0.2}], lr=0.1
    )
    assert ParameterNames().name_of(net.second.weight, optimizer) == "parameter 2"


def test_a_parameter_that_is_no_longer_in_the_optimizer_is_described_so(net):
    optimizer = torch.optim.SGD(net.first.parameters(), lr=0.1)
    assert "no longer in the optimizer" in ParameterNames().name_of(net.second.weight, optimizer)


def test_registering_a_model_does_not_keep_it_alive(make_net):
    names, net = ParameterNames(), make_net()
    names.register(net)
    assert len(names._registered) == 4
    del net
    gc.collect()
    assert len(names._registered) == 0


def test_flags_give_the_name_of_the_first_set_one_at_once_or_from_copies(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    names = ParameterNames()
    names.register(net)
    source = FlaggedSource(names, optimizer)
    assert not source.has_candidates()
    source.add(torch.tensor([0, 0], dtype=torch.int32), [net.first.weight, net.first.bias])
    source.add(torch.tensor([0, 1], dtype=torch.int32), [net.second.weight, net.second.bias])
    assert source.has_candidates()
    assert source.name() == "second.bias"
    assert source.name_from(source.fetch()) == "second.bias"


def test_without_a_set_flag_there_is_no_name(net):
    source = FlaggedSource(ParameterNames(), torch.optim.SGD(net.parameters(), lr=0.1))
    source.add(torch.zeros(4, dtype=torch.int32), list(net.parameters()))
    assert source.name() is None


def test_a_known_source_needs_no_copies():
    assert KnownSource("a").fetch() == []
    assert KnownSource("a").name_from([]) == KnownSource("a").name() == "a"
    assert NO_SOURCE.name() is None
    assert not NO_SOURCE.has_candidates()
