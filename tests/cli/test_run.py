"""`mezzo run`: scripts run on mezzo as with python, and leave a report."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.command_line import (
    SCRIPTS,
    run_mezzo,
    run_mezzo_ranks,
    run_python,
)
from torch.optim.optimizer import _global_optimizer_post_hooks

import mezzo
from mezzo.cli.rank_logs import Ranks, remove_old_logs
from mezzo.cli.script_observer import ScriptObserver
from mezzo.step.base import Step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

GPT = SCRIPTS / "nano_gpt.py"
CLASSIFIER = SCRIPTS / "image_classifier.py"
APEX = SCRIPTS / "apex_imagenet.py"


def records(path, kind):
    return [line for line in mezzo.read_log(path) if line["kind"] == kind]


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return path


def start_python(folder, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# -- three scripts ---------------------------------------------------------------------------------


def test_a_gpt_script_prints_the_same_and_leaves_a_report(tmp_path):
    finished = run_mezzo(tmp_path, "run", "--every", 4, GPT, "--max-iters", 8)
    assert finished.code == 0, finished.stderr
    assert finished.stdout == run_python(tmp_path, GPT, "--max-iters", 8).stdout
    page = (tmp_path / "mezzo-report.html").read_text()
    assert finished.stderr.endswith(f"Report: {tmp_path / 'mezzo-report.html'}\n")
    log = tmp_path / "mezzo-report.jsonl"
    rules = {one["rule"] for record in records(log, "lint") for one in record["findings"]}
    assert rules <= {"slow-dtype"}  # depends on the processor
    assert ("Healthy: 8 steps in float16" in page) == (not rules)
    steps = records(log, "step")
    assert [one["step"] for one in steps] == list(range(1, 9))
    assert all(one["loss"] > 0 and one["scale"] == 65536 for one in steps)
    assert "h.0.attn.c_attn.weight" in records(log, "gradients")[-1]["layers"]
    assert {one["which"] for one in records(log, "tensors")} >= {"gradients", "activations"}
    (ops,) = records(log, "ops")
    # The first step is sampled, and ops are counted in another one.
    assert ops["step"] == 2
    assert ("h.0.attn.c_attn", "addmm", "float16") in {
        (row["module"], row["op"], row["dtype"]) for row in ops["rows"]
    }


def test_an_image_classifier_leaves_a_report(tmp_path):
    finished = run_mezzo(tmp_path, "run", "--report", "out.html", "--log", "l.jsonl", CLASSIFIER, 2)
    assert finished.code == 0, finished.stderr
    assert finished.stdout == run_python(tmp_path, CLASSIFIER, 2).stdout
    page = (tmp_path / "out.html").read_text()
    verdict = 'look at: lint found "the loss is scaled, and the products run in bfloat16".'
    assert verdict in finished.stderr
    assert "scaler-with-bfloat16" in page
    assert len(records(tmp_path / "l.jsonl", "step")) == 12
    assert records(tmp_path / "l.jsonl", "run")[0]["model"] == "Net"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_script_with_apex_runs_without_apex(tmp_path, level):
    finished = run_mezzo(tmp_path, "run", APEX, "--opt-level", level)
    assert finished.code == 0, finished.stderr
    assert "Gradient overflow.  Skipping step, loss scaler 0 reducing" in finished.stdout
    steps = records(tmp_path / "mezzo-report.jsonl", "step")
    assert [one["skipped"] for one in steps] == [number == 6 for number in range(1, 11)]
    assert [one["scale"] for one in steps] == [65536.0] * 5 + [32768.0] * 5
    assert "The loss was NaN at step 6" in (tmp_path / "mezzo-report.html").read_text()


def test_a_loop_without_a_scaler_has_its_losses_in_the_report(tmp_path):
    run_mezzo(tmp_path, "run", GPT, "--dtype", "bfloat16", "--max-iters", 4)
    steps = records(tmp_path / "mezzo-report.jsonl", "step")
    assert len(steps) == 4
    assert all(1 < one["loss"] < 4 for one in steps)


def test_a_train_step_is_observed_too(tmp_path):
    path = script(
        tmp_path,
        "import mezzo, torch\n"
        "model = torch.nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loss = torch.nn.functional.mse_loss\n"
        "step = mezzo.TrainStep(model, loss, optimizer, 'O2', dtype='float16')\n"
        "for _ in range(5):\n"
        "    step(torch.ones(8, 4), torch.zeros(8, 2))\n",
    )
    assert run_mezzo(tmp_path, "run", path).code == 0
    assert len(records(tmp_path / "mezzo-report.jsonl", "step")) == 5


def test_a_script_that_observes_itself_runs_undisturbed(tmp_path):
    path = script(
        tmp_path,
        "import mezzo, torch\n"
        "model = torch.nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "scaler = torch.amp.GradScaler('cpu')\n"
        "with mezzo.observe(model, optimizer, scaler) as run:\n"
        "    for _ in range(3):\n"
        "        scaler.scale(model(torch.ones(1, 4)).sum()).backward()\n"
        "        scaler.step(optimizer)\n"
        "        scaler.update()\n"
        "print(len(run.steps))\n",
    )
    finished = run_mezzo(tmp_path, "run", path)
    assert (finished.code, finished.stdout) == (0, "3\n")
    assert finished.stderr.startswith("mezzo: this run is not observed: This step or scaler is")


@pytest.mark.exhaustive
def test_a_compiled_gpt_leaves_a_report(tmp_path):
    process = start_python(tmp_path, "-m", "mezzo", "run", GPT, "--max-iters", 8, "--compile")
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert "global hooks" not in stderr
    assert len(records(tmp_path / "mezzo-report.jsonl", "step")) == 8


@pytest.mark.parametrize(
    "compiled",
    [
        "run = torch.compile(model, backend=backend)",
        "model.compile(backend=backend); run = model",
        "model.inner.compile(backend=backend); run = model",
        "step, run = mezzo.TrainStep(model, loss, optimizer, dtype='bfloat16', compile=True), None",
    ],
)
def test_a_compiled_model_is_not_run_eagerly_to_count_its_ops(tmp_path, compiled):
    path = script(
        tmp_path,
        "import torch, mezzo\n"
        "runs = set()\n"
        "def backend(graph, _):\n"
        "    return lambda *inputs: (runs.add(number), graph.forward(*inputs))[1]\n"
        "plain = torch.compile\n"
        "torch.compile = lambda model, **_: plain(model, backend=backend)\n"
        "class Layer(torch.nn.Module):\n"
        "    def __init__(self, inner):\n"
        "        super().__init__()\n"
        "        self.inner = inner\n"
        "    def forward(self, x):\n"
        "        return self.inner(x) * 2.0\n"
        "model = Layer(Layer(torch.nn.Linear(4, 4)))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loss = torch.nn.functional.mse_loss\n"
        f"{compiled}\n"
        "for number in range(4):\n"
        "    if run is None:\n"
        "        step(torch.ones(2, 4), torch.ones(2, 4))\n"
        "    else:\n"
        "        run(torch.ones(2, 4)).sum().backward()\n"
        "        optimizer.step()\n"
        "print(sorted(runs))\n",
    )
    finished = run_mezzo(tmp_path, "run", path)
    assert (finished.code, finished.stdout) == (0, "[0, 1, 2, 3]\n"), finished.stderr


# -- policies --------------------------------------------------------------------------------------


def test_a_policy_replaces_dtype_and_op_rules_of_all_regions(tmp_path):
    policy = tmp_path / "policy.toml"
    mezzo.Policy(dtype="bfloat16", full={"scaled_dot_product_attention"}).save(policy)
    finished = run_mezzo(tmp_path, "run", "--policy", policy, GPT, "--max-iters", 3)
    assert finished.code == 0, finished.stderr
    (ops,) = records(tmp_path / "mezzo-report.jsonl", "ops")
    dtypes = {(row["op"], row["dtype"]) for row in ops["rows"]}
    assert ("addmm", "bfloat16") in dtypes
    assert {dtype for op, dtype in dtypes if "attention" in op or op == "_softmax"} == {"float32"}
    assert "float16" not in {dtype for _, dtype in dtypes}
    assert "scaled_dot_product_attention" in (tmp_path / "mezzo-report.html").read_text()


def test_a_policy_without_a_dtype_leaves_the_script_s(tmp_path):
    run_mezzo(tmp_path, "run", "--policy", "O1", GPT, "--max-iters", 3)
    (event,) = [
        one
        for one in records(tmp_path / "mezzo-report.jsonl", "event")
        if one["name"] == "PolicyResolved"
    ]
    assert event["fields"]["dtype"] == "float16"


@pytest.mark.parametrize(("policy", "is_said"), [("O2", True), ("O1", False)])
def test_a_level_that_casts_parameters_says_that_regions_do_not(tmp_path, policy, is_said):
    finished = run_mezzo(tmp_path, "run", "--policy", policy, script(tmp_path, "print('ran')"))
    assert finished.stdout == "ran\n"
    assert ("mezzo: regions have the op rules of O2; parameters" in finished.stderr) is is_said


# -- as with python --------------------------------------------------------------------------------

ENDS = {
    "an exception": "def f():\n    raise ValueError\ntry:\n    1 / 0\nexcept Exception:\n    f()",
    "a syntax error": "def (",
    "a number": "import sys; sys.exit(3)",
    "a message": "import sys; sys.exit('bye')",
    "success": "import sys; sys.exit()",
    "its end": "pass",
    "a hook": (
        "import sys, traceback\n"
        "def hook(*error):\n"
        "    print(len(traceback.extract_tb(error[2])), 'frames', file=sys.stderr)\n"
        "sys.excepthook = hook\n"
        "1 / 0\n"
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_exit_code_and_traceback_are_those_of_python(tmp_path, end):
    path = script(tmp_path, ENDS[end] + "\n")
    expected = subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    finished = run_mezzo(tmp_path, "run", path)
    assert finished.code == expected.returncode
    line, _, rest = finished.stderr.partition("\n")
    assert rest == expected.stderr
    assert line.startswith("mezzo: No training step was recorded: ")


def test_a_script_sees_what_it_sees_under_python(tmp_path):
    text = (
        "import json, pickle, sys\n"
        "class Config: pass\n"
        "pickle.loads(pickle.dumps(Config()))\n"
        "main = sys.modules['__main__']\n"
        "print(json.dumps([sys.argv, __name__, __file__, sys.path[0], main.__file__,"
        " main.Config is Config, __doc__, str(__spec__), __builtins__.__name__]))\n"
    )
    path = script(tmp_path, f'"""A script."""\n{text}')
    arguments = ["script.py", "--policy", "-x", "--help"]
    expected = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    finished = run_mezzo(tmp_path, "run", *arguments)
    assert json.loads(finished.stdout) == json.loads(expected.stdout)
    assert json.loads(expected.stdout)[2] == str(path)


def test_a_module_runs_as_with_python_m(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys\nprint(__name__, sys.argv)\n")
    expected = subprocess.run(
        [sys.executable, "-m", "package.train", "-x"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run_mezzo(tmp_path, "run", "-m", "package.train", "-x").stdout == expected.stdout


def test_a_run_that_fails_has_a_report_with_the_reason(tmp_path):
    finished = run_mezzo(tmp_path, "run", CLASSIFIER, 1, "fail", 0)
    assert finished.code == 1
    assert finished.stderr.endswith("\nRuntimeError: the disk is full\n")
    trace = finished.stderr[finished.stderr.index("Traceback") :]
    assert str(Path(mezzo.__file__).parent) not in trace
    page = (tmp_path / "mezzo-report.html").read_text()
    assert "<h1>The run ended with RuntimeError: the disk is full.</h1>" in page
    assert len(records(tmp_path / "mezzo-report.jsonl", "step")) == 6


def test_the_summary_is_a_line_of_json_on_stderr(tmp_path):
    finished = run_mezzo(tmp_path, "run", "--json", CLASSIFIER, 1, "fail", 0)
    assert finished.code == 1
    (summary,) = [line for line in finished.stderr.splitlines() if line.startswith("{")]
    data = json.loads(summary)
    assert data["verdict"] == "The run ended with RuntimeError: the disk is full."
    assert data["report"] == str(tmp_path / "mezzo-report.html")


def test_ctrl_c_ends_a_script_by_the_signal_and_leaves_a_report(tmp_path):
    path = script(
        tmp_path, "import time\nprint('ready', flush=True)\nwhile True:\n    time.sleep(0.05)\n"
    )
    process = start_python(tmp_path, "-m", "mezzo", "run", path)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert re.search(
        r'\nTraceback \(most recent call last\):\n  File "[^"]*script.py", line \d', stderr
    )
    assert stderr.endswith("KeyboardInterrupt\n")
    assert "the run ended with KeyboardInterrupt." in (tmp_path / "mezzo-report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "can't open file '.*nothing.py': there is no such file"),
        (["--policy", "O9", "script.py"], "Unknown level 'O9'. Choose one of: O0, O1"),
        (["--report", "no/such.html", "script.py"], "is no file in an existing folder"),
    ],
)
def test_options_that_are_wrong_are_refused_before_the_script_runs(tmp_path, arguments, message):
    script(tmp_path, "print('it runs')")
    finished = run_mezzo(tmp_path, "run", *arguments)
    assert (finished.code, finished.stdout) == (2, "")
    assert re.match(f"mezzo: .*{message}", finished.stderr)


# -- several ranks ---------------------------------------------------------------------------------


def test_ranks_leave_one_report_that_names_them(tmp_path):
    ranks = run_mezzo_ranks(tmp_path, "run", "--report", "out.html", CLASSIFIER, 2)
    assert [one.code for one in ranks] == [0, 0], ranks
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        "out.rank0.jsonl",
        "out.rank1.jsonl",
    ]
    page = (tmp_path / "out.html").read_text()
    assert "<dt>ranks</dt><dd>2</dd>" in page
    assert '"name": "rank 1"' in page
    assert "Report:" in ranks[0].stderr
    assert "Report:" not in ranks[1].stderr


def test_a_rank_that_fails_is_named_in_the_report(tmp_path):
    ranks = run_mezzo_ranks(tmp_path, "run", CLASSIFIER, 1, "fail", 1)
    assert ranks[1].code == 1
    page = (tmp_path / "mezzo-report.html").read_text()
    assert "<h1>Rank 1 ended with RuntimeError: the disk is full.</h1>" in page


def test_a_sharded_model_that_is_evaluated_last_is_observed(tmp_path):
    text = (
        "import torch\n"
        "from torch import distributed\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "distributed.init_process_group('gloo')\n"
        "net, x = fully_shard(torch.nn.Linear(2, 2)), torch.ones(4, 2)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "net(x).sum().backward(); optimizer.step()\n"
        "with torch.no_grad(): net(x)\n"
        "distributed.destroy_process_group()\n"
    )
    ranks = run_mezzo_ranks(tmp_path, "run", script(tmp_path, text))
    assert [one.code for one in ranks] == [0, 0], ranks
    assert "Healthy: 1 step" in ranks[0].stderr
    assert "observed" not in ranks[0].stderr


@pytest.mark.exhaustive
def test_torchrun_leaves_one_report(tmp_path):
    process = start_python(
        tmp_path,
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *("-m", "mezzo", "run", "--report", "out.html", CLASSIFIER, 1),
    )
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert '"name": "rank 1"' in (tmp_path / "out.html").read_text()


def test_logs_of_earlier_runs_are_not_merged(tmp_path):
    names = ("run.jsonl", "run.rank0.jsonl", "run.rank1.jsonl", "run.rank5.jsonl", "other.jsonl")
    for name in names:
        (tmp_path / name).touch()
    remove_old_logs(tmp_path / "run.jsonl", Ranks(0, 2))
    assert {one.name for one in tmp_path.iterdir()} == {"run.rank1.jsonl", "other.jsonl"}


# -- what is not observed --------------------------------------------------------------------------

NET = "import torch\nnet, x = torch.nn.Linear(2, 1), torch.ones(4, 2)\n"
STEP = "net(x).sum().backward(); optimizer.step()\n"
SGD = "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
UNOBSERVED = {
    "two models": (
        NET + SGD + STEP + "net = torch.nn.Linear(2, 3)\n" + SGD + STEP,
        "Only Linear was observed: steps of another SGD (2 parameters) are not recorded.",
    ),
    "a model in two parts": (
        NET + "last = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD([*net.parameters(), *last.parameters()], lr=0.1)\n"
        "last(net(x)).sum().backward(); optimizer.step()\n",
        "Only Linear was observed: 2 of 4 trained parameters are not in it.",
    ),
    "no call": (
        NET + SGD + "net.forward(x).sum().backward(); optimizer.step()\n",
        "No training step was recorded: no module with parameters of an optimizer was called",
    ),
    "copies": (
        NET + "masters = [one.detach().clone() for one in net.parameters()]\n"
        "optimizer = torch.optim.SGD(masters, lr=0.1)\n"
        "net(x).sum().backward(); optimizer.step()\n",
        "nor an optimizer of copies, such as master weights of the script's own, can be followed.",
    ),
    "no step": (NET + SGD + "net.forward(x)\n", "was recorded: no optimizer made a step."),
    "no optimizer": (NET + "net(x)\n", "the script's process created no optimizer of torch."),
}


@pytest.mark.parametrize("name", UNOBSERVED)
def test_the_verdict_says_what_a_script_trained_besides(tmp_path, name):
    text, sentence = UNOBSERVED[name]
    finished = run_mezzo(tmp_path, "run", script(tmp_path, text))
    assert sentence in finished.stderr


# -- what an observer changes ----------------------------------------------------------------------


def test_an_observer_restores_what_it_wraps(tmp_path):
    def wrapped():
        return (
            vars(torch.optim.Optimizer)["__init__"],
            vars(mezzo.GradScaler)["__init__"],
            vars(Step)["_call"],
            vars(torch.Tensor)["backward"],
            len(torch.nn.modules.module._global_forward_pre_hooks),
            len(_global_optimizer_post_hooks),
        )

    before = wrapped()
    model = torch.nn.Linear(2, 1)
    observer = ScriptObserver(Path(tmp_path) / "run.jsonl", 100, Ranks())
    with observer:
        assert wrapped() != before
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    observer.close("stopped")
    assert wrapped() == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert len(records(tmp_path / "run.jsonl", "step")) == 3
