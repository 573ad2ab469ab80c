"""A program made ready to be called: as a module for compilers and tools, and with its weights at hand for everybody else."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from mezzo._torch import pytree, tree_flatten_spec
from mezzo.graph.checked_ops import with_checks
from mezzo.graph.flat import flatten

_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class Runner:
    """Calls a program's graph directly where it can.

    torch's module looks every weight up through the modules around it at each call: of a ResNet-50 that is half of the time that a CPU needs to launch it
    (3.5 ms against 1.7).
    """

    def __init__(self, exported: ExportedProgram) -> None:
        flatten(exported)
        exported = with_checks(exported)
        self.module = exported.module()
        self._guards: Any = getattr(self.module, "_guards_fn", None)
        if self._guards is not None:
            # Where torch has put its guards into the graph, its look at the inputs' structure is left out: `Fit` has looked already.
            self.module.validate_inputs = False  # type: ignore[assignment]
        self._forward = exported.graph_module.forward
        self._inputs, self._outputs = exported.call_spec.in_spec, exported.call_spec.out_spec
        args, kwargs = pytree.tree_unflatten(range(self._inputs.num_leaves), self._inputs)
        self._shape = len(args), tuple(kwargs)
        self._weights = _weights(exported, self.module) if self._guards is not None else None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the program. Inputs that were positional in the example and are named now, or the other way round, are sorted out by torch's module."""
        if self._weights is None or self._shape != (len(args), tuple(kwargs)) or torch.compiler.is_compiling():
            return self.module(*args, **kwargs)
        leaves = tree_flatten_spec((args, kwargs), self._inputs)
        self._guards.forward(*leaves)
        return pytree.tree_unflatten(self._forward(*self._weights, *leaves), self._outputs)


def _weights(exported: ExportedProgram, module: nn.Module) -> tuple[torch.Tensor, ...] | None:
    """What a graph takes before the user's inputs, the module's own tensors; None where torch's module does more than call the graph: copy results into buffers."""
    signature = exported.graph_signature
    stored = [spec for spec in signature.input_specs if spec.kind in _STORED]
    users = signature.input_specs[len(stored) :]
    plain = signature.input_specs[: len(stored)] == stored and all(spec.kind is InputKind.USER_INPUT for spec in users)
    if not plain or any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        return None
    return tuple(operator.attrgetter(str(spec.target))(module) for spec in stored)
