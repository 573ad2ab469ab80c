"""`megengine.autodiff.GradManager`: compute gradients of attached tensors only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self
from weakref import ref

import torch

from mezzo._torch import DisableTorchFunctionSubclass
from mezzo.autocasting.autocast import autocast_all_devices
from mezzo.compat._missing import module_getattr
from mezzo.compat.megengine._substitutions import SUBSTITUTIONS

__all__ = ["GradManager"]

Outputs = torch.Tensor | Sequence[torch.Tensor] | None
"""Outputs to differentiate, or their gradients."""
Callback = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes a tensor and its new gradient; returns the gradient to accumulate."""


class _Attached(NamedTuple):
    """A tensor of a `GradManager`, held weakly, and its callbacks."""

    tensor: ref[torch.Tensor]
    callbacks: list[Callback]


class GradManager:
    """`megengine.autodiff.GradManager`: accumulate gradients into the attached tensors.

    Attaching a tensor sets its `requires_grad`. Differs from MegEngine: torch builds the autograd
    graph outside of a recording too.

    >>> x = torch.tensor([3.0])
    >>> with GradManager().attach(x) as gm:
    ...     gm.backward(x * x)
    >>> x.grad
    tensor([6.])
    """

    def __init__(self) -> None:
        self._attached: dict[int, _Attached] = {}
        self._recording = False

    def attach(
        self,
        tensors: torch.Tensor | Iterable[torch.Tensor],
        callbacks: Callback | Iterable[Callback] | None = None,
    ) -> Self:
        """Compute gradients for these tensors; attaching one again adds the callbacks."""
        new_callbacks = [callbacks] if callable(callbacks) else list(callbacks or ())
        if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
            tensors = [tensors]
        attachable = [_check_attachable(tensor) for tensor in tensors]
        for tensor in attachable:
            self._attach(tensor, new_callbacks)
        return self

    def _attach(self, tensor: torch.Tensor, callbacks: list[Callback]) -> None:
        if not tensor.requires_grad:
            tensor.requires_grad_()
        if not tensor.is_leaf:
            # Otherwise torch warns when .grad of a non-leaf tensor is read.
            tensor.retain_grad()
        key = id(tensor)
        if key not in self._attached:
            self._attached[key] = _Attached(ref(tensor, self._detach_callback(key)), [])
        self._attached[key].callbacks.extend(callbacks)

    def attached_tensors(self) -> list[torch.Tensor]:
        """Return the attached tensors that are still alive, in order of attachment."""
        tensors = [attached.tensor() for attached in list(self._attached.values())]
        return [tensor for tensor in tensors if tensor is not None]

    def backward(self, y: Outputs = None, dy: Any = None) -> None:
        """Accumulate the gradients of `y` into the attached tensors, and end the recording.

        `dy` are the gradients of the outputs, 1 by default.
        """
        if not self._recording:
            raise RuntimeError(
                "no computation history. did you forget record() or call a method that clears the"
                " history? Run the forward pass and backward() inside `with gm:`."
            )
        try:
            self._accumulate(as_list(y), as_list(dy))
        finally:
            self.release()

    def record(self) -> None:
        """Start recording."""
        if self._recording:
            raise RuntimeError(
                "already recording. Call backward() or release() first, or use another GradManager."
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

    def _accumulate(self, outputs: list[torch.Tensor], output_grads: list[Any]) -> None:
        attached = self.attached_tensors()
        check_outputs(outputs, output_grads)
        if not outputs or not attached:
            return
        if not output_grads:
            output_grads = [torch.ones_like(output) for output in outputs]
        pairs = [pair for pair in zip(outputs, output_grads, strict=True) if pair[0].requires_grad]
        if not pairs:
            raise RuntimeError(
                "The outputs passed to backward() do not depend on an attached tensor. Call"
                " gm.attach(net.parameters()) before the forward pass, and compute the loss inside"
                " `with gm:` without detach(), numpy() or torch.no_grad()."
            )
        outputs = [output for output, _ in pairs]
        output_grads = [_expand_output_grad(gradient, output) for output, gradient in pairs]
        # Read before autograd.grad, which writes .grad of attached non-leaf tensors.
        old_gradients = [tensor.grad for tensor in attached]
        # Backward runs in the dtypes of the forward pass, without casts of its own.
        with autocast_all_devices(enabled=False), DisableTorchFunctionSubclass():
            gradients = torch.autograd.grad(outputs, attached, output_grads, allow_unused=True)
        for tensor, gradient, old in zip(attached, gradients, old_gradients, strict=True):
            if gradient is not None:
                self._add(tensor, gradient, old)

    @torch.no_grad()
    def _add(self, tensor: torch.Tensor, gradient: torch.Tensor, old: torch.Tensor | None) -> None:
        for callback in self._attached[id(tensor)].callbacks:
            gradient = callback(tensor, gradient)
        tensor.grad = gradient if old is None else old.add_(gradient)

    def _detach_callback(self, key: int) -> Callable[[object], None]:
        # A weak reference, so that an attached tensor does not keep its manager alive.
        weak_manager = ref(self)

        def detach(_: object) -> None:
            manager = weak_manager()
            if manager is not None:
                manager._attached.pop(key, None)

        return detach


def as_list(values: Any) -> list[Any]:
    """Return None, one value, or a list or tuple of values as a list."""
    if values is None:
        return []
    return list(values) if isinstance(values, list | tuple) else [values]


def check_outputs(outputs: list[Any], output_grads: list[Any]) -> None:
    """Raise for outputs that are no tensors, and for more or fewer gradients than outputs."""
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"backward(y) takes a tensor or a list of tensors, got {type(output).__name__}."
                " Pass the loss itself, not loss.item() or loss.numpy()."
            )
    if output_grads and len(output_grads) != len(outputs):
        raise ValueError(
            f"backward() needs one dy for each y, got {len(outputs)} y and {len(output_grads)} dy."
        )


def _check_attachable(tensor: Any) -> torch.Tensor:
    """Return a tensor that can have gradients; raise AssertionError, as MegEngine, for others."""
    if not isinstance(tensor, torch.Tensor):
        raise AssertionError(
            f"Object to be attached should be Tensor, got {type(tensor).__name__}. Pass tensors,"
            " such as net.parameters()."
        )
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise AssertionError(
            f"A tensor to be attached must be floating-point, got {tensor.dtype}: integers have no"
            " gradients. Convert it: tensor.astype('float32')."
        )
    return tensor


def _expand_output_grad(gradient: Any, output: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an output; a single number is expanded to its shape."""
    tensor = torch.as_tensor(gradient, dtype=output.dtype, device=output.device)
    return tensor.expand_as(output) if tensor.numel() == 1 else tensor


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
