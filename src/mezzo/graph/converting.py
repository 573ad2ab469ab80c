"""What `mezzo.convert` does: words read, examples exported, each assembled. Apart from the function itself, since torch's tracer takes a while to import."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from mezzo import _events
from mezzo._dtypes import dtype_name
from mezzo._errors import ConversionError
from mezzo._hardware import hardware
from mezzo._torch import pytree
from mezzo.graph.assemble import assemble
from mezzo.graph.converted import Artefact, Converted
from mezzo.graph.exporting import export, unwrapped
from mezzo.graph.lists import Cost, Words, bytes_moved, read_exclude, read_lists
from mezzo.graph.weights import Pool
from mezzo.policy.decide import resolve
from mezzo.policy.policy import Policy


def convert_examples(model: nn.Module, args: Any, kwargs: Any, policy: Policy, dynamic_shapes: Any, **words: Any) -> Converted:
    """Convert a model once for each example."""
    begin = time.perf_counter()
    module, examples = unwrapped(model), _examples(args, kwargs)
    said = _said(policy, _device(module, examples), **words)
    exported = [export(module, *example, dynamic_shapes) for example in examples]
    pool, modules = Pool(), dict(module.named_modules(remove_duplicate=False))
    programs = tuple(assemble(one, said, modules, pool) for one in exported)
    converted = Converted(Artefact(programs, _options(said), tuple(exported)))
    if _events.listening():
        casts, taken = converted.casts, time.perf_counter() - begin
        _events.emit(_events.GraphConverted(type(module).__name__, dtype_name(said.dtype), casts.before.count, casts.after.count, taken))
    return converted


def _said(
    policy: Policy,
    device: str,
    *,
    half: Collection[str],
    full: Collection[str],
    conditional: Collection[Any],
    exclude: Collection[str] | str,
    cast_params: bool,
    keep_io: bool,
    cost: Cost | None,
) -> Words:
    halves, fulls, conditions = read_lists(half, full, conditional)
    resolved = resolve(policy, hardware(device))
    return Words(
        policy,
        resolved.dtype or torch.bfloat16,
        device,
        half=halves,
        full=fulls,
        conditional=conditions,
        exclude=read_exclude(exclude),
        cast_params=cast_params,
        keep_io=keep_io,
        cost=cost or bytes_moved,
        idle=resolved.reason if resolved.dtype is None else "",
    )


def _examples(args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """The example calls: one, or a list of them."""
    if not isinstance(args, list) or not all(isinstance(one, tuple) for one in args):
        return [(args, {} if kwargs is None else kwargs)]
    if not args:
        raise ConversionError("convert was given an empty list of example inputs. Pass at least one tuple of the model's arguments.")
    named = [kwargs or {}] * len(args) if kwargs is None or isinstance(kwargs, Mapping) else list(kwargs)
    if len(named) != len(args):
        raise ConversionError(f"There are {len(args)} example inputs and {len(named)} kwargs. Give one mapping for each, or one for all.")
    return list(zip(args, named, strict=True))


def _device(module: nn.Module, examples: list[tuple[Any, Any]]) -> str:
    tensors = [*module.parameters(), *module.buffers(), *(one for one in pytree.tree_leaves(examples) if isinstance(one, torch.Tensor))]
    return tensors[0].device.type if tensors else "cpu"


def _options(said: Words) -> dict[str, Any]:
    return {
        "policy": said.policy.words(),
        "dtype": dtype_name(said.dtype),
        "device": said.device,
        "half": sorted(said.half),
        "full": sorted(said.full),
        "conditional": [[one.op, one.argument, list(one.values), one.reason] for one in said.conditional],
        "exclude": list(said.exclude),
        "cast_params": said.cast_params,
        "keep_io": said.keep_io,
    }
