import pytest
import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls, names, relative_error
from torch import nn

import mezzo

X = torch.randn(2, 4)


def _dtypes(converted):
    return {row.node: row.dtype for row in converted.plan if row.op not in ("weight", "input")}


def _model():
    return Calls(
        lambda self, x: F.softmax(F.gelu(self.body(x)) @ self.body.weight, -1), body=nn.Linear(4, 4)
    )


def test_lists_of_the_call_override_the_policy():
    policy = mezzo.Policy("O1", "bfloat16", full={"gelu"})
    assert _dtypes(mezzo.convert(_model(), (X,), policy=policy))["gelu"] == "float32"
    converted = mezzo.convert(
        _model(), (X,), policy=policy, half={"gelu", "softmax"}, full={"matmul"}
    )
    assert _dtypes(converted) == {
        "linear": "bfloat16",
        "gelu": "bfloat16",
        "matmul": "float32",
        "softmax": "bfloat16",
    }


def test_exclude_overrides_every_list():
    converted = mezzo.convert(_model(), (X,), dtype=HALF, half={"gelu"}, exclude={"body", "gelu"})
    assert _dtypes(converted)["linear"] == "float32"
    assert _dtypes(converted)["gelu"] == "float32"


def test_conditions_match_the_arguments_of_a_call():
    converted = mezzo.convert(
        nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.GELU("tanh"), nn.Linear(4, 4)),
        (X,),
        dtype=HALF,
        conditional=[("gelu", "approximate", ["tanh"])],
    )
    assert (_dtypes(converted)["gelu"], _dtypes(converted)["gelu_1"]) == ("bfloat16", "float32")


def test_a_policy_from_a_file(tmp_path):
    mezzo.Policy("O1", "float16", full={"linear"}).save(tmp_path / "policy.toml")
    converted = mezzo.convert(_model(), (X,), policy=tmp_path / "policy.toml")
    assert _dtypes(converted)["linear"] == "float32"
    assert _dtypes(converted)["matmul"] == "float16"


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "OD"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_level_converts_in_both_dtypes(level, dtype):
    model = nn.Sequential(
        nn.Conv1d(4, 8, 3),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 6, 4),
        nn.LayerNorm(4),
    ).eval()
    x = torch.randn(2, 4, 8)
    converted = mezzo.convert(model, (x,), policy=level, dtype=dtype)
    assert (converted(x) - model(x)).abs().max() < 0.1
    assert converted.plan.row("conv1d").dtype == dtype
    assert converted.plan.row("layer_norm").dtype == ("float32" if level != "O3" else dtype)


def test_inputs_and_outputs_may_be_16_bit():
    converted = mezzo.convert(nn.Linear(4, 4), (X,), dtype=HALF, keep_io_dtypes=False)
    assert converted.casts.after.count == 0
    assert converted(X.to(HALF)).dtype is HALF
    assert converted(X).dtype is HALF


def test_invalid_arguments_raise():
    with pytest.raises(mezzo.PolicyError, match="both list 'linear'"):
        mezzo.convert(_model(), (X,), half={"linear"}, full={"linear"})
    with pytest.raises(
        mezzo.PolicyError, match="half= lists 'conv2d', and no such op is in the graph"
    ):
        mezzo.convert(_model(), (X,), half={"conv2d"})
    with pytest.raises(mezzo.PolicyError, match="Unknown level"):
        mezzo.convert(_model(), (X,), policy="O9")
    with pytest.raises(mezzo.PolicyError, match="Unknown op 'linaer'"):
        mezzo.convert(_model(), (X,), full={"linaer"})


# Models of many kinds


def _program(function, *args, **options):
    modules = options.pop("modules", {})
    model = Calls(function, **modules)
    converted = mezzo.convert(model, args or (X,), dtype=HALF, **options)
    return model, converted, converted._converted.programs[0].exported


def test_outputs_keep_their_structure_dtypes_and_order():
    def function(self, x, i):
        y = self.linear(x)
        return {"y": y, "rest": [i + 1, (y.sum(), None)], "twice": (y, y)}

    model, converted, _ = _program(
        function, X, torch.arange(3), modules={"linear": nn.Linear(4, 4)}
    )
    found, expected = converted(X, torch.arange(3)), model(X, torch.arange(3))
    assert found["rest"][1][1] is None
    assert torch.equal(found["rest"][0], expected["rest"][0])
    assert {found["y"].dtype, found["rest"][1][0].dtype, found["twice"][1].dtype} == {torch.float32}
    assert relative_error(found["y"], expected["y"]) < 0.05


def test_float32_sections_of_the_model_are_kept():
    def function(self, x):
        island = F.softplus(self.linear(x).float() * 3)
        return self.linear(island), island.half().float()

    _, converted, exported = _program(function, modules={"linear": nn.Linear(4, 4)})
    assert converted.plan.row("to").dtype == "float32"
    assert converted.plan.row("mul").dtype == "float32"
    assert converted.plan.row("to_1").dtype == "float16"
    assert converted(X)[1].dtype is torch.float32
    assert names(exported.graph_module).count("aten.to.dtype") >= 4


def test_disabled_regions_stay_float32_and_enabled_ones_are_planned():
    def function(self, x):
        with torch.autocast("cpu", dtype=HALF):
            x = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                x = self.linear(x.float())
        return x

    _, converted, _ = _program(function, modules={"linear": nn.Linear(4, 4)})
    found = [(row.dtype, row.reason) for row in converted.plan if row.op == "linear"]
    assert [dtype for dtype, _ in found] == ["bfloat16", "float32"]
    assert "disables autocast" in found[1][1]


def test_mezzo_regions_in_the_model_keep_their_dtypes():
    def function(self, x):
        with mezzo.autocast("cpu", dtype="bfloat16", full={"linear"}):
            one = self.linear(x)
        with mezzo.autocast("cpu", enabled=False):
            two = self.linear(x)
        return one, two, self.linear(x)

    model, converted, _ = _program(function, modules={"linear": nn.Linear(4, 4)})
    assert [row.dtype for row in converted.plan if row.op == "linear"] == [
        "float32",
        "float32",
        "bfloat16",
    ]
    assert torch.equal(converted(X)[0], model(X)[0])


def test_a_region_of_another_dtype_is_not_changed():
    def function(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.linear(x)

    model, converted, _ = _program(function, modules={"linear": nn.Linear(4, 4)})
    assert converted(X).dtype is torch.float16
    assert torch.equal(converted(X), model(X))


def test_a_custom_op_is_left_in_float32():
    @torch.library.custom_op("mezzo_test_assemble::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    _, converted, _ = _program(
        lambda self, x: self.linear(twice(self.linear(x))), modules={"linear": nn.Linear(4, 4)}
    )
    assert converted.plan.row("twice").dtype == "float32"
    assert "not an op that mezzo knows" in converted.plan.row("twice").reason


def test_a_registered_op_has_its_registered_rule():
    @torch.library.custom_op("mezzo_test_assemble::thrice", mutates_args=())
    def thrice(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    thrice.register_fake(torch.empty_like)
    from mezzo.policy.registry import registry
    from mezzo.policy.types import Entry, Rule

    registry().register(
        "thrice", (torch.ops.mezzo_test_assemble.thrice.default,), Entry(Rule.HALF, "mine")
    )
    try:
        _, converted, _ = _program(
            lambda self, x: thrice(self.linear(x)), modules={"linear": nn.Linear(4, 4)}
        )
    finally:
        registry().unregister("thrice")
    assert converted.plan.row("thrice").dtype == "bfloat16"


def test_buffers_mutated_in_forward_stay_float32():
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("keys", torch.zeros(4, 4))

        def forward(self, x, places):
            self.keys[places] = self.linear(x)
            return self.keys.sum(0)

    model, places = Cache(), torch.tensor([1, 3])
    converted = mezzo.convert(model, (X, places), dtype=HALF)
    assert relative_error(converted(X, places), model(X, places)) < 0.05
    assert converted._converted.programs[0].exported.state_dict["keys"].dtype is torch.float32


def test_a_mask_beyond_the_range_of_float16_does_not_become_infinite():
    def function(self, x):
        scores = self.linear(x).masked_fill(x > 0, -1e9)
        return torch.softmax(scores, -1)

    model = Calls(function, linear=nn.Linear(4, 4))
    converted = mezzo.convert(model, (X.abs(),), dtype="float16")
    assert converted(X.abs()).isfinite().all()


def test_dynamic_sizes_stay_dynamic():
    batch = torch.export.Dim("batch", min=2, max=64)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    converted = mezzo.convert(model, (X,), dtype=HALF, dynamic_shapes={"input": {0: batch}})
    for size in (2, 9, 64):
        x = torch.randn(size, 4)
        assert relative_error(converted(x), model(x)) < 0.05
    with pytest.raises(mezzo.ConversionError, match="64"):
        converted(torch.randn(65, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_model_that_is_not_float32_is_not_changed(dtype):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(dtype), X.to(dtype)
    converted = mezzo.convert(model, (x,), dtype=HALF)
    assert torch.equal(converted(x), model(x))
    assert converted.casts.after.count == 0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_decorated_model_can_be_converted(level):
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    model, optimizer = mezzo.decorate(
        model, torch.optim.SGD(model.parameters(), 0.1), level, dtype="bfloat16"
    )
    model(X).sum().backward()
    optimizer.step()
    expected = model(X)
    converted = mezzo.convert(model, (X,), dtype=HALF)
    assert relative_error(converted(X), expected) < 0.05
    assert {
        one.dtype
        for name, one in converted._converted.programs[0].exported.state_dict.items()
        if name[0] in "02"
    } == {HALF}
    assert torch.equal(model(X), expected)


# -- a softmax that feeds a product ----------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, *, dim=-1, mask=None, returned=False):
        super().__init__()
        torch.manual_seed(0)
        self.inputs = nn.Linear(16, 48)
        self.dim, self.mask, self.returned = dim, mask, returned

    def forward(self, x):
        q, k, v = self.inputs(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2)
        weights = (scores if self.mask is None else scores + self.mask).softmax(self.dim)
        return (weights @ v, weights) if self.returned else weights @ v


ATTENDED = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1)) * 8


def _softmax_dtype(model, **options):
    converted = mezzo.convert(model.eval(), (ATTENDED,), **{"dtype": "float16", **options})
    return next(row.dtype for row in converted.plan if row.op == "softmax")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_softmax_that_feeds_a_product_is_narrowed_without_a_larger_error(dtype):
    model = Attention().eval()
    narrowed = mezzo.convert(model, (ATTENDED,), dtype=dtype)
    wide = mezzo.convert(model, (ATTENDED,), dtype=dtype, full={"softmax"})
    row = next(row for row in narrowed.plan if row.op == "softmax")
    assert row.dtype == str(dtype).removeprefix("torch.")
    assert row.reason == "computes in float32 inside, and its readers round the result"
    exact = model.double()(ATTENDED.double()).detach()
    errors = [
        float((one(ATTENDED).detach().double() - exact).abs().max()) for one in (narrowed, wide)
    ]
    # Each rounds the weights of the attention once, after the same sums in float32.
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


def test_a_softmax_stays_float32_where_16_bits_could_give_another_result():
    assert _softmax_dtype(Attention()) == "float16"
    # Another reader gets its float32 result; its kernel for other dimensions rounds twice on CPUs;
    # torch.autocast adds a float32 mask in float32.
    for model in (
        Attention(returned=True),
        Attention(dim=1),
        Attention(mask=torch.full((12, 12), -1e5)),
    ):
        assert _softmax_dtype(model) == "float32"
    for options in ({"full": {"softmax"}}, {"exclude": "softmax"}):
        assert _softmax_dtype(Attention(), **options) == "float32"
    policy = mezzo.Policy("O1", "float16", full={"softmax"})
    assert _softmax_dtype(Attention(), policy=policy) == "float32"


def test_a_softmax_listed_float32_inside_follows_the_cut():
    policy = mezzo.Policy("O1", "float16", float32_inside={"softmax"})
    converted = mezzo.convert(Attention(dim=1).eval(), (ATTENDED,), policy=policy)
    row = next(row for row in converted.plan if row.op == "softmax")
    assert row.dtype == "float16"
    assert row.reason == "listed float32_inside: 16 bits here cast the fewest bytes"


def test_a_sparse_buffer_keeps_its_dtype():
    class Graph(nn.Linear):
        def forward(self, x):
            return super().forward(torch.sparse.mm(self.adjacency, x))

    model = Graph(4, 4)
    model.register_buffer("adjacency", torch.eye(4).to_sparse())
    x = torch.randn(4, 4)
    converted = mezzo.convert(model.eval(), (x,), dtype="bfloat16")
    assert torch.allclose(converted(x), model(x), atol=0.05)
