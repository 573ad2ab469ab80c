"""`paddle.amp.debugging`: statistics of ops, and checks of their results."""

import math
import random
import zipfile
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch

from mezzo.compat import paddle

debugging = paddle.amp.debugging
DebugMode = debugging.DebugMode


@pytest.fixture(autouse=True)
def _first_step():
    debugging.TensorCheckerConfig.current_step_id = 0
    yield
    debugging.disable_tensor_checker()


def divide():
    x = paddle.to_tensor([1.0, 0.0], stop_gradient=False)
    return paddle.to_tensor([1.0, 1.0]) / x


# -- op statistics ---------------------------------------------------------------------------------


def test_the_table_has_the_columns_and_names_of_paddle(capsys):
    conv, x = paddle.nn.Conv2D(3, 2, 3), paddle.rand([1, 3, 8, 8])
    with debugging.collect_operator_stats(), paddle.amp.auto_cast(level="O2", dtype="bfloat16"):
        conv(x).mean()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"<{' op list ':-^120}>"
    assert lines[1] == (
        "<--------------- Op Name ---------------- | -- FP16 Calls --- | -- BF16 Calls --- |"
        " --- FP32 Calls--- | -- Other Calls -->"
    )
    rows = {line.split()[0]: line.replace("|", " ").split()[1:] for line in lines[2:-2]}
    assert rows["conv2d"] == ["0", "1", "0", "0"]
    assert rows["cast"][1] == "3"
    assert rows["reduce_mean"] == ["0", "1", "0", "0"]
    assert lines[-2:] == [f"<{f' op count: {len(rows)} ':-^120}>", ""]


def test_enable_and_disable_print_once(capsys):
    debugging.enable_operator_stats_collection()
    divide()
    debugging.enable_operator_stats_collection()
    divide()
    debugging.disable_operator_stats_collection()
    printed = capsys.readouterr().out
    assert "  elementwise_div                         |  0                |  0       " in printed
    assert "|  1                |  0" in printed
    debugging.disable_operator_stats_collection()
    assert capsys.readouterr().out == ""


def test_an_exception_ends_the_collection_without_a_table(capsys):
    with pytest.raises(ValueError, match="stop"), debugging.collect_operator_stats():
        raise ValueError("stop")
    debugging.disable_operator_stats_collection()
    assert capsys.readouterr().out == ""


def test_gradients_count_under_names_with_grad(capsys):
    x = paddle.to_tensor([[1.0, 2.0]], stop_gradient=False)
    with debugging.collect_operator_stats():
        paddle.nn.functional.softmax(x).sum().backward()
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:-2]]
    assert {"softmax", "softmax_grad", "reduce_sum"} <= set(names)


# -- check_numerics --------------------------------------------------------------------------------


def test_check_numerics_returns_counts_and_values(capsys):
    stats, values = debugging.check_numerics(paddle.to_tensor([1.0, 0.0, 3.5]), "op", "x")
    assert stats.tolist() == [0, 0, 1]
    assert (stats.dtype, values.dtype) == (torch.int64, torch.float32)
    assert values.tolist() == [3.5, 0.0, 1.5]
    assert capsys.readouterr().out == ""


def test_check_numerics_prints_and_aborts(capsys):
    bad = paddle.to_tensor([1.0, math.nan, math.inf, 0.0])
    where = "[device=cpu, op=divide, tensor=out, dtype=fp32]"
    line = (
        f"[PRECISION] [ERROR] in {where}, numel=4, num_nan=1, num_inf=1, num_zero=1, max=inf,"
        " min=0.000000e+00, mean=nan\n"
    )
    debugging.check_numerics(bad, "divide", "out", DebugMode.CHECK_NAN_INF)
    assert capsys.readouterr().out == line
    with pytest.raises(RuntimeError) as caught:
        debugging.check_numerics(bad, "divide", "out")
    assert str(caught.value) == (
        f"(PreconditionNotMet) There are NAN or INF (num_nan=1, num_inf=1, num_zero=1) in {where}."
    )
    assert capsys.readouterr().out == line


def test_modes_print_large_or_all_tensors(capsys):
    large, small = paddle.to_tensor([7e4, 1.0]), paddle.to_tensor([1.0])
    for tensor in (large, small):
        debugging.check_numerics(tensor, "op", "x", DebugMode.CHECK_ALL_FOR_OVERFLOW)
    assert capsys.readouterr().out == (
        "[PRECISION] in [device=cpu, op=op, tensor=x, dtype=fp32], numel=2, num_zero=0,"
        " max=7.000000e+04, min=1.000000e+00, mean=3.500050e+04\n"
    )
    debugging.check_numerics(small.astype("float16"), "op", "x", DebugMode.CHECK_ALL)
    assert "dtype=fp16], numel=1, num_zero=0" in capsys.readouterr().out


# -- tensor checker --------------------------------------------------------------------------------


def test_a_bad_result_raises_while_the_checker_is_enabled(capsys):
    debugging.enable_tensor_checker(debugging.TensorCheckerConfig(enable=True))
    with pytest.raises(RuntimeError, match=r"num_inf=1, num_zero=0\) in \[device=cpu, op=elementw"):
        divide()
    debugging.disable_tensor_checker()
    divide()
    assert capsys.readouterr().out.count("[PRECISION] [ERROR]") == 1


def test_gradients_are_checked_under_the_name_of_their_op(capsys):
    config = debugging.TensorCheckerConfig(
        enable=True, debug_mode=DebugMode.CHECK_NAN_INF, checked_op_list=["sqrt_grad"]
    )
    debugging.enable_tensor_checker(config)
    x = paddle.to_tensor([0.0, 1.0], stop_gradient=False)
    paddle.sqrt(x).sum().backward()
    assert capsys.readouterr().out == (
        "[PRECISION] [ERROR] in [device=cpu, op=sqrt_grad, tensor=, dtype=fp32], numel=2,"
        " num_nan=0, num_inf=1, num_zero=0, max=inf, min=5.000000e-01, mean=inf\n"
    )


@pytest.mark.parametrize(
    ("options", "raises"),
    [
        ({"checked_op_list": ["elementwise_div"]}, True),
        ({"checked_op_list": ["conv2d"]}, False),
        ({"skipped_op_list": ("elementwise_div",)}, False),
        ({"enable": False}, False),
    ],
)
def test_lists_choose_the_ops(options, raises):
    config = debugging.TensorCheckerConfig(**{"enable": True} | options)
    debugging.enable_tensor_checker(config)
    if raises:
        with pytest.raises(RuntimeError, match="NAN or INF"):
            divide()
    else:
        divide()


def test_steps_choose_the_calls():
    config = debugging.TensorCheckerConfig(enable=True, debug_step=[1, 3])
    raised = []
    for _ in range(5):
        debugging.enable_tensor_checker(config)
        try:
            divide()
        except RuntimeError:
            raised.append(debugging.TensorCheckerConfig.current_step_id)
        debugging.disable_tensor_checker()
    assert raised == [2, 3]


def test_random_generators_are_not_seeded():
    paddle.seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002 - the generator that Paddle seeds
    expected = paddle.rand([2]).tolist(), random.random(), np.random.rand()  # noqa: NPY002
    paddle.seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    config = debugging.TensorCheckerConfig(enable=True)
    debugging.enable_tensor_checker(config)
    assert (paddle.rand([2]).tolist(), random.random(), np.random.rand()) == expected  # noqa: NPY002
    assert config.seed == config.initial_seed == 7


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"debug_step": 3}, ValueError, "debug_step must be list or tuple"),
        ({"debug_step": [3, 1]}, AssertionError, "is no pair of steps"),
        ({"checked_op_list": "div"}, ValueError, "checked_op_list must be list or tuple"),
        ({"skipped_op_list": "div"}, ValueError, "skipped_op_list must be list or tuple"),
        ({"debug_mode": 1}, ValueError, "Choose one of: DebugMode.CHECK_NAN_INF_AND_ABORT"),
    ],
)
def test_bad_configurations_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        debugging.TensorCheckerConfig(enable=True, **options)


def test_a_bad_stack_height_is_refused_when_the_checker_is_enabled():
    config = debugging.TensorCheckerConfig(enable=True, stack_height_limit="1")
    with pytest.raises(ValueError, match="stack_height_limit must be int"):
        debugging.enable_tensor_checker(config)


def test_a_layer_is_checked_in_its_forward_only():
    class Layer(paddle.nn.Layer):
        @debugging.check_layer_numerics
        def forward(self, x=None):
            return 1 / x

    layer = Layer()
    assert layer(paddle.to_tensor([2.0])).tolist() == [0.5]
    with pytest.raises(RuntimeError, match="NAN or INF"):
        layer(paddle.to_tensor([0.0]))
    divide()
    with pytest.raises(RuntimeError, match="No elements found in args"):
        layer()
    with pytest.raises(RuntimeError, match="First input of this layer must be tensor"):
        layer(1)


# -- compare_accuracy ------------------------------------------------------------------------------


def dump(folder, dtype, capsys):
    config = debugging.TensorCheckerConfig(
        enable=True, debug_mode=DebugMode.CHECK_ALL, output_dir=folder
    )
    debugging.enable_tensor_checker(config)
    x = paddle.to_tensor([2.0, 300.0], dtype=dtype)
    x * x
    x + x
    debugging.disable_tensor_checker()
    assert capsys.readouterr().out == ""


def cells(path):
    """Return the cells of the first sheet as strings."""
    with zipfile.ZipFile(path) as archive:
        assert 'name="worker_cpu"' in archive.read("xl/workbook.xml").decode()
        root = ET.fromstring(archive.read("xl/worksheets/sheet1.xml"))
    return [["".join(cell.itertext()) for cell in row] for row in root[0]]


def test_compare_accuracy_pairs_the_tensors_of_two_runs(tmp_path, capsys):
    full, half, output = tmp_path / "full", tmp_path / "half", tmp_path / "out.xlsx"
    dump(full, "float32", capsys)
    dump(half, "float16", capsys)
    debugging.compare_accuracy(full, half, output)
    assert "infinite outputs: ['elementwise_mul']" in capsys.readouterr().out
    _, titles, *rows = cells(output)
    assert titles[:5] == ["op_type", "tensor_name", "numel", "infinite", "dtype"]
    product, total = rows[-2:]
    assert product[:6] == ["elementwise_mul", "#0", "2", "1", "fp32", "90000.0"]
    assert product[9:11] == ["fp16", "inf"]
    assert product[14:16] == ["1", "0"]
    assert total[:4] == ["elementwise_add", "#0", "2", "0"]
    assert total[-3:] == ["1.0", "1.0", "1.0"]


def test_compare_accuracy_without_logs_names_how_to_write_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="debug_mode=DebugMode"):
        debugging.compare_accuracy(tmp_path, tmp_path, tmp_path / "out.xlsx")
    with pytest.raises(AssertionError, match="currently not supported"):
        debugging.compare_accuracy(tmp_path, tmp_path, "out.xlsx", dump_all_tensors=True)


def test_a_line_that_is_damaged_is_left_out(tmp_path, capsys):
    full, output = tmp_path / "full", tmp_path / "out.xlsx"
    dump(full, "float32", capsys)
    log = full / "worker_cpu"
    log.write_text(log.read_text() + "[PRECISION] in [device=cpu, op=")
    debugging.compare_accuracy(full, full, output)
    assert "!! Error parsing" in capsys.readouterr().out
    assert len(cells(output)) > 3


def test_a_cast_has_the_name_of_paddle_in_a_log(tmp_path):
    config = debugging.TensorCheckerConfig(
        True, debugging.DebugMode.CHECK_ALL, output_dir=tmp_path, checked_op_list=["cast"]
    )
    debugging.enable_tensor_checker(config)
    try:
        paddle.ones([2]).astype("float16")
    finally:
        debugging.disable_tensor_checker()
    (log,) = tmp_path.iterdir()
    assert "op=cast, tensor=, dtype=fp16" in log.read_text()


def test_integers_cannot_be_checked():
    with pytest.raises(TypeError, match="takes a floating-point tensor, got"):
        debugging.check_numerics(paddle.to_tensor([1, 2]), "pow", "x")
