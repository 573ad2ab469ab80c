"""Compare a converted model with float32, node by node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node

from mezzo._dtypes import dtype_name
from mezzo._errors import ConversionError
from mezzo._torch import OpOverload, pytree
from mezzo.conversion.checked_ops import with_checks
from mezzo.conversion.export import source_line
from mezzo.conversion.options import module_paths
from mezzo.conversion.signature import named_leaves

_SHOWN_NODES = 10


@dataclass(frozen=True)
class TensorError:
    """The error of one tensor."""

    name: str
    """The path of an output in what the model returns, or the name of a node."""
    dtype: str
    """The dtype in which the program computed it."""
    relative: float
    """The norm of the difference divided by the norm of the reference; for integers and booleans,
    the share of elements that differ."""
    largest: float
    """The largest absolute difference."""
    nonfinite: int
    """Elements that are infinite or NaN here and finite in the reference. They count in no other
    field."""
    op: str = ""
    """The op; empty for an output."""
    module: str = ""
    """The path of the module that called it; empty for the model itself and for an output."""
    source: str = ""
    """The file and line that called it; empty for an output."""

    @property
    def where(self) -> str:
        """The module and the source line, as far as they are known."""
        return " ".join(text for text in (self.module, self.source) if text)

    @property
    def sort_key(self) -> tuple[bool, float]:
        """Key to sort errors by: non-finite values are worse than any relative error."""
        return self.nonfinite > 0, self.relative


@dataclass(frozen=True)
class Comparison:
    """The errors of a converted program against float32.

    Print it to see a table of all outputs and of the ten worst nodes.

    >>> print(Comparison((TensorError("logits", "float32", 3.2e-4, 1e-2, 0),)))
    output  dtype    relative error  largest  non-finite
    logits  float32         3.2e-04  1.0e-02           0
    """

    outputs: tuple[TensorError, ...]
    """The error of each output, in the order in which the model returns them."""
    nodes: tuple[TensorError, ...] = ()
    """The error of each node that both graphs have, the worst first; empty if the program was
    compared with a model or function."""

    @property
    def worst(self) -> float:
        """The largest relative error of an output; infinite if an output has non-finite values."""
        return max(
            (float("inf") if output.nonfinite else output.relative for output in self.outputs),
            default=0.0,
        )

    def __str__(self) -> str:
        heading = ["output", "dtype", "relative error", "largest", "non-finite"]
        lines = _table(heading, self.outputs)
        if self.nodes:
            shown = self.nodes[:_SHOWN_NODES]
            lines += ["", f"the worst {len(shown)} of {len(self.nodes)} nodes"]
            lines += _table(["node", *heading[1:], "op", "where"], shown)
        return "\n".join(lines)


def _table(heading: Sequence[str], errors: Sequence[TensorError]) -> list[str]:
    cells = [
        (
            error.name,
            error.dtype,
            f"{error.relative:.1e}",
            f"{error.largest:.1e}",
            str(error.nonfinite),
            error.op,
            error.where,
        )[: len(heading)]
        for error in errors
    ]
    widths = [max(len(row[column]) for row in (heading, *cells)) for column in range(len(heading))]
    # Columns 2 to 4 are numbers and are aligned to the right.
    return [
        "  ".join(
            f"{cell:{'>' if column in {2, 3, 4} else '<'}{widths[column]}}"
            for column, cell in enumerate(row)
        ).rstrip()
        for row in (heading, *cells)
    ]


def compare(
    reference: ExportedProgram | Callable[..., Any],
    program: ExportedProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Comparison:
    """Compare a program with its float32 program, or with the outputs of a model or function.

    Both run on copies of the inputs and buffers, so that mutations have no effect outside. Random
    ops draw the same numbers in both.
    """
    with torch.no_grad(), torch.random.fork_rng():
        if isinstance(reference, ExportedProgram):
            return _compare_nodes(reference, program, args, dict(kwargs))
        expected = _call_reference(reference, *_with_cloned_tensors((args, dict(kwargs))))
        found = _outputs(program, _NodeRunner(program, args, dict(kwargs)).run_to_end())
    return Comparison(_output_errors(expected, found))


def tensor_error(
    expected: torch.Tensor, found: torch.Tensor, name: str, **where: str
) -> TensorError:
    """Return the error of one tensor against another of the same shape.

    >>> tensor_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), "output").relative
    0.1
    """
    dtype = dtype_name(found.dtype)
    if not expected.is_floating_point() and not expected.is_complex():
        differ = int((expected != found).sum())
        return TensorError(
            name, dtype, differ / max(expected.numel(), 1), float(differ > 0), 0, **where
        )
    wide_dtype = (
        torch.promote_types(expected.dtype, torch.float32)
        if expected.dtype.itemsize > 1
        else torch.float32
    )
    expected, found = expected.to(wide_dtype), found.to(wide_dtype)
    lost = expected.isfinite() & ~found.isfinite()
    # Values that are infinite in both, as in a mask, are no error.
    counted = expected.isfinite() & ~lost
    reference = torch.where(counted, expected, 0)
    difference = torch.where(counted, found, 0) - reference
    norm_dtype = torch.complex128 if wide_dtype.is_complex else torch.float64
    size, scale = (
        float(torch.linalg.vector_norm(tensor, dtype=norm_dtype))
        for tensor in (difference, reference)
    )
    relative = size / scale if scale else float("inf") if size else 0.0
    largest = float(difference.abs().max()) if difference.numel() else 0.0
    return TensorError(name, dtype, relative, largest, int(lost.sum()), **where)


# Compare node by node


def _compare_nodes(
    reference: ExportedProgram,
    program: ExportedProgram,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Comparison:
    """Run both programs in step, so that only the values still needed are kept in memory."""
    first, second = _NodeRunner(reference, args, kwargs), _NodeRunner(program, args, kwargs)
    errors, outputs = [], None
    for node, found in second.steps():
        expected = first.run_until(node.name)
        if node.op == "output":
            outputs = _output_errors(_outputs(reference, expected), _outputs(program, found))
        elif (
            _computes(node)
            and isinstance(expected, torch.Tensor)
            and isinstance(found, torch.Tensor)
            and expected.shape == found.shape
        ):
            errors.append(_node_error(node, expected, found))
    return Comparison(
        outputs or (), tuple(sorted(errors, key=lambda error: error.sort_key, reverse=True))
    )


class _NodeRunner:
    """Runs a program one node at a time."""

    def __init__(
        self, program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        program = with_checks(program)
        flat = program._graph_module_flat_inputs(args, kwargs)
        self._interpreter = Interpreter(program.graph_module)
        self._interpreter.env = {}
        # Weights can be large and are not copied: an inference graph only reads them.
        copies = _with_cloned_tensors(
            [None if isinstance(value, nn.Parameter) else value for value in flat]
        )
        self._interpreter.args_iter = iter(
            [value if copy is None else copy for value, copy in zip(flat, copies, strict=True)]
        )
        self._remaining = iter(program.graph.nodes)
        self._names = {node.name for node in program.graph.nodes}
        self._done: set[str] = set()

    def steps(self) -> Iterator[tuple[Node, Any]]:
        """Run the remaining nodes one by one; values that no later node reads are freed."""
        interpreter = self._interpreter
        for node in self._remaining:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                torch.manual_seed(crc32(node.name.encode()))
            value = interpreter.env[node] = interpreter.run_node(node)
            self._done.add(node.name)
            for unused in interpreter.user_to_last_uses.get(node, ()):
                interpreter.env.pop(unused, None)
            yield node, value

    def run_until(self, name: str) -> Any:
        """Run up to a node and return its value; None if it does not exist or has run before."""
        if name not in self._names or name in self._done:
            return None
        return next(value for node, value in self.steps() if node.name == name)

    def run_to_end(self) -> Any:
        """Run all nodes and return the flat outputs."""
        return [value for _, value in self.steps()][-1]


def _computes(node: Node) -> bool:
    """Return whether a node computes values; a view has the error of its source."""
    if node.target is operator.getitem:
        return _computes(node.all_input_nodes[0])
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"
    alias = [returned.alias_info for returned in node.target._schema.returns]
    return not alias or alias[0] is None or alias[0].is_write


def _node_error(node: Node, expected: torch.Tensor, found: torch.Tensor) -> TensorError:
    paths = module_paths(node)
    op = str(getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target))
    return tensor_error(
        expected,
        found,
        node.name,
        op=op,
        module=paths[-1] if paths else "",
        source=source_line(node),
    )


# Compare outputs


def _outputs(program: ExportedProgram, flat: Any) -> Any:
    """Return the model's outputs from those of its graph, where mutated buffers come first."""
    count = len(program.graph_signature.user_outputs)
    return pytree.tree_unflatten(list(flat)[len(flat) - count :], program.call_spec.out_spec)


def _output_errors(expected: Any, found: Any) -> tuple[TensorError, ...]:
    left, right = named_leaves(expected), named_leaves(found)
    if [name for name, _ in left] != [name for name, _ in right]:
        raise ConversionError(
            f"The program returns {_names(right)}, and the reference returns {_names(left)}."
            " Compare it with the model that was converted."
        )
    pairs = [
        (name, reference, output)
        for (name, reference), (_, output) in zip(left, right, strict=True)
        if isinstance(output, torch.Tensor)
    ]
    for name, reference, output in pairs:
        if not isinstance(reference, torch.Tensor) or reference.shape != output.shape:
            raise ConversionError(
                f"The output {name!r} has shape {tuple(output.shape)}, and in the reference"
                f" {tuple(getattr(reference, 'shape', ()))}. Compare it with the model that was"
                " converted."
            )
    return tuple(tensor_error(reference, output, name) for name, reference, output in pairs)


def _names(leaves: list[tuple[str, Any]]) -> str:
    return ", ".join(name for name, _ in leaves) or "nothing"


def _call_reference(
    reference: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not isinstance(reference, nn.Module):
        return reference(*args, **kwargs)
    buffers = {name: buffer.clone() for name, buffer in reference.named_buffers()}
    return torch.func.functional_call(reference, buffers, args, kwargs)


def _with_cloned_tensors(value: Any) -> Any:
    """Return nested values with cloned tensors; one that occurs twice is cloned once."""
    copies: dict[int, torch.Tensor] = {}
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: copies.setdefault(id(tensor), tensor.clone()), value
    )
