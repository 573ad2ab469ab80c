"""Wrapped optimizers and models: decorated first they train exactly, wrapped first they raise."""

import copy
import warnings

import pytest
import torch
from support.accelerate_state import reset_accelerate_state
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


def make_model():
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


def reference(wrap=lambda optimizer: optimizer, *, make=None, **options):
    """Return losses and weights of a 16-bit model with hand-written masters, without mezzo."""
    model = make_model()
    exact = [one.detach().clone() for one in model.parameters()]
    mezzo.decorate(model, sgd(model.parameters()), dtype="bfloat16")
    # A copy has the 16-bit weights and the forward wrapper, and no masters.
    model = copy.deepcopy(model)
    optimizer = wrap(MasterSGD(model.parameters(), **OPTIONS)) if make is None else make(model)
    masters = getattr(optimizer, "masters", None) or next(
        one.masters for one in vars(optimizer).values() if isinstance(one, MasterSGD)
    )
    for master, value in zip(masters.values(), exact, strict=True):
        master.data.copy_(value)
    return train(model, optimizer, **options), list(masters.values())


def assert_equals_reference(model, losses, expected):
    assert losses == expected[0]
    weights = mezzo.undecorate(model).parameters()
    assert all(
        one.dtype is torch.float32 and torch.equal(one, other)
        for one, other in zip(weights, expected[1], strict=True)
    )


def assert_refused(model, optimizer, match, **options):
    before = [(one.dtype, one.data_ptr(), one.detach().clone()) for one in model.parameters()]
    attributes = {name: value for name, value in vars(optimizer).items() if name != "state"}
    for call in (mezzo.plan, mezzo.decorate):
        with pytest.raises(mezzo.UnsupportedError, match=match):
            call(model, optimizer, **{"dtype": "bfloat16", **options})
    assert decoration_of(model) is None
    assert {name: value for name, value in vars(optimizer).items() if name != "state"} == attributes
    for one, (dtype, pointer, value) in zip(model.parameters(), before, strict=True):
        assert (one.dtype, one.data_ptr()) == (dtype, pointer)
        assert torch.equal(one, value)


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
def test_a_wrapped_optimizer_is_refused_before_anything_changes(wrap, match):
    model = make_model()
    assert_refused(model, wrap(model), match)
    assert_refused(model, wrap(model), match, policy="O1", clip_norm=1.0)


def test_a_wrapped_optimizer_is_accepted_at_o1():
    model = make_model()
    mezzo.decorate(model, Lookahead(sgd(model.parameters())), "O1", dtype="bfloat16")
    assert train(model, Lookahead(sgd(model.parameters())))


def test_sam_over_a_decorated_optimizer_trains_as_with_hand_written_masters():
    model = make_model()
    optimizer = SAM(model.parameters(), torch.optim.SGD, **OPTIONS)
    mezzo.decorate(model, optimizer.base_optimizer, dtype="bfloat16")
    expected = reference(
        make=lambda model: SAM(model.parameters(), MasterSGD, **OPTIONS), closure=True
    )
    assert_equals_reference(model, train(model, optimizer, closure=True), expected)


@pytest.mark.parametrize(
    "wrap",
    [Lookahead, lambda optimizer: Several([optimizer]), lambda optimizer: optimizer],
    ids=["lookahead", "several", "plain"],
)
def test_wrappers_of_a_decorated_optimizer_train_as_with_hand_written_masters(wrap):
    model = make_model()
    optimizer = sgd(model.parameters())
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    expected = reference(wrap if wrap is Lookahead else lambda optimizer: optimizer)
    assert_equals_reference(model, train(model, wrap(optimizer)), expected)


@pytest.mark.parametrize("shared", [False, True])
def test_a_hidden_inner_optimizer_is_refused_before_it_steps(shared):
    model = make_model()
    optimizer = Hidden(sgd(model.parameters()), shared=shared)
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(
        mezzo.UnsupportedError, match=r"Hidden steps another optimizer, a SGD.*Pass that one"
    ):
        train(model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    # The global hook is removed after the step.
    assert not _global_optimizer_pre_hooks


def test_an_optimizer_of_other_parameters_may_step_inside_the_step():
    class Nested(torch.optim.SGD):
        def step(self, closure=None):
            other.step()
            return super().step(closure)

    model, extra = make_model(), nn.Parameter(torch.ones(1))
    extra.grad = torch.ones(1)
    other = torch.optim.SGD([extra], lr=1.0)
    optimizer = Nested(model.parameters(), **OPTIONS)
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    assert_equals_reference(model, train(model, optimizer), reference())
    assert extra.item() == -7.0


def test_a_step_stored_before_decorating_is_refused_before_it_runs():
    model = make_model()
    optimizer = sgd(model.parameters())
    stored_step = optimizer.step
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    train(model, optimizer)
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(
        mezzo.UnsupportedError,
        match=r"The original step of this SGD was called.*First decorate, then wrap",
    ):
        stored_step()
    assert all(map(torch.equal, before, model.parameters()))
    mezzo.undecorate(model)
    stored_step()


# -- ZeRO, Fabric and Accelerate -------------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_zero_redundancy_optimizer_is_refused_with_a_pointer_to_fsdp2(level):
    model = make_model()
    assert_refused(
        model,
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **OPTIONS),
        r"clip its own share only.*fully_shard\(model\), then create the optimizer",
        policy=level,
    )


@pytest.fixture(scope="module")
def fabric():
    return pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)


def test_fabric_setup_after_decorate(fabric):
    model = make_model()
    optimizer = sgd(model.parameters())
    mezzo.decorate(model, optimizer, dtype="bfloat16", save_dtype="float32")
    wrapped, stepped = fabric.setup(model, optimizer)
    losses = train(wrapped, stepped, backward=fabric.backward)
    assert list(stepped.state_dict()["state"]) == [0, 1, 2, 3]
    assert wrapped.state_dict()["0.weight"].dtype is torch.float32
    assert_equals_reference(model, losses, reference())


def clipped_reference(limit, policy):
    """Return the weights after the same training, with torch's clipping called by hand."""
    model = make_model()
    optimizer = sgd(model.parameters())
    mezzo.decorate(model, optimizer, policy, dtype="bfloat16")

    def backward(loss):
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)

    train(model, optimizer, backward=backward)
    return list(mezzo.undecorate(model).parameters())


LIMIT = 1e-2
"""A norm below that of every gradient of `train`."""


@pytest.mark.parametrize("policy", ["O1", "O2"])
def test_fabric_clips_the_gradients_of_bfloat16_models(fabric, policy):
    model = make_model()
    optimizer = sgd(model.parameters())
    mezzo.decorate(model, optimizer, policy, dtype="bfloat16")
    wrapped, stepped = fabric.setup(model, optimizer)

    def backward(loss):
        fabric.backward(loss)
        assert fabric.clip_gradients(wrapped, stepped, max_norm=LIMIT) > LIMIT

    train(wrapped, stepped, backward=backward)
    expected = clipped_reference(LIMIT, policy)
    assert all(map(torch.equal, mezzo.undecorate(model).parameters(), expected))


@pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning")
@pytest.mark.filterwarnings("ignore::FutureWarning:pytorch_lightning")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("policy", ["O1", "O2"])
def test_lightning_clips_the_gradients_of_bfloat16_models(policy, precision):
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()
            self.optimizer = sgd(self.model.parameters())
            mezzo.decorate(self.model, self.optimizer, policy, dtype="bfloat16")

        def training_step(self, batch, _index):
            return self.model(batch).float().square().mean()

        def configure_optimizers(self):
            return self.optimizer

    module = Module()
    batches = [torch.randn(4, 4, generator=torch.Generator().manual_seed(n)) for n in range(8)]
    lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        precision=precision,
        gradient_clip_val=LIMIT,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    expected = clipped_reference(LIMIT, policy)
    assert all(map(torch.equal, mezzo.undecorate(module.model).parameters(), expected))


def test_fabric_setup_before_decorate_is_refused(fabric):
    model = make_model()
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
    # Accelerators share one state, and a doctest may have created it.
    reset_accelerate_state()
    yield accelerate.Accelerator(cpu=True, mixed_precision=request.param)
    reset_accelerate_state()


def test_accelerate_prepare_after_decorate(accelerator):
    model = make_model()
    optimizer = sgd(model.parameters())
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    wrapped, stepped = accelerator.prepare(model, optimizer)
    assert_equals_reference(
        model, train(wrapped, stepped, backward=accelerator.backward), reference()
    )


def test_accelerate_prepare_before_decorate_is_refused(accelerator):
    model = make_model()
    wrapped, stepped = accelerator.prepare(model, sgd(model.parameters()))
    match = (
        "runs in an autocast region of Accelerate"
        if accelerator.mixed_precision == "bf16"
        else r"AcceleratedOptimizer steps.*then accelerator.prepare"
    )
    assert_refused(wrapped, stepped, match)


def test_an_accelerated_optimizer_that_stored_the_original_step_is_refused(accelerator):
    from accelerate.optimizer import AcceleratedOptimizer

    model = make_model()
    optimizer = sgd(model.parameters())
    stepped = AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    with pytest.raises(mezzo.UnsupportedError, match="First decorate, then wrap"):
        train(model, stepped, backward=lambda loss: stepped.scaler.scale(loss).backward())
