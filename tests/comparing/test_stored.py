"""Test the stored results of other machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.comparisons import cpu_result, gpu_result

import mezzo
from mezzo.comparing import stored
from mezzo.comparing.stored import others, read_results, stored_results


def write(path, data):
    path.write_text(json.dumps(data))
    return path


def test_a_file_has_one_result_or_a_list_of_them(tmp_path):
    write(tmp_path / "compare-cpu.json", cpu_result().to_json())
    write(tmp_path / "compare-gpu.json", [gpu_result().to_json(), gpu_result("gpt").to_json()])
    write(tmp_path / "step-gpu.json", {"benchmark": "step"})
    assert stored_results(tmp_path) == (cpu_result(), gpu_result(), gpu_result("gpt"))


def test_results_of_a_checkout_are_those_of_the_benchmarks(tmp_path, monkeypatch):
    assert Path(mezzo.__file__).parents[2] / "benchmarks" / "results" == stored._CHECKOUT
    assert all(result.machine for result in stored_results())
    monkeypatch.setattr(stored, "_INSTALLED", tmp_path)
    write(tmp_path / "compare-gpu.json", gpu_result().to_json())
    assert stored_results() == (gpu_result(),)


def test_a_folder_that_is_not_there_has_no_results(tmp_path):
    assert stored_results(tmp_path / "missing") == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Expecting value"),
        ("\x00", "Expecting value"),
        ("3", "`benchmark` is not `compare`"),
        ('{"benchmark": "step"}', "`benchmark` is not `compare`"),
        ('{"benchmark": "compare"}', "it has no 'modes'"),
        ('[{"benchmark": "compare", "modes": [3]}]', "must be a mapping"),
        ('{"benchmark": "compare", "modes": [], "documented": [], "of": 1}', "unexpected keyword"),
    ],
)
def test_a_file_with_something_else_is_named(text, problem, tmp_path):
    path = tmp_path / "compare-x.json"
    path.write_text(text)
    with pytest.raises(mezzo.MezzoError) as raised:
        stored_results(tmp_path)
    assert str(raised.value).startswith(f"{path} has no results of mezzo compare (")
    assert problem in str(raised.value)
    assert str(raised.value).endswith("write it again: mezzo compare --json > compare-x.json")


@pytest.mark.parametrize(
    ("field", "value"), [("milliseconds", "fast"), ("casts", 1.5), ("loss_curve", [None])]
)
def test_a_field_of_a_wrong_type_is_named(field, value, tmp_path):
    data = gpu_result().to_json()
    data["modes"][2][field] = value
    with pytest.raises(mezzo.MezzoError, match=f"{field} is "):
        read_results(write(tmp_path / "compare-x.json", data))


def test_losses_that_are_not_finite_are_read_as_strict_json_has_them(tmp_path):
    data = gpu_result().to_json()
    data["modes"][0]["loss"] = "inf"
    data["modes"][0]["loss_curve"] = [1.0, "nan"]
    (result,) = read_results(write(tmp_path / "compare-x.json", data))
    assert result.modes[0].loss == float("inf")
    assert result.modes[0].loss_curve[1] != result.modes[0].loss_curve[1]


def test_results_of_the_same_machine_and_size_are_replaced_by_the_new_ones():
    known = (gpu_result(), cpu_result(), gpu_result("gpt"))
    assert others(cpu_result(), known) == [gpu_result()]
