"""The first bad parameter is named as the model names it, else as the optimizer does, else by its position."""

from __future__ import annotations

import gc

import torch

from mezzo.scaling.step_result import NO_SOURCE, FlaggedSource, KnownSource, ParameterNames


def test_a_watched_models_name_comes_before_the_optimizers(net):
    optimizer = torch.optim.SGD(
        [(f"optimizer.{name}", parameter) for name, parameter in net.named_parameters()], lr=0.1
    )
    names = ParameterNames()
    assert names.name_of(net.second.weight, optimizer) == "optimizer.second.weight"
    names.register(net)
    assert names.name_of(net.second.weight, optimizer) == "second.weight"


def test_without_names_the_position_over_all_groups_is_told(net):
    optimizer = torch.optim.SGD(
        [{"params": net.first.parameters()}, {"params": net.second.parameters(), "lr": 0.2}], lr=0.1
    )
    assert ParameterNames().name_of(net.second.weight, optimizer) == "parameter 2"


def test_a_parameter_that_left_the_optimizer_is_said_to_have_left(net):
    optimizer = torch.optim.SGD(net.first.parameters(), lr=0.1)
    assert "left" in ParameterNames().name_of(net.second.weight, optimizer)


def test_watching_keeps_no_model_alive(make_net):
    names, net = ParameterNames(), make_net()
    names.register(net)
    assert len(names._watched) == 4
    del net
    gc.collect()
    assert len(names._watched) == 0


def test_flags_name_the_first_raised_one_at_once_or_from_copies(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    names = ParameterNames()
    names.register(net)
    culprit = FlaggedSource(names, optimizer)
    assert not culprit.has_candidates()
    culprit.add(torch.tensor([0, 0], dtype=torch.int32), [net.first.weight, net.first.bias])
    culprit.add(torch.tensor([0, 1], dtype=torch.int32), [net.second.weight, net.second.bias])
    assert culprit.has_candidates()
    assert culprit.name() == "second.bias"
    assert culprit.name_from(culprit.fetch()) == "second.bias"


def test_no_raised_flag_means_no_name(net):
    culprit = FlaggedSource(ParameterNames(), torch.optim.SGD(net.parameters(), lr=0.1))
    culprit.add(torch.zeros(4, dtype=torch.int32), list(net.parameters()))
    assert culprit.name() is None


def test_a_known_culprit_needs_nothing_to_be_fetched():
    assert KnownSource("a").fetch() == []
    assert KnownSource("a").name_from([]) == KnownSource("a").name() == "a"
    assert NO_SOURCE.name() is None
    assert not NO_SOURCE.has_candidates()
