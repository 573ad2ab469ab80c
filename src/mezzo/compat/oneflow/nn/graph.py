"""`nn.Graph`: a whole step or an evaluation from `build`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mezzo._casting import cast_all
from mezzo._dtypes import HALF_DTYPES
from mezzo._errors import PolicyError
from mezzo.autocasting.autocast import autocast_all_devices
from mezzo.compat.oneflow.amp import GradScaler, StaticGradScaler
from mezzo.policy.policy import Policy
from mezzo.policy.types import Level
from mezzo.prepare.decorate import undecorate
from mezzo.scaling.scaler import GradScaler as Scaler
from mezzo.step.eval_step import EvalStep
from mezzo.step.train_step import train_step

_NEEDLESS = (
    "allow_fuse_add_to_output allow_fuse_cast_scale allow_fuse_model_update_ops"
    " enable_cudnn_conv_heuristic_search_algo enable_cudnn_fused_normalization_add_relu"
    " enable_fuse_model_update_ops set_outputs_buffer_size"
).split()
"""Hints to OneFlow's compiler: a step is fused and captured here without them."""


_ENDS = frozenset({"cross_entropy", "nll_loss", "log_softmax", "mean", "sum"})
"""What stands at the end of a graph. OneFlow's pass lets an op that follows be 16-bit only where
another listed op comes after it: losses are float32, and so is the gradient that a scale of 2^16
begins with."""


class GraphConfig:
    """The settings of a graph. `enable_amp` decides; hints to OneFlow's compiler are taken and have nothing to do.

    >>> config = GraphConfig()
    >>> config.enable_amp(True, dtype=torch.bfloat16)
    >>> config.policy()
    Policy('O1', dtype='bfloat16', preset='oneflow', full={'cross_entropy', 'log_softmax', 'mean', 'nll_loss', 'sum'})
    """

    def __init__(self) -> None:
        self._amp: torch.dtype | None = None
        self._settled = False

    def settle(self) -> None:
        """Nothing is set from now on: the graph was made ready with what there is."""
        self._settled = True

    # OneFlow's call shape.
    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.float16) -> None:
        """Run the graph in mixed precision, or not. Said before the first call of the graph."""
        if type(mode) is not bool:
            raise AssertionError(f"enable_amp(mode) takes True or False, got {mode!r}.")
        if dtype not in HALF_DTYPES:
            raise AssertionError(f"enable_amp(dtype=...) takes float16 or bfloat16, got {dtype!r}.")
        if self._settled:
            raise RuntimeError(
                "config.enable_amp() came after the graph's first call, which made it ready. Call"
                " it in __init__."
            )
        self._amp = dtype if mode else None

    @property
    def amp_dtype(self) -> torch.dtype | None:
        """What listed ops run in; None where everything is float32."""
        return self._amp

    def policy(self) -> Policy:
        """The settings as a policy."""
        return (
            Policy("O0")
            if self._amp is None
            else Policy("O1", self._amp, preset="oneflow", full=_ENDS)
        )

    def __getattr__(self, name: str) -> Any:
        if name in _NEEDLESS:
            return lambda *_, **__: None
        raise AttributeError(
            f"GraphConfig has no {name!r} here. There are: enable_amp, and without effect"
            f" {', '.join(_NEEDLESS)}."
        )


Build = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A graph without an optimizer."""

    build: Build
    policy: Policy

    def made(self, whole: Whole) -> Program:
        """The graph as an evaluation; as it is where it has no parameters."""
        if next(whole.parameters(), None) is None:
            return Program(_unparametrized(whole, self.policy))
        return Program(EvalStep(whole, self.policy))


@dataclass(frozen=True, eq=False)
class Training:
    """A graph with optimizers."""

    build: Build
    policy: Policy
    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[LRScheduler, ...]
    scaler: Scaler | None

    def made(self, whole: Whole) -> Program:
        """The graph as a training step. Nothing stays on the modules and optimizers: they may be in other graphs, and be called by themselves."""
        if next(whole.parameters(), None) is None:
            raise PolicyError(
                "The graph has an optimizer and no module with parameters. Set the modules as"
                " attributes of the graph in __init__."
            )
        make = train_step(
            models=whole,
            optimizers=self.optimizers,
            policy=self.policy,
            scaler=False if self.scaler is None else self.scaler,
            scheduler=self.schedulers or None,
        )
        try:
            return Program(make(whole.forward))
        finally:
            undecorate(whole)


class Program:
    """A graph that is ready."""

    def __init__(self, run: Runs) -> None:
        self.run = run


class Runs(Protocol):
    """Whatever runs a graph."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the graph."""


class Whole(nn.Module):
    """A graph's modules as one, with `build` as forward."""

    def __init__(self, build: Build, policy: Policy, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._build, self._casts = build, policy.level is not Level.O0
        for name, block in blocks.items():
            self.add_module(name, block)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `build` computes, in float32: the outputs of OneFlow's graphs are in none of its lists."""
        built = self._build(*args, **kwargs)
        return _widened(built) if self._casts else built


def program_of(parts: Training | Evaluation, blocks: Mapping[str, nn.Module]) -> Program:
    """Make a graph ready."""
    return parts.made(Whole(parts.build, parts.policy, blocks))


def _widened(value: Any) -> Any:
    for device in ("cpu", "cuda"):
        value = cast_all(value, torch.float32, device)
    return value


def _unparametrized(whole: Whole, policy: Policy) -> Runs:
    region = autocast_all_devices(policy)

    def run(*args: Any, **kwargs: Any) -> Any:
        with region, torch.inference_mode():
            return whole(*args, **kwargs)

    return run


_numbers: dict[str, Any] = {}


class Graph:
    """The base class of graphs: modules are attributes, `build` computes, and calling the graph runs it.

    With an optimizer the call trains: `build` calls `loss.backward()`, and scaling, update and new
    scale follow by themselves. Without one it evaluates. What `build` gives comes back in float32,
    as a graph's outputs do in OneFlow.

    >>> class Training(Graph):
    ...     def __init__(self, model, optimizer):
    ...         super().__init__()
    ...         self.model = model
    ...         self.add_optimizer(optimizer)
    ...         self.config.enable_amp(True, dtype=torch.bfloat16)
    ...     def build(self, x):
    ...         loss = self.model(x).square().mean()
    ...         loss.backward()
    ...         return loss
    >>> model = nn.Linear(4, 1)
    >>> graph = Training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> bool(graph(torch.ones(8, 4)) > graph(torch.ones(8, 4)))
    True
    """

    def __init__(self, **_: Any) -> None:
        self.config = GraphConfig()
        self._blocks: dict[str, nn.Module] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[LRScheduler] = []
        self._scaler: Scaler | None = None
        self._program: Program | None = None
        kind = type(self).__name__
        self._name = f"{kind}_{next(_numbers.setdefault(kind, count()))}"

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            if "_blocks" not in self.__dict__:
                raise AttributeError(
                    f"Cannot add the module {name!r} before super().__init__() was called. Call it"
                    " first in __init__."
                )
            self._blocks[name] = value
        super().__setattr__(name, value)

    # -- describing --------------------------------------------------------------------------------

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """What the graph computes; a subclass says it."""
        raise NotImplementedError(
            "nn.Graph.build() method must be overridden when subclassing the nn.Graph."
        )

    # A hint.
    def add_optimizer(
        self,
        optim: torch.optim.Optimizer,
        *,
        lr_sch: LRScheduler | None = None,
        is_sparse: bool = False,
    ) -> None:
        """Train with an optimizer, and a scheduler that advances with every good step."""
        self._refuse_late("add_optimizer")
        if not isinstance(optim, torch.optim.Optimizer):
            # OneFlow's type.
            raise AssertionError(
                f"optimizer must be an instance of Optimizer, got {type(optim).__name__}. Pass one"
                " of torch.optim."
            )
        if lr_sch is not None:
            if not isinstance(lr_sch, LRScheduler):
                raise AssertionError(
                    f"lr_sch must be an LRScheduler, got {type(lr_sch).__name__}. Pass one of"
                    " torch.optim.lr_scheduler."
                )
            if lr_sch.optimizer is not optim:
                raise AssertionError(
                    "lr_scheduler's optimizer must be the same optimizer in add_optimizer."
                )
            self._schedulers.append(lr_sch)
        self._optimizers.append(optim)

    def set_grad_scaler(self, grad_scaler: GradScaler | StaticGradScaler) -> None:
        """Scale gradients. Without this nothing is scaled, in float16 too."""
        self._refuse_late("set_grad_scaler")
        if not isinstance(grad_scaler, GradScaler | StaticGradScaler):
            raise AssertionError(
                "grad_scaler must be an amp.GradScaler or an amp.StaticGradScaler, got"
                f" {type(grad_scaler).__name__}."
            )
        self._scaler = grad_scaler.scaler()

    # -- running -----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; the first call makes it ready."""
        if self._program is None:
            self._program = program_of(self._parts(), self._blocks)
            self.config.settle()
        return self._program.run(*args, **kwargs)

    def _parts(self) -> Training | Evaluation:
        policy = self.config.policy()
        if not self._optimizers:
            return Evaluation(self.build, policy)
        return Training(
            self.build, policy, tuple(self._optimizers), tuple(self._schedulers), self._scaler
        )

    # -- asking ------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The class and a number."""
        return self._name

    @property
    def training(self) -> bool:
        """Whether the graph has an optimizer."""
        return bool(self._optimizers)

    @property
    def is_compiled(self) -> bool:
        """Whether the graph was called already."""
        return self._program is not None

    @property
    def mezzo_step(self) -> Any:
        """The step of mezzo that runs the graph: its `scale`, whether the last update was `skipped`, whether it is `captured`. None before the first call."""
        return None if self._program is None else self._program.run

    # -- saving ------------------------------------------------------------------------------------

    def state_dict(self) -> OrderedDict[str, Any]:
        """The states of modules by their names in the graph, and of optimizers, schedulers and the scale."""
        return OrderedDict((name, one.state_dict()) for name, one in self._stateful().items())

    # OneFlow's call shape.
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Take over states; names that do not agree are an error unless `strict` is false."""
        parts = self._stateful()
        if strict and state_dict.keys() != parts.keys():
            raise RuntimeError(
                f"The state has the parts {sorted(state_dict)}, the graph has {sorted(parts)}. Load"
                " with strict=False what both have."
            )
        for name, one in parts.items():
            if name in state_dict:
                one.load_state_dict(state_dict[name])

    def _stateful(self) -> dict[str, Any]:
        parts: dict[str, Any] = dict(self._blocks)
        parts |= {f"optimizer.{place}": one for place, one in enumerate(self._optimizers)}
        parts |= {f"lr_scheduler.{place}": one for place, one in enumerate(self._schedulers)}
        return parts if self._scaler is None else parts | {"grad_scaler": self._scaler}

    def _refuse_late(self, call: str) -> None:
        if self._program is not None:
            raise RuntimeError(
                f"{call}() came after the graph's first call, which made it ready. Call it in"
                " __init__."
            )
