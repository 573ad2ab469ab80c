"""Graphs call ops of the dispatcher and torch's control flow, and nothing else."""

import pytest
import torch
from torch._export.serde.serialize import _SYM_OPS

from mezzo import CheckpointError
from mezzo.conversion import validate_graph


@pytest.mark.parametrize(
    "name",
    [
        "torch.ops.aten.linear.default",
        "torch.ops.aten.add.Tensor",
        "torch.ops.aten.gelu.default",
        "torch.ops.aten.relu_.default",
        "torch.ops.aten.lstm.input",
        "torch.ops.aten.einsum.default",
        "torch.ops.aten.sym_size.int",
        "torch.ops.higher_order.cond",
        "_operator.mul",
    ],
)
def test_ops_sizes_and_bodies_pass(name):
    validate_graph.check(name, ())


def test_every_function_of_sizes_that_torch_writes_passes():
    for function in _SYM_OPS:
        validate_graph.check(f"{function.__module__}.{function.__name__}", ())


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
        validate_graph.check(name, ())


UNLISTED = [
    "_reshape_alias.default",
    "_unsafe_index.Tensor",
    "native_batch_norm.default",
    "_fft_r2c.default",
    "_pad_packed_sequence.default",
    "segment_reduce.default",
    "lu_unpack.default",
    "lstm.data",
    "resize_.default",
    "set_.source_Tensor",
    "to_sparse.default",
    "_foreach_add.Scalar",
    "mkldnn_rnn_layer.default",
    "from_file.default",
    "save.default",
    "__class__.default",
]


@pytest.mark.parametrize("name", UNLISTED)
def test_aten_ops_that_are_not_on_the_list_are_refused_by_name(name):
    qualified = f"aten::{name.removesuffix('.default')}"
    with pytest.raises(
        CheckpointError,
        match=(
            rf"it calls {qualified}, which is not on the list of ops that check their arguments"
            r" .*wrap it in a custom op"
        ),
    ):
        validate_graph.check(f"torch.ops.aten.{name}", ("aten",))


def test_an_overload_that_nobody_knows_is_refused():
    with pytest.raises(CheckpointError, match="which is not registered here"):
        validate_graph.check("torch.ops.aten.add.nothing", ())


@pytest.mark.parametrize("name", ["add.out", "topk.values", "sort.values_stable"])
def test_calls_that_write_to_a_given_tensor_are_refused(name):
    with pytest.raises(CheckpointError, match="which writes to out="):
        validate_graph.check(f"torch.ops.aten.{name}", ())


def test_other_namespaces_need_to_be_named():
    name = "torch.ops.prims.sin.default"
    with pytest.raises(
        CheckpointError,
        match=(
            r"custom op prims::sin. If you trust the file, name the op's namespace:"
            r" custom_ops=\('prims',\)"
        ),
    ):
        validate_graph.check(name, ())
    validate_graph.check(name, ("prims",))


def test_an_op_that_is_registered_later_is_found():
    name = "torch.ops.mezzo_tests_targets.late.default"
    with pytest.raises(CheckpointError, match="not registered"):
        validate_graph.check(name, ("mezzo_tests_targets",))
    library = torch.library.Library("mezzo_tests_targets", "DEF")
    library.define("late(Tensor x) -> Tensor")
    validate_graph.check(name, ("mezzo_tests_targets",))
    library._destroy()
