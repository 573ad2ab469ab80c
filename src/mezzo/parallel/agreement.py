"""Compare values over the ranks of a process group; raise on all of them if they differ.

Ranks that train with different settings drift apart, or wait for each other for ever. They compare
a hash once, before the first call of a step; the values themselves are exchanged only if it
differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from mezzo._errors import PolicyError

_SHOWN = 5
"""Fields that a message lists."""
_WIDTH = 60
"""Characters of a value that a message shows."""
_HASH_BYTES = 8


def check_agreement(
    values: Mapping[str, str], group: distributed.ProcessGroup | None, device: torch.device
) -> None:
    """Raise `PolicyError` on all ranks of a group unless all of them have the same values.

    `values` are settings by name. Every rank of the group has to call this, and all of them get the
    same error. It is one collective of 16 bytes, and two more if something differs. Synchronizes.
    """
    if distributed.get_world_size(group) == 1:
        return
    encoded = json.dumps(dict(values)).encode()
    digest = hashlib.sha256(json.dumps(sorted(values.items())).encode()).digest()[:_HASH_BYTES]
    own = torch.tensor([int.from_bytes(digest, signed=True), len(encoded)], device=device)
    gathered = [one.tolist() for one in _all_gather(own, group)]
    if any(one != gathered[0] for one in gathered):
        padded = torch.zeros(max(length for _, length in gathered), dtype=torch.uint8)
        padded[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        texts = [bytes(one.tolist()) for one in _all_gather(padded.to(device), group)]
        by_rank = [
            json.loads(text[:length]) for text, (_, length) in zip(texts, gathered, strict=True)
        ]
        raise PolicyError(disagreement(by_rank))


def _all_gather(
    tensor: torch.Tensor, group: distributed.ProcessGroup | None
) -> Sequence[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(gathered, tensor, group=group)
    return gathered


def disagreement(by_rank: Sequence[Mapping[str, Any]]) -> str:
    """Describe the fields that differ, with the ranks that have each value.

    >>> disagreement([{"dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": "float16"}])
    'The ranks train with different settings. dtype: float16 on ranks 0, 2; bfloat16 on rank 1. \
Create the step with the same arguments on all ranks.'
    """
    names = dict.fromkeys(name for values in by_rank for name in values)
    differing = [name for name in names if len({values.get(name) for values in by_rank}) > 1]
    lines = [f"{name}: {_by_value(name, by_rank)}" for name in differing[:_SHOWN]]
    if len(differing) > _SHOWN:
        lines.append(f"{len(differing) - _SHOWN} more fields differ")
    return (
        f"The ranks train with different settings. {'. '.join(lines)}. Create the step with the"
        " same arguments on all ranks."
    )


def _by_value(name: str, by_rank: Sequence[Mapping[str, Any]]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, values in enumerate(by_rank):
        ranks.setdefault(values.get(name, "absent"), []).append(rank)
    return "; ".join(
        f"{value:.{_WIDTH}} on rank{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}"
        for value, own in ranks.items()
    )
