"""Call a converted program; lay recurrent weights out as cuDNN wants them."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.backends.cudnn.rnn
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from mezzo._torch import flatten_cudnn_weights, pytree, tree_flatten_spec, uses_flat_cudnn_weights
from mezzo.conversion.checked_ops import with_checks
from mezzo.conversion.nodes import aten_name, bound, nodes_in
from mezzo.policy.missing_kernels import RECURRENT

_GATES = {"lstm": 4, "gru": 3}


def flatten(exported: ExportedProgram) -> None:
    """Lay the weights of each recurrent layer on a GPU into one piece, in place: what `nn.LSTM.flatten_parameters` does for a module."""
    tensors = {
        spec.arg.name: exported.state_dict.get(spec.target)
        for spec in exported.graph_signature.input_specs
        if spec.target is not None
    }
    for node in exported.graph.nodes:
        if aten_name(node) in RECURRENT:
            weights: list[Any] = [
                tensors.get(one.name) for one in nodes_in(dict(bound(node))["params"])
            ]
            if weights and _is_taken(weights):
                with torch.cuda.device_of(weights[0]), torch.no_grad():
                    flatten_cudnn_weights(weights, *_described(node, weights))


def _described(node: Node, weights: list[Any]) -> tuple[Any, ...]:
    """What torch wants to know of a layer beside its weights, in the order of its function."""
    said, op = dict(bound(node)), aten_name(node)
    each = len(weights) // (said["num_layers"] * (2 if said["bidirectional"] else 1))
    projection = weights[each - 1].shape[0] if each > (4 if said["has_biases"] else 2) else 0
    hidden, inputs = weights[0].shape[0] // _GATES.get(op, 1), weights[0].shape[1]
    mode = torch.backends.cudnn.rnn.get_cudnn_mode(op.upper())
    # A packed sequence has no batch dimension to come first.
    return (
        each,
        inputs,
        mode,
        hidden,
        projection,
        said["num_layers"],
        said.get("batch_first", False),
        said["bidirectional"],
    )


def _is_taken(weights: list[Any]) -> bool:
    """Whether cuDNN computes with these weights, all of them stored, and none of them is another's memory already."""
    first = weights[0]
    if not all(isinstance(one, torch.Tensor) for one in weights) or not first.is_cuda:
        return False
    alike = all(one.dtype is first.dtype and one.device == first.device for one in weights)
    apart = len({one.data_ptr() for one in weights}) == len(weights)
    return (
        alike and apart and torch.backends.cudnn.is_acceptable(first) and uses_flat_cudnn_weights()
    )


_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class ProgramRunner:
    """Calls a program's graph directly where it can.

    torch's module looks every weight up through the modules around it at each call: of a ResNet-50
    that is half of the time that a CPU needs to launch it (3.5 ms against 1.7).
    """

    def __init__(self, exported: ExportedProgram) -> None:
        flatten(exported)
        exported = with_checks(exported)
        self.module = exported.module()
        self._guards: Any = getattr(self.module, "_guards_fn", None)
        if self._guards is not None:
            # Where torch has put its guards into the graph, its look at the inputs' structure is
            # left out: `Fit` has looked already.
            self.module.validate_inputs = False  # type: ignore[assignment]
        self._forward = exported.graph_module.forward
        self._inputs, self._outputs = exported.call_spec.in_spec, exported.call_spec.out_spec
        args, kwargs = pytree.tree_unflatten(range(self._inputs.num_leaves), self._inputs)
        self._shape = len(args), tuple(kwargs)
        self._weights = _weights(exported, self.module) if self._guards is not None else None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the program. Inputs that were positional in the example and are named now, or the other way round, are sorted out by torch's module."""
        if (
            self._weights is None
            or self._shape != (len(args), tuple(kwargs))
            or torch.compiler.is_compiling()
        ):
            return self.module(*args, **kwargs)
        leaves = tree_flatten_spec((args, kwargs), self._inputs)
        self._guards.forward(*leaves)
        return pytree.tree_unflatten(self._forward(*self._weights, *leaves), self._outputs)


def _weights(exported: ExportedProgram, module: nn.Module) -> tuple[torch.Tensor, ...] | None:
    """What a graph takes before the user's inputs, the module's own tensors; None where torch's module does more than call the graph: copy results into buffers."""
    signature = exported.graph_signature
    stored = [spec for spec in signature.input_specs if spec.kind in _STORED]
    users = signature.input_specs[len(stored) :]
    plain = signature.input_specs[: len(stored)] == stored and all(
        spec.kind is InputKind.USER_INPUT for spec in users
    )
    if not plain or any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        return None
    return tuple(operator.attrgetter(str(spec.target))(module) for spec in stored)
