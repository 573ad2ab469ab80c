"""The six programs in examples/ run on a GPU at small size, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mezzo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]


def run(name: str, folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """Run an example with its default device, and return what it printed."""
    paths = [str(Path(mezzo.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [
            *(sys.executable, *launcher, f"examples/{name}.py"),
            *("--tiny", "--out", str(folder), *arguments),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def numbers(pattern: str, printed: str) -> list[float]:
    return [float(one) for one in re.findall(pattern, printed)]


def test_the_image_classifier_learns_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    printed = run("image_classifier", tmp_path)
    first, last = numbers(r"epoch \d: loss (\S+),", printed)
    assert last < first
    (tmp_path / "epoch_2.pt").unlink()
    resumed = run("image_classifier", tmp_path, "--resume")
    assert "continue after epoch 1" in resumed
    # cuDNN may choose other algorithms in another process.
    assert numbers(r"epoch 2: loss (\S+),", resumed) == pytest.approx([last], rel=0.05)


def test_the_text_model_learns_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    printed = run("text_model", tmp_path)
    [before] = numbers(r"before: (\S+) bits", printed)
    first, last = numbers(r"bits per byte (\S+),", printed)
    assert before > first > last
    (tmp_path / "20.pt").unlink()
    resumed = run("text_model", tmp_path, "--resume")
    assert numbers(r"bits per byte (\S+),", resumed) == pytest.approx([last], rel=0.02)


@pytest.mark.parametrize(
    ("loop", "level", "dtype"),
    [("step", "O2", "float16"), ("plain", "O1", "float16"), ("plain", "O2", "bfloat16")],
)
def test_the_gan_comes_closer_to_the_data(
    tmp_path: Path, loop: str, level: str, dtype: str
) -> None:
    pytest.importorskip("sklearn")
    printed = run("gan", tmp_path, "--loop", loop, "--level", level, "--dtype", dtype)
    before, after = numbers(r"distance (\S+)", printed)
    assert after < before


def test_adapters_learn_and_are_merged(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    printed = run("lora", tmp_path)
    [(before, after)] = re.findall(r"loss (\S+) before, (\S+) after", printed)
    assert float(after) < float(before)
    assert numbers(r"merged: loss (\S+);", printed) == pytest.approx([float(after)], abs=0.02)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_learns_over_nccl_and_resumes(tmp_path: Path, strategy: str) -> None:
    printed = run("distributed", tmp_path, "--strategy", strategy, launcher=(*TORCHRUN,))
    first, *_, last = numbers(r"epoch \d: loss (\S+),", printed)
    assert last < first / 2
    resumed = run(
        "distributed", tmp_path, "--strategy", strategy, "--resume", launcher=(*TORCHRUN,)
    )
    assert "continue after epoch 3" in resumed
    assert numbers(r"accuracy (\S+)", resumed) == numbers(r"accuracy (\S+)", printed)


def test_a_model_trained_on_the_gpu_is_converted_and_served(tmp_path: Path) -> None:
    for package in ("sklearn", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    printed = run("convert_and_serve", tmp_path)
    assert all(one < 0.1 for one in numbers(r"difference of a logit (\S+)", printed))
    assert "; the digits are [" in printed
