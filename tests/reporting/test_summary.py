"""The verdict, the terminal summary and TensorBoard's files."""

import io
import math
import sys

import pytest
import torch
from support import synthetic_logs as logs

import mezzo
from mezzo.reporting.policy_diff import policy_changes
from mezzo.reporting.run_data import RankLog, RunData, read_run
from mezzo.reporting.summary import print_summary, summary
from mezzo.reporting.tensorboard import write_tensorboard
from mezzo.reporting.verdict import Status, judge


def run_of(*lines, **header):
    records = {}
    for line in ({**logs.header(**header)}, *lines):
        records.setdefault(line["kind"], []).append(line)
    return RunData((RankLog(records["run"][0], records),))


def steps(*skipped, scale=1024.0, loss=1.0, first=1):
    return [
        {"kind": "step", "step": first + i, "time": 1.0, "loss": loss, "scale": scale, "skipped": s}
        for i, s in enumerate(skipped)
    ]


def step(number, *, scale, skipped=False, **fields):
    base = {"kind": "step", "step": number, "time": 1.0, "loss": 1.0, "parameter": None}
    return base | {"scale": scale, "skipped": skipped} | fields


def test_a_run_without_skips_is_healthy():
    verdict = judge(run_of(*steps(*[False] * 8)))
    assert verdict.status is Status.GOOD
    assert verdict.sentence == "Healthy: 8 steps in float16, no step was skipped."


def test_a_log_without_an_end_is_said_to_go_on_or_to_be_of_a_killed_run():
    end = {"kind": "end", "step": 8, "time": 1.0, "reason": "stopped"}
    text = "The log has no end: the run goes on, or it was killed."
    assert text in judge(run_of(*steps(*[False] * 8))).facts
    assert text not in judge(run_of(*steps(*[False] * 8), end)).facts
    with mezzo.observe(torch.nn.Linear(2, 1)) as run:
        run._attachment.models[0](torch.ones(1, 2))
        run._attachment.models[0](torch.ones(1, 2))
        assert text in summary(run)
    assert text not in summary(run)


@pytest.mark.parametrize(
    ("normal", "odd", "sentence"),
    [
        (1, 0, "1 step was skipped (0.1%), in the search for the loss scale."),
        (0, 1, "1 step was skipped (0.1%), not in the search for the loss scale."),
        (2, 0, "2 steps were skipped (0.2%), all in the search for the loss scale."),
        (1, 1, "2 steps were skipped (0.2%), 1 in the search for the loss scale."),
    ],
)
def test_the_sentence_about_skips_says_how_many_are_in_the_search(normal, odd, sentence):
    skips = [True] * normal + [False] * 99 + [True] * odd
    lines = steps(*skips, *[False] * (1000 - len(skips)))
    verdict = judge(run_of(*lines))
    assert sentence.lower() in f"{verdict.sentence} {verdict.facts}".lower()


def test_a_small_share_of_skips_is_not_called_zero():
    verdict = judge(run_of(*steps(True, *[False] * 4999)))
    assert "1 step was skipped (less than 0.1%)" in verdict.sentence


NOTHING = "nothing ran in 16 bits: the model ran in no autocast region."


@pytest.mark.parametrize(
    ("activations", "sentence"),
    [
        (["float32", "float32"], f"float32, {NOTHING}"),
        (["float32", "float64"], f"float32, {NOTHING}"),
        (["float32", "bfloat16"], "bfloat16, no step was skipped."),  # a region inside the model
        ([], "float32, no step was skipped."),  # a compiled model, or no samples
    ],
)
def test_the_verdict_names_the_dtype_or_says_that_nothing_ran_in_16_bits(activations, sentence):
    stats = {f"layer{index}": {"dtype": dtype} for index, dtype in enumerate(activations)}
    sample = {"kind": "tensors", "step": 1, "time": 0.0, "which": "activations", "stats": stats}
    run = run_of(*steps(*[False] * 8), sample, policy=None, dtype="float32")
    assert judge(run).sentence == f"Healthy: 8 steps in {sentence}"


def test_skips_of_the_scale_search_are_normal():
    run = run_of(
        step(1, scale=512.0, skipped=True, parameter="a"),
        *(step(number, scale=512.0) for number in range(2, 30)),
        step(30, scale=1024.0),
        step(31, scale=512.0, skipped=True, parameter="a"),
        *(step(number, scale=512.0) for number in range(32, 60)),
    )
    assert [skip.is_normal for skip in run.skips] == [True, True]
    assert "the first scale was too large" in run.skips[0].cause
    assert "the scale had grown to 1,024" in run.skips[1].cause
    assert judge(run).status is Status.GOOD


def test_skips_right_after_a_skip_of_the_search_belong_to_it():
    run = run_of(
        *(step(number, scale=512.0) for number in range(1, 9)),
        step(9, scale=1024.0),
        step(10, scale=512.0, skipped=True),
        step(11, scale=512.0),
        step(13, scale=256.0, skipped=True),
        *(step(number, scale=256.0) for number in range(14, 60)),
        step(60, scale=128.0, skipped=True),
    )
    assert [skip.is_normal for skip in run.skips] == [True, True, False]


def test_growth_between_logged_steps_is_recognized():
    run = run_of(
        *(step(number, scale=512.0) for number in range(10, 60, 10)),
        step(63, scale=512.0, skipped=True),
    )
    assert run.skips[0].is_normal
    assert run.skips[0].scale == 1024.0


def test_repeated_skips_at_a_scale_that_did_not_grow_are_reported_with_their_parameter():
    lines = [step(number, scale=512.0) for number in range(1, 50)]
    lines += [
        step(50, scale=256.0, skipped=True, parameter="head.weight"),
        step(51, scale=128.0, skipped=True, parameter="head.weight"),
        *(step(number, scale=128.0) for number in range(52, 80)),
    ]
    verdict = judge(run_of(*lines))
    assert verdict.status is Status.WATCH
    assert "2 of 79 steps were skipped" in verdict.sentence
    assert "head.weight" in verdict.sentence


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_the_verdict(loss):
    verdict = judge(run_of(*steps(*[False] * 5), *steps(False, loss=loss, first=6)))
    assert verdict.status is Status.BAD
    assert "at step 6 (1 such step, 1 applied to the weights)" in verdict.sentence


def test_the_rank_whose_loss_was_not_finite_is_named_and_gives_the_cause():
    def rank(number, loss):
        lines = [*steps(*[False] * 5), *steps(True, loss=loss, first=6)]
        return run_of(*lines, rank=number, ranks=2).ranks[0]

    run = RunData((rank(0, 1.0), rank(1, math.nan)))
    expected = "The loss was NaN at step 6 on rank 1 (1 such step, all skipped)."
    assert judge(run).sentence == expected
    (skip,) = run.skips
    assert (skip.rank, skip.cause.startswith("the loss was nan")) == (1, True)


@pytest.mark.parametrize("found", [False, True])
def test_what_overflowed_comes_with_the_call_that_finds_the_op(found):
    lines = [*steps(*[False] * 5), *steps(True, loss=math.nan, first=6)]
    facts = judge(run_of(*lines, *([logs.finding(step=6)] if found else []))).facts
    assert any("mezzo.trace_overflow(model, batch" in fact for fact in facts) is not found


def test_a_collapsed_scale_is_the_verdict():
    event = logs.event("ScaleCollapsed", 40, scale=0.5, consecutive_skips=30, message="")
    verdict = judge(run_of(*steps(*[False] * 5), event))
    assert verdict.sentence.startswith("The loss scale collapsed to 0.5 at step 40")


def test_a_run_whose_last_steps_were_all_skipped_does_not_train():
    verdict = judge(run_of(*steps(*[False] * 5, *[True] * 12)))
    assert verdict.status is Status.BAD
    assert verdict.sentence == "The run does not train: every step since step 6 was skipped."


def test_the_exception_that_ended_a_run_is_the_verdict():
    end = {"kind": "end", "step": 5, "time": 1.0, "reason": "ValueError: no data"}
    verdict = judge(run_of(*steps(*[False] * 5), end))
    assert verdict.sentence == "The run ended with ValueError: no data."
    expected = "No training step was recorded: the run ended with ValueError: no data."
    assert judge(run_of(end)).sentence == expected


def test_the_verdict_says_what_was_not_observed():
    line = {"kind": "unobserved", "what": "Only Net was observed."}
    assert judge(run_of(*steps(*[False] * 5), line)).sentence.endswith(". Only Net was observed.")
    expected = "No training step was recorded: only Net was observed."
    assert judge(run_of(line)).sentence == expected


def test_the_verdict_names_the_first_finding_of_lint():
    lint = {"kind": "lint", "findings": [{"what": "the batch has 3 rows"}]}
    sentence = judge(run_of(*steps(*[False] * 5), lint)).sentence
    assert sentence.endswith('look at: lint found "the batch has 3 rows".')
    lint["findings"].append({"what": "a convolution has 3 channels"})
    sentence = judge(run_of(*steps(*[False] * 5), lint)).sentence
    assert sentence.endswith('look at: lint found "the batch has 3 rows" and 1 more.')


def test_a_short_run_that_searched_for_its_first_scale_is_healthy():
    assert judge(run_of(*steps(True, True), *steps(*[False] * 8, first=3))).status is Status.GOOD
    never = judge(run_of(*steps(True, True)))
    assert never.status is Status.WATCH
    assert never.sentence.startswith("It has not trained yet: ")
    assert "2 of 2 steps were skipped (100.0%), all in the search for the scale" in never.sentence


def test_layers_that_underflow_are_named():
    record = {"kind": "gradients", "step": 4, "time": 1.0}
    layers = {"stem": [0, 40, 100], "head": [0, 99, 100]}
    line = record | {"layers": layers, "zeros": {"head": 99}}
    verdict = judge(run_of(*steps(*[False] * 5), line))
    assert verdict.status is Status.WATCH
    assert "40% of the gradient values of stem underflow." in verdict.sentence


def test_a_region_s_dtype_is_that_of_the_run_if_there_is_no_policy():
    event = logs.event("PolicyResolved", 1, policy="", device="cpu", dtype="bfloat16", reason="")
    assert run_of(event, policy=None, dtype="float32").dtype == "bfloat16"
    assert run_of(event, policy="O2", dtype="float16").dtype == "float16"


def test_the_cure_of_a_finding_is_a_difference_of_policies():
    by_level = policy_changes(run_of(logs.finding(), policy="O2", dtype="float16"))
    before = "Policy('O2', dtype='float16')"
    assert (by_level[0].before, by_level[0].after) == (before, f"{before[:-1]}, full={{'mul'}})")
    cure = "scaler=mezzo.GradScaler(init_scale=1024)"
    other = policy_changes(run_of(logs.finding(cure=cure, verified=False)))
    assert (other[0].before, other[0].after, other[0].verified) == (None, cure, False)
    assert policy_changes(run_of(logs.finding(cure=""))) == []


def test_a_suggested_policy_has_the_rules_of_the_run_once_each():
    run = mezzo.Policy("O2", "float16", full={"mul"})
    cured = mezzo.Policy("O2", "bfloat16", full={"mul", "exp"})
    finding = logs.finding(cure="dtype='bfloat16', full={'exp', 'mul'}", policy=cured.to_dict())
    (change,) = policy_changes(run_of(finding, policy=repr(run)))
    assert (change.before, eval(change.after, {"Policy": mezzo.Policy})) == (repr(run), cured)


@pytest.mark.parametrize("policy", [{"level": "O9"}, {"a b": 1}, ["O2"]])
def test_a_suggested_policy_without_a_readable_one_is_that_of_the_run_with_the_cure(policy):
    (change,) = policy_changes(run_of(logs.finding(policy=policy), policy="O2"))
    assert change.after.endswith("full={'mul'})")


def test_a_cure_with_which_the_batch_fails_is_not_suggested():
    run = run_of(*steps(*[False] * 5), logs.finding(step=3, policy={}, verified=False))
    assert policy_changes(run) == []
    assert "; no policy was found that cures it." in judge(run).sentence


def test_a_summary_has_verdict_numbers_skips_layers_and_policy(tmp_path):
    lines = [*logs.training_run(300)[:-1], logs.finding(), logs.lint()]
    text = summary(logs.write(tmp_path / "run.jsonl", lines))
    assert text.startswith("The op mul in transformer.h.2.attn")
    for part in (
        "steps 300",
        "Skipped steps (",
        "Layers whose gradients underflow most",
        "matrix-multiple",
        "+ Policy('O1', dtype='float16', full={'mul'}) (verified)",
    ):
        assert part in text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_the_same_in_color_and_a_file_plain_text(tmp_path):
    lines = [*logs.training_run(60, blocks=1)[:-1], logs.lint(where="[red]lm_head[/nothing]")]
    log = logs.write(tmp_path / "run.jsonl", lines)
    terminal, file = Terminal(), io.StringIO()
    print_summary(log, terminal)
    print_summary(log, file)
    assert "[red]lm_head[/nothing]" in terminal.getvalue().replace("\n", "")
    assert file.getvalue() == summary(log) + "\n"


def test_control_characters_of_a_log_do_not_reach_the_terminal_or_the_page(tmp_path):
    reason = "OSError: \x1b[2J\x00\x7f\u202e\udcff of 日本語 é"
    lines = [*logs.training_run(60, blocks=1)[:-1], {"kind": "end", "step": 60, "reason": reason}]
    log = logs.write(tmp_path / "run.jsonl", lines)
    expected = r"OSError: \x1b[2J\x00\x7f\u202e\udcff of 日本語 é"
    assert expected in summary(log)
    page = mezzo.write_report(log, tmp_path / "report.html").read_text(encoding="utf-8")
    assert expected in page


def test_tensorboard_gets_scalars_histograms_and_texts(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = logs.training_run(20, blocks=1)
    folder = write_tensorboard(logs.write(tmp_path / "run.jsonl", lines), tmp_path / "board")
    events = EventAccumulator(str(folder))
    events.Reload()
    losses = events.Scalars("step/loss")
    assert [one.step for one in losses] == list(range(1, 21))
    assert losses[0].value == pytest.approx(lines[1]["loss"])
    assert "gradient underflow/lm_head.weight" in events.Tags()["scalars"]
    histogram = events.Histograms("exponents of gradients/lm_head.weight")[0].histogram_value
    assert (histogram.min, histogram.num) == (-4, 300)
    assert "verdict/text_summary" in events.Tags()["tensors"]


def test_each_rank_has_its_folder_for_tensorboard(tmp_path):
    for rank in range(2):
        lines = logs.training_run(3, blocks=1, rank=rank, ranks=2)
        logs.write(tmp_path / f"run.rank{rank}.jsonl", lines)
    folder = write_tensorboard(tmp_path / "run.jsonl", tmp_path / "board")
    assert sorted(one.name for one in folder.iterdir()) == ["rank0", "rank1"]


def test_a_missing_tensorboard_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = logs.write(tmp_path / "run.jsonl", [logs.header()])
    with pytest.raises(mezzo.UnsupportedError, match=r"pip install 'mezzo\[tensorboard\]'"):
        write_tensorboard(log, tmp_path / "board")


def test_a_damaged_log_is_reported_up_to_the_damage(tmp_path):
    path = logs.write(tmp_path / "run.jsonl", logs.training_run(20, blocks=1))
    text = path.read_text()
    path.write_text(text[: len(text) // 3])
    with pytest.warns(UserWarning, match="damaged or cut off at line"):
        run = read_run(path)
    assert 0 < run.steps < 20
