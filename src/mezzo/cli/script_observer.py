"""Find the model, the optimizers and the scaler of a script as it trains, and observe them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import wraps
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from mezzo._errors import MezzoError
from mezzo.advising.lint import lint
from mezzo.cli.apex_observer import observe_apex
from mezzo.cli.rank_logs import Ranks
from mezzo.observing.attachments import LoopAttachment
from mezzo.observing.log import LogWriter, log_path
from mezzo.observing.module_hooks import ModuleHook
from mezzo.observing.op_stats import OpStats
from mezzo.observing.records import OpsRecord, Record, RunEnded, RunStarted
from mezzo.observing.run import Run, observe
from mezzo.policy.policy import Policy
from mezzo.prepare.arguments import uncompiled, unwrapped
from mezzo.scaling.gradients import parameters
from mezzo.scaling.mesh import named_shards
from mezzo.scaling.scaler import GradScaler
from mezzo.step.base import Step

_LARGE = 64 * 2**20
"""Bytes of a log that ended before a run was observed."""


@dataclass(frozen=True, kw_only=True)
class LintRecord(Record):
    """What `mezzo.lint` finds in the setup of a script."""

    kind: ClassVar[str] = "lint"
    findings: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class UnobservedRecord(Record):
    """What a script did that is not in its log, as a sentence."""

    kind: ClassVar[str] = "unobserved"
    what: str


class ScriptObserver:
    """Observes the first model that a script trains, and says what else it trained.

    While it is entered, optimizers and scalers are noted as they are created. The first forward
    pass, with gradients, of a module that has parameters of a noted optimizer begins the run.
    """

    def __init__(
        self, log: Path, every: int | None, ranks: Ranks, policy: Policy | None = None
    ) -> None:
        self._policy = policy
        self._region: torch.dtype | None = None
        """Dtype of the autocast region around the model, with a scaler of torch's or none."""
        self._log, self._every, self._ranks = log, every, ranks
        self._created = 0
        """Optimizers that were created before a run began."""
        # By number: in the order of their creation, without keeping them alive.
        self._optimizers: WeakValueDictionary[int, torch.optim.Optimizer] = WeakValueDictionary()
        self._scalers: WeakValueDictionary[int, GradScaler] = WeakValueDictionary()
        self._patches, self._began = ExitStack(), time.time()
        self._other_steps = ExitStack()
        self._stepped: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._others: list[str] = []
        """Optimizers that stepped and are not observed, in words."""
        self._refusal = ""
        """Why the run could not be observed."""
        self._is_done = False
        """Whether a run has begun, or could not."""
        self.run: Run | None = None
        """The run, once it has begun."""

    def __enter__(self) -> Self:
        self._patches.callback(_after(torch.optim.Optimizer, "__init__", self._add_optimizer))
        self._patches.callback(_after(GradScaler, "__init__", _adder(self._scalers)))
        self._patches.callback(self._wrap_steps())
        self._patches.callback(register_module_forward_pre_hook(self._before_forward).remove)
        hook = register_optimizer_step_post_hook(self._after_step)
        self._other_steps.callback(hook.remove)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patches.close()
        self._other_steps.close()

    def close(self, reason: str) -> None:
        """End the run and its log; without a run, write a log that has no step."""
        if self.run is not None:
            with suppress(MezzoError):
                self._lint(self.run)
            self.run._write([UnobservedRecord(what=what) for what in self._unobserved(self.run)])
            self.run.stop(reason)
            return
        writer = LogWriter(log_path(self._log, self._ranks.rank, self._ranks.size), _LARGE)
        started = RunStarted(
            torch=torch.__version__,
            rank=self._ranks.rank,
            ranks=self._ranks.size,
            started=self._began,
        )
        ended = RunEnded(reason=reason, time=round(time.time() - self._began, 6))
        writer.write([started, UnobservedRecord(what=self._why_no_run()), ended])
        writer.close()

    def _why_no_run(self) -> str:
        if self._refusal:
            return self._refusal
        if self._others:
            return (
                "No module with parameters of an optimizer was called with gradients enabled, as"
                " model(x) does: neither model.forward(x) nor an optimizer of copies, such as"
                " master weights of the script's own, can be followed."
            )
        if self._created:
            return "No optimizer made a step."
        return "The script's process created no optimizer of torch."

    def _unobserved(self, run: Run) -> list[str]:
        """Return what the script trained that the run does not show."""
        attachment = run._attachment
        if attachment is None:
            return []
        inside = {
            id(parameter) for model in attachment.models for _, parameter in named_shards(model)
        }
        trained = [
            parameter for optimizer in attachment.optimizers for parameter in parameters(optimizer)
        ]
        outside = sum(id(parameter) not in inside for parameter in trained)
        found = []
        if outside:
            found.append(f"{outside} of {len(trained)} trained parameters are not in it")
        if self._others:
            more = len(self._others) - 1
            others = self._others[0] + (f" and of {more} more" if more else "")
            found.append(f"steps of another {others} are not recorded")
        name = type(attachment.models[0]).__name__
        return [f"Only {name} was observed: {', and '.join(found)}."] if found else []

    def _lint(self, run: Run) -> None:
        """Write to the log what is wrong with the setup, as far as that shows without a sample."""
        attachment = run._attachment
        if isinstance(attachment, LoopAttachment) and self._region is not None:
            found = lint(
                attachment.models[0],
                attachment.optimizers,
                attachment._scaler,
                self._policy or "O1",
                dtype=self._region,
                measure=False,
            )
            if found:
                run._write([LintRecord(time=run._time(), findings=tuple(found.to_dicts()))])

    # -- begin a run -------------------------------------------------------------------------------

    def _wrap_steps(self) -> Callable[[], None]:
        """Observe the first `TrainStep` that is called; return what undoes this."""
        call = Step._call

        def observed(step: Step, *args: Any) -> Any:
            if self._is_done:
                return call(step, *args)
            with self._unless_it_fails():
                ops = not any(map(_is_compiled, (*step.models, getattr(step, "_forward", None))))
                self.run = observe(step, log=self._path(), every=self._every, ops=ops)
            # Observed, the step has another one.
            return step._call(*args)

        return _replace(Step, "_call", observed)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if self._is_done or not self._optimizers or not torch.is_grad_enabled():
            return
        trained = {
            id(parameter) for _, parameter in named_shards(module) if parameter.requires_grad
        }
        optimizers = [
            optimizer for optimizer in self._optimizers.values() if _steps_any(optimizer, trained)
        ]
        if not optimizers or torch.compiler.is_compiling():
            return
        scaler = next((scaler for scaler in self._scalers.values() if scaler.is_enabled()), None)
        with self._unless_it_fails():
            self._observe_loop(module, optimizers, scaler)

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._created += 1
        self._optimizers[self._created] = optimizer

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note an optimizer that is not observed, at its first step."""
        if optimizer in self._stepped:
            return
        self._stepped.add(optimizer)
        attachment = None if self.run is None else self.run._attachment
        if attachment is None or not any(other is optimizer for other in attachment.optimizers):
            count = len(parameters(optimizer))
            self._others.append(f"{type(optimizer).__name__} ({count} parameters)")

    def _observe_loop(
        self,
        module: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        scaler: GradScaler | None,
    ) -> None:
        self.run = run = observe(module, optimizers, scaler, log=self._path(), every=self._every)
        attachment = run._attachment
        is_apex = False
        if isinstance(attachment, LoopAttachment):
            # Its own hook is registered too late for this forward pass.
            attachment._before_forward()
            is_apex = scaler is None and observe_apex(attachment)
            if scaler is None and not is_apex:
                _note_losses(attachment)
            self._region = None if is_apex else attachment.region_dtype
        if not _is_compiled(module):
            _count_ops(run, module)

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """Begin a run; if that fails, the script goes on without one."""
        self._is_done = True
        self._patches.close()
        try:
            yield
        except MezzoError as error:
            self._refusal = f"It could not be observed: {error}"
            print(f"mezzo: this run is not observed: {error}", file=sys.stderr)  # noqa: T201

    def _path(self) -> Path:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return self._log
        return log_path(self._log, self._ranks.rank, self._ranks.size)


def _adder(objects: WeakValueDictionary[int, Any]) -> Callable[[Any], None]:
    numbers = count()

    def add(created: Any) -> None:
        objects[next(numbers)] = created

    return add


def _steps_any(optimizer: torch.optim.Optimizer, parameters: set[int]) -> bool:
    return any(
        id(parameter) in parameters
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _note_losses(attachment: LoopAttachment) -> None:
    """Note the loss of a loop without a scaler: the number that backward is called on."""

    def note(tensor: torch.Tensor) -> None:
        if tensor.numel() == 1:
            attachment.note_loss(tensor)

    attachment._detach.callback(_before(torch.Tensor, "backward", note))


def _is_compiled(module: Any) -> bool:
    """Return whether a module or one in it runs compiled.

    Its ops can only be counted eagerly, where they round and draw random numbers differently.
    """
    return isinstance(module, nn.Module) and any(
        uncompiled(part) is not part or part._compiled_call_impl is not None
        for part in module.modules()
    )


def _count_ops(run: Run, module: nn.Module) -> None:
    """Count the ops of the first forward pass that is not sampled, and write them to the log.

    Only the forward pass: modes that stayed active beyond it would end in another order than the
    regions of the script.
    """
    stats, handles = OpStats(unwrapped(module)), ExitStack()

    def start(*_: Any) -> None:
        if torch.is_grad_enabled() and run._sampling is None:
            handles.close()
            end = module.register_forward_hook(ModuleHook(stop), always_call=True)
            handles.callback(end.remove)
            stats.start()

    def stop(*_: Any) -> None:
        handles.close()
        stats.stop()
        rows = tuple(asdict(row) for row in stats.rows)
        run._write([OpsRecord(step=run._step_number, time=run._time(), rows=rows)])

    handles.callback(module.register_forward_pre_hook(ModuleHook(start)).remove)


# -- wrap methods ----------------------------------------------------------------------------------


def _before(owner: type, name: str, note: Callable[[Any], object]) -> Callable[[], None]:
    """Call `note` with each object before a method of its class; return what undoes this."""
    method = vars(owner)[name]

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(self)
        return method(self, *args, **kwargs)

    return _replace(owner, name, wrapped)


def _after(owner: type, name: str, note: Callable[[Any], object]) -> Callable[[], None]:
    """Call `note` with each object after a method of its class; return what undoes this."""
    method = vars(owner)[name]

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        returned = method(self, *args, **kwargs)
        note(self)
        return returned

    return _replace(owner, name, wrapped)


def _replace(owner: type, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    method = vars(owner)[name]
    setattr(owner, name, function)

    def restore() -> None:
        if vars(owner).get(name) is function:
            setattr(owner, name, method)

    return restore
