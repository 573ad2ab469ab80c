"""An Accelerator that trains with mezzo, against a plain loop with mezzo."""

import pytest
import torch
from support.accelerate_state import reset_accelerate_state
from torch import nn

import mezzo

accelerate = pytest.importorskip("accelerate")

from mezzo.integrations.accelerate import use  # noqa: E402

BATCHES = [torch.randn(4, 4, generator=torch.Generator().manual_seed(n)) for n in range(8)]
INF = torch.full((4, 4), torch.inf)
LIMIT = 1e-2
"""A norm below that of every gradient."""
LEVELS = [("O1", "bfloat16"), ("O1", "float16"), ("O2", "bfloat16"), ("O2", "float16")]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def decay(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def loss_of(model, batch):
    return model(batch).float().square().mean()


def train_plain(policy, dtype, batches=BATCHES, *, clip=None, every=1, fused=False):
    model = make_model()
    optimizer = adam(model, fused=fused)
    scheduler = decay(optimizer)
    mezzo.decorate(model, optimizer, policy, dtype=dtype)
    scaler = mezzo.GradScaler("cpu", enabled=dtype == "float16")
    losses = []
    for index, batch in enumerate(batches):
        loss = loss_of(model, batch)
        losses.append(loss.item())
        scaler.scale(loss / every).backward()
        if (index + 1) % every == 0:
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if not scaler.step(optimizer).skipped:
                scheduler.step()
            scaler.update()
            optimizer.zero_grad()
    return losses, list(mezzo.undecorate(model).parameters())


def start(policy, dtype, *, fused=False, **options):
    accelerator = use(accelerate.Accelerator(cpu=True, **options), policy, dtype=dtype)
    model = make_model()
    optimizer = adam(model, fused=fused)
    return accelerator, *accelerator.prepare(model, optimizer, decay(optimizer))


def train(accelerator, model, optimizer, scheduler, batches=BATCHES, clip=None):
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            losses.append(loss.item())
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


def assert_equal(actual, expected):
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("clip", [None, LIMIT])
@pytest.mark.parametrize(("policy", "dtype"), LEVELS)
def test_accelerator_trains_as_the_plain_loop(policy, dtype, clip):
    accelerator, model, optimizer, scheduler = start(policy, dtype, fused=True)
    losses = train(accelerator, model, optimizer, scheduler, clip=clip)
    expected, weights = train_plain(policy, dtype, clip=clip, fused=True)
    assert losses == expected
    assert_equal(mezzo.undecorate(model).parameters(), weights)


def test_accelerator_accumulates():
    accelerator, model, *rest = start("O2", "float16", gradient_accumulation_steps=2)
    losses, weights = train_plain("O2", "float16", every=2, clip=LIMIT)
    assert train(accelerator, model, *rest, clip=LIMIT) == losses
    assert_equal(mezzo.undecorate(model).parameters(), weights)


def test_a_skipped_step_is_reported_and_does_not_move_the_scheduler():
    accelerator, model, optimizer, scheduler = start("O2", "float16")
    rates, skips = [], []
    for batch in (BATCHES[0], INF, BATCHES[1]):
        accelerator.backward(loss_of(model, batch))
        result = optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
        skips.append((result.skipped, optimizer.step_was_skipped))
        assert accelerator.optimizer_step_was_skipped is result.skipped
    assert rates == [0.005, 0.005, 0.0025]
    assert accelerator.scaler.get_scale() == 2.0**15
    assert skips == [(False, False), (True, True), (False, False)]


@pytest.mark.parametrize("safe", [True, False])
def test_accelerator_resumes_to_the_bit(tmp_path, safe):
    batches = [*BATCHES[:2], INF, *BATCHES[2:]]
    run = start("O2", "float16")
    train(*run, batches[:5])
    run[0].save_state(str(tmp_path), safe_serialization=safe)
    losses = train(*run, batches[5:])
    fresh_accelerator, model, optimizer, scheduler = start("O2", "float16")
    fresh_accelerator.load_state(str(tmp_path))
    assert train(fresh_accelerator, model, optimizer, scheduler, batches[5:]) == losses
    assert fresh_accelerator.scaler.state_dict() == run[0].scaler.state_dict()
    assert scheduler.get_last_lr() == run[3].get_last_lr()
    assert_equal(mezzo.undecorate(model).parameters(), mezzo.undecorate(run[1]).parameters())


def test_the_mixed_precision_of_the_accelerator_gives_the_dtype_and_is_switched_off():
    accelerator = use(accelerate.Accelerator(cpu=True, mixed_precision="bf16"), "O2")
    model = make_model()
    model, _ = accelerator.prepare(model, adam(model))
    assert model[0].weight.dtype is torch.bfloat16
    assert not hasattr(model, "_original_forward")
    assert model(BATCHES[0]).dtype is torch.float32
    assert accelerator.get_state_dict(model)["0.weight"].dtype is torch.float32
    with accelerator.autocast():
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.bfloat16


def test_two_models_with_an_optimizer_each_train_with_one_scaler():
    accelerator = use(accelerate.Accelerator(cpu=True), "O2", dtype="float16")
    models = [make_model(), make_model()]
    optimizers = [adam(model) for model in models]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    for batch in BATCHES:
        accelerator.backward(sum(loss_of(model, batch) for model in models))
        for model, optimizer in zip(models, (first, second), strict=True):
            accelerator.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(models[0].parameters(), models[1].parameters())


def test_a_model_that_is_only_evaluated_stays_float32_and_can_be_trained_later():
    accelerator = use(accelerate.Accelerator(cpu=True), "O2", dtype="float16")
    model = accelerator.prepare_model(make_model().eval(), evaluation_mode=True)
    with torch.autocast("cpu", torch.float16):
        expected = make_model()(BATCHES[0]).float()
    assert torch.equal(model(BATCHES[0]), expected)
    assert model[0].weight.dtype is torch.float32
    model, _ = accelerator.prepare(model.train(), adam(model))
    assert model[0].weight.dtype is torch.float16


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("order", ["model first", "optimizer first", "single methods"])
def test_a_model_and_its_optimizer_may_be_prepared_apart_at_o1(order, is_training):
    accelerator = use(accelerate.Accelerator(cpu=True), "O1", dtype="float16")
    model = make_model().train(is_training)  # packages load models in evaluation mode
    optimizer = adam(model)
    if order == "model first":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    elif order == "optimizer first":
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    else:
        model = accelerator.prepare_model(model)
        optimizer = accelerator.prepare_optimizer(optimizer)
    scheduler = accelerator.prepare(decay(optimizer.optimizer))
    batches = [BATCHES[0], INF, *BATCHES[1:]]
    losses = train(accelerator, model, optimizer, scheduler, batches)
    torch.testing.assert_close(losses, train_plain("O1", "float16", batches)[0], equal_nan=True)
    assert accelerator.scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_that_is_prepared_alone_is_moved_before_it_is_decorated(level):
    class Watched(nn.Linear):
        def to(self, *args, **kwargs):
            plain_at_moves.append("forward" not in vars(self))
            return super().to(*args, **kwargs)

    for prepare in ("prepare", "prepare_model"):
        plain_at_moves = []
        accelerator = use(accelerate.Accelerator(cpu=True), level, dtype="bfloat16")
        getattr(accelerator, prepare)(Watched(4, 2).eval())
        assert plain_at_moves[0]
        reset_accelerate_state()


def test_a_decorated_model_keeps_its_policy():
    accelerator = use(accelerate.Accelerator(cpu=True), "O1", dtype="bfloat16")
    model = make_model()
    optimizer = adam(model)
    mezzo.decorate(model, optimizer, "O2", dtype="float16")
    run = accelerator.prepare(model, optimizer, decay(optimizer))
    assert train(accelerator, *run) == train_plain("O2", "float16")[0]


def test_wrong_use_is_refused_and_changes_nothing():
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(mezzo.PolicyError, match="O9"):
        use(accelerator, "O9")
    assert type(accelerator) is accelerate.Accelerator
    with pytest.raises(mezzo.PolicyError, match=r"takes an accelerate\.Accelerator, got str"):
        use("cpu")
    use(accelerator, "O2", dtype="float16")
    with pytest.raises(mezzo.PolicyError, match="in use already"):
        use(accelerator, "O2")
    with pytest.raises(mezzo.PolicyError, match=r"accelerator\.prepare\(model, optimizer\)"):
        accelerator.prepare(make_model())
    with pytest.raises(mezzo.PolicyError, match=r"accelerator\.prepare\(model, optimizer\)"):
        accelerator.prepare_model(make_model())
    with pytest.raises(mezzo.PolicyError, match="AdamW and without its model"):
        accelerator.prepare(adam(make_model()))


@pytest.mark.parametrize("policy", ["O1", "O2"])
def test_an_optimizer_that_updates_in_the_backward_pass_is_refused(policy):
    class Lomo(torch.optim.SGD):
        def fused_backward(self, loss, lr):
            raise AssertionError

    model = make_model()
    accelerator = use(accelerate.Accelerator(cpu=True), policy, dtype="bfloat16")
    with pytest.raises(mezzo.UnsupportedError, match="Lomo updates the parameters in the backward"):
        accelerator.prepare(model, Lomo(model.parameters()))
    assert model[0].weight.dtype is torch.float32


@pytest.mark.parametrize(
    ("handler", "remedy"),
    [
        (accelerate.GradScalerKwargs(init_scale=64.0), r"scaler=mezzo\.GradScaler"),
        (accelerate.utils.AutocastKwargs(enabled=False), "use"),
    ],
)
def test_settings_of_the_replaced_mixed_precision_are_refused(handler, remedy):
    accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[handler])
    with pytest.raises(mezzo.PolicyError, match=rf"{type(handler).__name__} .*{remedy}"):
        use(accelerator, "O2", dtype="float16")
    assert type(accelerator) is accelerate.Accelerator
