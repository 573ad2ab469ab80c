"""`megengine.autodiff.GradManager`: gradients for the tensors that were attached, and for no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self
from weakref import ref

import torch

from mezzo.autocasting.autocast import autocast_all_devices

Outputs = torch.Tensor | Sequence[torch.Tensor] | None
"""What is differentiated, or what its gradients are."""
Callback = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Sees a tensor and its new gradient before that is added, and gives the gradient to add."""


class GradManager:
    """Records while it is entered, and accumulates gradients into what was attached.

    A tensor that is attached needs gradients from then on. torch builds a graph outside of a
    recording too; MegEngine does not.

    >>> x = torch.tensor([3.0])
    >>> with GradManager().attach(x) as gm:
    ...     gm.backward(x * x)
    >>> x.grad
    tensor([6.])
    """

    def __init__(self) -> None:
        self._attached: dict[int, tuple[ref[torch.Tensor], list[Callback]]] = {}
        self._recording = False

    def attach(
        self,
        tensors: torch.Tensor | Iterable[torch.Tensor],
        callbacks: Callback | Iterable[Callback] | None = None,
    ) -> Self:
        """Compute gradients for these tensors; callbacks of a tensor that is attached again are added to those it has."""
        added = [] if callbacks is None else [callbacks] if callable(callbacks) else list(callbacks)
        for one in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if not isinstance(one, torch.Tensor):
                # MegEngine's type.
                raise AssertionError(
                    f"Object to be attached should be Tensor, got {type(one).__name__}. Pass"
                    " tensors, such as net.parameters()."
                )
            if not one.requires_grad:
                one.requires_grad_()
            if not one.is_leaf:
                # torch warns of the gradient of a result unless somebody asked for it.
                one.retain_grad()
            if id(one) not in self._attached:
                self._attached[id(one)] = ref(one, self._forget(id(one))), []
            self._attached[id(one)][1].extend(added)
        return self

    def attached_tensors(self) -> list[torch.Tensor]:
        """The attached tensors that are still alive, in the order in which they came."""
        return [one for weak, _ in list(self._attached.values()) if (one := weak()) is not None]

    def backward(self, y: Outputs = None, dy: Any = None) -> None:
        """Add the gradients of `y`, each output weighted by its `dy` (1 where there is none), to the attached tensors. Ends the recording."""
        if not self._recording:
            raise RuntimeError(
                "no computation history. did you forget record() or call a method that clears the"
                " history? Run the forward pass and backward() inside `with gm:`."
            )
        try:
            self._accumulate(listed(y), listed(dy))
        finally:
            self.release()

    def record(self) -> None:
        """Start to record."""
        if self._recording:
            raise RuntimeError(
                "already recording. Call backward() or release() first; another history needs"
                " another GradManager."
            )
        self._recording = True

    def release(self) -> None:
        """Stop recording."""
        self._recording = False

    def __enter__(self) -> Self:
        self.record()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _accumulate(self, outputs: list[torch.Tensor], weights: list[Any]) -> None:
        attached = self.attached_tensors()
        if not outputs or not attached:
            return
        given = (
            [_weight(weight, output) for weight, output in zip(weights, outputs, strict=True)]
            if weights
            else [torch.ones_like(one) for one in outputs]
        )
        # Noted before: torch itself writes the gradient of an attached result.
        before = [one.grad for one in attached]
        # Casts are the forward pass's business: backward runs in the dtypes that it left.
        with autocast_all_devices(enabled=False):
            gradients = torch.autograd.grad(outputs, attached, given, allow_unused=True)
        for tensor, gradient, old in zip(attached, gradients, before, strict=True):
            if gradient is not None:
                self._add(tensor, gradient, old)

    @torch.no_grad()
    def _add(self, tensor: torch.Tensor, gradient: torch.Tensor, old: torch.Tensor | None) -> None:
        for callback in self._attached[id(tensor)][1]:
            gradient = callback(tensor, gradient)
        tensor.grad = gradient if old is None else old.add_(gradient)

    def _forget(self, key: int) -> Callable[[object], None]:
        # Weakly: whoever is attached does not keep its manager.
        weak = ref(self)

        def forget(_: object) -> None:
            manager = weak()
            if manager is not None:
                manager._attached.pop(key, None)

        return forget


def listed(values: Any) -> list[Any]:
    """One value, several or none, as a list."""
    if values is None:
        return []
    return list(values) if isinstance(values, list | tuple) else [values]


def _weight(weight: Any, output: torch.Tensor) -> torch.Tensor:
    """What an output's gradient is: a single number serves an output of any shape."""
    given = torch.as_tensor(weight, dtype=output.dtype, device=output.device)
    return given.expand_as(output) if given.numel() == 1 else given
