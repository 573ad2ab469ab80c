"""States of the random number generators of torch, Python and NumPy, as plain values."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from mezzo._errors import CheckpointError

_CUDA_STATE = 16
"""Bytes of the state of a CUDA generator: seed and offset."""
_NUMPY_KIND = "MT19937"


def capture_rng_state() -> dict[str, Any]:
    """Return the states of all generators, of CUDA and NumPy only if they are in use."""
    state = capture_host_rng_state()
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def capture_host_rng_state() -> dict[str, Any]:
    """Return the states of the generators on the host, of NumPy only if it is in use."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def check_rng_state(state: Any) -> None:
    """Raise `CheckpointError` for invalid states: each is set on a new generator first."""
    try:
        torch.Generator().set_state(state["torch"])
        version, internal, gauss = state["python"]
        random.Random().setstate((version, tuple(internal), _check_gauss(gauss)))  # noqa: S311 - checks a state
        _check_cuda(state.get("cuda", []))
        _check_numpy(state.get("numpy"))
    except Exception as error:
        raise CheckpointError(
            f"The states of the random generators are not what mezzo saves: {error}. Save the"
            " checkpoint again."
        ) from error


def _check_cuda(states: Any) -> None:
    for state in states:
        if (
            state.dtype is not torch.uint8
            or state.dim() != 1
            or state.device.type != "cpu"
            or state.numel() > _CUDA_STATE
        ):
            raise ValueError(f"CUDA's state has shape {tuple(state.shape)} and {state.dtype}")
    if torch.cuda.is_initialized():
        for device, device_state in zip(range(torch.cuda.device_count()), states, strict=False):
            torch.Generator(f"cuda:{device}").set_state(device_state)


def _check_numpy(state: Any) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is None or state is None:
        return
    kind, keys, position, has_gauss, gauss = state
    # NumPy accepts any position, and reads out of bounds at the next draw.
    if kind == _NUMPY_KIND and not (isinstance(position, int) and 0 <= position <= len(keys)):
        raise ValueError(f"NumPy's state is at {position!r} of {len(keys)}")
    numpy.random.RandomState().set_state((kind, keys, position, has_gauss, _check_gauss(gauss)))


def _check_gauss(gauss: Any) -> Any:
    """Return the normal number that a generator has drawn ahead, or raise if it is not one."""
    if gauss is not None and not isinstance(gauss, float):
        raise ValueError(f"{gauss!r:.80} is not a normal number that was drawn ahead")
    return gauss


def host_rng_has_moved(since: dict[str, Any]) -> bool:
    """Return whether numbers were drawn on the host since a state was captured.

    >>> before = capture_host_rng_state()
    >>> host_rng_has_moved(before), torch.rand(1).shape, host_rng_has_moved(before)
    (False, torch.Size([1]), True)
    """
    now = capture_host_rng_state()
    return any(
        not torch.equal(now[name], saved) if name == "torch" else now[name] != saved
        for name, saved in since.items()
        if name in now
    )


def restore_rng_state(state: dict[str, Any]) -> None:
    """Set the states of all generators; those that are not in use now are skipped."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        for device, device_state in zip(
            range(torch.cuda.device_count()), state["cuda"], strict=False
        ):
            torch.cuda.set_rng_state(device_state, device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))
