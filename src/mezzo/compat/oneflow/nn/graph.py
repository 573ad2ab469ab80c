"""`oneflow.nn.Graph`: a training step or an evaluation defined by `build`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from textwrap import indent
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mezzo._casting import cast_all
from mezzo._dtypes import dtype_name
from mezzo._errors import PolicyError
from mezzo._torch import pytree
from mezzo.autocasting.autocast import autocast_all_devices
from mezzo.compat.oneflow.amp import GradScaler, StaticGradScaler
from mezzo.compat.oneflow.nn.graph_config import GraphConfig
from mezzo.policy.policy import Policy
from mezzo.policy.types import Level
from mezzo.prepare.decorate import undecorate
from mezzo.scaling.scaler import GradScaler as EngineScaler
from mezzo.step.eval_step import EvalStep
from mezzo.step.function_step import train_step
from mezzo.step.inputs import Call

_OTHER_METHODS = {
    "enable_shared": "the same graph for all shapes: other shapes are captured separately",
    "share_from": "the same graph for all shapes: other shapes are captured separately",
    "enable_save_runtime_state_dict": "state_dict()",
    "runtime_state_dict": "state_dict()",
    "load_runtime_state_dict": "load_state_dict()",
    "build_graph": "the first call of the graph",
    "trace": "a subclass with build()",
    "to_global": "torch.distributed.tensor.distribute_module",
}
"""Methods of OneFlow's graphs that are not here, and what to use."""


_MAX_DEBUG_LEVEL = 3

_instance_counts: dict[str, Any] = {}


class Graph:
    """`oneflow.nn.Graph`: set modules as attributes, define `build`, and call the graph.

    With an optimizer a call is a training step: `build` calls `loss.backward()`; loss scaling, the
    update and the new scale are automatic. Without one it is an evaluation. Outputs of `build` are
    cast to float32, as in OneFlow.

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
        self._scaler: EngineScaler | None = None
        self._scaler_settings: GradScaler | StaticGradScaler | None = None
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        self._debug_level = -1
        self._runner: GraphRunner | None = None
        class_name = type(self).__name__
        number = next(_instance_counts.setdefault(class_name, count()))
        self._name = f"{class_name}_{number}"

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            if "_blocks" not in self.__dict__:
                raise AttributeError(
                    f"Cannot add the module {name!r} before super().__init__() was called. Call it"
                    " first in __init__."
                )
            self._blocks[name] = value
        super().__setattr__(name, value)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the graph's outputs; subclasses override this."""
        raise NotImplementedError(
            "nn.Graph.build() method must be overridden when subclassing the nn.Graph."
        )

    def add_optimizer(
        self,
        optim: torch.optim.Optimizer,
        *,
        lr_sch: LRScheduler | None = None,
        is_sparse: bool = False,
    ) -> None:
        """Train with an optimizer, and a scheduler that advances with every successful step.

        `is_sparse` has no effect.
        """
        self._check_not_called("add_optimizer")
        if not isinstance(optim, torch.optim.Optimizer):
            # OneFlow raises AssertionError.
            raise AssertionError(
                f"optimizer must be an instance of Optimizer, got {type(optim).__name__}. Pass one"
                " of torch.optim."
            )
        if any("clip_grad_max_norm" in group for group in optim.param_groups):
            # torch's optimizers accept any entry of a group without effect.
            raise ValueError(
                "clip_grad_max_norm of a parameter group is not supported: gradients would not be"
                " clipped. Leave it out, and use clip_norm= of mezzo.TrainStep."
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
        """Enable loss scaling. Without this call there is none, even in float16."""
        self._check_not_called("set_grad_scaler")
        if not isinstance(grad_scaler, GradScaler | StaticGradScaler):
            raise AssertionError(
                "grad_scaler must be an amp.GradScaler or an amp.StaticGradScaler, got"
                f" {type(grad_scaler).__name__}."
            )
        self._scaler, self._scaler_settings = grad_scaler.make_scaler(), grad_scaler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; the first call prepares it."""
        if self._runner is None:
            return self._first_call(args, kwargs)
        return self._runner(*args, **kwargs)

    def _first_call(self, args: Any, kwargs: Any) -> Any:
        self._log(0, "start building graph.")
        runner = make_runner(self._spec(), self._blocks)
        for name, block in self._blocks.items():
            self._log(1, f"(MODULE:{name}:{type(block).__name__}()) is part of the graph.")
        self._runner = runner
        self.config.freeze()
        outputs = runner(*args, **kwargs)
        self._inputs, self._outputs = _describe((args, kwargs)), _describe(outputs)
        self._log(0, f"end building graph, first call done: {self._kind()}.")
        return outputs

    def debug(
        self,
        v_level: int = 0,
        *,
        ranks: int | list[int] | None = None,
        max_py_stack_depth: int = 2,
        only_user_py_stack: bool = True,
        op_repr_with_py_stack: bool = False,
    ) -> None:
        """Print the stages of the first call (`v_level` 0) and the modules (1); −1 disables it.

        On ranks other than 0 nothing is printed, unless `ranks` lists them or is −1. The other
        arguments, and levels above 1, have no effect.
        """
        if type(v_level) is not int or not -1 <= v_level <= _MAX_DEBUG_LEVEL:
            raise AssertionError(f"debug(v_level) takes -1 (off), 0, 1, 2 or 3, got {v_level!r}.")
        chosen = [0] if ranks is None else [ranks] if isinstance(ranks, int) else ranks
        if not isinstance(chosen, list):
            raise ValueError(f"ranks must be int or List[int], got {type(ranks).__name__}.")
        if -1 in chosen or _rank() in chosen:
            self._debug_level = v_level

    def _log(self, level: int, message: str) -> None:
        if level <= self._debug_level:
            print(f"[rank:{_rank()}] {self._shallow_repr()} {message}", flush=True)  # noqa: T201

    def _kind(self) -> str:
        """Return what the graph does, for messages."""
        precision = self.config.amp_dtype or torch.float32
        return f"{'training' if self.training else 'evaluation'} in {dtype_name(precision)}"

    def _shallow_repr(self) -> str:
        return f"(GRAPH:{self._name}:{type(self).__name__})"

    def __repr__(self) -> str:
        """Return the graph's settings and modules; after the first call its inputs and outputs."""
        lines = [f"(CONFIG:config:{self.config!r}, training={self.training})"]
        lines += [f"(OPTIMIZER:{type(optimizer).__name__})" for optimizer in self._optimizers]
        lines += [f"(LR_SCHEDULER:{type(scheduler).__name__})" for scheduler in self._schedulers]
        if self._scaler_settings is not None:
            lines.append(f"(SCALER:{self._scaler_settings!r})")
        lines += [f"(INPUT:{described})" for described in self._inputs]
        lines += [f"(MODULE:{name}:{block!r})" for name, block in self._blocks.items()]
        lines += [f"(OUTPUT:{described})" for described in self._outputs]
        body = indent("\n".join(lines), "  ")
        return f"{self._shallow_repr()}: (\n{body}\n)"

    def __getattr__(self, name: str) -> Any:
        if name in _OTHER_METHODS:
            raise AttributeError(f"nn.Graph has no {name}() here. Use {_OTHER_METHODS[name]}.")
        if "_runner" not in self.__dict__:
            raise AttributeError(
                f"{type(self).__name__} was not initialized as a graph. Call super().__init__()"
                " first in its __init__."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _spec(self) -> TrainingSpec | EvaluationSpec:
        policy = self.config.policy()
        if not self._optimizers:
            return EvaluationSpec(self.build, policy)
        return TrainingSpec(
            self.build, policy, tuple(self._optimizers), tuple(self._schedulers), self._scaler
        )

    @property
    def name(self) -> str:
        """Class name and instance number."""
        return self._name

    @property
    def training(self) -> bool:
        """Whether the graph has an optimizer."""
        return bool(self._optimizers)

    @property
    def is_compiled(self) -> bool:
        """Whether the graph was called before."""
        return self._runner is not None

    @property
    def mezzo_step(self) -> Any:
        """The mezzo step that runs the graph; None before the first call.

        A training step has `scale`, `skipped` and `captured`.
        """
        return self._runner

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the states of modules, optimizers, schedulers and the loss scale by name."""
        return OrderedDict(
            (name, part.state_dict()) for name, part in self._stateful_parts().items()
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a `state_dict`; with `strict` its names must equal those of the graph."""
        parts = self._stateful_parts()
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"load_state_dict takes a dictionary, got {type(state_dict).__name__}. Pass what"
                " graph.state_dict() returned."
            )
        if strict and state_dict.keys() != parts.keys():
            raise RuntimeError(
                f"The state has the parts {sorted(state_dict)}, the graph has {sorted(parts)}. Pass"
                " strict=False to load the common parts."
            )
        for name, part in parts.items():
            if name in state_dict:
                part.load_state_dict(state_dict[name])

    def _stateful_parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = dict(self._blocks)
        parts |= {f"optimizer.{i}": part for i, part in enumerate(self._optimizers)}
        parts |= {f"lr_scheduler.{i}": part for i, part in enumerate(self._schedulers)}
        return parts if self._scaler is None else parts | {"grad_scaler": self._scaler}

    def _check_not_called(self, call: str) -> None:
        if self._runner is not None:
            raise RuntimeError(
                f"{call}() was called after the graph's first call. Call it in __init__."
            )


Build = Callable[..., Any]


class GraphEvaluation(EvalStep):
    """An `EvalStep` that passes its arguments to `build` as they are, dictionaries too."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `build` and return copies of its outputs."""
        return self._evaluate(Call(args, kwargs))


@dataclass(frozen=True, eq=False)
class EvaluationSpec:
    """Parts of a graph without an optimizer."""

    build: Build
    policy: Policy

    def make_runner(self, module: BuildModule) -> GraphRunner:
        """Return an `EvalStep`, or without parameters a function in an autocast region."""
        if next(module.parameters(), None) is None:
            return _functional_runner(module, self.policy)
        return GraphEvaluation(module, self.policy)


@dataclass(frozen=True, eq=False)
class TrainingSpec:
    """Parts of a graph with optimizers."""

    build: Build
    policy: Policy
    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[LRScheduler, ...]
    scaler: EngineScaler | None

    def make_runner(self, module: BuildModule) -> GraphRunner:
        """Return a training step.

        The modules and optimizers are undecorated afterwards: they may belong to other graphs and
        be called directly.
        """
        if next(module.parameters(), None) is None:
            raise PolicyError(
                "The graph has an optimizer but no module with parameters. Set the modules as"
                " attributes of the graph in __init__."
            )
        as_train_step = train_step(
            models=module,
            optimizers=self.optimizers,
            policy=self.policy,
            scaler=False if self.scaler is None else self.scaler,
            scheduler=self.schedulers or None,
        )
        try:
            return as_train_step(module.forward)
        finally:
            undecorate(module)


class GraphRunner(Protocol):
    """Runs a graph."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph once."""


class BuildModule(nn.Module):
    """A graph's modules as one module, with `build` as its forward."""

    def __init__(self, build: Build, policy: Policy, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._build, self._casts_outputs = build, policy.level is not Level.O0
        for name, block in blocks.items():
            self.add_module(name, block)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run `build` and cast its outputs to float32, as OneFlow's graphs do."""
        outputs = self._build(*args, **kwargs)
        return _to_float32(outputs) if self._casts_outputs else outputs


def make_runner(
    spec: TrainingSpec | EvaluationSpec, blocks: Mapping[str, nn.Module]
) -> GraphRunner:
    """Return what runs a graph with these modules."""
    return spec.make_runner(BuildModule(spec.build, spec.policy, blocks))


def _describe(values: Any) -> list[str]:
    """Describe the tensors of arguments or outputs."""
    return [
        f"tensor(..., device='{leaf.device}', size={tuple(leaf.shape)}, dtype={leaf.dtype})"
        for leaf in pytree.tree_leaves(values)
        if isinstance(leaf, torch.Tensor)
    ]


def _rank() -> int:
    """Return the number of this process; 0 without torch.distributed."""
    distributed = torch.distributed
    return (
        distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    )


def _to_float32(value: Any) -> Any:
    for device in ("cpu", "cuda"):
        value = cast_all(value, torch.float32, device)
    return value


def _functional_runner(module: BuildModule, policy: Policy) -> GraphRunner:
    region = autocast_all_devices(policy)

    def run(*args: Any, **kwargs: Any) -> Any:
        with region, torch.inference_mode():
            return module(*args, **kwargs)

    return run
