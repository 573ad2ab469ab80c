"""Copy a model without its decoration, and let the user's objects stand in for the copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo._dtypes import HALF_DTYPES
from mezzo.autocasting.module_rules import RULED_FORWARD, WRAPPED_FORWARD
from mezzo.prepare.half_weights import HalfWeights
from mezzo.prepare.kept_results import copy_with_results


def plain_copy(model: nn.Module, *, to_float32: bool) -> nn.Module:
    """Return a copy of a model, not decorated, with exact float32 weights where it has them."""
    try:
        copied = copy_with_results(model)
    except TypeError:
        copied = copy_with_results(model, _uncopyable(model))
    for module in copied.modules():
        forward = module.__dict__.get("forward")
        if getattr(forward, "__module__", type(forward).__module__).startswith("mezzo."):
            _strip(module)
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = _LocalBatchNorm  # type: ignore[assignment]
    for source, tensor in zip(_tensors_of(model), _tensors_of(copied), strict=True):
        weights = HalfWeights.of(source)
        if weights is not None:
            tensor.data = weights.read(source)
        elif to_float32 and tensor.dtype in HALF_DTYPES:
            tensor.data = tensor.data.float()
        tensor.grad = None
        # They may change gradients, and are not copied with a tensor.
        if tensor.requires_grad:
            for hook in (source._backward_hooks or {}).values():
                tensor.register_hook(hook)
    return copied


def _strip(module: nn.Module) -> None:
    """Remove the forwards that decoration and module rules have put before the module's own."""
    forward = module.__dict__.pop("forward")
    while True:
        forward = getattr(forward, WRAPPED_FORWARD, getattr(forward, RULED_FORWARD, None))
        if forward is None:
            return
        if not getattr(forward, "__module__", "").startswith("mezzo."):
            if forward is not type(module).forward:
                module.__dict__["forward"] = forward
            return


def _uncopyable(model: nn.Module) -> dict[int, Any]:
    """Return what a model keeps that cannot be copied, such as a lock or a file: it is shared."""
    kept = (value for module in model.modules() for value in vars(module).values())
    return {id(value): value for value in kept if not _is_copyable(value)}


def _is_copyable(value: Any) -> bool:
    try:
        copy_with_results(value)
    except TypeError:
        # The dictionary of the modules inside is copied, without what they keep.
        return isinstance(value, dict) and any(
            isinstance(item, nn.Module) for item in value.values()
        )
    return True


class _LocalBatchNorm(nn.BatchNorm1d):
    """Batch norm over the batch of this rank: no collective is called."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - the name in torch
        pass


@contextmanager
def standing_in(
    models: Sequence[nn.Module],
    copies: Sequence[nn.Module],
    wrappers: Sequence[DistributedDataParallel],
) -> Iterator[None]:
    """Give the modules of the user the content of their copies in the block."""
    pairs = [
        pair
        for model, copy in zip(models, copies, strict=True)
        for pair in zip(model.modules(), copy.modules(), strict=True)
    ]
    contents = [(vars(module), dict(vars(module))) for module, _ in pairs]
    contents += [(vars(wrapper), dict(vars(wrapper))) for wrapper in wrappers]
    try:
        for module, copy in pairs:
            vars(module).clear()
            vars(module).update(vars(copy))
        for wrapper in wrappers:
            vars(wrapper)["forward"] = wrapper.module
        yield
    finally:
        for content, before in contents:
            content.clear()
            content.update(before)


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
