import torch

from mezzo.compat.mxnet.io import DataBatch


def test_a_batch_holds_its_data_and_its_labels():
    batch = DataBatch([torch.ones(1)], [torch.zeros(1)])
    assert (batch.data, batch.label, batch.pad) == ([torch.ones(1)], [torch.zeros(1)], None)
