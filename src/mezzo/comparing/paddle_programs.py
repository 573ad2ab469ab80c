"""The eight programs of PaddlePaddle's guide to AMP, run through the dialect and timed.

Each program is the guide's, with its sizes as arguments. The guide reports the mean time of a step
on a V100, and the loss of the last batch; times here are medians.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

import mezzo
from mezzo._errors import PolicyError, UnsupportedError
from mezzo._hardware import hardware
from mezzo.comparing.comparison import Comparison, ModeResult
from mezzo.comparing.workload import Documented, Preset
from mezzo.compat import paddle

NAME = "paddle-programs"
"""Name on the command line."""
EPOCHS = 2


@dataclass(frozen=True)
class Sizes:
    """Sizes of the guide's experiment."""

    input_size: int = 8192
    output_size: int = 8192
    batch_size: int = 2048
    nums_batch: int = 10
    """Batches of an epoch."""


@dataclass(frozen=True)
class Step:
    """Time and loss of one batch."""

    seconds: float
    loss: float


# -- the network and the data ----------------------------------------------------------------------


class SimpleNet(paddle.nn.Layer):
    """Nine linear layers."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.linears = paddle.nn.LayerList(
            [paddle.nn.Linear(input_size, output_size) for i in range(9)]
        )

    def forward(self, x: Any) -> Any:
        """Return the output of the last layer."""
        for linear in self.linears:
            x = linear(x)
        return x


class GuardedNet(SimpleNet):
    """The same network with all layers but the first inside `fp16_guard`."""

    def forward(self, x: Any) -> Any:
        """Return the output of the last layer."""
        for i, linear in enumerate(self.linears):
            if i > 0:
                with paddle.static.amp.fp16_guard():
                    x = linear(x)
            else:
                x = linear(x)
        return x


class RandomDataset(paddle.io.Dataset):
    """Rows of random numbers, drawn from NumPy's global generator."""

    def __init__(self, sizes: Sizes) -> None:
        import numpy as np  # noqa: PLC0415 - mezzo works without NumPy

        self.numpy, self.sizes = np, sizes

    def __getitem__(self, idx: int) -> tuple[Any, Any]:
        data = self.numpy.random.random([self.sizes.input_size]).astype("float32")
        label = self.numpy.random.random([self.sizes.output_size]).astype("float32")
        return data, label

    def __len__(self) -> int:
        return self.sizes.nums_batch * self.sizes.batch_size


def make_loader(sizes: Sizes) -> paddle.io.DataLoader:
    """Return the loader of the guide."""
    return paddle.io.DataLoader(
        RandomDataset(sizes),
        batch_size=sizes.batch_size,
        shuffle=False,
        drop_last=True,
        num_workers=0,
    )


# -- dynamic graph ---------------------------------------------------------------------------------


def train_float32(sizes: Sizes, place: Any) -> list[Step]:
    """Train in float32."""
    loader = make_loader(sizes)
    mse = paddle.nn.MSELoss()
    model = SimpleNet(sizes.input_size, sizes.output_size)
    optimizer = paddle.optimizer.SGD(learning_rate=0.0001, parameters=model.parameters())
    steps = []
    for _epoch in range(EPOCHS):
        for data, label in loader:
            start_time = time.perf_counter()
            label._to(place)
            output = model(data)
            loss = mse(output, label)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad(set_to_zero=False)
            train_loss = loss.numpy()
            steps.append(Step(time.perf_counter() - start_time, float(train_loss)))
    return steps


def train_o1(sizes: Sizes, place: Any) -> list[Step]:
    """Train at O1 with additions in float16."""
    loader = make_loader(sizes)
    mse = paddle.nn.MSELoss()
    model = SimpleNet(sizes.input_size, sizes.output_size)
    optimizer = paddle.optimizer.SGD(learning_rate=0.0001, parameters=model.parameters())
    scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
    steps = []
    for _epoch in range(EPOCHS):
        for data, label in loader:
            start_time = time.perf_counter()
            label._to(place)
            with paddle.amp.auto_cast(custom_white_list={"elementwise_add"}, level="O1"):
                output = model(data)
                loss = mse(output, label)
            scaled = scaler.scale(loss)
            scaled.backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad(set_to_zero=False)
            train_loss = loss.numpy()
            steps.append(Step(time.perf_counter() - start_time, float(train_loss)))
    return steps


def train_o2(sizes: Sizes, place: Any) -> list[Step]:
    """Train at O2 without master weights, since the guide does not pass the optimizer."""
    loader = make_loader(sizes)
    mse = paddle.nn.MSELoss()
    model = SimpleNet(sizes.input_size, sizes.output_size)
    optimizer = paddle.optimizer.SGD(learning_rate=0.0001, parameters=model.parameters())
    model = paddle.amp.decorate(models=model, level="O2")
    scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
    steps = []
    for _epoch in range(EPOCHS):
        for data, label in loader:
            start_time = time.perf_counter()
            label._to(place)
            with paddle.amp.auto_cast(level="O2"):
                output = model(data)
                loss = mse(output, label)
            scaled = scaler.scale(loss)
            scaled.backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad(set_to_zero=False)
            train_loss = loss.numpy()
            steps.append(Step(time.perf_counter() - start_time, float(train_loss)))
    return steps


def train_with_accumulation(sizes: Sizes, place: Any) -> list[Step]:
    """Train at O1 with one update for the batches of an epoch."""
    loader = make_loader(sizes)
    mse = paddle.nn.MSELoss()
    model = SimpleNet(sizes.input_size, sizes.output_size)
    optimizer = paddle.optimizer.SGD(learning_rate=0.0001, parameters=model.parameters())
    accumulate_batchs_num = sizes.nums_batch
    scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
    steps = []
    for _epoch in range(EPOCHS):
        for i, (data, label) in enumerate(loader):
            start_time = time.perf_counter()
            label._to(place)
            with paddle.amp.auto_cast(level="O1"):
                output = model(data)
                loss = mse(output, label)
            scaled = scaler.scale(loss)
            scaled.backward()
            if (i + 1) % accumulate_batchs_num == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.clear_grad(set_to_zero=False)
            train_loss = loss.numpy()
            steps.append(Step(time.perf_counter() - start_time, float(train_loss)))
    return steps


# -- static graph ----------------------------------------------------------------------------------


def run_static_float32(sizes: Sizes, place: Any) -> list[Step]:
    """Run the float32 program."""
    data, label, loss, optimizer = _record(sizes, SimpleNet)
    optimizer.minimize(loss)
    exe = _start(place)
    return _train_program(sizes, exe, data, label, loss)


def run_static_o1(sizes: Sizes, place: Any) -> list[Step]:
    """Run the O1 program with additions in float16."""
    data, label, loss, optimizer = _record(sizes, SimpleNet)
    amp_list = paddle.static.amp.CustomOpLists(custom_white_list=["elementwise_add"])
    optimizer = paddle.static.amp.decorate(
        optimizer=optimizer,
        amp_lists=amp_list,
        init_loss_scaling=128.0,
        use_dynamic_loss_scaling=True,
    )
    optimizer.minimize(loss)
    exe = _start(place)
    return _train_program(sizes, exe, data, label, loss)


def run_static_o2(sizes: Sizes, place: Any) -> list[Step]:
    """Run the float16 program."""
    data, label, loss, optimizer = _record(sizes, SimpleNet)
    optimizer = paddle.static.amp.decorate(
        optimizer=optimizer,
        init_loss_scaling=128.0,
        use_dynamic_loss_scaling=True,
        use_pure_fp16=True,
        use_fp16_guard=False,
    )
    optimizer.minimize(loss)
    exe = _start(place)
    optimizer.amp_init(place, scope=paddle.static.global_scope())
    return _train_program(sizes, exe, data, label, loss)


def run_static_guard(sizes: Sizes, place: Any) -> list[Step]:
    """Run the program with float16 inside `fp16_guard` only."""
    data, label, loss, optimizer = _record(sizes, GuardedNet)
    optimizer = paddle.static.amp.decorate(
        optimizer=optimizer,
        init_loss_scaling=128.0,
        use_dynamic_loss_scaling=True,
        use_pure_fp16=True,
        use_fp16_guard=True,
    )
    optimizer.minimize(loss)
    exe = _start(place)
    optimizer.amp_init(place, scope=paddle.static.global_scope())
    return _train_program(sizes, exe, data, label, loss)


def _record(sizes: Sizes, network: type[SimpleNet]) -> tuple[Any, Any, Any, Any]:
    """Record what all static programs begin with."""
    model = network(sizes.input_size, sizes.output_size)
    mse_loss = paddle.nn.MSELoss()
    shape = [sizes.batch_size, sizes.input_size]
    data = paddle.static.data(name="data", shape=shape, dtype="float32")
    label = paddle.static.data(name="label", shape=shape, dtype="float32")
    predict = model(data)
    loss = mse_loss(predict, label)
    optimizer = paddle.optimizer.SGD(learning_rate=0.0001, parameters=model.parameters())
    return data, label, loss, optimizer


def _start(place: Any) -> paddle.static.Executor:
    exe = paddle.static.Executor(place)
    exe.run(paddle.static.default_startup_program())
    return exe


def _train_program(sizes: Sizes, exe: Any, data: Any, label: Any, loss: Any) -> list[Step]:
    loader = make_loader(sizes)
    main_program = paddle.static.default_main_program()
    steps = []
    for _epoch in range(EPOCHS):
        for train_data, train_label in loader():
            start_time = time.perf_counter()
            train_loss = exe.run(
                main_program,
                feed={data.name: train_data, label.name: train_label},
                fetch_list=[loss.name],
                use_program_cache=True,
            )
            steps.append(Step(time.perf_counter() - start_time, float(train_loss[0])))
    return steps


# -- measuring -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A program, and what the guide reports of it."""

    mode: str
    run: Callable[[Sizes, Any], list[Step]]
    seconds: float
    loss: float
    speedup: float | None = None
    """Over the float32 program of the same kind of graph; None for that program itself."""
    is_static: bool = False


PROGRAMS = (
    Program("dynamic float32", train_float32, 0.529, 0.6486028),
    Program("dynamic O1", train_o1, 0.118, 0.6486219, 4.5),
    Program("dynamic O2", train_o2, 0.102, 0.6743, 5.2),
    Program("dynamic accumulation", train_with_accumulation, 0.113, 0.6602017, 4.7),
    Program("static float32", run_static_float32, 0.531, 0.6486028, is_static=True),
    Program("static O1", run_static_o1, 0.117, 0.6486222, 4.5, is_static=True),
    Program("static O2", run_static_o2, 0.098, 0.6743, 5.4, is_static=True),
    Program("static guard", run_static_guard, 0.140, 0.6691731, 3.8, is_static=True),
)
"""The programs in the guide's order."""


def run_programs(
    preset: Preset,
    device: torch.device | str,
    steps: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Run the eight programs with the same weights and batches, and return what was measured.

    `steps` counts the batches of both epochs: 20 as in the guide if not given. `progress` is
    called with the mode of each program before it runs. Ctrl-C ends the run and keeps what was
    measured. Needs NumPy.

    >>> result = run_programs(Preset.SMALL, "cpu", steps=2)
    >>> [round(mode.loss, 1) for mode in result.modes]
    [0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6]
    """
    device, sizes = torch.device(device), _sizes(preset, steps)
    modes: list[ModeResult] = []
    complete = True
    with _restored_process(device):
        place = paddle.set_device(str(device))
        try:
            for program in PROGRAMS:
                if progress is not None:
                    progress(program.mode)
                modes.append(_measure(program, sizes, place, device))
        except KeyboardInterrupt:
            if not modes:
                raise
            complete = False
    return Comparison(
        workload=NAME,
        title=f"PaddlePaddle's programs, 9 × Linear({sizes.input_size}), batch"
        f" {sizes.batch_size}, SGD",
        preset=preset.value,
        data="synthetic",
        machine=hardware(device).name,
        torch=torch.__version__,
        mezzo=mezzo.__version__,
        steps=EPOCHS * sizes.nums_batch,
        rounds=1,
        modes=tuple(modes),
        documented=tuple(
            Documented(one.mode, one.speedup, "PaddlePaddle, V100")
            for one in PROGRAMS
            if one.speedup is not None
        ),
        complete=complete,
        baseline=PROGRAMS[0].mode,
    )


def _sizes(preset: Preset, steps: int | None) -> Sizes:
    sizes = Sizes() if preset is Preset.FULL else Sizes(128, 128, 16)
    if steps is None:
        return sizes
    if steps < EPOCHS or steps % EPOCHS:
        raise PolicyError(
            f"steps={steps}: PaddlePaddle's programs train for {EPOCHS} epochs of equal length."
            f" Pass a multiple of {EPOCHS}."
        )
    return replace(sizes, nums_batch=steps // EPOCHS)


def _measure(program: Program, sizes: Sizes, place: Any, device: torch.device) -> ModeResult:
    _seed()
    is_cuda = device.type == "cuda"
    if is_cuda:
        # Models of earlier programs are in reference cycles, and would count as this one's memory.
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
    with _static_mode() if program.is_static else nullcontext():
        steps = program.run(sizes, place)
    milliseconds = 1e3 * statistics.median(step.seconds for step in steps)
    return ModeResult(
        program.mode,
        dtype=None if program.mode.endswith("float32") else "float16",
        milliseconds=milliseconds,
        samples_per_second=1e3 * sizes.batch_size / milliseconds,
        peak_bytes=torch.cuda.max_memory_allocated(device) if is_cuda else None,
        loss=steps[-1].loss,
        loss_curve=tuple(
            statistics.fmean(step.loss for step in steps[first : first + sizes.nums_batch])
            for first in range(0, len(steps), sizes.nums_batch)
        ),
        note=f"PaddlePaddle at 8192 × 2048 on a V100: {1e3 * program.seconds:g} ms, loss"
        f" {program.loss}",
    )


def _seed() -> None:
    import numpy as np  # noqa: PLC0415 - mezzo works without NumPy

    paddle.seed(100)
    np.random.seed(100)  # noqa: NPY002 - as in the guide


@contextmanager
def _static_mode() -> Iterator[None]:
    """Record into new programs, since each block of the guide is a program of its own."""
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            yield
    finally:
        paddle.disable_static()


@contextmanager
def _restored_process(device: torch.device) -> Iterator[None]:
    """Restore the default place and the random states of torch and NumPy afterwards."""
    try:
        import numpy as np  # noqa: PLC0415 - mezzo works without NumPy
    except ImportError as error:
        raise UnsupportedError(
            "numpy is not installed, which PaddlePaddle's programs need. Run: pip install numpy"
        ) from error
    place, state = paddle.get_device(), np.random.get_state()  # noqa: NPY002 - as in the guide
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            # That a CPU emulates 16 bits shows in the times.
            warnings.filterwarnings("ignore", "AMP is slow on")
            yield
    finally:
        np.random.set_state(state)  # noqa: NPY002
        paddle.set_device(place)
