"""Pad token batches to few lengths, where masks and labels mark what is padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from mezzo._casting import map_tensors
from mezzo._errors import PolicyError
from mezzo.step.inputs import Call, as_keywords, move_inputs

Padding = int | Callable[[Any], Any] | None
"""A multiple to pad sequences to, a function of the batch, or None."""

_TOKENS, _MASK, _LABELS = "input_ids", "attention_mask", "labels"
_DECODER = "decoder_"
IGNORED_LABEL = -100
"""The label that cross-entropy ignores, in torch and in transformers."""
_HELP = "Pad in the collate function of the data loader, or pass pad_to=function."


def pad_batch(
    batch: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    multiple: int = 64,
    *,
    pad_token_id: int = 0,
) -> dict[str, Any]:
    """Pad the sequences of a batch of tokens on the right, to a multiple of a length.

    Captured steps and compiled models then meet few shapes. `input_ids` are padded with
    `pad_token_id`, labels with -100, which losses ignore, and masks and all others with 0. An
    `attention_mask` is added if there is none.

    Args:
        batch: A mapping of tensors with the shapes [batch, sequence, ...]; or a list of samples,
            each a mapping of sequences or numbers. So `functools.partial(mezzo.pad_batch,
            multiple=64)` is a collate function of a `DataLoader`.
        multiple: What the padded length is a multiple of.
        pad_token_id: The token to pad with.

    >>> padded = pad_batch([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}], multiple=4)
    >>> padded["input_ids"].tolist()
    [[5, 6, 7, 0], [8, 0, 0, 0]]
    >>> padded["attention_mask"].tolist()
    [[1, 1, 1, 0], [1, 0, 0, 0]]
    """
    rule = PaddingRule(check_multiple(multiple), pad_token_id)
    if isinstance(batch, Mapping):
        return rule.pad(dict(batch.items()))
    if not batch or not all(isinstance(sample, Mapping) for sample in batch):
        kinds = ", ".join(sorted({type(sample).__name__ for sample in batch})) or "nothing"
        raise PolicyError(
            f"pad_batch takes a mapping of tensors or a list of mappings, got a list of {kinds}."
        )
    return rule.pad(_stack([dict(sample.items()) for sample in batch], rule))


@dataclass(frozen=True)
class PaddingRule:
    """How sequences are padded."""

    multiple: int
    pad_token_id: int = 0
    longest: int | None = None
    """The longest sequence that the model takes; None if there is no limit."""
    makes_mask: bool = True
    """Whether an `attention_mask` is added if there is none."""

    @classmethod
    def for_model(cls, model: nn.Module, multiple: int) -> PaddingRule:
        """Read the padding token, the longest sequence and the parameters of a model."""
        config = getattr(model, "config", None)
        token = getattr(config, "pad_token_id", None)
        longest = getattr(config, "max_position_embeddings", None)
        return cls(
            multiple,
            token if isinstance(token, int) and token >= 0 else 0,
            longest if isinstance(longest, int) and longest > 0 else None,
            _MASK in inspect.signature(model.forward).parameters,
        )

    def padded(self, length: int) -> int:
        """Return the length that a sequence is padded to."""
        rounded = -(-length // self.multiple) * self.multiple
        return rounded if self.longest is None else max(length, min(rounded, self.longest))

    def fill(self, name: str) -> int:
        """Return what an input is padded with."""
        if name.endswith(_LABELS):
            return IGNORED_LABEL
        return self.pad_token_id if name.removeprefix(_DECODER) == _TOKENS else 0

    def pad(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Pad the tensors of a batch whose dimension 1 is that of the tokens or of the mask."""
        length = _length(batch)
        if batch.get(_MASK) is None:
            batch = batch | {_MASK: self._new_mask(batch)}
        return {
            name: self._pad_one(name, value) if _is_sequence(name, value, length) else value
            for name, value in batch.items()
        }

    def pad_target(self, target: Any, length: int) -> Any:
        """Pad labels that are passed as the target: integers, one for each token."""

        def pad(tensor: torch.Tensor) -> torch.Tensor:
            is_labels = _is_sequence(_LABELS, tensor, length) and tensor.shape[1] == length
            return self._pad_one(_LABELS, tensor) if is_labels else tensor

        return map_tensors(target, pad)

    def _pad_one(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        extra = self.padded(tensor.shape[1]) - tensor.shape[1]
        if not extra:
            return tensor
        return F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, extra), value=self.fill(name))

    def _new_mask(self, batch: dict[str, Any]) -> torch.Tensor:
        if not self.makes_mask:
            raise PolicyError(
                f"pad_to={self.multiple} needs a mask that marks what is padding, and the model's"
                f" forward has no parameter {_MASK!r}. {_HELP}"
            )
        tokens: torch.Tensor = batch[_TOKENS]
        return torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)


@dataclass(frozen=True)
class InputPadding:
    """Pads the inputs of a training step."""

    rule: PaddingRule | None
    function: Callable[[Any], Any] | None

    @classmethod
    def parse(cls, pad_to: Padding, model: nn.Module) -> InputPadding | None:
        """Read the argument `pad_to=`."""
        if pad_to is None:
            return None
        if callable(pad_to):
            return cls(None, pad_to)
        return cls(PaddingRule.for_model(model, check_multiple(pad_to, "pad_to")), None)

    def change(self, call: Call, device: torch.device) -> Call:
        """Pad the arguments of a call, on the device: copies to it are asynchronous."""
        if self.rule is None:
            return self._change_by_function(call)
        args, kwargs = move_inputs(call, device)
        keywords = as_keywords(args[0]) if args else kwargs
        if keywords is None or (args and kwargs):
            kinds = ", ".join(type(arg).__name__ for arg in args)
            raise PolicyError(
                f"pad_to={self.rule.multiple} pads batches that are passed by keyword or as one"
                f" mapping with {_TOKENS!r} or {_MASK!r}, got {kinds}. {_HELP}"
            )
        length = _length(keywords)
        padded = self.rule.pad(keywords)
        targets = (self.rule.pad_target(arg, length) for arg in args[1:])
        return Call((padded, *targets) if args else (), {} if args else padded)

    def _change_by_function(self, call: Call) -> Call:
        if self.function is None:
            return call
        args, kwargs = call
        if not args:
            return Call((self.function(kwargs),), {})
        if len(args) == 1:
            return Call((self.function(args[0]),), kwargs)
        return Call(tuple(self.function(args)), kwargs)


def check_multiple(multiple: Any, name: str = "multiple") -> int:
    """Return the multiple that lengths are padded to; raise `PolicyError` unless it is one."""
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise PolicyError(
            f"{name}={multiple!r} is not a length. Pass an integer of 1 or more, such as 64."
        )
    return multiple


def _length(batch: Mapping[str, Any]) -> int:
    """Return the length of the sequences of a batch."""
    found = [(name, batch[name]) for name in (_TOKENS, _MASK) if batch.get(name) is not None]
    if not found:
        raise PolicyError(
            f"Padding needs a batch with {_TOKENS!r} or {_MASK!r}, got"
            f" {', '.join(map(str, batch)) or 'nothing'}. {_HELP}"
        )
    for name, value in found:
        if not isinstance(value, torch.Tensor) or value.dim() != 2:
            shape = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(type(value))
            raise PolicyError(
                f"Padding needs {name!r} as a tensor of shape [batch, sequence], got {shape}."
                f" {_HELP}"
            )
    length: int = found[0][1].shape[1]
    return length


def _is_sequence(name: str, value: Any, length: int) -> bool:
    """Return whether dimension 1 of an input is that of a sequence.

    Labels of integers and inputs of a decoder may have a length of their own.
    """
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return False
    if name.endswith(_LABELS):
        return not value.is_floating_point()
    return value.shape[1] == length or name.startswith(_DECODER)


def _stack(samples: list[dict[str, Any]], rule: PaddingRule) -> dict[str, Any]:
    """Stack samples; sequences of different lengths are padded to the longest."""
    if _MASK not in samples[0] and _TOKENS in samples[0]:
        samples = [sample | {_MASK: [1] * len(sample[_TOKENS])} for sample in samples]
    stacked = {}
    for name in samples[0]:
        tensors = [torch.as_tensor(sample[name]) for sample in samples]
        longest = max((len(tensor) for tensor in tensors if tensor.dim()), default=0)
        stacked[name] = torch.stack(
            [
                F.pad(
                    tensor,
                    (0, 0) * (tensor.dim() - 1) + (0, longest - len(tensor)),
                    value=rule.fill(name),
                )
                if tensor.dim()
                else tensor
                for tensor in tensors
            ]
        )
    return stacked
