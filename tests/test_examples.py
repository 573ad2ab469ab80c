"""The six programs in examples/ run at small size, learn, resume and agree with what they claim."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.processes import run_ranks
from support.states import assert_equal
from torch import distributed

import mezzo

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "overflow")
"""The programs; the overflow is a part of the demo, and tested with it."""
PAGE = (ROOT / "docs" / "examples.md").read_text()

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs an example and returns what it printed.

    In this process, since importing torch and transformers takes longer than most examples do.
    """

    def run(name: str, *arguments: object) -> str:
        options = ["--tiny", "--device", "cpu", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def numbers(pattern: str, printed: str) -> list[float]:
    """Return the numbers that a pattern finds, in order."""
    return [float(one) for one in re.findall(pattern, printed)]


def assert_resumes(run: Run, name: str, folder: Path, printed: str, first: str, last: str) -> None:
    """Run again from the first checkpoint, and compare the last one and the lines printed."""
    complete = torch.load(folder / last)
    (folder / last).unlink()
    continued = run(name, "--out", folder, "--resume")
    assert f"continue after {first}" in continued
    assert_equal(torch.load(folder / last), complete)
    ending = continued.partition("continue after ")[2].partition("\n")[2]
    assert printed.endswith(ending)


@pytest.mark.slow
def test_the_image_classifier_learns_and_resumes_to_the_bit(run: Run, tmp_path: Path):
    pytest.importorskip("sklearn")
    printed = run("image_classifier", "--out", tmp_path)
    first, last = numbers(r"epoch \d: loss (\S+),", printed)
    assert last < first / 2
    assert numbers(r"test accuracy (\S+)%,", printed)[-1] > 70
    assert "precision: O2, bfloat16" in printed
    assert "skipped" in (tmp_path / "report.html").read_text()
    assert_resumes(run, "image_classifier", tmp_path, printed, "epoch 1", "epoch_2.pt")


def test_the_image_classifier_reads_the_binary_files_of_cifar(tmp_path: Path):
    load = runpy.run_path(str(EXAMPLES / "image_classifier.py"))["load_cifar"]
    rows = torch.randint(256, (4, 3073), dtype=torch.uint8)
    rows[:, 0] = torch.tensor([3, 0, 9, 1])
    for number in (1, 2):
        part = rows[2 * number - 2 : 2 * number]
        (tmp_path / f"data_batch_{number}.bin").write_bytes(bytes(part.flatten().tolist()))
    with pytest.raises(SystemExit, match=r"test_batch\.bin"):
        load(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(bytes(rows[:2].flatten().tolist()))
    (images, labels), test = load(tmp_path)[0].tensors, load(tmp_path)[1]
    assert labels.tolist() == [3, 0, 9, 1]
    torch.testing.assert_close(images[3, 1, 0], rows[3, 1025:1057] / 127.5 - 1)
    assert len(test) == 2


@pytest.mark.slow
def test_the_text_model_learns_and_resumes_to_the_bit(run: Run, tmp_path: Path):
    pytest.importorskip("transformers")
    printed = run("text_model", "--out", tmp_path)
    before, *_ = numbers(r"before: (\S+) bits", printed)
    first, last = numbers(r"bits per byte (\S+),", printed)
    assert before > first + 1 > last + 1
    assert "generated: b'def " in printed
    assert_resumes(run, "text_model", tmp_path, printed, "update 10", "20.pt")


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "level"), [("step", "O2"), ("plain", "O1")])
def test_the_gan_comes_closer_to_the_data(run: Run, tmp_path: Path, loop: str, level: str):
    pytest.importorskip("sklearn")
    printed = run("gan", "--out", tmp_path, "--loop", loop, "--level", level)
    before, after = numbers(r"distance (\S+)", printed)
    assert after < 0.85 * before
    picture = (tmp_path / "digits.pgm").read_bytes()
    assert picture.startswith(b"P5 64 64 255\n")
    assert len(picture) == 13 + 64 * 64


@pytest.mark.slow
def test_adapters_learn_are_saved_alone_and_merged(run: Run, tmp_path: Path):
    pytest.importorskip("peft")
    printed = run("lora", "--out", tmp_path)
    [(before, after)] = re.findall(r"loss (\S+) before, (\S+) after", printed)
    assert float(after) < float(before) - 0.1
    base, adapters = numbers(r"([\d.]+) bytes", printed.replace(",", ""))
    assert adapters < base / 4
    saved = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in saved
    assert not any(name.startswith("model") for name in saved)
    assert numbers(r"merged: loss (\S+);", printed)[0] == pytest.approx(float(after), abs=0.01)
    assert numbers(r"difference of a logit (\S+)", printed)[0] < 0.1


@pytest.mark.slow
def test_a_converted_model_agrees_is_smaller_and_is_served(run: Run, tmp_path: Path):
    for package in ("sklearn", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    printed = run("convert_and_serve", "--out", tmp_path)
    sizes = numbers(r"(\d+) bytes", printed.replace(",", ""))
    assert max(sizes[1:]) < sizes[0]
    float32, pt2, onnx = numbers(r"accuracy (\S+)%", printed)
    assert float32 == pytest.approx(pt2, abs=0.5) == pytest.approx(onnx, abs=0.5)
    assert float32 > 75
    assert all(one < 0.05 for one in numbers(r"difference of a logit (\S+)", printed))
    [(answer, digits)] = re.findall(r"answers (\[.*\]); the digits are (\[.*\])", printed)
    right = sum(map(int.__eq__, json.loads(answer), json.loads(digits)))
    assert right >= 6


def test_the_server_answers_a_bad_request_and_goes_on():
    pytest.importorskip("sklearn")
    pytest.importorskip("onnxruntime")
    names = runpy.run_path(str(EXAMPLES / "convert_and_serve.py"))
    with names["make_server"](lambda images: images.reshape(-1, 64), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(urllib.error.HTTPError, match="400") as raised:
            urllib.request.urlopen(address, b'{"images": [[1, 2]]}', timeout=30)
        with raised.value as error:
            assert "RuntimeError" in json.load(error)["error"]
        assert names["ask"](server, torch.eye(64)[[5, 7]]) == [5, 7]
        server.shutdown()


def test_without_torchrun_the_command_line_is_named(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        run("distributed")
    assert "start it with torchrun --nproc-per-node=2" in capsys.readouterr().err


@pytest.mark.slow
def test_replicas_learn_under_torchrun(tmp_path: Path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = os.environ | {
        "PYTHONPATH": str(Path(mezzo.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    arguments = ["--tiny", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=2", "examples/distributed.py", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = numbers(r"epoch \d: loss (\S+),", done.stdout)
    assert last < first / 2
    assert numbers(r"accuracy (\S+)", done.stdout)[0] > 0.95


def run_distributed(rank: int, folder: str) -> dict[str, Any]:
    """Run both strategies on a rank of a group: a whole run, then one from its second epoch."""
    printed = StringIO()
    # torchrun would start processes for each run; their group is there already.
    with (
        patch.object(distributed, "init_process_group"),
        patch.object(distributed, "destroy_process_group"),
        patch.dict(os.environ, RANK=str(rank)),
        redirect_stdout(printed),
    ):
        for strategy in ("ddp", "fsdp"):
            options = f"--tiny --device cpu --out {folder} --strategy {strategy}"
            for extra in ([], ["--resume"]):
                with patch.object(sys, "argv", ["distributed.py", *options.split(), *extra]):
                    runpy.run_path(str(EXAMPLES / "distributed.py"), run_name="__main__")
                distributed.barrier()
                last = Path(folder, strategy, "epoch_3")
                if rank == 0 and not extra:
                    last.rename(Path(folder, f"{strategy}_complete"))
                distributed.barrier()
    return {"printed": printed.getvalue()}


@pytest.mark.slow
def test_replicas_and_shards_learn_alike_and_resume_to_the_bit(tmp_path: Path):
    first, second = (one["printed"] for one in run_ranks(2, run_distributed, str(tmp_path)))
    assert not second
    runs = first.split("accuracy ")
    assert len(runs) == 5
    assert first.count("continue after epoch 2") == 2
    for line in (r"epoch 3: loss (\S+),", r"accuracy (\S+)", r"  loss: (\S+),"):
        ddp, ddp_resumed, fsdp, fsdp_resumed = numbers(line, first)
        assert ddp == ddp_resumed
        assert fsdp == fsdp_resumed
        assert ddp == pytest.approx(fsdp, rel=0.02)
    assert_equal(
        torch.load(tmp_path / "ddp" / "epoch_3")["step"],
        torch.load(tmp_path / "ddp_complete")["step"],
    )


def test_the_page_lists_every_example():
    assert sorted(set(re.findall(r"examples/(\w+)\.py", PAGE))) == NAMES
    assert len(NAMES) == 6


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_short_and_says_how_to_run_it(name: str):
    source = (EXAMPLES / f"{name}.py").read_text()
    assert 80 <= len(source.splitlines()) <= 175
    description = ast.get_docstring(ast.parse(source))
    commands = re.findall(r"^ +((?:python|torchrun) .*)$", description, re.MULTILINE)
    assert 1 <= len(commands) <= 3
    for command in commands:
        shown = {one.partition("=")[0] for one in re.findall(r" (--[\w-]+=?)", command)}
        assert shown - {"--nproc-per-node"} <= set(
            re.findall(r'add_argument\("(--[\w-]+)"', source)
        )
