"""`paddle.DataParallel` on torch's `DistributedDataParallel`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.compat.paddle.nn import Layer


class DataParallel(Layer):
    """`paddle.DataParallel`: average a model's gradients over the processes of a group.

    Decorate the model first, then wrap it. In a single process it calls the model directly.

    >>> model = DataParallel(nn.Linear(2, 1))
    >>> sorted(model.state_dict())
    ['bias', 'weight']
    """

    def __init__(
        self,
        layers: nn.Module,
        strategy: Any = None,
        comm_buffer_size: int = 25,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: Any = None,
    ) -> None:
        super().__init__()
        self._layers = layers
        is_distributed = (
            distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size(group) > 1
        )
        # Not registered as a submodule: every parameter would then have two names.
        self.__dict__["_wrapped"] = (
            DistributedDataParallel(
                layers,
                bucket_cap_mb=comm_buffer_size,
                find_unused_parameters=find_unused_parameters,
                process_group=group,
            )
            if is_distributed
            else layers
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        return self.__dict__["_wrapped"](*inputs, **kwargs)

    def no_sync(self) -> Any:
        """Return a context in which gradients are accumulated without averaging them."""
        wrapped = self.__dict__["_wrapped"]
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss unchanged: torch averages the gradients during backward."""
        return loss

    def apply_collective_grads(self) -> None:
        """Do nothing: torch averages the gradients during backward."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state dict, without a prefix."""
        return self._layers.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the model."""
        return self._layers.load_state_dict(*args, **kwargs)

    def set_state_dict(self, state_dict: Any, use_structured_name: bool = True) -> Any:
        """Load a state dict of the model; of a `Layer` in Paddle's way, with its warnings."""
        load = getattr(self._layers, "set_state_dict", self._layers.load_state_dict)
        return load(state_dict)

    set_dict = set_state_dict
