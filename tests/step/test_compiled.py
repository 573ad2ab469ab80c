"""What torch.compile is told of a step's model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn import functional as F

from mezzo.step import compiled

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
OURS = torch.ops.mezzo.max_pool2d.default
LAST = torch.randn(2, 8, 12, 12).contiguous(memory_format=torch.channels_last)


class CountingPass(CustomGraphPass):
    """Counts its graphs."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: fx.Graph) -> None:
        """Count one."""
        self.calls += 1

    def uuid(self) -> None:
        """Nothing is kept."""


def _calls_after_the_pass(function: Any, x: torch.Tensor) -> list[Any]:
    """What of a function's calls are ours, arguments included."""
    found: list[Any] = []

    def look(module: fx.GraphModule, _: Any) -> Any:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        compiled.Substitutes("cpu")(graph)
        found.extend(node.args[1:] for node in graph.nodes if node.target is OURS)
        return module.forward

    torch.compile(function, backend=look, fullgraph=True)(x)
    return found


REPLACED = {
    "a number": (lambda x: F.max_pool2d(x, 2), ((2, 2), (2, 2), (0, 0))),
    "words": (lambda x: F.max_pool2d(input=x, kernel_size=(3, 2), stride=(2, 1), padding=1), ((3, 2), (2, 1), (1, 1))),
    "lists": (lambda x: torch.max_pool2d(x, [3], [2], [1]), ((3, 3), (2, 2), (1, 1))),
    "a layer": (nn.MaxPool2d(3, 2, 1), ((3, 3), (2, 2), (1, 1))),
    "half": (lambda x: F.max_pool2d(x.half(), 2), ((2, 2), (2, 2), (0, 0))),
}
LEFT = {
    "channels first": lambda x: F.max_pool2d(x.contiguous(), 2),
    "indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "ceil_mode": lambda x: F.max_pool2d(x, 5, 2, ceil_mode=True),
    "dilation": lambda x: F.max_pool2d(x, 2, dilation=2),
    "a large window": lambda x: F.max_pool2d(x, 12),
    "an image alone": lambda x: F.max_pool2d(x[0], 2),
    "float64": lambda x: F.max_pool2d(x.double(), 2),
    "a mean": lambda x: F.avg_pool2d(x, 2),
}


@pytest.mark.parametrize(("function", "expected"), REPLACED.values(), ids=REPLACED)
def test_max_pooling_is_told_in_one_form(function, expected):
    assert _calls_after_the_pass(function, LAST) == [expected]


@pytest.mark.parametrize("function", LEFT.values(), ids=LEFT)
def test_what_is_not_done_here_is_left_to_inductor(function):
    assert _calls_after_the_pass(function, LAST) == []


def test_another_device_is_left_alone():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(F.max_pool2d, (x, 2)))
    with torch._subclasses.FakeTensorMode():
        x.meta["example_value"] = torch.empty(2, 8, 12, 12, memory_format=torch.channels_last)
    compiled.Substitutes("cuda")(graph)
    assert not graph.find_nodes(op="call_function", target=OURS)
    compiled.Substitutes("cpu")(graph)
    assert len(graph.find_nodes(op="call_function", target=OURS)) == 1


def test_code_that_was_compiled_with_another_pass_is_not_taken():
    assert compiled.Substitutes("cpu").uuid() == compiled.Substitutes("cpu").uuid() != compiled.Substitutes("cuda").uuid()


@pytest.mark.parametrize("theirs", [None, CountingPass()], ids=["ours", "theirs"])
def test_inductor_gets_the_pass_unless_the_user_gave_it_one(theirs, monkeypatch):
    monkeypatch.setattr(compiled, "has_kernel", lambda _: True)
    ours = CountingPass()
    monkeypatch.setattr(compiled, "Substitutes", lambda _: ours)
    with config.patch(pre_grad_custom_pass=theirs):
        compiled.compiled(nn.Linear(2, 2))(torch.ones(1, 2))
    assert (ours.calls, getattr(theirs, "calls", 0)) == ((0, 1) if theirs else (1, 0))
