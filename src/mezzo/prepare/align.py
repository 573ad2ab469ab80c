"""Wide linear layers whose number of outputs is odd for the hardware: they compute a few more, which nobody sees.

Tensor cores read rows of 16 bytes. The head of GPT-2 has 50257 outputs, and no fast 16-bit kernel takes rows of that length: its three products take 16.1 ms of a step on
an H200, where 50264 outputs take 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import MethodType

import torch
from torch import nn
from torch.nn import functional as F

MULTIPLE = 8
"""16 bytes of 16-bit numbers."""
_WORTHWHILE = 2**20
"""Elements of a weight below which the extra copies cost more than they save."""


@dataclass(frozen=True, eq=False)
class Aligned:
    """A layer that computes more outputs than it gives."""

    name: str
    module: nn.Linear

    @property
    def outputs(self) -> int:
        """How many it computes."""
        return self.module.out_features + -self.module.out_features % MULTIPLE

    def __str__(self) -> str:
        return f"{self.name} computes {self.outputs} outputs and gives {self.module.out_features}: rows of 16-bit numbers are fast in multiples of {MULTIPLE}"


def find(models: Iterable[nn.Module], device: str) -> tuple[Aligned, ...]:
    """The layers that gain by it. Only GPUs mind, and only plain linear layers are known to do nothing but the product."""
    if device != "cuda":
        return ()
    return tuple(Aligned(name, module) for model in models for name, module in model.named_modules() if isinstance(module, nn.Linear) and _gains(module))


def _gains(module: nn.Linear) -> bool:
    plain = type(module) is nn.Linear and "forward" not in module.__dict__
    return plain and module.out_features % MULTIPLE != 0 and module.weight.numel() >= _WORTHWHILE


def apply(aligned: Aligned) -> Callable[[], None]:
    """Replace the layer's forward; what comes back puts it back."""
    module = aligned.module
    module.__dict__["forward"] = MethodType(_forward, module)
    return partial(module.__dict__.pop, "forward", None)


def _forward(module: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    missing = -module.out_features % MULTIPLE
    weight = F.pad(module.weight, (0, 0, 0, missing))
    bias = None if module.bias is None else F.pad(module.bias, (0, missing))
    # Contiguous, as any linear layer's outputs: whoever calls `view` on them need not know.
    return F.linear(inputs, weight, bias)[..., : module.out_features].contiguous()


# A method is pickled by its name: what comes out of a file has the forward of its class, which gives the same.
_forward.__name__ = "forward"
