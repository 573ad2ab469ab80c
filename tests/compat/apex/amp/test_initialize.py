"""`amp.initialize` at every level: results, options, errors, saving and resuming."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat.apex import amp, fp16_utils

LEVELS = ("O0", "O1", "O2", "O3")
torch.manual_seed(0)
X, Y = torch.randn(16, 3, 8, 8), torch.randint(10, (16,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = (
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.Linear(6 * 64, 10),
        )

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


def make(seed=0, **kwargs):
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), **({"lr": 0.05, "momentum": 0.9} | kwargs))


def train(model, optimizer, steps=1, x=X):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), Y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain_losses(steps):
    model, optimizer = make()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- return value ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_objects_are_returned(level):
    model, optimizer = make()
    result = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert result == (model, optimizer)


def test_lists_are_returned_as_lists():
    (model1, optimizer1), (model2, optimizer2) = make(), make()
    assert amp.initialize([model1, model2], [optimizer1, optimizer2], verbosity=0) == (
        [model1, model2],
        [optimizer1, optimizer2],
    )
    (model3, optimizer3), (model4, _) = make(), make()
    assert amp.initialize([model3, model4], optimizer3, verbosity=0) == (
        [model3, model4],
        optimizer3,
    )
    model5, optimizer5 = make()
    assert amp.initialize(model5, [optimizer5], verbosity=0) == (model5, [optimizer5])


def test_without_an_optimizer_only_the_models_are_returned():
    model, _ = make()
    assert amp.initialize(model, opt_level="O2", verbosity=0) is model
    assert amp.initialize([model], opt_level="O3", verbosity=0) == [model]
    assert model.head.weight.dtype is torch.float16


def test_disabled_changes_nothing_and_scale_loss_yields_the_loss():
    model, optimizer = make()
    assert amp.initialize(model, optimizer, enabled=False, opt_level="nonsense") == (
        model,
        optimizer,
    )
    assert amp.initialize(model, enabled=False) is model
    loss = model(X).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert amp.state_dict() == {}
    assert not amp._amp_state.opt_properties.enabled


# -- levels ----------------------------------------------------------------------------------------

DTYPES = {
    "O0": ("float32", "float32", "float32"),
    "O1": ("float32", "float32", "float16"),
    "O2": ("float16", "float32", "float32"),
    "O3": ("float16", "float16", "float32"),
}


@pytest.mark.parametrize("level", LEVELS)
def test_dtypes_of_parameters_norms_and_outputs(level):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    tensors = (model.head.weight, model.norm.weight, model(X))
    assert tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors) == DTYPES[level]


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_trains_as_float32_does(level):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert train(model, optimizer, 8) == pytest.approx(
        plain_losses(8), abs=0.0 if level == "O0" else 0.02
    )


def test_o1_casts_outside_the_model_too():
    _alive = amp.initialize(*make(), opt_level="O1", verbosity=0)
    a = torch.ones(2, 2)
    assert torch.mm(a, a).dtype is torch.float16
    assert torch.softmax(a.half(), 0).dtype is torch.float32
    assert (a.half() + a).dtype is torch.float32
    with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        nn.functional.binary_cross_entropy(torch.rand(2).half(), torch.rand(2).half())


def test_o2_casts_nothing_outside_the_model():
    amp.initialize(*make(), opt_level="O2", verbosity=0)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, torch.float32),
        ("True", torch.float32),
        (False, torch.float16),
        ("False", torch.float16),
    ],
)
def test_keep_batchnorm_fp32_keeps_batch_norms(value, dtype):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", keep_batchnorm_fp32=value, verbosity=0)
    assert model.norm.weight.dtype is dtype
    train(model, optimizer)


def test_layer_norms_are_cast_as_in_apex():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    assert model[1].weight.dtype is torch.float16


def test_o3_with_masters_and_norms_equals_o2():
    model, optimizer = make()
    amp.initialize(
        model,
        optimizer,
        opt_level="O3",
        master_weights=True,
        keep_batchnorm_fp32=True,
        loss_scale="dynamic",
        verbosity=0,
    )
    assert (model.head.weight.dtype, model.norm.weight.dtype) == (torch.float16, torch.float32)
    assert [parameter.dtype for parameter in amp.master_params(optimizer)] == [torch.float32] * 6


def test_o2_without_masters_loses_small_updates():
    model, optimizer = make(lr=1e-5, momentum=0)
    amp.initialize(
        model, optimizer, opt_level="O2", master_weights=False, loss_scale=128.0, verbosity=0
    )
    before = model.head.weight.clone()
    train(model, optimizer)
    same = (model.head.weight == before).float().mean()
    assert same > 0.9


@pytest.mark.parametrize("level", LEVELS)
def test_cast_model_outputs_casts_outputs(level):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=level, cast_model_outputs=torch.float16, verbosity=0)
    assert model(X).dtype is torch.float16


def test_o0_casts_half_inputs_to_float32():
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    assert model(X.half()).dtype is torch.float32


def test_a_model_may_be_cast_to_bfloat16():
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", cast_model_type=torch.bfloat16, verbosity=0)
    assert model.head.weight.dtype is torch.bfloat16
    train(model, optimizer)


def test_patch_torch_functions_false_disables_casts_at_o1():
    amp.initialize(*make(), opt_level="O1", patch_torch_functions=False, verbosity=0)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_optimizer_parameters_outside_the_model_stay_float32():
    model, _ = make()
    extra = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    loss = model(X).float().square().mean() + extra.sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert extra.dtype is torch.float32
    torch.testing.assert_close(extra.data, torch.full((3,), 0.9))


# -- loss scales -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "scale"), [(None, 65536.0), ("dynamic", 65536.0), (128.0, 128.0), ("128.0", 128.0)]
)
def test_initial_loss_scales(value, scale):
    amp.initialize(*make(), opt_level="O2", loss_scale=value, verbosity=0)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": scale, "unskipped": 0}}


@pytest.mark.parametrize("losses", [0, -1, 1.5])
def test_an_invalid_number_of_losses_is_a_value_error(losses):
    with pytest.raises(ValueError, match="1 or more"):
        amp.initialize(*make(), num_losses=losses, verbosity=0)


def test_a_scale_stays_between_min_and_max_loss_scale():
    model, optimizer = make()
    with pytest.warns(UserWarning, match="floor"):
        _shrink(model, optimizer)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 128.0


def _shrink(model, optimizer):
    amp.initialize(
        model, optimizer, opt_level="O1", min_loss_scale=128.0, max_loss_scale=512.0, verbosity=0
    )
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 512.0
    train(model, optimizer, 5, X * float("inf"))


# -- repeated calls --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "levels", [("O1", "O1"), ("O2", "O2"), ("O1", "O2"), ("O2", "O1"), ("O3", "O0")], ids="-".join
)
def test_a_model_may_be_initialized_again_with_a_new_optimizer(levels):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=levels[0], verbosity=0)
    train(model, optimizer, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=levels[1], verbosity=0)
    assert model.head.weight.dtype is (
        torch.float16 if levels[1] in ("O2", "O3") else torch.float32
    )
    losses = train(model, optimizer, 6)
    assert losses[-1] < losses[0] < 2.0


def test_the_last_call_defines_the_casts():
    a = torch.ones(2, 2)
    _alive = amp.initialize(*make(), opt_level="O1", verbosity=0)
    _alive = amp.initialize(*make(), opt_level="O2", verbosity=0)
    assert torch.mm(a, a).dtype is torch.float32
    _alive = amp.initialize(*make(), opt_level="O1", verbosity=0)
    _alive = amp.initialize(*make(), opt_level="O1", verbosity=0)
    assert torch.mm(a, a).dtype is torch.float16
    amp.initialize(make()[0], enabled=False)
    assert torch.mm(a, a).dtype is torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_of_an_earlier_call_is_kept_alive(level):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(model, optimizer)
    references = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.head.weight)]
    del model, optimizer
    amp.initialize(*make(), opt_level=level, verbosity=0)
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_levels_one_after_the_other_train_as_each_alone():
    alone = {}
    for level in LEVELS:
        model, optimizer = make()
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        alone[level] = train(model, optimizer, 2)
    for level in reversed(LEVELS):
        model, optimizer = make()
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert train(model, optimizer, 2) == alone[level]


# -- output ----------------------------------------------------------------------------------------


def test_the_level_and_its_properties_are_printed(capsys):
    amp.initialize(*make(), opt_level="O2", loss_scale=128.0, keep_batchnorm_fp32="False")
    output = capsys.readouterr().out
    assert "Selected optimization level O2" in output
    defaults, after = output.split("After processing overrides")
    assert "keep_batchnorm_fp32    : True" in defaults
    assert "loss_scale             : dynamic" in defaults
    assert "keep_batchnorm_fp32    : False" in after
    assert "loss_scale             : 128.0" in after
    assert "cast_model_type        : torch.float16" in after


def test_verbosity_zero_prints_nothing(capsys):
    model, optimizer = make()
    amp.initialize(model, optimizer, verbosity=0)
    train(model, optimizer, 1, X * float("inf"))
    assert capsys.readouterr().out == ""


def test_a_skipped_step_is_printed(capsys):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2")
    capsys.readouterr()
    train(model, optimizer, 1, X * float("inf"))
    assert (
        capsys.readouterr().out
        == "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    )


# -- saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_state_dict_is_float32_at_every_level(level):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert {
        value.dtype for name, value in model.state_dict().items() if "num_batches" not in name
    } == {torch.float32}


@pytest.mark.parametrize("initialized", ["before", "after"])
@pytest.mark.parametrize("resumed", LEVELS)
@pytest.mark.parametrize("level", LEVELS)
def test_training_resumes_without_a_spike(level, resumed, initialized):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(model, optimizer, 3)
    saved = copy.deepcopy(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    )
    continued = train(model, optimizer, 3)
    restored, restored_optimizer = make(seed=1)
    if initialized == "before":
        amp.initialize(restored, restored_optimizer, opt_level=resumed, verbosity=0)
    restored.load_state_dict(saved["model"])
    restored_optimizer.load_state_dict(saved["optimizer"])
    if initialized == "after":
        amp.initialize(restored, restored_optimizer, opt_level=resumed, verbosity=0)
    if resumed == level:
        amp.load_state_dict(saved["amp"])
        assert amp.state_dict() == saved["amp"]
    # Bit for bit at the same level; O3 saves its 16-bit weights.
    assert train(restored, restored_optimizer, 3) == (
        continued if resumed == level else pytest.approx(continued, abs=0.02)
    )


def test_masters_start_from_the_float32_values():
    model, optimizer = make()
    before = model.head.weight.detach().clone()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert torch.equal(model.state_dict()["head.weight"], before)
    assert not torch.equal(model.head.weight.float(), before)


def test_load_state_dict_prints_a_different_number_of_losses_and_rejects_unknown_keys(capsys):
    amp.initialize(*make(), num_losses=2, verbosity=0)
    amp._amp_state.verbosity = 1
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}})
    assert "contains 1 entries, while 2 loss_scalers are used" in capsys.readouterr().out
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 8.0, "unskipped": 3}
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: 'model'"):
        amp.load_state_dict({"model": {}})


def test_a_failed_call_leaves_the_state_as_it_was():
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    before = amp._amp_state.opt_properties
    with pytest.raises(RuntimeError):
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert amp._amp_state.opt_properties is before
    assert model.head.weight.dtype is torch.float16
    assert isinstance(mezzo.undecorate(model), Net)


# -- rejected arguments ----------------------------------------------------------------------------


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "models", [(nn.Linear(1, 1),), "model", None, [3]], ids=["tuple", "str", "none", "list"]
)
def test_invalid_models_are_type_errors(models):
    with pytest.raises(TypeError, match="models should be a model or a list of models"):
        amp.initialize(models, verbosity=0)


@pytest.mark.parametrize("optimizers", [(3,), "sgd", [3]], ids=["tuple", "str", "list"])
def test_invalid_optimizers_are_type_errors(optimizers):
    with pytest.raises(
        TypeError, match="optimizers should be an optimizer, a list of optimizers or None"
    ):
        amp.initialize(nn.Linear(1, 1), optimizers, verbosity=0)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_wrapped_model_is_a_runtime_error(level):
    with pytest.raises(RuntimeError, match=r"torch\.nn\.parallel\.DataParallel.*AFTER"):
        amp.initialize(nn.DataParallel(nn.Linear(1, 1)), opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_half_parameters_are_a_runtime_error(level):
    model = nn.Linear(1, 1).half()
    with pytest.raises(
        RuntimeError, match=r"Found param weight with type torch.HalfTensor.*Leave \.half\(\) out"
    ):
        amp.initialize(model, sgd(model), opt_level=level, verbosity=0)


def test_half_buffers_are_a_runtime_error():
    model = nn.BatchNorm1d(2, affine=False).half()
    with pytest.raises(RuntimeError, match=r"Found buffer 1\.running_mean"):
        amp.initialize(nn.Sequential(nn.Linear(2, 2), model), verbosity=0)


def test_half_parameters_may_be_allowed():
    amp._amp_state.allow_incoming_model_not_fp32 = True
    amp.initialize(nn.Linear(1, 1).half(), opt_level="O1", verbosity=0)


def test_an_fp16_optimizer_is_a_runtime_error():
    model = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="has an FP16_Optimizer"):
        amp.initialize(model, fp16_utils.FP16_Optimizer(sgd(model), verbose=False), verbosity=0)


def test_nothing_changes_when_arguments_are_rejected():
    valid, invalid = nn.Linear(1, 1), nn.Linear(1, 1).half()
    with pytest.raises(RuntimeError):
        amp.initialize([valid, invalid], sgd(valid), opt_level="O2", verbosity=0)
    assert valid.weight.dtype is torch.float32
    assert not hasattr(amp._amp_state, "opt_properties")
