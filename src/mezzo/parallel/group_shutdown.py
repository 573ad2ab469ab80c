"""Drop captured graphs before a process group shuts down, which would wait for them for ever.

NCCL waits at the end for all CUDA graphs that hold its collectives. A script that ends with
`torch.distributed.destroy_process_group()` has its training step in memory, and would not end.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any, Protocol
from weakref import WeakSet

from torch import distributed


class GraphHolder(Protocol):
    """Holds captured graphs with collectives."""

    def drop_graphs(self) -> None:
        """Drop the graphs, after waiting for them."""


_holders: WeakSet[GraphHolder] = WeakSet()


def drop_before_shutdown(holder: GraphHolder) -> None:
    """Call `holder.drop_graphs()` before any process group shuts down. Keeps no reference."""
    _holders.add(holder)
    _extend_shutdown()


@cache
def _extend_shutdown() -> None:
    # The method, not `destroy_process_group`, which scripts may have imported by name.
    shutdown = distributed.ProcessGroup.shutdown

    @wraps(shutdown)
    def drop_and_shut_down(group: Any) -> None:
        for holder in list(_holders):
            holder.drop_graphs()
        shutdown(group)

    setattr(distributed.ProcessGroup, shutdown.__name__, drop_and_shut_down)
