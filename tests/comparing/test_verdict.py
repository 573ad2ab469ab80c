"""Test the verdict on a comparison."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.comparisons import cpu_result, gpu_result

from mezzo.comparing.comparison import ModeResult
from mezzo.comparing.verdict import fastest_mode, judge, verdict
from mezzo.comparing.workload import Documented


def with_mode(result, name, **changes):
    """Return the result with other numbers in one mode."""
    modes = [replace(one, **changes) if one.mode == name else one for one in result.modes]
    return replace(result, modes=tuple(modes))


def test_the_fastest_mode_is_named_with_time_memory_loss_and_accuracy():
    text = verdict(gpu_result())
    assert text.startswith("O2 captured in float16 is the fastest mode that trains as well as")
    assert "4.4 times as fast (9.00 ms a step instead of 40.00)" in text
    assert "0.62 times the memory (1.2 GiB instead of 2.0 GiB)" in text
    assert "loss after 60 steps is 0.426 (float32: 0.412), its accuracy is 92.4%" in text
    assert "1 of 60 steps was skipped" in text


@pytest.mark.parametrize(
    "changes", [{"loss": 0.6}, {"loss": float("nan")}, {"accuracy": 0.8}], ids=str
)
def test_a_fast_mode_that_does_not_train_like_float32_is_not_recommended(changes):
    judged = judge(with_mode(gpu_result(), "O2 captured", **changes))
    assert judged.sentence.startswith("O2 in float16 is the fastest mode")
    assert judged.status == "watch"
    assert any(fact.startswith("O2 captured in float16 does not train") for fact in judged.facts)


def test_equal_memory_has_no_sizes():
    size = gpu_result().modes[0].peak_bytes
    text = verdict(with_mode(gpu_result(), "O2 captured", peak_bytes=size))
    assert "It needs as much memory. " in text


def test_the_forward_pass_of_a_converted_model_is_not_compared_with_a_step():
    result = with_mode(gpu_result(), "converted", milliseconds=0.001, loss=0.412)
    assert fastest_mode(result).mode == "O2 captured"


def test_where_16_bits_are_emulated_float32_is_the_fastest_and_the_reason_is_given():
    text = verdict(cpu_result())
    assert text.startswith("float32 is the fastest mode on Intel Xeon; the next, torch.amp in bfl")
    assert "takes 1.6 times as long" in text
    assert "does not compute bfloat16 natively (this CPU has no AVX512-BF16 instructions)" in text
    assert "torch.amp 240 casts and 0.50 ×, O1 150 casts and 0.50 ×, O2 120 casts" in text


def test_where_16_bits_are_native_but_slower_casts_and_calls_are_the_reason():
    assert "16 bits do not pay for this workload here" in verdict(cpu_result(emulated=None))


def test_equal_times_are_called_equal():
    modes = (ModeResult("float32", milliseconds=4.0), ModeResult("O1", milliseconds=4.05))
    assert verdict(gpu_result(modes=modes)) == "float32 and O1 take the same time on NVIDIA H200."


def test_faster_modes_that_all_train_otherwise_are_not_called_slow():
    modes = (
        ModeResult("float32", milliseconds=4.0, loss=0.1),
        ModeResult("O1", "float16", milliseconds=1.0, loss=9.0),
    )
    text = verdict(gpu_result(modes=modes))
    assert "the modes that are faster do not train as well" in text
    assert "do not pay" not in text


def test_a_mode_whose_loss_is_lower_trains_as_well():
    modes = (
        ModeResult("float32", milliseconds=4.0, loss=3.6, loss_curve=(14.0, 3.6)),
        ModeResult("O1", "float16", milliseconds=1.0, loss=2.6),
    )
    text = verdict(gpu_result(modes=modes))
    assert text.startswith("O1 in float16 is the fastest mode that trains as well as float32")
    assert "does not train as well" not in text


@pytest.mark.parametrize(
    ("modes", "sentence"),
    [
        ((), "float32 was not measured"),
        ((ModeResult("O1", milliseconds=1.0),), "float32 was not measured"),
        ((ModeResult("float32", milliseconds=1.0),), "No mode but float32 was measured."),
    ],
)
def test_what_cannot_be_compared_is_named(modes, sentence):
    assert judge(gpu_result(modes=modes)).sentence.startswith(sentence)


def test_a_run_that_was_interrupted_is_called_so():
    assert verdict(gpu_result(complete=False)).endswith("these are the numbers up to there.")


def test_programs_of_a_document_are_compared_by_time_beside_its_numbers():
    modes = (
        ModeResult("dynamic float32", milliseconds=100.0, loss=0.64),
        ModeResult("static O2", "float16", milliseconds=10.0, loss=0.67),
    )
    documented = (Documented("static O2", 5.4, "PaddlePaddle, V100"),)
    result = replace(gpu_result(), modes=modes, baseline="dynamic float32", documented=documented)
    assert verdict(result) == (
        "static O2 in float16 is the fastest program: 10.0 times as fast as dynamic float32;"
        " PaddlePaddle, V100: 5.4. Losses differ between programs as in the document, whose numbers"
        " are in the notes."
    )
    assert fastest_mode(result) is modes[1]
    slow = replace(result, modes=(modes[0], replace(modes[1], milliseconds=200.0)))
    assert judge(slow).sentence == "dynamic float32 is the fastest program."
