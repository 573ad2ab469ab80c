"""Names of OneFlow that neither this dialect nor torch has, and what to use instead."""

SUBSTITUTIONS = {
    "env.init_rdma": "torch.distributed",
    "placement": "torch.distributed.device_mesh.DeviceMesh",
    "sbp": "torch.distributed.tensor.Shard, Replicate and Partial",
    "comm": "torch.distributed",
    "boxing": "torch.distributed.tensor.DTensor.redistribute",
    "one_embedding": "torch.nn.EmbeddingBag",
    "scope": "torch.no_grad and other context managers of torch",
    "enable_eager_execution": "nothing: torch is eager",
    "mock_torch": "import mezzo.compat.oneflow as torch",
    "framework": "torch",
    "nn.graph.Graph": "nn.Graph",
    "nn.FusedMLP": "torch.nn.Sequential of Linear and ReLU",
    "nn.FusedBatchNorm2d": "torch.nn.BatchNorm2d",
    "nn.FusedBatchNorm1d": "torch.nn.BatchNorm1d",
    "nn.FakeQuantization": "torch.ao.quantization.FakeQuantize",
    "nn.Quantization": "torch.ao.quantization",
    "nn.COCOReader": "torchvision.datasets.CocoDetection",
    "nn.OFRecordReader": "torch.utils.data.DataLoader",
    "nn.functional.sparse_softmax_cross_entropy": "nn.functional.cross_entropy",
    "nn.functional.fused_mlp": "torch.nn.functional.linear and relu",
    "amp.custom_fwd": "torch.amp.custom_fwd",
    "amp.custom_bwd": "torch.amp.custom_bwd",
}
"""Dotted name → what to use."""
