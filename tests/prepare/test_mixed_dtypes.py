"""Errors of ops that refuse 16-bit tensors together with float32 ones, or with large numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.nn import functional as F

import mezzo

INDEX = torch.arange(4)
CALLS = {
    "index_add": lambda weight, x: weight.index_add(0, INDEX, x),
    "scatter": lambda weight, x: weight.scatter(0, INDEX[None], x[:1]),
    "masked_scatter": lambda weight, x: weight.masked_scatter(x > 0, x),
    "mv": lambda weight, x: torch.mv(weight, x[0]),
    "embedding_bag": lambda weight, x: F.embedding_bag(
        INDEX[None], weight, per_sample_weights=x[:1], mode="sum"
    ),
}


class Net(nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.randn(4, 4)), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.weight, x)


def decorated(call, **options) -> nn.Module:
    return mezzo.decorate(Net(call).eval(), None, "O2", dtype="float16", **options)


@pytest.mark.parametrize(("op", "call"), CALLS.items(), ids=CALLS)
def test_the_error_names_the_op_and_a_remedy_that_works(op, call):
    with pytest.raises(mezzo.UnsupportedError, match=rf"^{op} got 16-bit.*promote={{'{op}'}}") as e:
        decorated(call)(torch.randn(4, 4))
    assert isinstance(e.value.__cause__, RuntimeError)
    assert decorated(call, promote={op})(torch.randn(4, 4)).dtype is torch.float32


def assigned(table, x):
    table[INDEX] = x


@pytest.mark.parametrize("policy", [{}, {"full": {"softmax"}, "half": {"add"}}, {"policy": "O3"}])
@pytest.mark.parametrize(
    ("op", "write"),
    [
        ("index_add_", lambda table, x: table.index_add_(0, INDEX, x)),
        ("scatter_add_", lambda table, x: table.scatter_add_(0, INDEX[None], x[:1])),
        ("index_put_", assigned),
    ],
)
def test_the_error_of_a_write_in_place_says_to_cast_the_values(op, write, policy):
    def call(weight, x):
        return write(torch.zeros(4, 4), x @ weight)

    model = mezzo.decorate(Net(call).eval(), None, **{"policy": "O2", "dtype": "float16"} | policy)
    with pytest.raises(mezzo.UnsupportedError, match=rf"^{op} writes values.*\.to\(tensor\.dtype"):
        model(torch.randn(4, 4))


@pytest.mark.parametrize("policy", ["O1", "O2"])
def test_the_remedy_works_for_a_module_of_torch_that_writes_in_place(policy):
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.AdaptiveLogSoftmaxWithLoss(4, 8, [3], div_value=2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x, torch.arange(8)).loss

    x = torch.randn(8, 4)
    with pytest.raises(mezzo.UnsupportedError, match=r"index_copy_ writes.*modules={name: 'full'}"):
        mezzo.decorate(Classifier().eval(), None, policy, dtype="float16")(x)
    model, head = Classifier().eval(), {"head": "full"}
    assert mezzo.decorate(model, None, policy, dtype="float16", modules=head)(x).isfinite()


@pytest.mark.parametrize("policy", ["O1", "O2"])
@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("binomial", lambda logits: torch.binomial(torch.ones_like(logits), logits.sigmoid())),
        ("linalg_norm", lambda x: torch.linalg.norm(x, "nuc")),
        ("linalg_matrix_norm", lambda x: torch.linalg.matrix_norm(x, 2)),
    ],
)
def test_the_error_of_a_missing_kernel_says_to_run_the_op_in_float32(policy, op, call):
    def decorated(**options):
        net = Net(lambda weight, x: call(x @ weight))
        return mezzo.decorate(net.eval(), None, policy, dtype="bfloat16", **options)

    with pytest.raises(mezzo.UnsupportedError, match=rf"^{op} has no 16-bit kernel.*full={{'{op}'"):
        decorated()(torch.randn(4, 4))
    assert decorated(full={op})(torch.randn(4, 4)).isfinite().all()


MASK = torch.ones(4, 4).triu(1).bool()


@pytest.mark.parametrize("policy", ["O1", "O2"])
@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("masked_fill", lambda scores: scores.masked_fill(MASK, -1e9)),
        ("clamp", lambda scores: scores.clamp(min=-1e9)),
        ("pad", lambda scores: F.pad(scores, (0, 1), value=-1e9)),
        ("full_like", lambda scores: torch.where(MASK, torch.full_like(scores, -9e15), scores)),
    ],
)
def test_the_error_of_a_number_out_of_range_says_what_to_write(policy, op, call):
    def decorated(**options):
        net = Net(lambda weight, x: call(x @ weight).softmax(-1))
        return mezzo.decorate(net.eval(), None, policy, dtype="float16", **options)

    with pytest.raises(mezzo.UnsupportedError, match=rf"^{op} got a number.*65504.*'-inf'.*full="):
        decorated()(torch.randn(4, 4))
    assert decorated(full={op})(torch.randn(4, 4)).isfinite().all()


def test_the_error_of_a_large_number_written_in_place_names_the_op_that_returns_a_tensor():
    model = decorated(lambda weight, x: (x @ weight).masked_fill_(MASK, -1e9))
    with pytest.raises(mezzo.UnsupportedError, match=r"^masked_fill_ got .* call masked_fill, "):
        model(torch.randn(4, 4))
    model = decorated(lambda weight, x: (x @ weight).new_full((4,), -1e9))
    with pytest.raises(mezzo.UnsupportedError, match=r"^An op got a number .* -1e9\.$"):
        model(torch.randn(4, 4))


def test_the_error_is_explained_in_a_block_that_observes_ops():
    model = decorated(CALLS["index_add"])
    with mezzo.op_stats(model), pytest.raises(mezzo.UnsupportedError, match=r"^index_add got"):
        model(torch.randn(4, 4))


FILLS = {
    "masked_fill": lambda x, value: x.masked_fill(x > 0, value),
    "clamp": lambda x, value: x.clamp(min=value),
    "pad": lambda x, value: F.pad(x, (1, 1), value=value),
}


@pytest.mark.parametrize(("op", "fill"), FILLS.items(), ids=FILLS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_error_of_a_number_beyond_float16_has_remedies_that_work(op, fill, level):
    def model(value=-1e9, **options):
        net = Net(lambda weight, x: fill(x @ weight, value or torch.finfo(torch.float16).min))
        options = {"dtype": "float16"} | options
        return mezzo.decorate(net.eval(), None, level, preset="torch-cuda", **options)

    x = torch.randn(4, 4)
    with pytest.raises(mezzo.UnsupportedError, match=rf"^{op} got a number.*full={{'{op}'}}"):
        model()(x)
    for remedied in (model(full={op}), model(None), model(dtype="bfloat16")):
        assert remedied(x).isfinite().all()


@pytest.mark.parametrize("index", [torch.ones(4), torch.ones(4).half()])
def test_a_floating_point_index_is_not_explained_as_mixed_dtypes(index):
    with pytest.raises(RuntimeError, match="Long") as raised:
        decorated(lambda weight, _: F.embedding(index, weight))(torch.randn(4, 4))
    assert not isinstance(raised.value, mezzo.MezzoError)


def test_other_errors_are_torchs():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        decorated(lambda weight, x: x[:, :3] @ weight)(torch.randn(4, 4))
    assert not isinstance(raised.value, mezzo.MezzoError)


def test_the_forward_wrapper_adds_one_frame_to_the_traceback_of_a_model():
    def fail(*_):
        raise ValueError("in the model")

    with pytest.raises(ValueError, match="in the model") as raised:
        decorated(fail)(torch.randn(4, 4))
    files = [entry.path.as_posix() for entry in raised.traceback]
    assert [path.rpartition("/src/")[2] for path in files if "/src/mezzo/" in path] == [
        "mezzo/prepare/forward.py"
    ]


class Aggregation(nn.Module):
    def forward(self, h):
        return torch.sparse.mm(torch.eye(4).to_sparse_csr(), h, "mean")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_the_error_of_a_sparse_product_has_a_remedy_that_works():
    def graph(**options):
        model = nn.Sequential(nn.Linear(4, 4), Aggregation()).eval()
        return mezzo.decorate(model, None, "O2", dtype="bfloat16", **options)

    with pytest.raises(mezzo.UnsupportedError, match=r"^torch\.sparse\.mm got .*modules="):
        graph()(torch.randn(4, 4))
    assert graph(modules={"1": "full"})(torch.randn(4, 4)).isfinite().all()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, x):
        ctx.save_for_backward(weight, x)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        weight, x = ctx.saved_tensors
        return x.t() @ gradient, gradient @ weight.t()


class CastProduct(Product):
    forward = staticmethod(custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(custom_bwd(Product.backward, device_type="cpu"))


def product_step(function):
    model = Net(lambda weight, x: function.apply(weight, x))
    return mezzo.TrainStep(
        model, torch.mean, torch.optim.SGD(model.parameters(), 0.1), "O1", dtype="bfloat16"
    )


def test_the_error_of_a_custom_backward_has_a_remedy_that_works():
    with pytest.raises(
        mezzo.UnsupportedError, match=r"test_mixed_dtypes\.py:\d+\) got 16-bit.*custom_bwd"
    ):
        product_step(Product)(torch.randn(4, 4))
    assert product_step(CastProduct)(torch.randn(4, 4)).isfinite()


class Recomputed(torch.autograd.Function):
    """Compute a module again in backward, without autocast, as adjoint methods do."""

    @staticmethod
    def forward(ctx, module, x, *_parameters):
        ctx.module, ctx.x = module, x.detach().requires_grad_()
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            torch.autograd.backward(ctx.module(ctx.x), gradient)
        return None, ctx.x.grad, *[None for _ in ctx.module.parameters()]


def recomputing_step(**options):
    inner = nn.Linear(4, 4)
    model = Net(lambda _, x: Recomputed.apply(inner, x, *inner.parameters()))
    model.inner = inner
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return mezzo.TrainStep(model, torch.mean, optimizer, "O2", dtype="bfloat16", **options)


def test_the_error_of_a_backward_that_reads_16_bit_parameters_has_a_remedy_that_works():
    with pytest.raises(mezzo.UnsupportedError, match=r"got 16-bit.*keep_full="):
        recomputing_step()(torch.randn(4, 4))
    assert recomputing_step(keep_full={"inner"})(torch.randn(4, 4)).isfinite()


@pytest.mark.parametrize("policy", ["O1", "O2"])
def test_the_error_of_a_sparse_product_in_backward_names_one_that_works(policy):
    adjacency = torch.eye(4).to_sparse()

    def trained(product):
        net = Net(lambda weight, x: product(adjacency, x @ weight))
        optimizer = torch.optim.SGD(net.parameters())
        step = mezzo.TrainStep(net, lambda y: y.sum(), optimizer, policy, dtype="bfloat16")
        return step(torch.randn(4, 4))

    with pytest.raises(mezzo.UnsupportedError, match=r"backward of an op got 16-bit.*write a @ b"):
        trained(torch.sparse.mm)
    assert trained(torch.matmul).isfinite()


def test_the_backward_of_a_package_whose_name_begins_with_torch_is_explained():
    file = Path(torch.__file__).parent.with_name("torchadjoint") / "adjoint.py"
    source = "def backward(ctx, gradient):\n    return original(ctx, gradient)\n"
    names = {"original": Product.backward}
    exec(compile(source, str(file), "exec"), names)
    function = type("Adjoint", (Product,), {"backward": staticmethod(names["backward"])})
    with pytest.raises(mezzo.UnsupportedError, match=r"\(adjoint\.py:2\) got 16-bit"):
        product_step(function)(torch.randn(4, 4))
