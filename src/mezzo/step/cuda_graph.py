"""Capture one CUDA graph, and find the host reads that prevent a capture."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from mezzo._casting import map_tensors
from mezzo._errors import MEZZO_FOLDER, TORCH_FOLDER
from mezzo._torch import (
    clear_cublas_workspaces,
    end_allocate_to_pool,
    foreach_copy_,
    is_profiler_enabled,
    loaded,
    release_pool,
)
from mezzo.prepare import rng_state
from mezzo.scaling.check_unscale import captured_tables
from mezzo.step.assigned_tensors import (
    Assignments,
    KeptTensors,
    explain_replaced,
    keep_assigned,
    made_tensors,
    module_state,
    prepare_replay,
    replaced_parameter,
)
from mezzo.step.host_inputs import HostInput, HostInputs
from mezzo.step.host_random import HostDraws, draw_again
from mezzo.step.inputs import copy_outputs, make_static_buffers
from mezzo.step.pass_changes import PassChanges
from mezzo.step.profiler_ranges import Range, profiled

_MANY = 16
"""More tensors than this, such as gradients, are copied in a few launches; batches have fewer."""


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """A captured CUDA graph for one signature of inputs."""

    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    """Static buffers that the graph reads its inputs from."""
    returned: Any
    """Outputs of the captured function, which each replay overwrites."""
    kept_alive: tuple[Any, ...] = ()
    """Tables, host memory and tensors of modules that the graph reads and writes at each replay."""
    host_inputs: HostInputs | None = None
    """Copies inputs from the host; None copies them like others."""
    host_draws: tuple[torch.Size, ...] = ()
    """Random numbers without an effect that the function draws on the host."""
    owned: tuple[KeptTensors, ...] = ()
    """Tensors of modules in places that this function or another one assigns."""
    made: tuple[KeptTensors, ...] = ()
    """Tensors that the function assigns to modules in empty places."""

    def prepare(self) -> bool:
        """Prepare a replay after eager calls; return False if it cannot be replayed any more."""
        return not self.owned or prepare_replay(self.owned)

    def replay(self, leaves: list[torch.Tensor]) -> Any:
        """Run the graph on other inputs; return copies of its outputs."""
        self._copy_inputs(leaves)
        if is_profiler_enabled():
            with profiled(Range.REPLAY):
                self.graph.replay()
        else:
            self.graph.replay()
        draw_again(self.host_draws)
        for tensors in self.made:
            # Copies: other graphs use the same memory.
            tensors.replace({})
        return copy_outputs(self.returned)

    def _copy_inputs(self, leaves: list[torch.Tensor]) -> None:
        # One by one: inputs differ in dtype and size, for which torch's foreach copy is a slower
        # loop. Reading them by pointer inside the graph saves 1.3 % of a step of 63 µs on an H200.
        on_host, on_device, are_many = [], [], len(leaves) > _MANY
        for buffer, leaf in zip(self.inputs, leaves, strict=True):
            if self.host_inputs is not None and not leaf.is_cuda:
                on_host.append(HostInput(buffer, leaf))
            elif are_many:
                on_device.append((buffer, leaf))
            else:
                buffer.copy_(leaf, non_blocking=True)
        if on_device:
            _copy_by_dtype(on_device)
        if self.host_inputs is not None and on_host:
            self.host_inputs.copy(on_host)


def _copy_by_dtype(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy with torch's foreach copy, which is fast for tensors of equal dtype."""
    groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for buffer, leaf in pairs:
        targets, sources = groups.setdefault(leaf.dtype, ([], []))
        targets.append(buffer)
        sources.append(leaf)
    for targets, sources in groups.values():
        foreach_copy_(targets, sources)


class GraphPool:
    """The memory pool that the graphs of one step share.

    torch does not reuse a pool after all its graphs are freed, nor after a failed capture.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def handle(self) -> Any:
        """Return the pool for the next capture: a new one unless a graph uses the last."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        """Record a graph that was captured in this pool. Does not keep it alive."""
        self._graphs.add(graph)

    def leave(self) -> None:
        """Use a new pool from now on."""
        self._graphs = WeakSet()


@dataclass(frozen=True, eq=False)
class GraphCapturer:
    """Captures the graphs of one step, on a stream that warm-ups use too."""

    device: torch.device
    stream: torch.cuda.Stream
    host_inputs: HostInputs
    pool: GraphPool = field(default_factory=GraphPool)
    assignments: Assignments = field(default_factory=Assignments)
    """What the passes of warm-up calls have assigned to modules; callers note it."""

    @classmethod
    def on(cls, device: torch.device) -> GraphCapturer:
        """Create one with a new stream and memory pool."""
        return cls(device, torch.cuda.Stream(device), HostInputs(device))

    def run_on_capture_stream(self, run: Callable[[], Any]) -> Any:
        """Run a function on the capture stream, in order with the current stream."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                return run()
        finally:
            current.wait_stream(self.stream)

    def find_host_reads(self, run: Callable[[], Any]) -> tuple[Any, list[str]]:
        """Run a function on the capture stream; return also the lines that read from the device."""
        with find_host_syncs() as lines:
            return self.run_on_capture_stream(run), lines

    def capture(
        self,
        run: Callable[[Any], Any],
        values: Any,
        kept_alive: object = None,
        *,
        models: Sequence[nn.Module] = (),
        hides_capture: bool = True,
        records_draws: bool = False,
    ) -> CapturedGraph:
        """Capture a function of nested inputs, or raise `CaptureFailed` with all generators reset.

        `kept_alive` is what the graph reads and writes that may else be freed. `models` are those
        that the function runs: their buffers and attributes are kept alive too. `hides_capture` is
        for models that ask whether they are captured, see `hide_capture`, `records_draws` for those
        that draw random numbers on the host, see `HostDraws`.
        """
        graph, pool, draws = torch.cuda.CUDAGraph(), self.pool.handle(), HostDraws()
        empty = self.assignments.empty()
        before = [*module_state(models), *empty]
        changes = PassChanges(models, before)
        with (
            self._restored_on_error(pool, [*before, changes]) as host_state,
            find_host_syncs() as host_reads,
        ):
            try:
                buffers = make_static_buffers(values)
                owned, state = self.assignments.own(before, models), module_state(models)
                # "relaxed": this thread and others, such as a data loader's, may allocate pinned
                # memory meanwhile. Synchronizing with the stream fails in every mode.
                with (
                    _private_workspaces(),
                    hide_capture() if hides_capture else nullcontext(),
                    _no_recompilation(),
                    draws if records_draws else nullcontext(),
                    changes.noting_reads(),
                    captured_tables() as tables,
                    torch.cuda.graph(
                        graph, pool=pool, stream=self.stream, capture_error_mode="relaxed"
                    ),
                ):
                    returned = map_tensors(run(buffers.values), torch.Tensor.detach)
                    keep_assigned(owned)
                    made = made_tensors(empty)
            except CaptureFailed:
                raise
            # Any error: a function may do anything that cannot be captured.
            except Exception as error:
                raise CaptureFailed(failure_reason(error, host_reads)) from error
            if rng_state.host_rng_has_moved(host_state) and not draws.explain(host_state):
                raise HostDrawsFound
            if (obstacle := changes.obstacle(self.assignments.numbers)) is not None:
                raise CaptureFailed(obstacle)
            if (name := replaced_parameter(state)) is not None:
                raise CaptureFailed(explain_replaced(name))
        self.pool.add(graph)
        return CapturedGraph(
            graph,
            buffers.tensors,
            returned,
            (*tables, kept_alive, _memory_of(state)),
            self.host_inputs,
            tuple(draws.shapes),
            tuple(tensors for tensors in owned if tensors.are_current),
            made,
        )

    @contextmanager
    def _restored_on_error(
        self, pool: Any, before: Iterable[KeptTensors | PassChanges]
    ) -> Iterator[dict[str, Any]]:
        """Restore what a failed capture leaves behind; yield the state of the host's generators.

        A capture that CUDA has invalidated leaves its stream current, the device's generator in its
        capturing state and the allocator waiting for the end of the capture.
        """
        stream, index = torch.cuda.current_stream(self.device), self.device.index or 0
        host_state = rng_state.capture_host_rng_state()
        try:
            yield host_state
        except BaseException:
            torch.cuda.set_stream(stream)
            rng_state.restore_rng_state(host_state)
            for held in before:
                # Tensors that the capture has assigned hold nothing.
                held.restore()
            # An error means that the capture has ended in order.
            with suppress(RuntimeError):
                end_allocate_to_pool(index, pool)
                release_pool(index, pool)
            self.pool.leave()
            self._end_capturing_state(torch.cuda.default_generators[index])
            raise

    def _end_capturing_state(self, generator: torch.Generator) -> None:
        """Let the device's generator leave its capturing state, by a capture that succeeds.

        Earlier graphs use the same state, so that this is the last resort.
        """
        try:
            with torch.cuda.graph(
                torch.cuda.CUDAGraph(), stream=self.stream, capture_error_mode="relaxed"
            ):
                torch.zeros(1, device=self.device)
        except RuntimeError:
            generator.graphsafe_set_state(generator.clone_state())


def _memory_of(state: Iterable[KeptTensors]) -> list[torch.Tensor]:
    """Return the tensors of modules, to keep their memory. A new address of a parameter is noticed.

    Not with their history: its nodes that accumulate gradients would be on the capture stream.
    """
    tensors = (tensor for kept in state for tensor in kept.tensors)
    return [tensor.detach() for tensor in tensors if not isinstance(tensor, nn.Parameter)]


class CaptureFailed(Exception):  # noqa: N818 - not an error: the call runs eagerly
    """A function cannot be captured; the message is the reason."""


class HostDrawsFound(CaptureFailed):
    """A function draws random numbers on the host, which may have an effect."""

    def __init__(self) -> None:
        super().__init__(
            "it draws random numbers on the host (torch on the CPU, random or numpy), which a"
            " captured graph would repeat at each replay"
        )


def failure_reason(error: BaseException, host_reads: list[str]) -> str:
    """Return why a capture failed: a host read if there was one, else the first error of a chain.

    Ending a failed capture raises another error.
    """
    if host_reads:
        return f"the host reads from the device in {host_reads[0]}"
    while error.__context__ is not None:
        error = error.__context__
    stack = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}" + (
        f", in {user_line(stack)}" if stack else ""
    )


def release_frames(error: BaseException) -> None:
    """Clear the local variables in the tracebacks of an error and of its causes.

    An autograd graph among them would keep alive the nodes that accumulate gradients on the capture
    stream.
    """
    following: BaseException | None = error
    while following is not None:
        traceback.clear_frames(following.__traceback__)
        following = following.__cause__ or following.__context__


@contextmanager
def _no_recompilation() -> Iterator[None]:
    """Raise if torch.compile compiles: the warm-up has compiled what the capture runs."""
    if loaded("OptimizedModule") is not None:
        with torch.compiler.set_stance("fail_on_recompile"):
            yield
    else:
        yield


@contextmanager
def _private_workspaces() -> Iterator[None]:
    """Let cuBLAS allocate its workspaces in the graph's memory pool.

    cuBLAS keeps one workspace per stream, and a captured matrix product keeps using it. That of the
    warm-up can be freed by other code, as torch.compile does when it captures.
    """
    clear_cublas_workspaces()
    try:
        yield
    finally:
        clear_cublas_workspaces()


_is_capturing = torch.cuda.is_current_stream_capturing
_capturing_threads: list[int] = []
_lock = threading.Lock()


@contextmanager
def hide_capture() -> Iterator[None]:
    """Make `torch.cuda.is_current_stream_capturing` return False to model code of this thread.

    transformers builds masks in a capture that it omits in eager mode, and attention then runs
    another kernel. torch itself, mezzo and other threads get the true answer. Models that read from
    the device in eager mode only cannot be captured like this; a second attempt goes without.
    """
    with _lock:
        _capturing_threads.append(threading.get_ident())
        torch.cuda.is_current_stream_capturing = _is_capturing_for_caller
    try:
        yield
    finally:
        with _lock:
            _capturing_threads.remove(threading.get_ident())
            if not _capturing_threads:
                torch.cuda.is_current_stream_capturing = _is_capturing


def _is_capturing_for_caller() -> bool:
    package = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
    if threading.get_ident() in _capturing_threads and package not in {"torch", "mezzo"}:
        return False
    return _is_capturing()


_SYNC_MESSAGE = "called a synchronizing CUDA operation"
_PROTOTYPE_MESSAGE = "Synchronization debug mode"
_STEP_PACKAGE = str(Path(__file__).parent)
_RECORDING_FILES = (__file__, warnings.__file__)
_STANDARD_LIBRARY = str(Path(warnings.__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
"""Folders of installed packages. Without a virtual environment the standard library has them."""


@contextmanager
def find_host_syncs() -> Iterator[list[str]]:
    """Collect the lines that synchronize with the device, in order. They run as usual."""
    lines: list[str] = []
    other_warnings: list[warnings.WarningMessage] = []

    def record(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        if _SYNC_MESSAGE in str(message):
            lines.append(user_line(traceback.extract_stack()))
        elif _PROTOTYPE_MESSAGE not in str(message):
            other_warnings.append(
                warnings.WarningMessage(message, category, filename, lineno, file, line)
            )

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for other in other_warnings:
        warnings.warn_explicit(str(other.message), other.category, other.filename, other.lineno)


def user_line(stack: traceback.StackSummary) -> str:
    """Return the innermost line of user code within a step; without one, the innermost line."""
    frames = [
        frame
        for frame in stack
        if frame.filename not in _RECORDING_FILES and not frame.filename.startswith("<")
    ]
    for frame in reversed(frames):
        if frame.filename.startswith(_STEP_PACKAGE):
            break
        if not _is_library(frame.filename):
            return _format_frame(frame)
    return _format_frame(frames[-1]) if frames else "a line that is not in a file"


def _is_library(file: str) -> bool:
    """Return whether a file belongs to mezzo, torch or the standard library."""
    return file.startswith((MEZZO_FOLDER, TORCH_FOLDER)) or (
        file.startswith(_STANDARD_LIBRARY) and not file.startswith(_INSTALLED)
    )


def _format_frame(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}: {frame.line}"
