"""Which devices a program can be put on."""

from __future__ import annotations

import torch

from mezzo._errors import UnsupportedError, choices


def devices_here() -> frozenset[str]:
    """The types of the devices of this machine.

    >>> sorted(devices_here() & {"cpu", "meta"})
    ['cpu', 'meta']
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    return frozenset({"cpu", "meta"} if here is None else {"cpu", "meta", here.type})


def device_here(device: str | torch.device) -> torch.device:
    """A device of this machine, or an error that says which there are."""
    kind = str(device).partition(":")[0]
    if kind not in devices_here():
        raise UnsupportedError(f"There is no device {str(device)!r} here. {choices(sorted(devices_here()))}")
    return torch.device(device)
