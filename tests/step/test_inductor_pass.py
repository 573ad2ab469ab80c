"""The Inductor pass: which calls it replaces, with the same numbers, and its cache key."""

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
CUSTOM_OP = torch.ops.mezzo.max_pool2d.default
CHANNELS_LAST = torch.randn(2, 8, 12, 12).contiguous(memory_format=torch.channels_last)


class CountingPass(CustomGraphPass):
    """Counts the graphs it is called with."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: fx.Graph) -> None:
        """Count a graph."""
        self.calls += 1

    def uuid(self) -> None:
        """Return None: nothing is cached."""


def _apply_pass(function: Any, x: torch.Tensor, *, runs: bool = False) -> tuple[list[fx.Node], Any]:
    """Return the nodes of a function after the pass, and its result.

    With `runs`, the result is that of the new nodes; else of the old ones, as the custom op needs a
    GPU.
    """
    nodes: list[fx.Node] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        inductor_pass.ConvPoolPass("cpu")(graph)
        nodes.extend(graph.nodes)
        return fx.GraphModule(module, graph).forward if runs else module.forward

    torch._dynamo.reset()
    return nodes, torch.compile(function, backend=backend, fullgraph=True)(x)


def _poolings(function: Any, x: torch.Tensor) -> list[Any]:
    """Return the arguments of the custom op's calls."""
    nodes, _ = _apply_pass(function, x)
    return [node.args[1:] for node in nodes if node.target is CUSTOM_OP]


REPLACED = {
    "a number": (lambda x: F.max_pool2d(x, 2), ((2, 2), (2, 2), (0, 0))),
    "keyword arguments": (
        lambda x: F.max_pool2d(input=x, kernel_size=(3, 2), stride=(2, 1), padding=1),
        ((3, 2), (2, 1), (1, 1)),
    ),
    "lists": (lambda x: torch.max_pool2d(x, [3], [2], [1]), ((3, 3), (2, 2), (1, 1))),
    "a layer": (nn.MaxPool2d(3, 2, 1), ((3, 3), (2, 2), (1, 1))),
    "half": (lambda x: F.max_pool2d(x.half(), 2), ((2, 2), (2, 2), (0, 0))),
}
NOT_REPLACED = {
    "channels first": lambda x: F.max_pool2d(x.contiguous(), 2),
    "indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "ceil_mode": lambda x: F.max_pool2d(x, 5, 2, ceil_mode=True),
    "dilation": lambda x: F.max_pool2d(x, 2, dilation=2),
    "a large window": lambda x: F.max_pool2d(x, 12),
    "an image without batch": lambda x: F.max_pool2d(x[0], 2),
    "float64": lambda x: F.max_pool2d(x.double(), 2),
    "average pooling": lambda x: F.avg_pool2d(x, 2),
}


@pytest.mark.parametrize(("function", "expected"), REPLACED.values(), ids=REPLACED)
def test_max_pooling_is_replaced(function, expected):
    assert _poolings(function, CHANNELS_LAST) == [expected]


@pytest.mark.parametrize("function", NOT_REPLACED.values(), ids=NOT_REPLACED)
def test_other_pooling_is_left_to_inductor(function):
    assert _poolings(function, CHANNELS_LAST) == []


def _conv(channels: int, kernel: int, stride: int, **kwargs: Any) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(channels, 8, kernel, stride, **kwargs).to(memory_format=torch.channels_last)


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
UNCHANGED = {
    "float32": (_conv(3, 4, 4), IMAGES),
    "channels first": (
        _conv(3, 4, 4, dtype=torch.float16).to(memory_format=torch.contiguous_format),
        IMAGES.half().contiguous(),
    ),
    "many channels": (_conv(8, 4, 4, dtype=torch.float16), CHANNELS_LAST.half()),
    "dilation": (_conv(3, 4, 4, dilation=2, dtype=torch.float16), IMAGES.half()),
    "groups": (
        nn.Conv2d(3, 9, 4, 4, groups=3, dtype=torch.float16).to(memory_format=torch.channels_last),
        IMAGES.half(),
    ),
    "padding by name": (_conv(3, 3, 1, padding="same", dtype=torch.float16), IMAGES.half()),
    "a large kernel in bfloat16": (_conv(3, 9, 2, dtype=torch.bfloat16), IMAGES.bfloat16()),
    "an image without batch": (_conv(3, 4, 4, dtype=torch.float16), IMAGES[0].half()),
}


@pytest.mark.parametrize(("model", "x", "arguments"), FORMS.values(), ids=FORMS)
def test_a_first_convolution_is_replaced_with_the_same_result(model, x, arguments):
    expected = model(x)
    out_gradient = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, tuple(model.parameters()), out_gradient)
    nodes, result = _apply_pass(model, x, runs=True)
    assert F.pad in {node.target for node in nodes}
    assert [node.args[3:] for node in nodes if node.target is torch.conv2d] == arguments
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        torch.autograd.grad(result, tuple(model.parameters()), out_gradient), gradients
    )


@pytest.mark.parametrize(("model", "x"), UNCHANGED.values(), ids=UNCHANGED)
def test_other_convolutions_are_not_replaced(model, x):
    nodes, result = _apply_pass(model, x, runs=True)
    assert [node.target for node in nodes if node.op == "call_function"] == [torch.conv2d]
    assert torch.equal(result, model(x))


def test_in_an_autocast_region_the_dtype_of_the_result_counts():
    model = _conv(3, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        nodes, result = _apply_pass(model, IMAGES, runs=True)
        expected = model(IMAGES)
    assert F.pad in {node.target for node in nodes}
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result, expected)


def test_a_convolution_with_a_dynamic_batch_size_is_replaced():
    model = _conv(3, 4, 4, dtype=torch.bfloat16)
    x = IMAGES.bfloat16()
    torch._dynamo.maybe_mark_dynamic(x, 0)
    nodes, result = _apply_pass(model, x, runs=True)
    assert F.pad in {node.target for node in nodes}
    torch.testing.assert_close(result, model(x))


def test_calls_on_another_device_are_not_replaced():
    graph = fx.Graph()
    x = graph.placeholder("x")
    pooled = graph.call_function(F.max_pool2d, (x, 2))
    graph.output(pooled)
    with torch._subclasses.FakeTensorMode():
        x.meta["example_value"] = torch.empty(2, 8, 12, 12, memory_format=torch.channels_last)
        pooled.meta["example_value"] = torch.empty(2, 8, 6, 6, memory_format=torch.channels_last)
    inductor_pass.ConvPoolPass("cuda")(graph)
    assert not graph.find_nodes(op="call_function", target=CUSTOM_OP)
    inductor_pass.ConvPoolPass("cpu")(graph)
    assert len(graph.find_nodes(op="call_function", target=CUSTOM_OP)) == 1


def test_the_uuid_depends_on_the_device():
    assert (
        inductor_pass.ConvPoolPass("cpu").uuid()
        == inductor_pass.ConvPoolPass("cpu").uuid()
        != inductor_pass.ConvPoolPass("cuda").uuid()
    )


@pytest.mark.parametrize(
    "module", [inductor_pass, max_pool, inputs], ids=lambda module: module.__name__
)
def test_the_uuid_depends_on_the_source(module, monkeypatch, tmp_path):
    before = inductor_pass.ConvPoolPass("cpu").uuid()
    changed = tmp_path / "changed.py"
    changed.write_text(Path(module.__file__).read_text() + "# changed")
    monkeypatch.setattr(module, "__file__", str(changed))
    assert inductor_pass.ConvPoolPass("cpu").uuid() != before


class OtherPass(inductor_pass.ConvPoolPass):
    """A pass with another uuid."""

    def uuid(self) -> str:
        """Return a fixed string."""
        return "other"


def test_code_compiled_with_other_passes_is_not_reused_from_a_warm_cache(monkeypatch):
    x, weight = (
        CHANNELS_LAST[:, :3].bfloat16().contiguous(memory_format=torch.channels_last),
        torch.ones(4, 3, 4, 4, dtype=torch.bfloat16),
    )
    added = [0.0]
    # Each pass adds another number, so that the result shows which one ran.
    monkeypatch.setattr(
        inductor_pass,
        "fast_conv_form",
        lambda *_: lambda x, weight, bias, _, *args: F.conv2d(x, weight, bias, *args) + added[0],
    )
    passes = {0.0: None, 1.0: inductor_pass.ConvPoolPass("cpu"), 2.0: OtherPass("cpu")}
    plain, hits = F.conv2d(x, weight, None, 4), []
    with fresh_cache():
        for _ in range(2):
            counters.clear()
            for number, one in passes.items():
                torch._dynamo.reset()
                added[0] = number
                # Without Inductor's own kernels, which gcc takes seconds to compile.
                options = {"fallback_by_default": True} | (
                    {} if one is None else {"pre_grad_custom_pass": one}
                )
                result = torch.compile(
                    lambda x, w: F.conv2d(x, w, None, 4), fullgraph=True, options=options
                )(x, weight)
                torch.testing.assert_close(result, plain + number)
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, len(passes)]


@pytest.mark.parametrize("user_pass", [None, CountingPass()], ids=["ours", "the user's"])
def test_a_pass_of_the_user_takes_precedence(user_pass, monkeypatch):
    monkeypatch.setattr(inductor_pass, "has_triton", lambda _: True)
    ours = CountingPass()
    monkeypatch.setattr(inductor_pass, "ConvPoolPass", lambda _: ours)
    with config.patch(pre_grad_custom_pass=user_pass):
        inductor_pass.compiled(nn.Linear(2, 2))(torch.ones(1, 2))
    assert (ours.calls, getattr(user_pass, "calls", 0)) == ((0, 1) if user_pass else (1, 0))


# -- forms of convolutions of few channels ---------------------------------------------------------

CONVOLUTIONS = [
    # images, weight, stride, padding
    ((2, 3, 32, 32), (8, 3, 16, 16), (16, 16), (0, 0)),
    ((2, 3, 33, 47), (8, 3, 16, 16), (16, 16), (0, 0)),
    ((2, 3, 28, 28), (8, 3, 4, 4), (4, 4), (0, 0)),
    ((2, 3, 17, 16), (8, 3, 3, 3), (2, 2), (1, 1)),
    ((2, 1, 28, 28), (4, 1, 5, 5), (2, 2), (2, 2)),
    ((2, 3, 19, 23), (8, 3, 7, 5), (2, 3), (3, 1)),
    ((1, 4, 9, 9), (8, 4, 9, 9), (3, 3), (4, 4)),
    ((3, 2, 11, 13), (5, 2, 3, 3), (1, 2), (0, 2)),
    ((2, 3, 65, 64), (8, 3, 11, 11), (4, 4), (2, 2)),
    ((0, 3, 16, 16), (8, 3, 4, 4), (4, 4), (0, 0)),
]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("form", [inductor_pass.in_blocks, inductor_pass.with_four])
@pytest.mark.parametrize(("image", "kernel", "stride", "padding"), CONVOLUTIONS, ids=str)
def test_values_and_gradients_of_a_form_equal_torchs(
    form, image, kernel, stride, padding, has_bias
):
    leaves = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in (image, kernel, *([kernel[:1]] if has_bias else []))
    ]
    x, weight, bias = (*leaves, None)[:3]
    result = form(x, weight, bias, (image, kernel), stride, padding)
    expected = F.conv2d(x, weight, bias, stride, padding)
    torch.testing.assert_close(result, expected)
    out_gradient = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(result, leaves, out_gradient),
        torch.autograd.grad(expected, leaves, out_gradient),
    )


@pytest.mark.parametrize(
    ("weight", "stride", "dtype", "form"),
    [
        ((768, 3, 16, 16), (16, 16), torch.bfloat16, inductor_pass.in_blocks),
        ((32, 3, 3, 3), (2, 2), torch.float16, inductor_pass.in_blocks),
        ((32, 4, 6, 6), (2, 2), torch.float16, inductor_pass.in_blocks),
        ((64, 3, 7, 7), (2, 2), torch.float16, inductor_pass.with_four),
        ((64, 3, 3, 3), (1, 1), torch.float16, inductor_pass.with_four),
        ((64, 3, 1, 1), (2, 2), torch.float16, inductor_pass.with_four),
        ((64, 3, 7, 7), (2, 2), torch.bfloat16, inductor_pass.in_blocks),
        ((64, 3, 9, 9), (2, 2), torch.bfloat16, None),
        ((64, 3, 3, 3), (1, 1), torch.bfloat16, None),
        ((64, 3, 4, 4), (4, 4), torch.float32, None),
        ((64, 4, 3, 3), (1, 1), torch.float16, None),
        ((64, 5, 16, 16), (16, 16), torch.float16, None),
    ],
)
def test_kernel_stride_and_dtype_choose_the_form(weight, stride, dtype, form):
    assert inductor_pass.fast_conv_form(weight, stride, dtype) is form


def test_blocks_have_a_multiple_of_8_channels_in_channels_last(monkeypatch):
    operands = []
    monkeypatch.setattr(F, "conv2d", lambda *tensors: operands.extend(tensors))
    inductor_pass.in_blocks(
        torch.ones(2, 3, 17, 16),
        torch.ones(8, 3, 3, 3),
        None,
        ((2, 3, 17, 16), (8, 3, 3, 3)),
        (2, 2),
        (1, 1),
    )
    images, weight, _ = operands
    assert (images.shape, weight.shape) == ((2, 16, 10, 9), (8, 16, 2, 2))
    assert all(
        tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (images, weight)
    )
