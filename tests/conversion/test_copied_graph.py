import torch
from support.graphs import graph
from torch import nn

from mezzo.conversion.nodes import copied_graph


def test_a_copy_keeps_names_that_python_has_a_word_for():
    module = graph(nn.Linear(4, 4), torch.randn(2, 4), tidied=False)
    assert "input" in [node.name for node in module.graph.nodes]
    made = copied_graph(module)
    assert [node.name for node in made.graph.nodes] == [node.name for node in module.graph.nodes]


def test_a_change_to_the_copy_leaves_the_original():
    module = graph(
        lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)),
        torch.randn(2, 4),
        tidied=False,
    )
    made = copied_graph(module)
    made.true_graph_0.graph.output_node().meta["changed"] = True
    assert "changed" not in module.true_graph_0.graph.output_node().meta
