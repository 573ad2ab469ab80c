"""Train and evaluate a static program in its precision."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
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
from mezzo.compat.paddle.amp._grad_scaler import ScalerParameters
from mezzo.compat.paddle.nn import clip_of, norm_for_all
from mezzo.compat.paddle.static._executor import Around, evaluating, plainly, replay
from mezzo.compat.paddle.static._program import Node, Program, Variable, default_main_program
from mezzo.policy.presets import paddle
from mezzo.policy.registry import registry
from mezzo.policy.types import Level, Rule
from mezzo.step.train_step import FunctionStep

GRAY = (
    "batch_norm concat dropout elementwise_add elementwise_div elementwise_floordiv elementwise_max"
    " elementwise_min elementwise_mod elementwise_mul elementwise_sub gather layer_norm leaky_relu"
    " pool2d pool3d relu relu6 reshape2 sigmoid sign split stack tanh top_k transpose2"
)
"""Ops of static programs that follow what flows into them (PaddlePaddle 3.3.1,
static/amp/fp16_lists.py), those with a counterpart here."""

_KEPT_BY = {"batch_norm", "layer_norm", "instance_norm"}
"""Ops whose parameters and statistics stay float32."""


@dataclass(frozen=True)
class Precision:
    """What `static.amp.decorate` was told; without it, everything is float32."""

    level: str = "O0"
    dtype: str = "float16"
    half: frozenset[str] = frozenset()
    """Ops of the custom white list, in mezzo's names."""
    full: frozenset[str] = frozenset()
    """Ops of the custom black list."""
    guarded: bool = False
    """Whether only what is inside `fp16_guard` is 16-bit."""
    promote: bool = False
    """Whether ops in no list follow the widest input, as they do in eager mode."""
    masters: bool = False
    master_grad: bool = False
    scaling: ScalerParameters | None = None
    """How losses are scaled; None does not."""

    @property
    def policy(self) -> mezzo.Policy:
        """The same in mezzo's words."""
        return _policy(self)

    @property
    def fed(self) -> torch.dtype | None:
        """What floating-point feeds are cast to: where all is 16-bit Paddle asks the user to cast them."""
        return parse_dtype(self.dtype) if self.level == "O2" and not self.guarded else None

    def stays_full(self, nodes: Iterable[Node]) -> list[torch.Tensor]:
        """Parameters and buffers that a norm, an op of the black list or something outside of `fp16_guard` reads."""
        policy, found = self.policy, []
        for node in nodes:
            if (
                node.name in _KEPT_BY
                or (self.guarded and not node.guarded)
                or _is_full(policy, node.function)
            ):
                found += [one for one in node.tensors() if not isinstance(one, Variable)]
        return found


@cache
def _policy(told: Precision) -> mezzo.Policy:
    """In no list means float32 at O1 and 16-bit at O2, unless ops promote."""
    if told.level == "O0":
        return mezzo.Policy("O0")
    words: dict[str, Any] = {
        "half": told.half,
        "full": told.full,
        "master": "float32" if told.masters else None,
    }
    if told.master_grad:
        words["grad_dtype"] = "float32"
    if not told.promote and told.level == "O1":
        listed = paddle.lists(Level.O1, torch.float16).entries.keys() | told.half | told.full
        gray = {ours for name in GRAY.split() for ours in paddle.NAMES.known[name]}
        words |= {"default_rule": "full", "promote": gray - listed}
    elif not told.promote and told.level == "O2":
        words["default_rule"] = "half"
    return mezzo.Policy(told.level, told.dtype, preset="paddle", keep_full=(), **words)


def _is_full(policy: mezzo.Policy, function: Any) -> bool:
    name = registry().name_of(function)
    return name is not None and policy.explain(name, device="cpu").rule is Rule.FULL


Optimizer = torch.optim.Optimizer


class ProgramTrainer:
    """A program, the loss that is minimized, and by whom."""

    def __init__(
        self, program: Program, loss: Variable, optimizer: Optimizer, precision: Precision
    ) -> None:
        self.program, self.loss, self.optimizer, self.precision = (
            program,
            loss,
            optimizer,
            precision,
        )
        self.scaler = None if precision.scaling is None else precision.scaling.make()
        self.prepared = False
        self._steps: dict[tuple[int, ...], FunctionStep] = {}
        nodes = program.needed_for([loss])
        self._held = Held(nodes, optimizer)
        self._kept = self._held.names_of(precision.stays_full(nodes))

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self._held.parameters()).device

    def prepare(self) -> None:
        """Make parameters 16-bit where the level says so; at the first run at the latest."""
        if not self.prepared:
            # No loss is fetched by this one: it is what makes parameters, optimizer and scaler
            # ready.
            self._steps[()] = self._made(())
            self.prepared = True

    def move(self, device: torch.device) -> None:
        """Bring parameters and buffers to a device, before the first run."""
        if not self.prepared:
            for tensor in (*self._held.parameters(), *self._held.buffers()):
                if tensor.device.type != device.type:
                    tensor.data = tensor.data.to(device)

    def train(
        self, feeds: dict[str, torch.Tensor], wanted: Sequence[Variable], *, capture: bool
    ) -> list[torch.Tensor]:
        """Train on a feed, and give the values of variables as they were before the update."""
        self.prepare()
        key = (int(capture), *map(id, wanted))
        if key not in self._steps:
            self._steps[key] = self._made(wanted, capture=capture)
        return list(self._steps[key](feeds))

    def evaluate(
        self, program: Program, feeds: dict[str, torch.Tensor], wanted: Sequence[Variable]
    ) -> list[torch.Tensor]:
        """The values of variables in the precision of training, without training."""
        self.prepare()
        with torch.no_grad(), enter_regions(self._region()):
            return self._run(
                program,
                program.needed_for(wanted),
                feeds,
                wanted,
                evaluating if program.for_test else plainly,
            )

    def _made(self, wanted: Sequence[Variable], *, capture: bool = False) -> FunctionStep:
        computed = [self.loss, *wanted]
        nodes = self.program.needed_for(computed)

        def body(feeds: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            loss, *fetched = self._run(self.program, nodes, feeds, computed, plainly)
            loss.backward()
            return tuple(fetched)

        words: dict[str, Any] = (
            {}
            if self.prepared
            else {
                "policy": self.precision.policy,
                "keep_full": self._kept,
                "clip_norm": self._clip_norm(),
            }
        )
        scaler: Any = self.scaler if self.scaler is not None else False
        return mezzo.train_step(
            models=self._held,
            optimizers=self.optimizer,
            scaler=scaler,
            capture="auto" if capture else False,
            **words,
        )(body)

    def _run(
        self,
        program: Program,
        nodes: Sequence[Node],
        feeds: dict[str, torch.Tensor],
        wanted: Sequence[Variable],
        around: Around,
    ) -> list[torch.Tensor]:
        dtype = self.precision.fed
        if dtype is not None:
            feeds = cast_all(feeds, dtype, self.device.type)
        if self.precision.guarded:
            around = _outside_in_float32(around, self._region(enabled=False), self.device.type)
        given = {program.feeds[name]: value for name, value in feeds.items()}
        return replay(nodes, given, wanted, around)

    def _region(self, *, enabled: bool = True) -> Region:
        return region_for(self.precision.policy, self.device.type, enabled=enabled)

    def _clip_norm(self) -> float | None:
        norm = norm_for_all([self.optimizer])
        if norm is None and clip_of(self.optimizer) is not None and self.scaler is not None:
            raise ValueError(
                f"{self.optimizer._grad_clip!r} clips gradients that are still scaled. "  # type: ignore[attr-defined]
                "In a static program with loss scaling use nn.ClipGradByGlobalNorm(clip_norm=...)."
            )
        return norm


class Held(nn.Module):
    """All parameters and buffers of a program, and those of its optimizer: what a step takes for its model."""

    def __init__(self, nodes: Sequence[Node], optimizer: Optimizer) -> None:
        super().__init__()
        read = [
            tensor
            for node in nodes
            for tensor in node.tensors()
            if not isinstance(tensor, Variable)
        ]
        stepped = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        self._names: dict[int, str] = {}
        for tensor in (*read, *stepped):
            if id(tensor) not in self._names:
                self._names[id(tensor)] = name = f"tensor_{len(self._names)}"
                if isinstance(tensor, nn.Parameter):
                    self.register_parameter(name, tensor)
                else:
                    self.register_buffer(name, tensor)

    def names_of(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """What tensors are called here, buffers always among them: statistics and constants keep their dtype."""
        kept = [self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names]
        return sorted({*kept, *(name for name, _ in self.named_buffers())})


def close(loss: Any, optimizer: Optimizer, precision: Precision) -> ProgramTrainer:
    """Close the program that a loss is part of; a function is called with the variables that are named like its parameters, and its result is the loss.

    A later call closes it anew: the last optimizer trains.
    """
    variable = loss if isinstance(loss, Variable) else _built(loss)
    program = variable.program
    closing = program.closing = ProgramTrainer(program, variable, optimizer, precision)
    return closing


def _built(function: Callable[..., Any]) -> Variable:
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
            f"The function gave {type(loss).__name__}, not a loss computed from what is fed."
        )
    program.name(loss, getattr(function, "__name__", "loss"))
    with suppress(AttributeError):
        # So that `fetch_list=[loss.name]` may stay as it is; a method, say, takes no attributes.
        function.name = loss.name  # type: ignore[attr-defined]
    return loss


def _outside_in_float32(around: Around, off: Region, device: str) -> Around:
    def carry_out(node: Node, given: tuple[Any, Any]) -> Any:
        if node.guarded:
            return around(node, given)
        with enter_regions(off):
            return around(node, cast_all(given, torch.float32, device))

    return carry_out
