"""What torch.compile is told of a step's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

from mezzo.step import inductor_pass, inputs, max_pool

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


def _after_the_pass(
    function: Any, x: torch.Tensor, *, runs: bool = False
) -> tuple[list[fx.Node], Any]:
    """What a function calls then, and what it gives: by those calls, or by its own where the others need a GPU."""
    found: list[fx.Node] = []

    def look(module: fx.GraphModule, _: Any) -> Any:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        inductor_pass.ConvPoolPass("cpu")(graph)
        found.extend(graph.nodes)
        return fx.GraphModule(module, graph).forward if runs else module.forward

    torch._dynamo.reset()
    return found, torch.compile(function, backend=look, fullgraph=True)(x)


def _poolings(function: Any, x: torch.Tensor) -> list[Any]:
    """Of those that are ours, what they are told."""
    nodes, _ = _after_the_pass(function, x)
    return [node.args[1:] for node in nodes if node.target is OURS]


REPLACED = {
    "a number": (lambda x: F.max_pool2d(x, 2), ((2, 2), (2, 2), (0, 0))),
    "words": (
        lambda x: F.max_pool2d(input=x, kernel_size=(3, 2), stride=(2, 1), padding=1),
        ((3, 2), (2, 1), (1, 1)),
    ),
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
    assert _poolings(function, LAST) == [expected]


@pytest.mark.parametrize("function", LEFT.values(), ids=LEFT)
def test_what_is_not_done_here_is_left_to_inductor(function):
    assert _poolings(function, LAST) == []


def _conv(channels: int, kernel: int, stride: int, **words: Any) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(channels, 8, kernel, stride, **words).to(memory_format=torch.channels_last)


IMAGES = torch.randn(2, 3, 19, 20).contiguous(memory_format=torch.channels_last)
FORMS = {
    "patches": (_conv(3, 4, 4, dtype=torch.bfloat16), IMAGES.bfloat16(), [()]),
    "a stride, without bias": (
        _conv(3, 3, 2, padding=1, bias=False, dtype=torch.float16),
        IMAGES.half(),
        [()],
    ),
    "four channels": (
        _conv(3, 7, 2, padding=3, dtype=torch.float16),
        IMAGES.half(),
        [((2, 2), (3, 3))],
    ),
    "reflected": (
        _conv(3, 3, 2, padding=1, padding_mode="reflect", dtype=torch.float16),
        IMAGES.half(),
        [()],
    ),
}
AS_THEY_ARE = {
    "float32": (_conv(3, 4, 4), IMAGES),
    "channels first": (
        _conv(3, 4, 4, dtype=torch.float16).to(memory_format=torch.contiguous_format),
        IMAGES.half().contiguous(),
    ),
    "many channels": (_conv(8, 4, 4, dtype=torch.float16), LAST.half()),
    "dilation": (_conv(3, 4, 4, dilation=2, dtype=torch.float16), IMAGES.half()),
    "groups": (
        nn.Conv2d(3, 9, 4, 4, groups=3, dtype=torch.float16).to(memory_format=torch.channels_last),
        IMAGES.half(),
    ),
    "padding by name": (_conv(3, 3, 1, padding="same", dtype=torch.float16), IMAGES.half()),
    "a large kernel in bfloat16": (_conv(3, 9, 2, dtype=torch.bfloat16), IMAGES.bfloat16()),
    "an image alone": (_conv(3, 4, 4, dtype=torch.float16), IMAGES[0].half()),
}


@pytest.mark.parametrize(("model", "x", "told"), FORMS.values(), ids=FORMS)
def test_a_first_convolution_takes_another_form_and_gives_the_same(model, x, told):
    expected = model(x)
    given = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, tuple(model.parameters()), given)
    nodes, result = _after_the_pass(model, x, runs=True)
    assert F.pad in {node.target for node in nodes}
    assert [node.args[3:] for node in nodes if node.target is torch.conv2d] == told
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        torch.autograd.grad(result, tuple(model.parameters()), given), wanted
    )


@pytest.mark.parametrize(("model", "x"), AS_THEY_ARE.values(), ids=AS_THEY_ARE)
def test_other_convolutions_stay_as_they_are(model, x):
    nodes, result = _after_the_pass(model, x, runs=True)
    assert [node.target for node in nodes if node.op == "call_function"] == [torch.conv2d]
    assert torch.equal(result, model(x))


def test_under_a_region_the_dtype_of_the_result_counts():
    model = _conv(3, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        nodes, result = _after_the_pass(model, IMAGES, runs=True)
        expected = model(IMAGES)
    assert F.pad in {node.target for node in nodes}
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result, expected)


def test_a_batch_of_any_size_takes_the_form_too():
    model = _conv(3, 4, 4, dtype=torch.bfloat16)
    x = IMAGES.bfloat16()
    torch._dynamo.maybe_mark_dynamic(x, 0)
    nodes, result = _after_the_pass(model, x, runs=True)
    assert F.pad in {node.target for node in nodes}
    torch.testing.assert_close(result, model(x))


def test_another_device_is_left_alone():
    graph = fx.Graph()
    x = graph.placeholder("x")
    pooled = graph.call_function(F.max_pool2d, (x, 2))
    graph.output(pooled)
    with torch._subclasses.FakeTensorMode():
        x.meta["example_value"] = torch.empty(2, 8, 12, 12, memory_format=torch.channels_last)
        pooled.meta["example_value"] = torch.empty(2, 8, 6, 6, memory_format=torch.channels_last)
    inductor_pass.ConvPoolPass("cuda")(graph)
    assert not graph.find_nodes(op="call_function", target=OURS)
    inductor_pass.ConvPoolPass("cpu")(graph)
    assert len(graph.find_nodes(op="call_function", target=OURS)) == 1


def test_the_pass_is_another_one_for_another_device():
    assert (
        inductor_pass.ConvPoolPass("cpu").uuid()
        == inductor_pass.ConvPoolPass("cpu").uuid()
        != inductor_pass.ConvPoolPass("cuda").uuid()
    )


@pytest.mark.parametrize(
    "module", [inductor_pass, max_pool, inputs], ids=lambda module: module.__name__
)
def test_the_pass_is_another_one_when_its_source_changes(module, monkeypatch, tmp_path):
    before = inductor_pass.ConvPoolPass("cpu").uuid()
    changed = tmp_path / "changed.py"
    changed.write_text(Path(module.__file__).read_text() + "# changed")
    monkeypatch.setattr(module, "__file__", str(changed))
    assert inductor_pass.ConvPoolPass("cpu").uuid() != before


class AnotherPass(inductor_pass.ConvPoolPass):
    """A pass with another identity."""

    def uuid(self) -> str:
        """Identify the pass."""
        return "another"


def test_code_compiled_with_other_passes_is_never_served_from_a_warm_cache(monkeypatch):
    x, weight = (
        LAST[:, :3].bfloat16().contiguous(memory_format=torch.channels_last),
        torch.ones(4, 3, 4, 4, dtype=torch.bfloat16),
    )
    added = [0.0]
    # The pass shows in the result.
    monkeypatch.setattr(
        inductor_pass,
        "fast_conv_form",
        lambda *_: lambda x, weight, bias, _, *words: F.conv2d(x, weight, bias, *words) + added[0],
    )
    passes = {0.0: None, 1.0: inductor_pass.ConvPoolPass("cpu"), 2.0: AnotherPass("cpu")}
    plain, hits = F.conv2d(x, weight, None, 4), []
    with fresh_cache():
        for _ in range(2):
            counters.clear()
            for number, one in passes.items():
                torch._dynamo.reset()
                added[0] = number
                # Without kernels of Inductor's own, which gcc would take seconds for.
                options = {"fallback_by_default": True} | (
                    {} if one is None else {"pre_grad_custom_pass": one}
                )
                found = torch.compile(
                    lambda x, w: F.conv2d(x, w, None, 4), fullgraph=True, options=options
                )(x, weight)
                torch.testing.assert_close(found, plain + number)
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, len(passes)]


@pytest.mark.parametrize("theirs", [None, CountingPass()], ids=["ours", "theirs"])
def test_inductor_gets_the_pass_unless_the_user_gave_it_one(theirs, monkeypatch):
    monkeypatch.setattr(inductor_pass, "has_triton", lambda _: True)
    ours = CountingPass()
    monkeypatch.setattr(inductor_pass, "ConvPoolPass", lambda _: ours)
    with config.patch(pre_grad_custom_pass=theirs):
        inductor_pass.compiled(nn.Linear(2, 2))(torch.ones(1, 2))
    assert (ours.calls, getattr(theirs, "calls", 0)) == ((0, 1) if theirs else (1, 0))
