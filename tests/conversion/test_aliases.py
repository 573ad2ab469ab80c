import torch
from support.graphs import graph, node
from torch import nn

from mezzo.conversion.nodes import alias_sets, writes, written


def _names(found):
    return {one.name for one in found}


def test_views_of_views_share_one_memory():
    module = graph(lambda x: x.view(4).unsqueeze(0) + 1, torch.ones(2, 2), tidied=False)
    assert _names(alias_sets(module.graph)[node(module, "view")]) == {"args_0", "view", "unsqueeze"}
    assert _names(alias_sets(module.graph)[node(module, "add")]) == {"add"}


def test_what_is_written_through_a_view_is_written_under_every_name():
    def function(x):
        made = torch.zeros_like(x)
        made[0] = x[1]
        return made + 1

    module = graph(function, torch.ones(2, 2), tidied=False)
    assert _names(written(module.graph)) == {"zeros_like", "select_1", "copy_"}


def test_a_batch_norm_in_training_writes_its_statistics_though_its_schema_does_not_say_so():
    training, evaluating = (
        graph(nn.BatchNorm1d(2).train(), torch.ones(3, 2), tidied=False),
        graph(nn.BatchNorm1d(2).eval(), torch.ones(3, 2), tidied=False),
    )
    assert _names(writes(node(training, "batch_norm"))) == {"b_running_mean", "b_running_var"}
    assert not writes(node(evaluating, "batch_norm"))


def test_a_dropout_may_give_back_its_input():
    module = graph(nn.Dropout().eval(), torch.ones(2), tidied=False)
    assert len(alias_sets(module.graph)[node(module, "dropout")]) == 2
