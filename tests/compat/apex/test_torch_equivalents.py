"""Modules of Apex that torch replaces: norms, DistributedDataParallel, multi-tensor kernels."""

import pytest
import torch
from torch import nn

from mezzo import UnsupportedError
from mezzo.compat.apex import amp, normalization, parallel
from mezzo.compat.apex.multi_tensor_apply import multi_tensor_applier


@pytest.mark.parametrize(
    ("norm", "torch_norm"),
    [
        (normalization.FusedLayerNorm, nn.LayerNorm),
        (normalization.MixedFusedLayerNorm, nn.LayerNorm),
        (normalization.FusedRMSNorm, nn.RMSNorm),
        (normalization.MixedFusedRMSNorm, nn.RMSNorm),
    ],
)
def test_norms_equal_those_of_torch(norm, torch_norm):
    x = torch.randn(2, 4)
    assert torch.equal(norm(4, 1e-3, True, True)(x), torch_norm(4, 1e-3)(x))
    assert norm(4, elementwise_affine=False).weight is None
    assert norm(4).eps == 1e-5


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_is_wrapped_after_initialize_and_trains(process_group, level):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0
    )
    model = parallel.DistributedDataParallel(model, delay_allreduce=True, message_size=1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_initialize_rejects_a_wrapped_model(process_group):
    with pytest.raises(RuntimeError, match=r"torch\.nn\.parallel\.DistributedDataParallel.*AFTER"):
        amp.initialize(parallel.DistributedDataParallel(nn.Linear(1, 1)), verbosity=0)


def test_gradient_average_false_is_rejected():
    with pytest.raises(NotImplementedError, match="averages gradients"):
        parallel.DistributedDataParallel(nn.Linear(1, 1), gradient_average=False)


def test_convert_syncbn_model_replaces_batch_norms():
    model = parallel.convert_syncbn_model(nn.Sequential(nn.BatchNorm2d(2)))
    assert isinstance(model[0], parallel.SyncBatchNorm)


@pytest.mark.parametrize("name", ["LARC", "Reducer"])
def test_missing_classes_raise_with_a_remedy(name):
    with pytest.raises(UnsupportedError, match=f"{name} is not available here. (Use|Wrap)"):
        getattr(parallel, name)(nn.Linear(1, 1))


def test_multi_tensor_kernels_are_reported_as_unavailable():
    assert not multi_tensor_applier.available
    assert multi_tensor_applier.chunk_size == 2048 * 32
    with pytest.raises(
        UnsupportedError, match=r"not available here\. Use torch's foreach functions"
    ):
        multi_tensor_applier(None, None, [[]])
