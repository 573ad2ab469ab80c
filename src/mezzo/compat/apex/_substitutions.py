"""Names of Apex that this dialect lacks, and what to use instead."""

SUBSTITUTIONS = {
    "contrib": "torch's own layers and optimizers, which are fused as well",
    "mlp": "torch.nn.Sequential of Linear and ReLU under torch.compile",
    "mlp.MLP": "torch.nn.Sequential of Linear and ReLU under torch.compile",
    "fused_dense": "torch.nn.Linear",
    "RNN": "torch.nn.LSTM and torch.nn.GRU",
    "pyprof": "torch.profiler",
    "reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "transformer": "torch.nn.functional.scaled_dot_product_attention, and torch.distributed",
    "amp.casted_args": "amp.half_function",
    "amp.handle": "amp.scale_loss",
    "amp.opt": "amp.initialize",
    "amp.frontend": "amp.initialize",
    "amp.load_state": "amp.load_state_dict",
    "optimizers.FP16_Optimizer": "fp16_utils.FP16_Optimizer",
    "parallel.multiproc": "torchrun",
    "parallel.create_syncbn_process_group": "torch.distributed.new_group",
    "fp16_utils.clip_grad_norm": "torch.nn.utils.clip_grad_norm_",
}
"""Dotted name → what to use."""
