"""`megengine.amp`: autocast, assignable settings, `GradScaler`, channels-last conversion."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat.megengine import amp
from mezzo.compat.megengine.autodiff import GradManager
from mezzo.compat.megengine.optimizer import SGD


@pytest.fixture(autouse=True)
def settings_are_restored():
    yield
    amp.enabled = False
    amp.low_prec_dtype = "float16"


# -- autocast --------------------------------------------------------------------------------------


def product_dtype():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_matmul_is_16_bit_and_exp_is_float32_inside():
    with amp.autocast():
        half = torch.ones(2, 2) @ torch.ones(2, 2)
        assert (half.dtype, torch.exp(half).dtype, half.mean().dtype) == (
            torch.float16,
            torch.float32,
            torch.float32,
        )
    assert product_dtype() is torch.float32


def test_batch_norm_takes_16_bit_inputs_and_keeps_float32_parameters():
    norm = nn.BatchNorm1d(2)
    with amp.autocast():
        out = norm(torch.randn(4, 2))
    assert (out.dtype, norm.weight.dtype, norm.running_mean.dtype) == (
        torch.float16,
        torch.float32,
        torch.float32,
    )


def test_a_disabled_region_disables_the_outer_one():
    with amp.autocast(), amp.autocast(enabled=False):
        assert product_dtype() is torch.float32


def test_an_inner_region_has_its_own_dtype_and_restores_the_outer_one():
    with amp.autocast():
        with amp.autocast(low_prec_dtype="bfloat16"):
            assert product_dtype() is torch.bfloat16
        assert product_dtype() is torch.float16


def test_an_assignment_to_enabled_ends_with_the_region():
    with amp.autocast():
        amp.enabled = False
        amp.enabled = True
    assert (amp.enabled, product_dtype()) == (False, torch.float32)


def test_enabled_is_restored_after_a_region_that_assigned_it():
    amp.enabled = True
    try:
        with amp.autocast(low_prec_dtype="bfloat16"):
            amp.enabled = False
            assert product_dtype() is torch.float32
        assert product_dtype() is torch.float16
    finally:
        amp.enabled = False
    assert product_dtype() is torch.float32


def test_dtype_is_restored_when_the_body_raises():
    with pytest.raises(KeyError), amp.autocast():
        raise KeyError
    assert product_dtype() is torch.float32


def test_one_instance_can_decorate_and_nest():
    region = amp.autocast()

    @region
    def nested(depth):
        return product_dtype() if depth == 0 else nested(depth - 1)

    assert nested(2) is torch.float16
    with region, region:
        assert product_dtype() is torch.float16
    assert product_dtype() is torch.float32


def test_a_region_compiles_with_fullgraph():
    def run(x):
        with amp.autocast():
            return x @ x

    assert (
        torch.compile(run, backend="eager", fullgraph=True)(torch.ones(2, 2)).dtype is torch.float16
    )


@pytest.mark.parametrize(
    "kwargs", [{"low_prec_dtype": "float8"}, {"high_prec_dtype": "float16"}], ids=["low", "high"]
)
def test_invalid_dtypes_are_rejected(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        amp.autocast(**kwargs)


# -- assignable settings ---------------------------------------------------------------------------


def test_assigning_enabled_activates_and_deactivates_autocast():
    assert amp.enabled is False
    amp.enabled = True
    assert (amp.enabled, product_dtype()) == (True, torch.float16)
    amp.enabled = False
    assert (amp.enabled, product_dtype()) == (False, torch.float32)


def test_assigning_a_dtype_changes_an_enabled_autocast():
    amp.enabled = True
    amp.low_prec_dtype = "bfloat16"
    assert (product_dtype(), amp.low_prec_dtype) == (torch.bfloat16, "bfloat16")


def test_assigning_a_dtype_does_not_enable_autocast():
    amp.low_prec_dtype = torch.bfloat16
    assert (amp.enabled, product_dtype()) == (False, torch.float32)
    amp.enabled = True
    assert product_dtype() is torch.bfloat16


def test_attributes_inside_a_region_describe_that_region():
    with amp.autocast(low_prec_dtype="bfloat16"):
        assert (amp.enabled, amp.low_prec_dtype, amp.high_prec_dtype) == (
            True,
            "bfloat16",
            "float32",
        )
    assert (amp.enabled, amp.low_prec_dtype) == (False, "float16")


def test_assigning_false_inside_a_region_disables_it():
    with amp.autocast():
        amp.enabled = False
        assert (amp.enabled, product_dtype()) == (False, torch.float32)


def test_attributes_describe_a_mezzo_region_too():
    with mezzo.autocast("cpu", dtype="bfloat16"):
        assert amp.enabled
        assert amp.low_prec_dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["float8", "float32", torch.float64], ids=str)
def test_a_low_precision_other_than_16_bit_is_rejected(dtype):
    with pytest.raises(ValueError, match=r"low_prec_dtype=.*Choose one of: float16, bfloat16"):
        amp.low_prec_dtype = dtype


def test_a_high_precision_other_than_float32_is_rejected():
    amp.high_prec_dtype = "float32"
    with pytest.raises(ValueError, match="high_prec_dtype='float64'"):
        amp.high_prec_dtype = "float64"


def test_enabled_applies_to_its_thread_only():
    amp.enabled = True
    with ThreadPoolExecutor() as pool:
        assert pool.submit(lambda: amp.enabled).result() is False
    assert amp.enabled


# -- GradScaler ------------------------------------------------------------------------------------


@pytest.fixture
def weight():
    return nn.Parameter(torch.ones(2))


@pytest.fixture
def gm(weight):
    return GradManager().attach(weight)


def run(gm, scaler, weight, factor, **kwargs):
    with gm:
        scaler.backward(gm, (weight * factor).sum(), **kwargs)


def test_defaults_are_those_of_megengine():
    scaler = amp.GradScaler()
    assert (
        scaler.scale_factor,
        scaler.growth_factor,
        scaler.backoff_factor,
        scaler.growth_interval,
    ) == (16.0, 2.0, 0.5, 2000)


def test_backward_unscales_and_the_scale_grows_after_the_interval(gm, weight):
    scaler, scales = amp.GradScaler(growth_interval=2), []
    for _ in range(4):
        run(gm, scaler, weight, 3.0)
        assert weight.grad.tolist() == [3.0, 3.0]
        weight.grad = None
        scales.append(scaler.scale_factor)
    assert scales == [16.0, 32.0, 32.0, 64.0]


def test_a_non_finite_gradient_removes_all_and_the_scale_backs_off(gm, weight):
    other = nn.Parameter(torch.ones(1))
    gm.attach(other)
    scaler = amp.GradScaler(init_scale=8.0)
    with gm:
        scaler.backward(gm, (weight * math.inf).sum() + other.sum())
    assert (weight.grad, other.grad, scaler.scale_factor) == (None, None, 4.0)
    SGD([weight, other], lr=1.0, momentum=0.9).step().clear_grad()
    assert weight.tolist() == [1.0, 1.0]


def test_manual_scaling_in_three_calls_gives_the_same(gm, weight):
    scaler = amp.GradScaler(growth_interval=1)
    with gm:
        gm.backward((weight * 3.0).sum(), dy=torch.tensor(scaler.scale_factor))
    assert weight.grad.tolist() == [48.0, 48.0]
    assert scaler.unscale(gm.attached_tensors()) is scaler
    scaler.update()
    assert (weight.grad.tolist(), scaler.scale_factor) == ([3.0, 3.0], 32.0)


def test_gradients_accumulate_scaled_until_they_are_unscaled(gm, weight):
    scaler = amp.GradScaler(growth_interval=1)
    run(gm, scaler, weight, 1.0, unscale_grad=False)
    assert (weight.grad.tolist(), scaler.scale_factor) == ([16.0, 16.0], 16.0)
    run(gm, scaler, weight, 2.0)
    assert (weight.grad.tolist(), scaler.scale_factor) == ([3.0, 3.0], 32.0)


def test_several_losses_keep_their_own_scales(gm, weight):
    first, second = amp.GradScaler(init_scale=16.0), amp.GradScaler(init_scale=4.0)
    run(gm, first, weight, 3.0)
    run(gm, second, weight, 5.0)
    assert weight.grad.tolist() == [8.0, 8.0]
    run(gm, second, weight, math.inf)
    assert (weight.grad, first.scale_factor, second.scale_factor) == (None, 16.0, 2.0)


def test_gradients_are_kept_when_backward_fails(gm, weight):
    scaler = amp.GradScaler()
    run(gm, scaler, weight, 3.0)
    with pytest.raises(RuntimeError, match="no computation history"):
        scaler.backward(gm, weight.sum())
    assert weight.grad.tolist() == [3.0, 3.0]


def test_a_non_finite_gradient_counts_until_the_update(gm, weight):
    scaler, other = amp.GradScaler(), nn.Parameter(torch.ones(1))
    weight.grad, other.grad = torch.full((2,), math.nan), torch.ones(1)
    scaler.unscale([weight])
    scaler.unscale([other])
    assert other.grad is None
    scaler.update()
    assert scaler.scale_factor == 8.0
    other.grad = torch.full((1,), 8.0)
    scaler.unscale([other])
    assert other.grad.item() == 1.0


def test_the_scale_can_be_kept_or_set(gm, weight):
    scaler = amp.GradScaler(growth_interval=1)
    run(gm, scaler, weight, 1.0, update_scale=False)
    assert scaler.scale_factor == 16.0
    scaler.update(new_scale=512)
    assert scaler.scale_factor == 512.0
    scaler.scale_factor = 4.0
    run(gm, scaler, weight, 1.0)
    assert scaler.scale_factor == 8.0


@pytest.mark.parametrize(
    "kwargs", [{"growth_interval": 0}, {"growth_factor": 0}], ids=["interval", "factor"]
)
def test_a_static_scale_is_constant_and_removes_non_finite_gradients(gm, weight, kwargs):
    scaler = amp.GradScaler(**kwargs)
    run(gm, scaler, weight, math.inf)
    assert weight.grad is None
    run(gm, scaler, weight, 1.0)
    scaler.update(new_scale=512)
    assert (scaler.scale_factor, weight.grad.tolist()) == (16.0, [1.0, 1.0])


def test_several_outputs_and_their_gradients_are_scaled(gm, weight):
    scaler = amp.GradScaler()
    with gm:
        scaler.backward(
            gm, [weight.sum(), (2.0 * weight).sum()], [torch.tensor(1.0), torch.tensor(10.0)]
        )
    assert weight.grad.tolist() == [21.0, 21.0]


def test_a_loaded_scaler_continues(gm, weight):
    scaler = amp.GradScaler(init_scale=8.0, growth_interval=2)
    run(gm, scaler, weight, 1.0)
    loaded = amp.GradScaler()
    loaded.load_state_dict(scaler.state_dict())
    run(gm, loaded, weight, 1.0)
    assert loaded.scale_factor == 16.0


@pytest.mark.parametrize(
    "kwargs",
    [
        {"init_scale": 0.0},
        {"init_scale": math.inf},
        {"growth_factor": 0.5},
        {"growth_interval": -1},
    ],
    ids=str,
)
def test_invalid_scaler_arguments_are_rejected(kwargs):
    with pytest.raises(ValueError, match="must be"):
        amp.GradScaler(**kwargs)


# -- channels-last conversion ----------------------------------------------------------------------


def is_channels_last(tensor):
    return tensor.is_contiguous(
        memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[tensor.dim()]
    )


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (2, 3, 4, 4, 4)], ids=["image", "volume"])
@pytest.mark.parametrize("inplace", [True, False], ids=["inplace", "copied"])
def test_images_and_volumes_are_converted(shape, inplace):
    tensor = torch.randn(shape)
    before = tensor.clone()
    converted = amp.convert_tensor_format(tensor, inplace=inplace)
    assert is_channels_last(converted)
    assert torch.equal(converted, before)
    assert (converted is tensor) is inplace
    assert is_channels_last(tensor) is inplace


def test_other_tensors_are_not_converted():
    tensor = torch.randn(2, 3)
    assert amp.convert_tensor_format(tensor) is tensor


@pytest.mark.parametrize("inplace", [True, False], ids=["inplace", "copied"])
def test_a_converted_module_keeps_values_and_parameter_identity(inplace):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(4, 4, 2), nn.BatchNorm2d(4))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    parameters = list(module.parameters())
    converted = amp.convert_module_format(module, inplace=inplace)
    assert (converted is module) is inplace
    assert is_channels_last(converted[0].weight)
    assert is_channels_last(converted[1].weight)
    assert is_channels_last(module[0].weight) is inplace
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in converted.state_dict().items())


def test_autocast_without_brackets_is_refused_at_once():
    with pytest.raises(TypeError, match=r"got the function 'step'. Write @amp.autocast\(\)"):

        @amp.autocast
        def step():
            pass


def scaled_weight():
    weight = torch.ones(1)
    gm = GradManager().attach(weight)
    with gm:
        gm.backward(weight * 1.0, dy=16.0)
    return weight, gm


def test_unscaling_twice_is_refused_until_the_next_update():
    scaler, (weight, gm) = amp.GradScaler(), scaled_weight()
    scaler.unscale(gm.attached_tensors())
    with pytest.raises(mezzo.ScalerError, match=r"already called.*unscale_grad=False"):
        scaler.unscale([weight])
    assert weight.grad.item() == 1.0
    scaler.update()
    scaler.unscale(weight)
    assert weight.grad.item() == 1.0 / 16


def test_new_gradients_may_be_unscaled_without_an_update():
    scaler, (weight, gm) = amp.GradScaler(), scaled_weight()
    scaler.unscale(gm.attached_tensors())
    weight.grad = None
    with gm:
        scaler.backward(gm, weight * 2.0, update_scale=False)
    assert weight.grad.item() == 2.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s, gm, y: s.backward(y), TypeError, r"takes a GradManager first, got Tensor"),
        (lambda s, gm, y: s.backward(gm, 3.0), TypeError, "a list of tensors, got float"),
        (lambda s, gm, y: s.backward(gm, y, [1.0, 2.0]), ValueError, "got 1 y and 2 dy"),
        (lambda s, gm, y: s.backward(gm, y.detach()), RuntimeError, "do not depend on an attached"),
        (lambda s, gm, y: s.load_state_dict({"scale_factor": 1.0}), KeyError, "needs growth_fac"),
    ],
    ids=["loss", "number", "dy", "detached", "state"],
)
def test_wrong_arguments_of_the_scaler_are_refused_in_plain_words(call, error, message):
    weight = torch.ones(1)
    with GradManager().attach(weight) as gm, pytest.raises(error, match=message):
        call(amp.GradScaler(), gm, 2 * weight)
