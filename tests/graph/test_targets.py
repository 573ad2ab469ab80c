"""Graphs call ops of the dispatcher and torch's control flow, and nothing else."""

import pytest
import torch
from torch._export.serde.serialize import _SYM_OPS

from mezzo import CheckpointError
from mezzo.graph import targets


@pytest.mark.parametrize(
    "name",
    [
        "torch.ops.aten.linear.default",
        "torch.ops.aten.add.Tensor",
        "torch.ops.aten.gelu.default",
        "torch.ops.aten.einsum.default",
        "torch.ops.aten.sym_size.int",
        "torch.ops.higher_order.cond",
        "_operator.mul",
    ],
)
def test_ops_sizes_and_bodies_pass(name):
    targets.check(name, ())


def test_every_function_of_sizes_that_torch_writes_passes():
    for function in _SYM_OPS:
        targets.check(f"{function.__module__}.{function.__name__}", ())


@pytest.mark.parametrize(
    "name",
    [
        "",
        "os.system",
        "torch.load",
        "torch.hub.load",
        "torch.ops.load_library",
        "torch.ops.aten",
        "torch.ops.aten.add",
        "torch.ops.aten.add.Tensor.__class__",
        "torch.ops.aten.add.Tensor\n",
        "torch.ops.higher_order.aoti_call_delegate",
        "torch.ops.higher_order.call_torchbind",
        "torch.ops.higher_order.print",
        "_operator.call",
        "_operator.methodcaller",
        "math.factorial",
        "#extension:op",
    ],
)
def test_other_functions_are_refused(name):
    with pytest.raises(CheckpointError, match="which is no op"):
        targets.check(name, ())


@pytest.mark.parametrize(
    "name", ["torch.ops.aten.save.default", "torch.ops.aten.__class__.default", "torch.ops.aten.nothing.default", "torch.ops.aten.add.nothing"]
)
def test_names_that_only_torchscript_or_nobody_knows_are_refused(name):
    with pytest.raises(CheckpointError, match="which is not registered here"):
        targets.check(name, ())


def test_ops_that_take_the_name_of_a_file_are_refused():
    with pytest.raises(CheckpointError, match="aten::from_file with a filename"):
        targets.check("torch.ops.aten.from_file.default", ())


@pytest.mark.parametrize("name", ["_unsafe_index.Tensor", "_unsafe_index_put.default", "_unsafe_masked_index.default"])
def test_ops_that_do_not_look_where_they_write_are_refused(name):
    with pytest.raises(CheckpointError, match="without looking where"):
        targets.check(f"torch.ops.aten.{name}", ())


def test_other_namespaces_need_to_be_named():
    name = "torch.ops.prims.sin.default"
    with pytest.raises(CheckpointError, match=r"custom op prims::sin. If you trust the file, name the op's namespace: custom_ops=\('prims',\)"):
        targets.check(name, ())
    targets.check(name, ("prims",))


def test_an_op_that_is_registered_later_is_found():
    name = "torch.ops.mezzo_tests_targets.late.default"
    with pytest.raises(CheckpointError, match="not registered"):
        targets.check(name, ("mezzo_tests_targets",))
    library = torch.library.Library("mezzo_tests_targets", "DEF")
    library.define("late(Tensor x) -> Tensor")
    targets.check(name, ("mezzo_tests_targets",))
    library._destroy()
