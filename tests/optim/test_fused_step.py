"""The fused step without a GPU: kernels in Triton's interpreter, and the original step on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import step_cases
from support.interpreted import needs_triton, run_interpreted

from mezzo import UnsupportedError, _launch
from mezzo.optim.bind_optimizer import bind_optimizer
from mezzo.optim.fused_algorithms import ALGORITHMS
from mezzo.optim.fused_step import FusedBinding
from mezzo.optim.master_weights import MasterWeights
from mezzo.scaling.loss_scales import binding_of


@pytest.mark.slow
@needs_triton
def test_the_kernels_pass_their_tests_in_tritons_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("fused_interpreted.py"))


@pytest.mark.parametrize("name", step_cases.OPTIMIZERS)
def test_the_optimizers_own_step_runs_on_a_cpu(name: str) -> None:
    trained = step_cases.training(name, "split", torch.bfloat16, "cpu", seed=5, clip_norm=2.0)
    assert isinstance(trained.bound, FusedBinding)
    for steps in (1, 2):
        trained.gradients(8.0)
        values, _, _ = step_cases.wanted(trained, steps, 8.0, 2.0)
        trained.step(8.0, found=False)
        assert all(
            step_cases.close(got, value) for got, value in zip(trained.exact(), values, strict=True)
        )


def test_unbinding_moves_step_counts_to_the_cpu() -> None:
    trained = step_cases.training("AdamW", "split", torch.bfloat16, "cpu", seed=5)
    trained.gradients()
    trained.step()
    trained.bound.unbind()
    assert {
        trained.optimizer.state[parameter]["step"].device.type for parameter in trained.parameters
    } == {"cpu"}
    assert binding_of(trained.optimizer) is None


# -- algorithms ------------------------------------------------------------------------------------

WEIGHT = torch.nn.Parameter(torch.ones(2))


def numbers(optimizer_class: type[torch.optim.Optimizer], **options: object) -> tuple[float, ...]:
    (group,) = optimizer_class([WEIGHT], **options).param_groups
    return ALGORITHMS[optimizer_class].numbers(group)


def test_hyper_parameters_are_in_the_order_that_the_kernel_reads() -> None:
    sgd, adam = {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "betas": (0.2, 0.3), "eps": 1e-4}
    expected = [
        (
            numbers(torch.optim.SGD, **sgd, dampening=0.25, weight_decay=0.5),
            (0.1, 1.0, 0.5, 0.9, 0.75, 0.0, 0.0),
        ),
        (
            numbers(torch.optim.SGD, **sgd, nesterov=True, maximize=True),
            (0.1, -1.0, 0, 0.9, 1.0, 0.0, 1.0),
        ),
        (
            numbers(torch.optim.Adam, **adam, weight_decay=0.5),
            (0.1, 1.0, 0.5, 0.2, 0.3, 1e-4, 0.0),
        ),
        (
            numbers(torch.optim.AdamW, **adam, weight_decay=0.5),
            (0.1, 1.0, 0.5, 0.2, 0.3, 1e-4, 1.0),
        ),
        (
            numbers(torch.optim.Adagrad, lr=0.1, lr_decay=0.2, eps=1e-4),
            (0.1, 1.0, 0, 0.2, 0.0, 1e-4, 0.0),
        ),
    ]
    for actual, wanted in expected:
        assert actual == wanted


def test_every_algorithm_has_seven_numbers_and_at_most_three_states() -> None:
    for optimizer_class, algorithm in ALGORITHMS.items():
        (group,) = optimizer_class([WEIGHT], lr=0.1).param_groups
        assert len(algorithm.numbers(group)) == 7
        assert len(algorithm.states(group)) <= 3


def test_state_names_depend_on_the_variant() -> None:
    sgd, adam = ALGORITHMS[torch.optim.SGD], ALGORITHMS[torch.optim.Adam]
    assert sgd.states({"momentum": 0.0}) == ()
    assert sgd.states({"momentum": 0.9}) == ("momentum_buffer",)
    assert adam.states({"amsgrad": True}) == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert (sgd.variant({"momentum": 0.9}), adam.variant({"amsgrad": False})) == (True, False)


# -- capture ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lr", "betas"])
def test_the_recapture_key_tells_apart_tensors_that_a_captured_copy_reads(name: str) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    binding = bind_optimizer(optimizer, MasterWeights())
    (group,) = optimizer.param_groups

    def key_with(value: torch.Tensor) -> object:
        group[name] = value if name == "lr" else (value, 0.99)
        return binding.recapture_key()

    numbers = binding.recapture_key()
    first, second = torch.tensor(0.5), torch.tensor(0.5)
    keys = [key_with(first), key_with(second), key_with(first.fill_(0.25)), numbers]
    assert [keys.index(key) for key in keys] == [0, 1, 0, 3]
    group |= {"lr": 0.5, "betas": (0.5, 0.99)}
    assert binding.recapture_key() == numbers


def test_a_step_without_kernels_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    binding = bind_optimizer(optimizer, MasterWeights())
    monkeypatch.setattr(binding, "_has_kernels", True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]
    monkeypatch.setattr(_launch, "is_capturing", lambda _: True)
    with pytest.raises(UnsupportedError, match="the fused step of SGD cannot update"):
        optimizer.step()


def test_groups_that_change_places_change_the_recapture_key() -> None:
    weights = [torch.nn.Parameter(torch.ones(size)) for size in (2, 3)]
    optimizer = torch.optim.AdamW([{"params": [weight]} for weight in weights])
    binding = bind_optimizer(optimizer, MasterWeights())
    key = binding.recapture_key()
    optimizer.param_groups.reverse()
    assert binding.recapture_key() != key
    optimizer.param_groups.reverse()
    assert binding.recapture_key() == key


def test_a_capture_copies_no_learning_rate_from_a_tensor_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rate, device = torch.tensor(0.5), torch.device("cpu")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=rate)
    binding = bind_optimizer(optimizer, MasterWeights())
    assert binding._hyper_on(device, optimizer.param_groups)[0, 0] == 0.5
    rate.fill_(0.25)
    monkeypatch.setattr(_launch, "is_capturing", lambda _: True)
    assert binding._hyper_on(device, optimizer.param_groups)[0, 0] == 0.5
    # Before each replay.
    monkeypatch.setattr(_launch, "is_capturing", lambda _: False)
    assert binding._hyper_on(device, optimizer.param_groups)[0, 0] == 0.25
