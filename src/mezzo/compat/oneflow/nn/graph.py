"""`oneflow.nn.Graph`: a class whose `build` is the whole step, run as one captured program where a device can replay it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mezzo.compat.oneflow.amp.scalers import GradScaler, StaticGradScaler
from mezzo.compat.oneflow.nn.config import GraphConfig
from mezzo.compat.oneflow.nn.program import Evaluation, Program, Training, program_of
from mezzo.scaling.scaler import GradScaler as Scaler

_numbers: dict[str, Any] = {}


class Graph:
    """The base class of graphs: modules are attributes, `build` computes, and calling the graph runs it.

    With an optimizer the call trains: `build` calls `loss.backward()`, and scaling, update and new scale follow by themselves. Without one it evaluates.
    What `build` gives comes back in float32, as a graph's outputs do in OneFlow.

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
                raise AttributeError(f"Cannot add the module {name!r} before super().__init__() was called. Call it first in __init__.")
            self._blocks[name] = value
        super().__setattr__(name, value)

    # -- describing ------------------------------------------------------------------------------------------------------------------------------

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """What the graph computes; a subclass says it."""
        raise NotImplementedError("nn.Graph.build() method must be overridden when subclassing the nn.Graph.")

    def add_optimizer(self, optim: torch.optim.Optimizer, *, lr_sch: LRScheduler | None = None, is_sparse: bool = False) -> None:  # noqa: ARG002 - a hint
        """Train with an optimizer, and a scheduler that advances with every good step."""
        self._refuse_late("add_optimizer")
        if not isinstance(optim, torch.optim.Optimizer):
            raise AssertionError(f"optimizer must be an instance of Optimizer, got {type(optim).__name__}. Pass one of torch.optim.")  # noqa: TRY004 - OneFlow's type
        if lr_sch is not None:
            if not isinstance(lr_sch, LRScheduler):
                raise AssertionError(f"lr_sch must be an LRScheduler, got {type(lr_sch).__name__}. Pass one of torch.optim.lr_scheduler.")
            if lr_sch.optimizer is not optim:
                raise AssertionError("lr_scheduler's optimizer must be the same optimizer in add_optimizer.")
            self._schedulers.append(lr_sch)
        self._optimizers.append(optim)

    def set_grad_scaler(self, grad_scaler: GradScaler | StaticGradScaler) -> None:
        """Scale gradients. Without this nothing is scaled, in float16 too."""
        self._refuse_late("set_grad_scaler")
        if not isinstance(grad_scaler, GradScaler | StaticGradScaler):
            raise AssertionError(f"grad_scaler must be an amp.GradScaler or an amp.StaticGradScaler, got {type(grad_scaler).__name__}.")  # noqa: TRY004
        self._scaler = grad_scaler.scaler()

    # -- running ---------------------------------------------------------------------------------------------------------------------------------

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
        return Training(self.build, policy, tuple(self._optimizers), tuple(self._schedulers), self._scaler)

    # -- asking ----------------------------------------------------------------------------------------------------------------------------------

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

    # -- saving ----------------------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> OrderedDict[str, Any]:
        """The states of modules by their names in the graph, and of optimizers, schedulers and the scale."""
        return OrderedDict((name, one.state_dict()) for name, one in self._stateful().items())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001, FBT002 - OneFlow's call shape
        """Take over states; names that do not agree are an error unless `strict` is false."""
        parts = self._stateful()
        if strict and state_dict.keys() != parts.keys():
            raise RuntimeError(f"The state has the parts {sorted(state_dict)}, the graph has {sorted(parts)}. Load with strict=False what both have.")
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
            raise RuntimeError(f"{call}() came after the graph's first call, which made it ready. Call it in __init__.")
