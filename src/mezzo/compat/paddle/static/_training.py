"""Train and evaluate a static program in the precision of `static.amp.decorate`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

import mezzo
from mezzo._casting import cast_all
from mezzo._dtypes import parse_dtype
from mezzo.autocasting.arguments import region_for
from mezzo.autocasting.regions import Region, enter_regions
from mezzo.compat.paddle._places import place_of
from mezzo.compat.paddle.amp._scaler_parameters import ScalerParameters
from mezzo.compat.paddle.amp._support import warn_if_slow
from mezzo.compat.paddle.nn._clip import hook_clip, shared_clip_norm
from mezzo.compat.paddle.static._executor import (
    CallNode,
    call_in_eval,
    call_node,
    move_tensors,
    run_nodes,
    tensors_read_by,
)
from mezzo.compat.paddle.static._program import (
    Node,
    Program,
    Variable,
    default_main_program,
    paddle_shape,
)
from mezzo.policy.presets import paddle
from mezzo.policy.registry import registry
from mezzo.policy.types import Level, Rule
from mezzo.scaling.gradients import parameters
from mezzo.step.function_step import FunctionStep

Optimizer = torch.optim.Optimizer

GRAY = (
    "batch_norm concat dropout elementwise_add elementwise_div elementwise_floordiv elementwise_max"
    " elementwise_min elementwise_mod elementwise_mul elementwise_sub gather layer_norm leaky_relu"
    " pool2d pool3d relu relu6 reshape2 sigmoid sign split stack tanh top_k transpose2"
)
"""Gray list of static programs: ops that run in the dtype of their inputs (PaddlePaddle 3.3.1,
static/amp/fp16_lists.py). Only those with an equivalent in torch."""

_NORMS = {"batch_norm", "layer_norm", "instance_norm"}
"""Ops whose parameters and statistics stay float32."""


@dataclass(frozen=True)
class Precision:
    """Precision of a static program: the arguments of `static.amp.decorate`.

    The default, for an optimizer that is not decorated, is float32.
    """

    level: str = "O0"
    dtype: str = "float16"
    half: frozenset[str] = frozenset()
    """Ops of the custom white list, in mezzo's names."""
    full: frozenset[str] = frozenset()
    """Ops of the custom black list, in mezzo's names."""
    guarded: bool = False
    """Whether only calls inside `fp16_guard` are 16-bit."""
    promote: bool = False
    """Whether ops in no list promote to the widest input, as they do in eager mode."""
    masters: bool = False
    """Whether float32 master weights are kept."""
    master_grad: bool = False
    """Whether gradients of 16-bit parameters are float32."""
    scaling: ScalerParameters | None = None
    """Loss scaling; None does not scale losses."""

    @property
    def policy(self) -> mezzo.Policy:
        """The equivalent policy in mezzo."""
        return _policy(self)

    @property
    def feed_dtype(self) -> torch.dtype | None:
        """The dtype that floating-point feeds are cast to, or None.

        Only where everything is 16-bit; in Paddle the program must cast them itself.
        """
        return parse_dtype(self.dtype) if self.level == "O2" and not self.guarded else None

    def full_tensors(self, nodes: Iterable[Node]) -> list[torch.Tensor]:
        """Return the parameters and buffers that stay float32.

        They are read by a norm, by an op of the black list, or outside of `fp16_guard`.
        """
        policy, tensors = self.policy, []
        for node in nodes:
            if (
                node.name in _NORMS
                or (self.guarded and not node.guarded)
                or _is_full(policy, node.function)
            ):
                tensors += [tensor for tensor in node.tensors() if not isinstance(tensor, Variable)]
        return tensors


@cache
def _policy(precision: Precision) -> mezzo.Policy:
    """Return the policy. Ops in no list are float32 at O1 and 16-bit at O2, unless they promote."""
    if precision.level == "O0":
        return mezzo.Policy("O0")
    fields: dict[str, Any] = {
        "half": precision.half,
        "full": precision.full,
        "master": "float32" if precision.masters else None,
        "on_unsupported": "ignore",  # `warn_if_slow` has warned
    }
    if precision.master_grad:
        fields["grad_dtype"] = "float32"
    if not precision.promote and precision.level == "O1":
        entries = paddle.lists(Level.O1, torch.float16).entries
        listed = entries.keys() | precision.half | precision.full
        gray = {op for name in GRAY.split() for op in paddle.NAMES.known[name]}
        fields |= {"default_rule": "full", "promote": gray - listed}
    elif not precision.promote and precision.level == "O2":
        fields["default_rule"] = "half"
    return mezzo.Policy(precision.level, precision.dtype, preset="paddle", keep_full=(), **fields)


def _is_full(policy: mezzo.Policy, function: Any) -> bool:
    name = registry().name_of(inspect.unwrap(function))
    return name is not None and policy.explain(name, device="cpu").rule is Rule.FULL


def attach_trainer(loss: Any, optimizer: Optimizer, precision: Precision) -> ProgramTrainer:
    """Make every run of a loss's program train; the last call for a program counts.

    The loss may also be a function that builds it. It is called with the `static.data` variables
    that are named like its parameters.
    """
    variable = loss if isinstance(loss, Variable) else _build_loss(loss)
    program = variable.program
    if not any(group["params"] for group in optimizer.param_groups):
        # Constructed without parameters=.
        nodes = program.needed_for([variable])
        read = {id(tensor): tensor for node in nodes for tensor in node.tensors()}
        optimizer.param_groups[0]["params"] += [
            tensor
            for tensor in read.values()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        ]
    _check_loss(variable, optimizer)
    trainer = ProgramTrainer(program, variable, optimizer, precision)
    program.train_with(trainer)
    return trainer


class ProgramTrainer:
    """Trains and evaluates a program: its loss, optimizer and precision."""

    def __init__(
        self, program: Program, loss: Variable, optimizer: Optimizer, precision: Precision
    ) -> None:
        self.program, self.loss = program, loss
        self.optimizer, self.precision = optimizer, precision
        self.scaler = None if precision.scaling is None else precision.scaling.make_scaler()
        self.prepared = False
        self._steps: dict[tuple[int, ...], FunctionStep] = {}
        nodes = program.needed_for([loss])
        self._module = _ProgramModule(nodes, optimizer)
        self._keep_full = self._module.keep_full_names(precision.full_tensors(nodes))

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self._module.parameters()).device

    def prepare(self) -> None:
        """Cast parameters to 16 bits if the level requires it; the first run does so too."""
        if not self.prepared:
            if self.precision.level != "O0":
                warn_if_slow(self.precision.dtype, self.device)
            # Constructing a step decorates the parameters and the optimizer. This first one
            # fetches nothing.
            self._steps[()] = self._make_step(())
            self.prepared = True

    def move(self, device: torch.device) -> None:
        """Move parameters and buffers to a device, before the first run."""
        if not self.prepared:
            move_tensors((*self._module.parameters(), *self._module.buffers()), device)
        elif self.device != device:
            raise ValueError(
                f"The parameters of this program are on {place_of(self.device)!r}, where it ran"
                f" first or amp_init put them, and this run is on {place_of(device)!r}. Use one"
                " place for both."
            )

    def train(
        self, feeds: dict[str, torch.Tensor], fetched: Sequence[Variable], *, capture: bool
    ) -> list[torch.Tensor]:
        """Train on a feed and return the values of variables from before the update."""
        self.prepare()
        key = (int(capture), *map(id, fetched))
        if key not in self._steps:
            self._steps[key] = self._make_step(fetched, capture=capture)
        return list(self._steps[key](feeds))

    def evaluate(
        self, program: Program, feeds: dict[str, torch.Tensor], fetched: Sequence[Variable]
    ) -> list[torch.Tensor]:
        """Return the values of variables in the precision of training, without training."""
        self.prepare()
        call = call_in_eval if program.for_test else call_node
        nodes = program.needed_for(fetched)
        move_tensors(tensors_read_by(nodes), self.device)
        with torch.no_grad(), enter_regions(self._region()):
            return self._run(program, nodes, feeds, fetched, call)

    def _make_step(self, fetched: Sequence[Variable], *, capture: bool = False) -> FunctionStep:
        computed = [self.loss, *fetched]
        nodes = self.program.needed_for(computed)
        # What is fetched beside the loss may read other tensors than it.
        move_tensors(tensors_read_by(nodes), self.device)

        def body(feeds: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            loss, *values = self._run(self.program, nodes, feeds, computed, call_node)
            loss.backward()
            return tuple(values)

        options: dict[str, Any] = {}
        if not self.prepared:
            options = {
                "policy": self.precision.policy,
                "keep_full": self._keep_full,
                "clip_norm": self._clip_norm(),
            }
        scaler: Any = self.scaler if self.scaler is not None else False
        return mezzo.train_step(
            models=self._module,
            optimizers=self.optimizer,
            scaler=scaler,
            capture="auto" if capture else False,
            **options,
        )(body)

    def _run(
        self,
        program: Program,
        nodes: Sequence[Node],
        feeds: dict[str, torch.Tensor],
        fetched: Sequence[Variable],
        call: CallNode,
    ) -> list[torch.Tensor]:
        dtype = self.precision.feed_dtype
        if dtype is not None:
            feeds = cast_all(feeds, dtype, self.device.type)
        if self.precision.guarded:
            disabled = self._region(enabled=False)
            call = _float32_outside_guard(call, disabled, self.device.type)
        by_variable = {program.feeds[name]: value for name, value in feeds.items()}
        return run_nodes(nodes, by_variable, fetched, call)

    def _region(self, *, enabled: bool = True) -> Region:
        return region_for(self.precision.policy, self.device.type, enabled=enabled)

    def _clip_norm(self) -> float | None:
        norm = shared_clip_norm([self.optimizer])
        if norm is None and hook_clip(self.optimizer) is not None and self.scaler is not None:
            raise ValueError(
                f"{self.optimizer._grad_clip!r} clips gradients that are still scaled. "  # type: ignore[attr-defined]
                "In a static program with loss scaling use nn.ClipGradByGlobalNorm(clip_norm=...)."
            )
        return norm


class _ProgramModule(nn.Module):
    """All parameters and buffers of a program and its optimizer, as the model of a step."""

    def __init__(self, nodes: Sequence[Node], optimizer: Optimizer) -> None:
        super().__init__()
        read = tensors_read_by(nodes)
        stepped = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        self._names: dict[int, str] = {}
        for tensor in (*read, *stepped):
            if id(tensor) not in self._names:
                self._names[id(tensor)] = name = f"tensor_{len(self._names)}"
                if isinstance(tensor, nn.Parameter):
                    self.register_parameter(name, tensor)
                else:
                    self.register_buffer(name, tensor)

    def keep_full_names(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of tensors, and of all buffers: statistics and constants stay too."""
        names = [self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names]
        return sorted({*names, *(name for name, _ in self.named_buffers())})


def _check_loss(loss: Variable, optimizer: Optimizer) -> None:
    if math.prod(loss.sizes) != 1:
        raise ValueError(
            f"The loss.shape should be [], but the current loss.shape is {paddle_shape(loss)}."
            " Maybe that you should call paddle.mean to process the current loss."
        )
    stepped = {id(tensor) for tensor in parameters(optimizer) if tensor.requires_grad}
    nodes = loss.program.needed_for([loss])
    if stepped.isdisjoint(id(tensor) for node in nodes for tensor in node.tensors()):
        raise ValueError(
            f"The loss {loss.name!r} does not depend on any parameter of the optimizer that needs a"
            " gradient. Pass the parameters of the network that computes it:"
            " parameters=model.parameters()."
        )


def _build_loss(function: Any) -> Variable:
    if not callable(function):
        raise TypeError(
            "minimize() takes the loss of a static program, or a function that builds it, but"
            f" received {type(function).__name__}."
        )
    program = default_main_program()
    names = list(inspect.signature(function).parameters)
    if missing := [name for name in names if name not in program.feeds]:
        raise ValueError(
            f"The function takes {', '.join(missing)}, and the program has no static.data of that"
            f" name. Call static.data(name={missing[0]!r}, ...)."
        )
    loss = function(*(program.feeds[name] for name in names))
    if not isinstance(loss, Variable):
        raise TypeError(
            f"The function returned {type(loss).__name__}, not a loss computed from its arguments."
        )
    program.set_name(loss, getattr(function, "__name__", "loss"))
    with suppress(AttributeError):
        # Makes `fetch_list=[loss.name]` work with a function. A method has no settable attributes.
        function.name = loss.name
    return loss


def _float32_outside_guard(call: CallNode, disabled: Region, device: str) -> CallNode:
    """Run nodes outside of `fp16_guard` in float32, without autocast."""

    def call_guarded(node: Node, arguments: tuple[Any, Any]) -> Any:
        if node.guarded:
            return call(node, arguments)
        with enter_regions(disabled):
            return call(node, cast_all(arguments, torch.float32, device))

    return call_guarded
