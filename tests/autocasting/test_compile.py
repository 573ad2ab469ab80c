"""Regions around and inside compiled functions, on every backend, recompiled only when needed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import mezzo

HALF, FULL = torch.bfloat16, torch.float32
pytestmark = [
    pytest.mark.usefixtures("_fresh_compiler"),
    # Inductor imports a module that uses deprecated functions of torch.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
X = torch.linspace(-1, 1, 4).reshape(2, 2)


def region(**fields: Any) -> mezzo.autocast:
    return mezzo.autocast("cpu", dtype=HALF, **fields)


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x @ x, x + x


def dtypes(result: tuple[Tensor, ...]) -> tuple[torch.dtype, ...]:
    return tuple(one.dtype for one in result)


@BACKENDS
def test_a_region_around_a_compiled_function_applies(backend: str) -> None:
    compiled = torch.compile(both, backend=backend, fullgraph=True)
    assert dtypes(compiled(X)) == (FULL, FULL)
    for fields in ({}, {"half": {"add"}}, {"full": {"matmul"}}):
        with region(**fields):
            expected, found = both(X), compiled(X)
        assert dtypes(found) == dtypes(expected)
        assert all(map(torch.equal, found, expected))
    assert dtypes(compiled(X)) == (FULL, FULL)


@BACKENDS
def test_a_region_inside_a_compiled_function_applies(backend: str) -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        with mezzo.autocast("cpu", dtype=torch.bfloat16):
            default = both(x)
        with mezzo.autocast("O1", device_type="cpu", dtype="bfloat16", half={"add"}):
            custom = both(x)
        return *default, *custom, *both(x)

    found = torch.compile(run, backend=backend, fullgraph=True)(X)
    assert dtypes(found) == dtypes(run(X)) == (HALF, FULL, HALF, HALF, FULL, FULL)


def test_nested_regions_inside_a_compiled_function() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        with mezzo.autocast("cpu", dtype="bfloat16", half={"add"}):
            first = both(x)
            with mezzo.autocast("cpu", enabled=False):
                off = both(x)
            with torch.autocast("cpu", enabled=False):
                torchs = both(x)
            with mezzo.autocast("cpu", dtype="float16", full={"matmul"}):
                second = both(x)
            with mezzo.autocast("cpu", dtype=torch.bfloat16):
                plain = both(x)
            return *first, *off, *torchs, *second, *plain, *both(x)

    found = torch.compile(run, backend="eager", fullgraph=True)(X)
    assert (
        dtypes(found)
        == dtypes(run(X))
        == (HALF, HALF, FULL, FULL, FULL, FULL, FULL, FULL, HALF, FULL, HALF, HALF)
    )


NESTED = (
    "the eager backend runs the graph under the mode of the outer region, which casts ops that the"
    " inner region does not; other backends do not"
)


@pytest.mark.parametrize(
    "backend",
    [pytest.param("eager", marks=pytest.mark.xfail(strict=True, reason=NESTED)), "aot_eager"],
)
def test_a_region_inside_a_compiled_function_inside_a_custom_region(backend: str) -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        with mezzo.autocast("cpu", dtype="bfloat16", full={"matmul"}):
            first = both(x)
        with mezzo.autocast("cpu", dtype=torch.bfloat16):
            second = both(x)
        return *first, *second, *both(x)

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    with region(half={"add"}):
        assert dtypes(run(X)) == (FULL, FULL, HALF, FULL, HALF, HALF)
        assert dtypes(compiled(X)) == (FULL, FULL, HALF, FULL, HALF, HALF)
        assert dtypes(both(X)) == (HALF, HALF)


def test_a_region_inside_a_compiled_function_inside_a_default_region() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        with mezzo.autocast("cpu", dtype="bfloat16", full={"matmul"}):
            return *both(x), *both(x)

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    with region():
        assert dtypes(compiled(X)) == dtypes(run(X)) == (FULL, FULL, FULL, FULL)
        assert dtypes(both(X)) == (HALF, FULL)


@pytest.mark.parametrize("fields", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_a_decorated_function_can_be_compiled(fields: dict[str, Any]) -> None:
    decorated = region(**fields)(both)
    compiled = torch.compile(lambda x: (*decorated(x), x @ x), backend="eager", fullgraph=True)
    assert dtypes(compiled(X)) == (HALF, HALF if fields else FULL, FULL)


@pytest.mark.parametrize("fields", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_a_compiled_function_can_be_decorated(fields: dict[str, Any]) -> None:
    decorated = region(**fields)(torch.compile(both, backend="eager", fullgraph=True))
    assert dtypes(decorated(X)) == (HALF, HALF if fields else FULL)


def test_an_instance_created_outside_and_entered_inside_is_never_ignored() -> None:
    made = region(half={"add"})

    def run(x: Tensor) -> tuple[Tensor, ...]:
        with made:
            return both(x)

    try:
        found = torch.compile(run, backend="aot_eager", fullgraph=True)(X)
    except torch._dynamo.exc.Unsupported as error:  # before torch 2.14
        assert "autocast" in str(error)  # noqa: PT017
    else:
        assert dtypes(found) == (HALF, HALF)
    assert dtypes(torch.compile(run, backend="eager")(X)) == (HALF, HALF)


def test_another_policy_is_recompiled_and_the_same_one_is_not() -> None:
    counter = CompileCounter()
    compiled = torch.compile(both, backend=counter, fullgraph=True)
    frames = []
    for fields in (
        {"half": {"add"}},
        {"half": {"add"}},
        {"full": {"matmul"}},
        {"half": {"add"}},
        {},
        {},
        {"full": {"matmul"}},
    ):
        with region(**fields):
            compiled(X)
        frames.append(counter.frame_count)
    assert frames == [1, 1, 2, 2, 3, 3, 3]


def test_entering_the_same_region_again_does_not_recompile() -> None:
    counter = CompileCounter()
    compiled = torch.compile(nn.Linear(2, 2), backend=counter, fullgraph=True)
    made = region(half={"add"})
    for step in range(4):
        with made if step % 2 else region(half={"add"}):
            compiled(X)
            with region(half={"add"}):
                compiled(X)
    assert counter.frame_count == 1


def test_another_dtype_is_recompiled() -> None:
    compiled = torch.compile(both, backend="eager", fullgraph=True)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with mezzo.autocast("cpu", dtype=dtype, half={"add"}):
            assert dtypes(compiled(X)) == (dtype, dtype)


def test_enable_applies_to_compiled_code() -> None:
    compiled = torch.compile(both, backend="eager", fullgraph=True)
    mezzo.enable_autocast("cpu", dtype="bfloat16", half={"add"})
    try:
        assert dtypes(compiled(X)) == (HALF, HALF)
    finally:
        mezzo.disable_autocast()
    assert dtypes(compiled(X)) == (FULL, FULL)


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "condition": (
        lambda x: torch.softmax(x.to(HALF), -1),
        {"conditional": [("softmax", "dim", [-1])]},
    ),
    "condition by name": (
        lambda x: nn.functional.softmax(x.to(HALF), dim=-1),
        {"conditional": [("softmax", "dim", [-1])]},
    ),
    "no condition": (
        lambda x: torch.softmax(x.to(HALF), 0),
        {"conditional": [("softmax", "dim", [-1])]},
    ),
    "condition by default": (
        lambda x: nn.functional.gelu(x.to(HALF)),
        {"conditional": [("gelu", "approximate", ["none"])]},
    ),
    "condition on a tensor": (
        lambda x: torch.pow(x.to(HALF), x.to(HALF)),
        {"conditional": [("pow", "exponent", [2])]},
    ),
    "exempt_args": (
        lambda x: nn.functional.batch_norm(x, torch.zeros(2), torch.ones(2)),
        {"half": {"batch_norm"}, "exempt_args": {"batch_norm": ["running_mean", "running_var"]}},
    ),
    "explicit dtype": (lambda x: torch.sum(x.to(HALF), dtype=torch.float64), {"full": {"sum"}}),
    "out": (lambda x: torch.add(x, x, out=torch.empty(2, 2)), {"half": {"add"}}),
    "in place": (lambda x: x.clone().add_(1), {"half": {"add"}}),
    "inplace=True": (lambda x: nn.functional.relu(x.clone(), inplace=True), {"half": {"relu"}}),
    "promote": (lambda x: torch.cat([x, x.to(HALF)]), {"promote": {"cat"}}),
    "keep": (lambda x: torch.mm(x, x), {"keep": {"mm"}}),
    "operator": (lambda x: 1 - x, {"half": {"sub"}}),
    "float64": (lambda x: x.double() + x.double(), {"half": {"add"}}),
    "list": (lambda x: torch.einsum("ij,jk->ik", [x, x]), {"half": {"einsum"}}),
    "unflatten": (lambda x: x.unflatten(1, (1, 2)) + 1, {"half": {"add"}}),
}


@pytest.mark.parametrize(("call", "fields"), CALLS.values(), ids=CALLS.keys())
def test_compiled_calls_are_cast_as_in_eager(call: Any, fields: dict[str, Any]) -> None:
    with region(**fields):
        expected = call(X.abs())
        found = torch.compile(call, backend="eager", fullgraph=True)(X.abs())
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


def test_a_norm_that_needs_one_dtype_computes_in_float32_in_compiled_code(
    one_dtype: Any,
) -> None:
    seen: set[torch.dtype] = set()

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        norm = next(node for node in graph.graph.nodes if node.target is nn.functional.layer_norm)
        seen.update(node.meta["example_value"].dtype for node in norm.all_input_nodes)
        return graph

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (2,), weight, bias=weight)

    found = []
    for call in (run, torch.compile(run, backend=backend, fullgraph=True)):
        x, weight = X.to(HALF).requires_grad_(), torch.tensor([0.3, 0.7], requires_grad=True)
        with region(promote={"layer_norm"}, exempt_args={"layer_norm": ["weight", "bias"]}):
            result = call(x, weight)
        result.sum().backward()
        found.append((result.detach(), x.grad, weight.grad))
    assert seen == {FULL}
    assert [one.dtype for one in found[1]] == [HALF, HALF, FULL]
    assert all(map(torch.equal, *found))


def test_a_refused_op_raises_in_compiled_code() -> None:
    with region(refuse={"exp"}), pytest.raises(Exception, match="refuses exp"):
        torch.compile(torch.exp, backend="eager", fullgraph=True)(X)


def test_compiled_training_gives_the_gradients_of_eager() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 1))
    gradients = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        with region(half={"gelu"}, full={"layer_norm"}):
            run(X).float().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("fields", [{}, {"half": {"add"}}, {"full": {"linear"}}], ids=str)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_checkpointing_in_compiled_code_keeps_the_precision(
    fields: dict[str, Any], backend: str
) -> None:
    layer = nn.Linear(2, 2)

    def run(x: Tensor) -> Tensor:
        return checkpoint(lambda x: layer(x) + x, x, use_reentrant=False)

    results = []
    for call in (run, torch.compile(run, backend=backend, fullgraph=True)):
        x = X.clone().requires_grad_()
        with region(**fields):
            result = call(x)
        result.float().sum().backward()
        results.append((result.detach(), x.grad))
    (expected, slope), (found, other) = results
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    torch.testing.assert_close(other, slope, rtol=1e-2, atol=1e-2)


CACHED: dict[str, tuple[Any, tuple[torch.dtype, torch.dtype]]] = {
    "torch": (lambda: torch.autocast("cpu", dtype=HALF), (HALF, FULL)),
    "default": (region, (HALF, FULL)),
    "float16": (lambda: mezzo.autocast("cpu", dtype="float16"), (torch.float16, FULL)),
    "none": (nullcontext, (FULL, FULL)),
    "half add": (lambda: region(half={"add"}), (HALF, HALF)),
    "full matmul": (lambda: region(full={"matmul"}), (FULL, FULL)),
}


def test_the_cache_on_disk_is_not_shared_by_policies() -> None:
    hits = []
    with fresh_cache():
        for _ in range(2):
            counters.clear()
            for name, (made, expected) in CACHED.items():
                torch._dynamo.reset()
                with made():
                    # Without Inductor kernels, which take gcc seconds to compile.
                    found = torch.compile(
                        both, fullgraph=True, options={"fallback_by_default": True}
                    )(X)
                assert dtypes(found) == expected, name
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    # "torch" and "default" are the same; before torch 2.14 graphs with a region inside are not
    # cached.
    assert hits[1] >= len(CACHED) - 1 > hits[0]


@pytest.mark.parametrize("where", ["around", "inside"])
def test_compiled_code_holds_the_same_ops_as_casts_by_hand(where: str) -> None:
    from collections import Counter

    from torch._dynamo.backends.common import aot_autograd

    seen: list[Counter[str]] = []

    def count(graph: torch.fx.GraphModule, _inputs: object) -> object:
        seen.append(
            Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        )
        return graph.forward

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.nn.functional.linear(x, w) + x)

    def by_hand(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.linear(x.to(torch.bfloat16), w.to(torch.bfloat16))
        return torch.tanh(hidden + x.to(torch.bfloat16))

    region = {"dtype": torch.bfloat16, "half": {"add", "linear"}}

    def inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with mezzo.autocast("cpu", **region):
            return plain(x, w)

    backend = aot_autograd(fw_compiler=count)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    with torch.no_grad():
        torch.compile(by_hand, backend=backend, fullgraph=True)(x, w)
        if where == "inside":
            torch.compile(inside, backend=backend, fullgraph=True)(x, w)
        else:
            with mezzo.autocast("cpu", **region):
                torch.compile(plain, backend=backend, fullgraph=True)(x, w)
    assert seen[0] == seen[1]
    assert seen[0]["aten._to_copy.default"] == 3


# -- Python functions of torch under O2, which overrides nearly every op in them -------------------

IMAGES, ROWS, IDS = (
    torch.randn(2, 4, 9, 8),
    torch.randn(2, 4, 10),
    torch.arange(12).reshape(3, 4) % 5,
)
ATTENTION, DECODER = (
    nn.MultiheadAttention(4, 2, batch_first=True),
    nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
)
WHOLE: dict[str, Any] = {
    "pooled to a number": lambda: nn.functional.adaptive_avg_pool2d(IMAGES, 1),
    "pooled to a pair": lambda: nn.functional.adaptive_avg_pool2d(IMAGES, (None, 3)),
    "maxima": lambda: nn.functional.adaptive_max_pool2d(IMAGES, 2),
    "volumes": lambda: nn.functional.adaptive_avg_pool3d(IMAGES[None], 2),
    "einsum": lambda: torch.einsum("bchw,bdhw->bcd", IMAGES, IMAGES),
    "einsum of lists": lambda: torch.einsum(ROWS, [0, 1, 2], ROWS, [0, 1, 3], [2, 3]),
    "einsum of three": lambda: torch.einsum("bci,bdi,bej->cde", ROWS, ROWS, ROWS),
    "tensordot": lambda: torch.tensordot(ROWS, ROWS, dims=([0, 1], [0, 1])),
    "bilinear": lambda: nn.functional.interpolate(IMAGES, scale_factor=2, mode="bilinear"),
    "nearest": lambda: nn.functional.interpolate(IMAGES, size=5),
    "area": lambda: nn.functional.interpolate(IMAGES, size=(3, 3), mode="area"),
    "reflected": lambda: nn.functional.pad(IMAGES, (1, 1, 1, 1), mode="reflect"),
    "fold": lambda: nn.functional.fold(ROWS[:, :, :9], 4, 2),
    "spectra": lambda: torch.stft(ROWS[0], 8, window=torch.ones(8), return_complex=True).abs(),
    "unique": lambda: torch.unique(ROWS[0, 0]),
    "unique rows": lambda: torch.unique(ROWS[0], dim=0, return_counts=True)[0],
    "unique neighbours": lambda: torch.unique_consecutive(ROWS[0, 0]),
    "attention": lambda: ATTENTION(
        IMAGES[0, :, :, :4],
        *[IMAGES[0, :, :, :4]] * 2,
        key_padding_mask=torch.zeros(4, 9, dtype=torch.bool),
    )[0],
    "a decoder": lambda: DECODER(
        IMAGES[0, :, :, :4],
        IMAGES[1, :, :, :4],
        tgt_key_padding_mask=torch.zeros(4, 9, dtype=torch.bool),
    ),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "fields",
    [{"policy": "O3"}, {"half": {"add", "mul", "sub", "neg", "div", "softmax"}}],
    ids=["O3", "arithmetic"],
)
@pytest.mark.parametrize("call", WHOLE.values(), ids=WHOLE)
def test_python_functions_compile_without_graph_breaks_as_in_eager(
    call: Any, fields: dict[str, Any]
) -> None:
    torch._dynamo.reset()
    # Not the eager backend, which runs the recorded graph under the mode again.
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with region(**fields), torch.no_grad():
        expected, found = call(), compiled()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_decomposed_function_warns_in_eager_and_compiles_without_graph_breaks() -> None:
    def run() -> Tensor:
        return nn.functional.affine_grid(ROWS[:, :2, :3], [2, 3, 4, 4])

    with region(policy="O3"):
        with pytest.warns(UserWarning, match="affine_grid"):
            expected = run()
        found = torch.compile(run, backend="aot_eager", fullgraph=True)()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_mask_of_the_wrong_shape_raises_as_in_torch() -> None:
    with (
        region(policy="O3"),
        pytest.raises(AssertionError, match=r"key_padding_mask.*\(4, 9\).*\(4, 7\)"),
    ):
        ATTENTION(
            IMAGES[0, :, :, :4],
            *[IMAGES[0, :, :, :4]] * 2,
            key_padding_mask=torch.zeros(4, 7, dtype=torch.bool),
        )


def test_a_graph_break_inside_a_region_does_not_compile_mezzo() -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph

    def inner(y: Tensor) -> Tensor:
        return y @ y

    def run(x: Tensor) -> Tensor:
        with region(half={"add"}):
            y = x + 1
            torch._dynamo.graph_break()
            return inner(y)

    assert torch.compile(run, backend=backend)(X).dtype is HALF
    assert len(graphs) == 1, graphs
    assert "matmul" in graphs[0]
