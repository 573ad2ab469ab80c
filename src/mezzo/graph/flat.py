"""Weights of recurrent layers in one piece of memory, as cuDNN wants them: otherwise torch copies them together at every call, and warns."""

from __future__ import annotations

from typing import Any

import torch
import torch.backends.cudnn.rnn
from torch.export import ExportedProgram
from torch.fx import Node

from mezzo._torch import flatten_cudnn_weights, uses_flat_cudnn_weights
from mezzo.graph.nodes import base, bound, nodes_in
from mezzo.policy.missing_kernels import RECURRENT

_GATES = {"lstm": 4, "gru": 3}


def flatten(exported: ExportedProgram) -> None:
    """Lay the weights of each recurrent layer on a GPU into one piece, in place: what `nn.LSTM.flatten_parameters` does for a module."""
    tensors = {spec.arg.name: exported.state_dict.get(spec.target) for spec in exported.graph_signature.input_specs if spec.target is not None}
    for node in exported.graph.nodes:
        if base(node) in RECURRENT:
            weights: list[Any] = [tensors.get(one.name) for one in nodes_in(dict(bound(node))["params"])]
            if weights and _is_taken(weights):
                with torch.cuda.device_of(weights[0]), torch.no_grad():
                    flatten_cudnn_weights(weights, *_described(node, weights))


def _described(node: Node, weights: list[Any]) -> tuple[Any, ...]:
    """What torch wants to know of a layer beside its weights, in the order of its function."""
    said, op = dict(bound(node)), base(node)
    each = len(weights) // (said["num_layers"] * (2 if said["bidirectional"] else 1))
    projection = weights[each - 1].shape[0] if each > (4 if said["has_biases"] else 2) else 0
    hidden, inputs = weights[0].shape[0] // _GATES.get(op, 1), weights[0].shape[1]
    mode = torch.backends.cudnn.rnn.get_cudnn_mode(op.upper())
    # A packed sequence has no batch dimension to come first.
    return each, inputs, mode, hidden, projection, said["num_layers"], said.get("batch_first", False), said["bidirectional"]


def _is_taken(weights: list[Any]) -> bool:
    """Whether cuDNN computes with these weights, all of them stored, and none of them is another's memory already."""
    first = weights[0]
    if not all(isinstance(one, torch.Tensor) for one in weights) or not first.is_cuda:
        return False
    alike = all(one.dtype is first.dtype and one.device == first.device for one in weights)
    apart = len({one.data_ptr() for one in weights}) == len(weights)
    return alike and apart and torch.backends.cudnn.is_acceptable(first) and uses_flat_cudnn_weights()
