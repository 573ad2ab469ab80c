"""`paddle.DataParallel`: torch's, in Paddle's words; on one process the model itself."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


class DataParallel(nn.Module):
    """A model whose gradients are averaged over the processes of a group. Decorate first, then wrap.

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
        several = (
            distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size(group) > 1
        )
        # Not a module of this one, or every parameter would have two names.
        self.__dict__["_called"] = (
            DistributedDataParallel(
                layers,
                bucket_cap_mb=comm_buffer_size,
                find_unused_parameters=find_unused_parameters,
                process_group=group,
            )
            if several
            else layers
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's own output."""
        return self.__dict__["_called"](*inputs, **kwargs)

    def no_sync(self) -> Any:
        """Leave gradients unaveraged for a while, to accumulate them."""
        called = self.__dict__["_called"]
        return called.no_sync() if isinstance(called, DistributedDataParallel) else nullcontext()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as it is: gradients are averaged by themselves."""
        return loss

    def apply_collective_grads(self) -> None:
        """Nothing is left to do: gradients are averaged by themselves."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own state, without a prefix."""
        return self._layers.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's own state."""
        return self._layers.load_state_dict(*args, **kwargs)

    set_state_dict = load_state_dict
