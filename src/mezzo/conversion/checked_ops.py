"""Check the arguments of ops that models need and that do not check them themselves.

Their CPU kernels compute addresses from sizes that they never compare: oneDNN's LSTM reads beyond
weights that are too small for the input, attention beyond the values if they are fewer than the
keys. The arguments are results of other ops of a file, so that their sizes are known only when the
program runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from mezzo._errors import CheckpointError
from mezzo.conversion.nodes import copied_graph

_aten = torch.ops.aten
_GATES = 4
_DIMENSIONS = 3


def with_checks(exported: ExportedProgram) -> ExportedProgram:
    """Return the program with checks before unchecked ops; itself if it calls no such op."""
    if not any(
        node.target in CHECKED
        for graph in _graphs(exported.graph_module)
        for node in graph.graph.nodes
    ):
        return exported
    checked = copy.copy(exported)
    checked._graph_module = copied_graph(exported.graph_module)
    for graph_module in _graphs(checked.graph_module):
        for node in graph_module.graph.nodes:
            node.target = CHECKED.get(node.target, node.target)
        graph_module.recompile()
    return checked


def lstm(
    input: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Call `aten::lstm.input` if its weights and states fit its input."""
    states = [tuple(state.shape) for state in hx]
    if (
        input.dim() != _DIMENSIONS
        or [len(state) for state in states] != [_DIMENSIONS, _DIMENSIONS]
        or num_layers < 1
    ):
        raise _size_error("lstm", [input, *hx])
    directions, batch = 2 if bidirectional else 1, input.shape[0 if batch_first else 1]
    outputs, hidden = states[0][2], states[1][2]
    layers = num_layers * directions
    needed: list[tuple[int, ...]] = []
    for layer in range(layers if len(params) >= layers else 0):
        inputs = input.shape[2] if layer < directions else outputs * directions
        needed += [
            (_GATES * hidden, inputs),
            (_GATES * hidden, outputs),
            *[(_GATES * hidden,)] * (2 * has_biases),
            *[(outputs, hidden)] * (outputs != hidden),
        ]
    if (
        not hidden
        or states != [(layers, batch, outputs), (layers, batch, hidden)]
        or [tuple(parameter.shape) for parameter in params] != needed
    ):
        raise _size_error("lstm", [input, *hx, *params])
    # The kernel ignores strides.
    input, hx, params = (
        input.contiguous(),
        [state.contiguous() for state in hx],
        [parameter.contiguous() for parameter in params],
    )
    return _aten.lstm.input(
        input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
    )


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Call `aten::_weight_norm` if there is one length per row."""
    if dim in (0, v.dim() - 1) and (not v.numel() or g.numel() != v.shape[dim]):
        raise _size_error("_weight_norm", [v, g])
    found: torch.Tensor = _aten._weight_norm.default(v, g, dim)
    return found


def embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Any:
    """Call `aten::embedding_bag.padding_idx` if offsets and indices are in range.

    The check does not synchronize with a GPU.
    """
    if indices.dim() != 1 or offsets.dim() != 1 or (indices.numel() and not offsets.numel()):
        raise _size_error("embedding_bag", [weight, indices, offsets])
    inside = (
        ((indices >= 0) & (indices < weight.shape[0])).all()
        & ((offsets >= 0) & (offsets <= indices.numel())).all()
        & (offsets.diff() >= 0).all()
    )
    if include_last_offset:
        inside = inside & (offsets[-1:] == indices.numel()).all()
    _aten._assert_async.msg(
        inside,
        "embedding_bag is called with indices outside of its table, or with offsets outside of its"
        " indices",
    )
    return _aten.embedding_bag.padding_idx(
        weight,
        indices,
        offsets,
        scale_grad_by_freq,
        mode,
        sparse,
        per_sample_weights,
        include_last_offset,
        padding_idx,
    )


def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
) -> Any:
    """Call `aten::scaled_dot_product_attention` if there is one value per key.

    With `enable_gqa`, no size may be 0: torch divides by the number of heads.
    """
    if key.shape[-2] != value.shape[-2] or (
        named.get("enable_gqa") and 0 in (*key.shape, *value.shape)
    ):
        raise _size_error("scaled_dot_product_attention", [query, key, value])
    return _aten.scaled_dot_product_attention.default(query, key, value, *rest, **named)


def _division(op: Any) -> Callable[..., Any]:
    def division(self: torch.Tensor, other: Any, *, rounding_mode: str | None) -> Any:
        """Call an overload of `aten::div` unless the quotient exceeds the largest integer by 1.

        The CPU traps there, and the signal (SIGFPE) ends the process.
        """
        # torch.result_type, which torch.compile does not support: tensors without dimensions count
        # only if all are.
        tensors = [operand for operand in (self, other) if isinstance(operand, torch.Tensor)]
        dtype = reduce(
            torch.promote_types,
            [
                operand.dtype
                for operand in [tensor for tensor in tensors if tensor.dim()] or tensors
            ],
        )
        if (
            rounding_mode == "trunc"
            and dtype in {torch.int32, torch.int64}
            and not isinstance(other, float)
        ):
            overflows = (self == torch.iinfo(dtype).min) & (other == -1)
            _aten._assert_async.msg(
                ~overflows.any(),
                "div is called with the smallest integer and -1, whose quotient no integer holds",
            )
        return op(self, other, rounding_mode=rounding_mode)

    return division


CHECKED: Mapping[Any, Callable[..., Any]] = {
    _aten.lstm.input: lstm,
    _aten._weight_norm.default: weight_norm,
    _aten.embedding_bag.padding_idx: embedding_bag,
    _aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
    **{
        op: _division(op)
        for op in (
            _aten.div.Tensor_mode,
            _aten.div.Scalar_mode,
            _aten.div_.Tensor_mode,
            _aten.div_.Scalar_mode,
        )
    },
}
"""Ops, and the functions that are called instead."""


def _graphs(module: torch.nn.Module) -> list[GraphModule]:
    return [submodule for submodule in module.modules() if isinstance(submodule, GraphModule)]


def _size_error(op: str, tensors: Sequence[torch.Tensor]) -> CheckpointError:
    sizes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
    return CheckpointError(
        f"The program calls {op} with tensors that do not fit each other: {sizes:.500}. Its file is"
        " damaged, or was not written by Converted.save."
    )
