"""Optimizers and models that others wrap: decorated first they train as over masters written by hand, wrapped first they are refused with the right order."""

import copy
import warnings

import pytest
import torch
from support.wrappers import SAM, Hidden, Lookahead, MasterSGD, Several
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import mezzo
from mezzo.prepare.decoration import decoration_of

with warnings.catch_warnings():
    # torch scripts its functional optimizers, and warns that scripting is deprecated.
    warnings.simplefilter("ignore")
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

OPTIONS = {"lr": 1e-3, "momentum": 0.9}


def sgd(parameters):
    return torch.optim.SGD(parameters, **OPTIONS)


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model, optimizer, *, backward=torch.Tensor.backward, closure=False):
    losses = []
    for step in range(8):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))

        def evaluate(x=x):
            loss = model(x).float().square().mean()
            backward(loss)
            return loss.detach()

        optimizer.zero_grad()
        losses.append(evaluate())
        if closure:
            optimizer.step(evaluate)
        else:
            optimizer.step()
    return losses


def by_hand(wrap=lambda optimizer: optimizer, *, make=None, **options):
    """Losses and exact weights of a 16-bit model over masters that are written by hand."""
    model = made()
    exact = [one.detach().clone() for one in model.parameters()]
    mezzo.decorate(model, sgd(model.parameters()), dtype="bfloat16")
    # A copy has the 16-bit weights and the forward, and no masters.
    model = copy.deepcopy(model)
    optimizer = wrap(MasterSGD(model.parameters(), **OPTIONS)) if make is None else make(model)
    masters = getattr(optimizer, "masters", None) or next(
        one.masters for one in vars(optimizer).values() if isinstance(one, MasterSGD)
    )
    for master, value in zip(masters.values(), exact, strict=True):
        master.data.copy_(value)
    return train(model, optimizer, **options), list(masters.values())


def assert_as_by_hand(model, losses, expected):
    assert losses == expected[0]
    weights = mezzo.undecorate(model).parameters()
    assert all(
        one.dtype is torch.float32 and torch.equal(one, other)
        for one, other in zip(weights, expected[1], strict=True)
    )


def assert_refused(model, optimizer, match, **words):
    before = [(one.dtype, one.data_ptr(), one.detach().clone()) for one in model.parameters()]
    attributes = {name: value for name, value in vars(optimizer).items() if name != "state"}
    for call in (mezzo.plan, mezzo.decorate):
        with pytest.raises(mezzo.UnsupportedError, match=match):
            call(model, optimizer, **{"dtype": "bfloat16", **words})
    assert decoration_of(model) is None
    assert {name: value for name, value in vars(optimizer).items() if name != "state"} == attributes
    for one, (dtype, pointer, value) in zip(model.parameters(), before, strict=True):
        assert (one.dtype, one.data_ptr()) == (dtype, pointer)
        assert torch.equal(one, value)


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


# -- optimizers ------------------------------------------------------------------------------------


WRAPPERS = {
    "SAM": (
        lambda model: SAM(model.parameters(), torch.optim.SGD, **OPTIONS),
        r"\.base_optimizer \(SGD\).*decorate\(model, optimizer\.base_optimizer",
    ),
    "Lookahead": (
        lambda model: Lookahead(sgd(model.parameters())),
        (
            r"decorate\(model, optimizer\.optimizer, \.\.\.\), before wrapping it.*Lookahead"
            r" does, use policy 'O1'"
        ),
    ),
    "two": (
        lambda model: Lookahead(Lookahead(sgd(model.parameters()))),
        r"\.optimizer\.optimizer \(SGD\)",
    ),
    "several": (
        lambda model: Several([sgd(model[0].parameters()), sgd(model[2].parameters())]),
        r"decorate\(model, \[optimizer\._parts\['all'\]\[0\], optimizer\._parts\['all'\]\[1\]\]",
    ),
    "averaging": (
        lambda model: PostLocalSGDOptimizer(sgd(model.parameters()), None),
        r"decorate\(model, optimizer\.optim,",
    ),
}


@pytest.mark.parametrize(("wrap", "match"), WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapping_optimizer_is_refused_before_anything_changes(wrap, match):
    model = made()
    assert_refused(model, wrap(model), match)
    assert_refused(model, wrap(model), match, policy="O1", clip_norm=1.0)


def test_where_nothing_is_bound_a_wrapping_optimizer_is_welcome():
    model = made()
    mezzo.decorate(model, Lookahead(sgd(model.parameters())), "O1", dtype="bfloat16")
    assert train(model, Lookahead(sgd(model.parameters())))


def test_sam_over_a_decorated_optimizer_trains_as_over_masters_by_hand():
    model = made()
    optimizer = SAM(model.parameters(), torch.optim.SGD, **OPTIONS)
    mezzo.decorate(model, optimizer.base_optimizer, dtype="bfloat16")
    expected = by_hand(
        make=lambda model: SAM(model.parameters(), MasterSGD, **OPTIONS), closure=True
    )
    assert_as_by_hand(model, train(model, optimizer, closure=True), expected)


@pytest.mark.parametrize(
    "wrap",
    [Lookahead, lambda optimizer: Several([optimizer]), lambda optimizer: optimizer],
    ids=["lookahead", "several", "plain"],
)
def test_a_decorated_optimizer_that_is_wrapped_trains_as_over_masters_by_hand(wrap):
    model = made()
    optimizer = sgd(model.parameters())
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    expected = by_hand(wrap if wrap is Lookahead else lambda optimizer: optimizer)
    assert_as_by_hand(model, train(model, wrap(optimizer)), expected)


@pytest.mark.parametrize("shared", [False, True])
def test_an_inner_optimizer_that_nobody_saw_is_refused_before_it_steps(shared):
    model = made()
    optimizer = Hidden(sgd(model.parameters()), shared=shared)
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(
        mezzo.UnsupportedError, match=r"Hidden steps another optimizer, a SGD.*Pass that one"
    ):
        train(model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    # Heard during that step alone.
    assert not _global_optimizer_pre_hooks


def test_another_optimizer_may_step_other_parameters_in_between():
    class Curious(torch.optim.SGD):
        def step(self, closure=None):
            other.step()
            return super().step(closure)

    model, extra = made(), nn.Parameter(torch.ones(1))
    extra.grad = torch.ones(1)
    other = torch.optim.SGD([extra], lr=1.0)
    optimizer = Curious(model.parameters(), **OPTIONS)
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    assert_as_by_hand(model, train(model, optimizer), by_hand())
    assert extra.item() == -7.0


def test_a_step_that_was_taken_hold_of_before_decorating_is_refused_before_it_runs():
    model = made()
    optimizer = sgd(model.parameters())
    held = optimizer.step
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    train(model, optimizer)
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(
        mezzo.UnsupportedError,
        match=r"The original step of this SGD was called.*First decorate, then wrap",
    ):
        held()
    assert all(map(torch.equal, before, model.parameters()))
    mezzo.undecorate(model)
    held()


# -- torch's and other packages' -------------------------------------------------------------------


@pytest.mark.usefixtures("group")
def test_zero_redundancy_optimizer_is_decorated_by_its_inner_one():
    model = made()
    assert_refused(
        model,
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **OPTIONS),
        r"decorate\(model, optimizer\.optim, .*state_dict\(\) in every",
    )
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **OPTIONS)
    mezzo.decorate(model, optimizer.optim, dtype="bfloat16")
    assert_as_by_hand(model, train(model, optimizer), by_hand())


@pytest.fixture(scope="module")
def fabric():
    return pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)


def test_fabric_comes_after_decorate(fabric):
    model = made()
    optimizer = sgd(model.parameters())
    mezzo.decorate(model, optimizer, dtype="bfloat16", save_dtype="float32")
    wrapped, stepped = fabric.setup(model, optimizer)
    losses = train(wrapped, stepped, backward=fabric.backward)
    assert list(stepped.state_dict()["state"]) == [0, 1, 2, 3]
    assert wrapped.state_dict()["0.weight"].dtype is torch.float32
    assert_as_by_hand(model, losses, by_hand())


def test_what_fabric_has_set_up_is_refused(fabric):
    model = made()
    wrapped, stepped = fabric.setup(model, sgd(model.parameters()))
    assert_refused(
        wrapped,
        stepped,
        r"wrapped by _FabricModule already.*First decorate, then wrap: .*fabric.setup",
    )
    assert_refused(wrapped, stepped, "_FabricModule", policy="O1")
    assert_refused(
        model, stepped, r"FabricSGD steps another optimizer, \.optimizer \(SGD\).*then fabric.setup"
    )


@pytest.fixture(scope="module", params=["no", "bf16"])
def accelerator(request):
    accelerate = pytest.importorskip("accelerate")
    yield accelerate.Accelerator(cpu=True, mixed_precision=request.param)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def test_accelerate_comes_after_decorate(accelerator):
    model = made()
    optimizer = sgd(model.parameters())
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    wrapped, stepped = accelerator.prepare(model, optimizer)
    assert_as_by_hand(model, train(wrapped, stepped, backward=accelerator.backward), by_hand())


def test_what_accelerate_has_prepared_is_refused(accelerator):
    model = made()
    wrapped, stepped = accelerator.prepare(model, sgd(model.parameters()))
    match = (
        "runs in an autocast region that Accelerate"
        if accelerator.mixed_precision == "bf16"
        else r"AcceleratedOptimizer steps.*then accelerator.prepare"
    )
    assert_refused(wrapped, stepped, match)


def test_an_accelerated_optimizer_that_holds_the_step_from_before_is_refused(accelerator):
    from accelerate.optimizer import AcceleratedOptimizer

    model = made()
    optimizer = sgd(model.parameters())
    stepped = AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    with pytest.raises(mezzo.UnsupportedError, match="First decorate, then wrap"):
        train(model, stepped, backward=lambda loss: stepped.scaler.scale(loss).backward())
