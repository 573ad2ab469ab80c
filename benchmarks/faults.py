"""Faults: `mezzo.trace_overflow` on 50 planted faults, in eager, compiled, captured, distributed.

A row is right if the op, the module, the pass, the step, the line and whether precision is the
cause are as planted, and if the cure is verified where there is one.

Run it with `python benchmarks/faults.py`, or in parts with `--only "log of zero"`. On a CPU set
ONEDNN_MAX_CPU_ISA=AVX2, where float16 is slow without it.
"""

from __future__ import annotations

import argparse
import json
import linecache
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fault_cases
import torch
from fault_cases import FAULTS, Fault, batches, network
from measure import Row, store
from torch import distributed, nn
from torch import multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel

import mezzo

BY_NAME = {fault.name: fault for fault in FAULTS}
RANKS = 2


@dataclass(frozen=True)
class Report(Row):
    """What was reported of one fault; the value is the number of wrong fields, the bar 0."""

    run: str = ""
    op: str = ""
    module: str = ""
    direction: str = ""
    line: str = ""
    step: int | None = None
    cure: str = ""
    verified: bool = False
    wrong: tuple[str, ...] = ()
    """The fields that are not as planted."""
    text: str = ""
    """The printed report."""

    def __str__(self) -> str:
        outcome = f"WRONG: {', '.join(self.wrong)}" if self.wrong else "right"
        where = " ".join(filter(None, (self.op, self.module and f"in {self.module}", self.line)))
        cure = f"; {self.cure}{' (verified)' if self.verified else ''}" if self.cure else ""
        return f"{self.name:38} {self.run:11} {outcome:5}  {self.direction}: {where}{cure}"


def report_of(fault: Fault, found: mezzo.Overflow) -> Report:
    """Compare what was reported with what was planted."""
    expected = {
        "op": fault.op,
        "module": fault.module,
        "direction": fault.direction,
        "step": fault.step,
        "precision": fault.precision,
        "verified": fault.cured,
    }
    wrong = [name for name, value in expected.items() if getattr(found, name) != value]
    if found.line and "# fault" not in _source(found.line):
        wrong.append("line")
    if fault.direction in {"forward", "backward"} and not found.line:
        wrong.append("line")
    return Report(
        fault.name,
        {},
        float(len(wrong)),
        "wrong",
        0.0,
        fault.run,
        found.op,
        found.module,
        found.direction.value,
        found.line,
        found.step,
        found.cure,
        found.verified,
        tuple(wrong),
        str(found),
    )


def _source(line: str) -> str:
    file, _, number = line.rpartition(":")
    return linecache.getline(str(Path(fault_cases.__file__).with_name(file)), int(number))


def run_step(fault: Fault, device: str) -> mezzo.Overflow:
    """Train with `mezzo.TrainStep` up to the fault, then trace the last batch."""
    model = network(fault, device)
    step = _step(fault, model, model, device)
    return _train(step, batches(fault, device))


def _step(fault: Fault, model: nn.Module, wrapped: nn.Module, device: str) -> mezzo.TrainStep:
    captured = fault.run == "captured" and device == "cuda"
    optimizer = torch.optim.SGD(model.parameters(), lr=fault.rate)
    decorated = fault.policy.level.value in {"O2", "O3"}
    if decorated and wrapped is not model:
        raise ValueError("decorate before the model is wrapped")
    return mezzo.TrainStep(
        wrapped, fault.loss, optimizer, fault.policy, scaler=fault.scaler, capture=captured
    )


def _train(step: mezzo.TrainStep, data: list[Any]) -> mezzo.Overflow:
    for x, y in data:
        loss = step(x, y)
        if step.scaler is not None and not bool(loss.isfinite()):
            break
    return mezzo.trace_overflow(step, data[-1])


def run_compiled(fault: Fault, device: str) -> mezzo.Overflow:
    """Train a compiled model with autocast in a loop, then trace the last batch."""
    torch.compiler.reset()
    model = network(fault, device)
    compiled = torch.compile(model, backend="inductor" if device == "cuda" else "aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=fault.rate)
    scaler = mezzo.GradScaler(device)
    data = batches(fault, device)
    for x, y in data:
        with mezzo.autocast(device, policy=fault.policy):
            loss = fault.loss(compiled(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return mezzo.trace_overflow(compiled, data[-1], fault.loss, fault.policy, step=len(data))


def run_distributed(faults: list[Fault], device: str) -> list[Report]:
    """Train all faults in DistributedDataParallel with two ranks, and trace on each of them."""
    with tempfile.TemporaryDirectory() as folder:
        names = [fault.name for fault in faults]
        processes.spawn(_rank, (folder, names, device), nprocs=RANKS)
        reports = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    return [
        Report(**{**of_ranks[fault.rank], "wrong": tuple(of_ranks[fault.rank]["wrong"])})
        for fault, *of_ranks in zip(faults, *reports, strict=True)
    ]


def _rank(rank: int, folder: str, names: list[str], device: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    reports = []
    for name in names:
        fault = BY_NAME[name]
        model = network(fault, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=fault.rate)
        mezzo.decorate(model, optimizer, fault.policy)
        step = mezzo.TrainStep(DistributedDataParallel(model), fault.loss, optimizer)
        for x, y in batches(fault, device, rank):
            step(x, y)
        # Ranks whose batch is right have nothing to report, and do not wait for the others.
        if rank == fault.rank:
            found = mezzo.trace_overflow(step, batches(fault, device, rank)[-1])
            reports.append(asdict(report_of(fault, found)))
        else:
            reports.append({})
    Path(folder, f"{rank}.json").write_text(json.dumps(reports))
    distributed.barrier()
    distributed.destroy_process_group()


def run_fault(fault: Fault, device: str) -> Report:
    """Run a fault in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = run_compiled if fault.run == "compiled" else run_step
        return report_of(fault, run(fault, device))


def main() -> None:
    """Run all faults, print and store the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(BY_NAME), metavar="FAULT")
    parser.add_argument("--text", action="store_true", help="print the reports too")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = [fault for fault in FAULTS if fault.name in options.only]
    begin = time.perf_counter()
    reports = [run_fault(fault, device) for fault in chosen if fault.run != "distributed"]
    if together := [fault for fault in chosen if fault.run == "distributed"]:
        reports += run_distributed(together, device)
    for report in reports:
        print(report)
        if options.text:
            print(f"    {report.text}")
    right = sum(not report.wrong for report in reports)
    print(f"{right} of {len(reports)} right, {time.perf_counter() - begin:.0f} s on {device}")
    if len(chosen) == len(FAULTS):
        print(store("faults", reports, device))


if __name__ == "__main__":
    main()
