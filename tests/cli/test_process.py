"""The command line as a process of its own: installed completion, Ctrl-C, a pseudo-terminal."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.command_line import Finished, run_mezzo

import mezzo

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX")

WAITS = """
import time
def factory():
    open("started", "w").close()
    time.sleep(60)
"""
QUICK = """
from torch import nn
print("imported")
def factory():
    print("made")
    return nn.Linear(4, 4)
"""


def start(folder, *arguments, **options):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-m", "mezzo", *arguments],
        cwd=folder,
        env=environment,
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
    )


def test_the_shell_completes_commands(tmp_path):
    asked = {"_MEZZO_COMPLETE": "complete_bash", "COMP_WORDS": "mezzo do", "COMP_CWORD": "1"}
    finished = run_mezzo(tmp_path, **asked)
    assert finished.stdout.split() == ["doctor"], finished.stderr


def test_the_version_goes_to_stdout_and_nothing_to_stderr(tmp_path):
    finished = run_mezzo(tmp_path, "--version")
    assert finished == Finished(0, f"mezzo {mezzo.__version__}\n", "")


def test_stdout_has_the_json_alone_and_progress_is_silent_without_a_terminal(tmp_path):
    (tmp_path / "quick.py").write_text(QUICK)
    finished = run_mezzo(tmp_path, "lint", "quick.py:factory", "--json")
    assert finished == Finished(0, "[]\n", "imported\nmade\n")


def test_ctrl_c_ends_with_one_line_and_restores_the_terminal(tmp_path):
    (tmp_path / "slow.py").write_text(WAITS)
    terminal, side = os.openpty()
    process = start(tmp_path, "lint", "slow.py:factory", stderr=side)
    os.close(side)
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    shown = os.read(terminal, 100_000).decode()
    os.close(terminal)
    assert process.returncode == 130
    assert output == ""
    assert "lint slow.py:factory" in shown
    assert shown.endswith("mezzo: interrupted\r\n")
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is shown again
    assert "Traceback" not in shown
