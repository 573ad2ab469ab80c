"""What Paddle's own calls are in torch's words: said by the error that asks for one, and by docs/coming-from/paddle.md."""

from __future__ import annotations

from typing import NoReturn

SUBSTITUTIONS = {
    "nn.Layer": "torch.nn.Module",
    "nn.LayerList": "torch.nn.ModuleList",
    "nn.Sequential": "torch.nn.Sequential",
    "nn.Linear": "torch.nn.Linear; Paddle starts from Xavier-uniform weights and zero biases: torch.nn.init.xavier_uniform_, zeros_",
    "nn.Conv2D": "torch.nn.Conv2d",
    "nn.BatchNorm2D": "torch.nn.BatchNorm2d",
    "nn.LayerNorm": "torch.nn.LayerNorm",
    "nn.Embedding": "torch.nn.Embedding",
    "nn.ReLU": "torch.nn.ReLU",
    "nn.MSELoss": "torch.nn.MSELoss",
    "nn.CrossEntropyLoss": "torch.nn.CrossEntropyLoss; its labels have no last dimension of one",
    "nn.functional": "torch.nn.functional",
    "io.Dataset": "torch.utils.data.Dataset",
    "io.DataLoader": "torch.utils.data.DataLoader",
    "vision.transforms": "torchvision.transforms",
    "vision.datasets": "torchvision.datasets",
    "optimizer.lr": "torch.optim.lr_scheduler, made with the optimizer",
    "regularizer.L2Decay": "the coefficient itself: weight_decay=1e-4",
    "to_tensor": "torch.as_tensor",
    "seed": "torch.manual_seed",
    "no_grad": "torch.no_grad",
    "save": "torch.save",
    "load": "torch.load",
    "distributed.init_parallel_env": "torch.distributed.init_process_group",
    "loss.numpy()": "loss.item(), or loss.detach().numpy()",
    "label._to(place)": "label.to(device)",
    "model.set_state_dict": "model.load_state_dict",
    "tensor.stop_gradient = False": "tensor.requires_grad_()",
}
"""Paddle's call → torch's."""


def refuse(module: str, name: str) -> NoReturn:
    """Say what a name of Paddle's is in torch's words."""
    asked = f"{module}.{name}" if module else name
    inside = [call for call in SUBSTITUTIONS if call.startswith(f"{asked}.")]
    if asked in SUBSTITUTIONS:
        remedy = f" Use {SUBSTITUTIONS[asked]}."
    elif inside:
        remedy = f" Use torch's: {'; '.join(f'{call} is {SUBSTITUTIONS[call]}' for call in inside)}."
    else:
        remedy = " Layers, tensors and data are torch's: docs/coming-from/paddle.md has the table."
    raise AttributeError(f"mezzo.compat.paddle has no {asked}: it brings Paddle's mixed precision alone.{remedy}")
