"""The eight programs of PaddlePaddle's guide to AMP, with their sizes as arguments."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from mezzo.compat import paddle

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
