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

_SHOWN = 10


@dataclass(frozen=True)
class TensorError:
    """The error of one tensor."""

    name: str
    """The output's place in what the model returns, or the node's name."""
    dtype: str
    """What the program computed it in."""
    relative: float
    """The norm of the difference over the norm of the reference; of integers and booleans, the
    share of elements that differ."""
    largest: float
    """The largest absolute difference."""
    nonfinite: int
    """Elements that are infinite or NaN here and finite in the reference. They count in no other
    number."""
    op: str = ""
    """The op; empty for an output."""
    module: str = ""
    """The path of the module that called it; empty for the model itself and for an output."""
    source: str = ""
    """The file and line that called it."""

    @property
    def where(self) -> str:
        """The module and the source line, as far as they are known."""
        return " ".join(word for word in (self.module, self.source) if word)

    @property
    def sort_key(self) -> tuple[bool, float]:
        """What the worst are sorted by: values that are lost, then the relative error."""
        return self.nonfinite > 0, self.relative


@dataclass(frozen=True)
class Comparison:
    """A program against its reference: every output, and every node that both have, worst first.

    >>> print(Comparison((TensorError("logits", "float32", 3.2e-4, 1e-2, 0),)))
    output  dtype    relative error  largest  non-finite
    logits  float32         3.2e-04  1.0e-02           0
    """

    outputs: tuple[TensorError, ...]
    """In the order in which the model returns them."""
    nodes: tuple[TensorError, ...] = ()
    """Worst first; empty where there was no graph to compare with."""

    @property
    def worst(self) -> float:
        """The largest relative error of an output; infinite where an output has lost values."""
        return max(
            (float("inf") if one.nonfinite else one.relative for one in self.outputs), default=0.0
        )

    def __str__(self) -> str:
        lines = _table(["output", "dtype", "relative error", "largest", "non-finite"], self.outputs)
        if self.nodes:
            lines += ["", f"the worst {min(_SHOWN, len(self.nodes))} of {len(self.nodes)} nodes"]
            lines += _table(
                ["node", "dtype", "relative error", "largest", "non-finite", "op", "where"],
                self.nodes[:_SHOWN],
            )
        return "\n".join(lines)


def _table(heading: Sequence[str], errors: Sequence[TensorError]) -> list[str]:
    cells = [
        (
            one.name,
            one.dtype,
            f"{one.relative:.1e}",
            f"{one.largest:.1e}",
            str(one.nonfinite),
            one.op,
            one.where,
        )[: len(heading)]
        for one in errors
    ]
    widths = [max(len(row[column]) for row in (heading, *cells)) for column in range(len(heading))]
    # Numbers, columns two to four, stand on the right.
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
    """Compare a program with the float32 program that it was made of, or with a model or function: then by its outputs alone.

    Both run on copies of the inputs and buffers: what a program writes stays as it was. Random ops
    draw the same numbers in both.
    """
    with torch.no_grad(), torch.random.fork_rng():
        if isinstance(reference, ExportedProgram):
            return _beside(reference, program, args, dict(kwargs))
        expected = _called(reference, *_copied((args, dict(kwargs))))
        found = _outputs(program, _Run(program, args, dict(kwargs)).to_the_end())
    return Comparison(_output_errors(expected, found))


def tensor_error(
    expected: torch.Tensor, found: torch.Tensor, name: str, **where: str
) -> TensorError:
    """The error of one tensor against another of the same shape.

    >>> tensor_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), "output").relative
    0.1
    """
    dtype = dtype_name(found.dtype)
    if not expected.is_floating_point() and not expected.is_complex():
        differ = int((expected != found).sum())
        return TensorError(
            name, dtype, differ / max(expected.numel(), 1), float(differ > 0), 0, **where
        )
    kind = (
        torch.promote_types(expected.dtype, torch.float32)
        if expected.dtype.itemsize > 1
        else torch.float32
    )
    expected, found = expected.to(kind), found.to(kind)
    lost = expected.isfinite() & ~found.isfinite()
    # Where both are infinite, as in a mask, nothing is lost.
    counted = expected.isfinite() & ~lost
    left = torch.where(counted, expected, 0)
    difference = torch.where(counted, found, 0) - left
    size, scale = (
        float(
            torch.linalg.vector_norm(
                one, dtype=torch.complex128 if kind.is_complex else torch.float64
            )
        )
        for one in (difference, left)
    )
    relative = size / scale if scale else float("inf") if size else 0.0
    largest = float(difference.abs().max()) if difference.numel() else 0.0
    return TensorError(name, dtype, relative, largest, int(lost.sum()), **where)


class _Run:
    """One program's way through its nodes, step by step."""

    def __init__(
        self, program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        program = with_checks(program)
        flat = program._graph_module_flat_inputs(args, kwargs)
        self._interpreter = Interpreter(program.graph_module)
        self._interpreter.env = {}
        # Weights, of which there may be much, are not copied: an inference graph reads them.
        copies = _copied([None if isinstance(one, nn.Parameter) else one for one in flat])
        self._interpreter.args_iter = iter(
            [one if copy is None else copy for one, copy in zip(flat, copies, strict=True)]
        )
        self._left = iter(program.graph.nodes)
        self.nodes = {node.name: node for node in program.graph.nodes}
        self._passed: set[str] = set()

    def steps(self) -> Iterator[tuple[Node, Any]]:
        """Run what is left, a node at a time; what no later node reads is let go."""
        interpreter = self._interpreter
        for node in self._left:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                torch.manual_seed(crc32(node.name.encode()))
            value = interpreter.env[node] = interpreter.run_node(node)
            self._passed.add(node.name)
            for done in interpreter.user_to_last_uses.get(node, ()):
                interpreter.env.pop(done, None)
            yield node, value

    def upto(self, name: str) -> Any:
        """The value of a node, after all before it have run; None if it is not there, or was passed already."""
        if name not in self.nodes or name in self._passed:
            return None
        return next(value for node, value in self.steps() if node.name == name)

    def to_the_end(self) -> Any:
        """The flat outputs."""
        return [value for _, value in self.steps()][-1]


def _beside(
    reference: ExportedProgram,
    program: ExportedProgram,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Comparison:
    first, second = _Run(reference, args, kwargs), _Run(program, args, kwargs)
    errors, outputs = [], None
    for node, found in second.steps():
        expected = first.upto(node.name)
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


def _computes(node: Node) -> bool:
    """Whether a node makes values: what only looks at those of another has that one's error."""
    if node.target is operator.getitem:
        return _computes(node.all_input_nodes[0])
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"
    alias = [one.alias_info for one in node.target._schema.returns]
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


def _outputs(program: ExportedProgram, flat: Any) -> Any:
    """What the model returns, made of what its graph gives: buffers that it writes come first there."""
    count = len(program.graph_signature.user_outputs)
    return pytree.tree_unflatten(list(flat)[len(flat) - count :], program.call_spec.out_spec)


def _output_errors(expected: Any, found: Any) -> tuple[TensorError, ...]:
    left, right = named_leaves(expected), named_leaves(found)
    if [name for name, _ in left] != [name for name, _ in right]:
        raise ConversionError(
            f"The program returns {_pair_outputs(right)}, and what it is compared with"
            f" {_pair_outputs(left)}. Compare it with the model that was converted."
        )
    pairs = [
        (name, one, other)
        for (name, one), (_, other) in zip(left, right, strict=True)
        if isinstance(other, torch.Tensor)
    ]
    for name, one, other in pairs:
        if not isinstance(one, torch.Tensor) or one.shape != other.shape:
            raise ConversionError(
                f"{name!r} has shape {tuple(other.shape)}, and what it is compared with"
                f" {tuple(getattr(one, 'shape', ()))}."
            )
    return tuple(tensor_error(one, other, name) for name, one, other in pairs)


def _pair_outputs(leaves: list[tuple[str, Any]]) -> str:
    return ", ".join(name for name, _ in leaves) or "nothing"


def _called(reference: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(reference, nn.Module):
        return reference(*args, **kwargs)
    buffers = {name: buffer.clone() for name, buffer in reference.named_buffers()}
    return torch.func.functional_call(reference, buffers, args, kwargs)


def _copied(value: Any) -> Any:
    """The same around tensors that can be written without harm; one that occurs twice is one again."""
    copies: dict[int, torch.Tensor] = {}
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: copies.setdefault(id(tensor), tensor.clone()), value
    )
