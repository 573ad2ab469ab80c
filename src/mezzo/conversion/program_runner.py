"""Call a converted program; lay out recurrent weights for cuDNN."""

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
from mezzo.conversion.nodes import aten_name, named_arguments, nodes_in
from mezzo.policy.missing_kernels import RECURRENT

_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)

_GATES = {"lstm": 4, "gru": 3}


class ProgramRunner:
    """Calls a program's graph directly where possible.

    torch's module looks up every weight through its submodules at each call: for a ResNet-50 that
    is half of the time that a CPU needs to launch it (3.5 ms against 1.7).
    """

    def __init__(self, exported: ExportedProgram) -> None:
        _flatten_recurrent_weights(exported)
        exported = with_checks(exported)
        self.module = exported.module()
        self._guards: Any = getattr(self.module, "_guards_fn", None)
        if self._guards is not None:
            # `InputSignature` has checked the structure of the inputs already.
            self.module.validate_inputs = False  # type: ignore[assignment]
        self.graphs = (exported.graph_module, self.module)
        """The graphs that calls run, one or the other."""
        self._forward = exported.graph_module.forward
        self._inputs, self._outputs = exported.call_spec.in_spec, exported.call_spec.out_spec
        args, kwargs = pytree.tree_unflatten(range(self._inputs.num_leaves), self._inputs)
        self._shape = len(args), tuple(kwargs)
        self._weights = _weights(exported, self.module) if self._guards is not None else None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the program.

        torch's module runs it if an input is passed by keyword that was positional in the example,
        or the other way round.
        """
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
    """Return the tensors that a graph takes before the user's inputs.

    Returns None if torch's module does more than call the graph: copy results into buffers.
    """
    signature = exported.graph_signature
    stored = [spec for spec in signature.input_specs if spec.kind in _STORED]
    users = signature.input_specs[len(stored) :]
    plain = signature.input_specs[: len(stored)] == stored and all(
        spec.kind is InputKind.USER_INPUT for spec in users
    )
    if not plain or any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        return None
    return tuple(operator.attrgetter(str(spec.target))(module) for spec in stored)


# Recurrent weights


def _flatten_recurrent_weights(exported: ExportedProgram) -> None:
    """Move the weights of each recurrent layer on a GPU into one buffer, in place.

    This is what `nn.LSTM.flatten_parameters` does for a module.
    """
    tensors = {
        spec.arg.name: exported.state_dict.get(spec.target)
        for spec in exported.graph_signature.input_specs
        if spec.target is not None
    }
    for node in exported.graph.nodes:
        if aten_name(node) in RECURRENT:
            weights: list[Any] = [
                tensors.get(weight.name)
                for weight in nodes_in(dict(named_arguments(node))["params"])
            ]
            if weights and _can_flatten(weights):
                with torch.cuda.device_of(weights[0]), torch.no_grad():
                    flatten_cudnn_weights(weights, *_cudnn_layout(node, weights))


def _can_flatten(weights: list[Any]) -> bool:
    """Return whether cuDNN computes with these weights, and all are stored in separate memory."""
    first = weights[0]
    if not all(isinstance(weight, torch.Tensor) for weight in weights) or not first.is_cuda:
        return False
    alike = all(weight.dtype is first.dtype and weight.device == first.device for weight in weights)
    separate = len({weight.data_ptr() for weight in weights}) == len(weights)
    cudnn = torch.backends.cudnn.is_acceptable(first)
    return alike and separate and cudnn and uses_flat_cudnn_weights()


def _cudnn_layout(node: Node, weights: list[Any]) -> tuple[Any, ...]:
    """Return the arguments of torch's flattening function after the weights."""
    arguments, op = dict(named_arguments(node)), aten_name(node)
    layers, bidirectional = arguments["num_layers"], arguments["bidirectional"]
    per_layer = len(weights) // (layers * (2 if bidirectional else 1))
    has_projection = per_layer > (4 if arguments["has_biases"] else 2)
    return (
        per_layer,
        weights[0].shape[1],
        torch.backends.cudnn.rnn.get_cudnn_mode(op.upper()),
        weights[0].shape[0] // _GATES.get(op, 1),
        weights[per_layer - 1].shape[0] if has_projection else 0,
        layers,
        # A packed sequence has no batch dimension, and its op no such argument.
        arguments.get("batch_first", False),
        bidirectional,
    )
