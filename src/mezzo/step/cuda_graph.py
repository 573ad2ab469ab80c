"""One captured CUDA graph, and the host reads that keep a step from being captured."""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mezzo._casting import map_tensors
from mezzo._launch import has_triton
from mezzo._torch import clear_cublas_workspaces
from mezzo.scaling.check_unscale import captured_tables
from mezzo.step.inputs import buffers_for, copies
from mezzo.step.replay_inputs import ReplayInputs


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """A step that was captured for one kind of inputs."""

    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    """Where it reads its inputs."""
    returned: Any
    """Where it writes what the body returns."""
    replay_inputs: ReplayInputs | None = None
    """How it learns where its inputs are; without, they are copied before it runs."""
    tables: Sequence[Any] = ()
    """What the gradient check reads at every replay, kept for it."""

    def replay(self, leaves: list[torch.Tensor]) -> Any:
        """Run it on other inputs; what comes back is the caller's own."""
        loss = None
        if self.replay_inputs is not None:
            loss = self.replay_inputs.write(leaves)
        else:
            # One by one: inputs differ in dtype and size, and for such torch's list of copies is a
            # slower loop.
            for buffer, leaf in zip(self.inputs, leaves, strict=True):
                buffer.copy_(leaf, non_blocking=True)
        self.graph.replay()
        return copies(self.returned) if loss is None else loss


@dataclass(frozen=True, eq=False)
class GraphCapturer:
    """Where programs of one step are captured: a stream on which it also warms up, and memory that the programs share and nobody else uses."""

    device: torch.device
    stream: torch.cuda.Stream
    pool: Any

    @classmethod
    def on(cls, device: torch.device) -> GraphCapturer:
        """Make one."""
        return cls(device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle())

    def emptied(self) -> GraphCapturer:
        """The same with other memory: torch takes none again whose programs are gone."""
        return replace(self, pool=torch.cuda.graph_pool_handle())

    def run_on_capture_stream(self, run: Callable[[], Any]) -> Any:
        """Run something on the stream, in order with the current one."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                return run()
        finally:
            current.wait_stream(self.stream)

    def capture(
        self,
        run: Callable[[Any], Any],
        values: Any,
        leaves: Sequence[torch.Tensor] = (),
        kept: object = None,
    ) -> CapturedGraph:
        """Capture a function of nested inputs, whose tensors come as `leaves` from the caller. `kept` is what it writes to of the host's memory.

        Where that fails, the random generator is as it was: torch leaves it in the middle of a
        capture.
        """
        held, inputs = buffers_for(values)
        mail = (
            ReplayInputs(self.device, leaves, inputs, kept)
            if leaves and has_triton(self.device)
            else None
        )
        if mail is not None:
            mail.rehearse(leaves)
        graph, generator = (
            torch.cuda.CUDAGraph(),
            torch.cuda.default_generators[self.device.index or 0],
        )
        safe = generator.clone_state()
        try:
            # Pinned memory may be asked for meanwhile, here and in other threads, such as a
            # loader's. What waits for the stream fails in every mode.
            with (
                _own_workspaces(),
                eager_answers(),
                captured_tables() as tables,
                torch.cuda.graph(
                    graph, pool=self.pool, stream=self.stream, capture_error_mode="relaxed"
                ),
            ):
                returned = map_tensors(
                    run(held) if mail is None else mail.around(run, held), torch.Tensor.detach
                )
        except BaseException:
            generator.graphsafe_set_state(safe)
            raise
        return CapturedGraph(graph, inputs, returned, mail, tables)


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Let cuBLAS ask for workspaces in the program's own memory.

    It keeps one for each stream, and a captured product goes on using the one it had. That of the
    warm-up is anybody's to free, and torch.compile does so whenever it captures.
    """
    clear_cublas_workspaces()
    try:
        yield
    finally:
        clear_cublas_workspaces()


_is_capturing = torch.cuda.is_current_stream_capturing
_capturing: list[int] = []
"""Threads that capture just now."""
_lock = threading.Lock()


@contextmanager
def eager_answers() -> Iterator[None]:
    """Let model code of this thread see what it sees in eager mode when it asks whether it is being captured.

    transformers builds masks in a capture that it drops in eager mode, and attention then runs
    another kernel. torch itself, mezzo and other threads get the true answer. What a model does in
    eager mode and cannot do in a capture, such as reading from the device, has been found in the
    warm-up.
    """
    with _lock:
        _capturing.append(threading.get_ident())
        torch.cuda.is_current_stream_capturing = _answer
    try:
        yield
    finally:
        with _lock:
            _capturing.remove(threading.get_ident())
            if not _capturing:
                torch.cuda.is_current_stream_capturing = _is_capturing


def _answer() -> bool:
    asking = sys._getframe(1).f_globals.get("__name__", "")
    if threading.get_ident() in _capturing and asking.partition(".")[0] not in {"torch", "mezzo"}:
        return False
    return _is_capturing()


_SAID_BY_TORCH = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode"
_OURS = Path(__file__).parents[1]
_STEP, _NOTING = str(_OURS / "step"), (__file__, warnings.__file__)
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(_OURS), str(Path(warnings.__file__).parent))


@contextmanager
def find_host_syncs() -> Iterator[list[str]]:
    """Collect the lines that read from the device, in the order in which they do. Nothing is stopped: the step that is watched is a real one."""
    found: list[str] = []
    others: list[warnings.WarningMessage] = []

    def note(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        if _SAID_BY_TORCH in str(message):
            found.append(user_line(traceback.extract_stack()))
        elif _PROTOTYPE not in str(message):
            others.append(warnings.WarningMessage(message, category, filename, lineno, file, line))

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for other in others:
        warnings.warn_explicit(str(other.message), other.category, other.filename, other.lineno)


def user_line(stack: traceback.StackSummary) -> str:
    """The innermost line within a step that is neither torch's nor ours; where there is none, the innermost at all."""
    inner = [
        frame
        for frame in stack
        if frame.filename not in _NOTING and not frame.filename.startswith("<")
    ]
    for frame in reversed(inner):
        if frame.filename.startswith(_STEP):
            break
        if not frame.filename.startswith(_NOT_THE_USERS):
            return _described(frame)
    return _described(inner[-1]) if inner else "a line that is not in a file"


def _described(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}: {frame.line}"
