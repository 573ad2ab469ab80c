"""Models that FSDP2 and tensor parallelism have sharded, in two and four processes.

`support/sharded_ranks.py` has what each rank does; all scenarios share one start of the processes.
"""

import pytest
import torch
from support import half_shards, sharded_ranks
from support.processes import run_ranks
from torch import distributed, nn

import mezzo
from mezzo.prepare import sharding

BOUNDS = {"bfloat16": 1e-2, "float16": 1e-3}
"""Largest difference of a loss (1 to 2) from that of one process: halves of a batch are rounded
separately."""
SKIPS = [False, True, False, False]


@pytest.fixture(scope="module")
def two():
    return run_ranks(2, sharded_ranks.two_ranks)


@pytest.fixture(scope="module")
def four():
    return run_ranks(4, sharded_ranks.four_ranks)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Return a function that trains in one process on whole batches."""
    store = tmp_path_factory.mktemp("store") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield lambda *args, **options: sharded_ranks.train(
        sharded_ranks.make_model(), *args, 0, 1, **options
    )
    distributed.destroy_process_group()


def assert_equal_within(results, reference, bound):
    for result in results:
        for losses in ("losses", "norms"):
            assert result[losses] == pytest.approx(reference[losses], abs=bound)
    first, *others = (result["weights"] for result in results)
    assert all(
        torch.equal(*pair) for weights in others for pair in zip(first, weights, strict=True)
    )


def assert_all_skip(results, bad_rank, name):
    """Assert that every rank skips the second step, and only the bad one names the parameter."""
    for rank, result in enumerate(results):
        assert result["skipped"] == SKIPS
        assert result["scales"] == [1024.0, 512.0, 512.0, 512.0]
        assert result["changed"] == [not skips for skips in SKIPS]
        assert result["names"] == [None, name if rank == bad_rank else None, None, None]


# -- losses and norms ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("level", "options"), [("O1", {}), ("O2", {"clip_norm": 0.5})])
def test_losses_and_norms_equal_those_of_one_process(two, one, level, options, dtype):
    results = [rank[f"train {level} {dtype}"] for rank in two]
    assert_equal_within(results, one(level, dtype, **options), BOUNDS[dtype])


def test_float32_losses_differ_by_the_order_of_sums_only(two, one):
    results = [rank["train O0"] for rank in two]
    assert_equal_within(results, one("O0", None, clip_norm=0.5), 1e-6)


@pytest.mark.parametrize("mesh", ["hybrid", "both"])
def test_norms_are_right_on_meshes_of_two_dimensions(four, one, mesh):
    reference = one("O2", "float16", clip_norm=0.5)
    assert_equal_within([rank[mesh] for rank in four], reference, BOUNDS["float16"])


def test_accumulated_gradients_equal_those_of_the_whole_batch(two):
    whole, *others = (two[0]["accumulate"][name] for name in ("whole", "by hand", "step", "flush"))
    for weights in others:
        for expected, found in zip(whole, weights, strict=True):
            # Gradients of two examples are rounded to bfloat16 before they are added up.
            torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)


def test_an_evaluation_of_a_sharded_model_equals_that_of_the_whole(two):
    torch.testing.assert_close(*two[0]["eval"]["outputs"], rtol=2.0**-7, atol=2.0**-8)


def test_the_ops_of_a_sharded_model_are_checked_by_its_shards(two):
    assert [one["check"]["clean"] for one in two] == [0, 0]
    assert [len(one["check"]["broken"]) for one in two] == [0, 1]


def test_a_sharded_model_trains_after_an_evaluation(two):
    assert two[0]["eval"]["falls"]


# -- overflows -------------------------------------------------------------------------------------


def test_all_ranks_skip_for_an_inf_in_one_shard(two):
    assert_all_skip([rank["one shard"] for rank in two], 1, "blocks.1.up.weight")


def test_all_ranks_skip_for_an_overflow_of_the_data_of_one_rank(two):
    for rank in two:
        assert rank["one batch"]["skipped"] == SKIPS
        assert rank["one batch"]["scales"] == [1024.0, 512.0, 512.0, 512.0]


def test_all_ranks_skip_after_unscale_of_an_optimizer_that_is_not_decorated(two):
    expected = [(skips, not skips) for skips in SKIPS]
    assert [rank["unscaled"] for rank in two] == [expected, expected]


def test_all_ranks_skip_for_an_inf_in_one_shard_of_hybrid_sharding(four):
    assert_all_skip([rank["hybrid, one shard"] for rank in four], 3, "blocks.0.up.weight")


def test_all_ranks_skip_for_an_inf_in_one_tensor_parallel_shard(two, four):
    assert_all_skip(
        [rank["tensor parallel"]["one shard"] for rank in two], 1, "blocks.0.down.weight"
    )
    assert_all_skip([rank["both, one shard"] for rank in four], 1, "blocks.1.up.weight")


def test_all_ranks_skip_for_an_inf_in_a_parameter_outside_the_tensor_mesh(four):
    assert_all_skip([rank["both, one norm"] for rank in four], 2, "blocks.1.norm.weight")


def test_ranks_of_another_mesh_do_not_skip(four):
    skips = [rank["pairs"] for rank in four]
    assert skips == [SKIPS, [False] * 4, SKIPS, [False] * 4]


def test_a_step_needs_one_all_reduce_for_flag_and_norm(two):
    for rank in two:
        assert (rank["all-reduces"]["float16"], rank["all-reduces"]["bfloat16"]) == (1, 1)


def test_reading_the_result_on_one_rank_needs_no_other_rank(two):
    assert two[0]["all-reduces"]["read"] == 0


def test_tensors_without_an_optimizer_are_unscaled_with_one_answer(two):
    assert [rank["tensors"] for rank in two] == [[False, True], [False, True]]


def test_a_partial_gradient_is_added_up_before_it_is_checked(two):
    # 4 from each of two ranks, unscaled by 2; the sum of 3e38 and 3e38 is infinite.
    for rank in two:
        assert rank["partial"]["finite"] == (False, [-4.0, -4.0, -4.0])
        assert rank["partial"]["overflow"] == (True, [-4.0, -4.0, -4.0])


# -- tensor parallelism ----------------------------------------------------------------------------


def test_tensor_parallel_losses_equal_those_of_one_process(two, one):
    results = [rank["tensor parallel"]["train"] for rank in two]
    assert_equal_within(results, one("O1", "float16", clip_norm=0.5), BOUNDS["float16"])


def test_tensor_parallelism_alone_is_refused_at_o2(two):
    message = two[0]["tensor parallel"]["O2"]
    assert message.startswith("UnsupportedError: The parameter 'blocks.0.up.weight' is split by")
    assert "tensor parallelism alone" in message
    assert "fully_shard(model), after parallelize_module" in message
    assert "'O1'" in message


# -- 16-bit shards ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "master"), half_shards.FORMATS)
def test_16_bit_shards_train_as_one_process_bit_for_bit(two, dtype, master):
    expected = half_shards.train(dtype, master, sharded=False)
    for rank in two:
        assert all(map(torch.equal, rank["16-bit shards"][f"{dtype} {master}"], expected))


@pytest.mark.parametrize("case", half_shards.CASES)
def test_16_bit_shards_do_what_whole_weights_do(two, case):
    expected = half_shards.CASES[case](sharded=False)
    for rank in two:
        assert all(map(torch.equal, rank["16-bit shards"][case], expected))


def test_losses_and_norms_of_16_bit_shards_equal_those_of_one_process(two, four, one):
    results = [rank["train split"] for rank in two], [rank["both, split"] for rank in four]
    reference = one("O2", "bfloat16", clip_norm=0.5, master="split")
    for found in results:
        assert_equal_within(found, reference, BOUNDS["bfloat16"])


def test_replicas_of_16_bit_shards_are_rounded_alike(four, one):
    results = [rank["hybrid, stochastic"] for rank in four]
    reference = one("O2", "bfloat16", clip_norm=0.5, master="stochastic")
    # Norms in groups with other layers are rounded too, and quarters of a batch separately.
    assert_equal_within(results, reference, 2 * BOUNDS["bfloat16"])


def test_all_ranks_skip_for_an_inf_in_one_16_bit_shard(two):
    assert_all_skip([rank["one 16-bit shard"] for rank in two], 1, "blocks.1.up.weight")


def test_shards_their_gradients_and_masters_are_16_bit(two):
    found = two[0]["16-bit shards"]["describe"]
    half, full = [(torch.bfloat16,) * 2] * 2, [(torch.float32,) * 2] * 2
    assert found["shards"] == found["gradients"] == [*half, *full, *half]
    assert found["master"] == ("DTensor", (12, 8))


def test_the_plan_states_what_16_bit_shards_save(two):
    found, weights = two[0]["16-bit shards"]["describe"], 8 * 12 + 3 * 12
    assert found["saved"] == 4 * weights
    assert "16-bit shards, their gradients and masters take 528 bytes less" in found["plan"]
    assert "updates are rounded at random; bfloat16 shard, gathered in bfloat16" in found["plan"]


# -- precision of groups ---------------------------------------------------------------------------


def test_groups_are_gathered_in_16_bits_and_reduced_in_float32_by_default(two):
    # Explicit, because torch's own default differs between its versions.
    assert two[0]["groups"]["default"] == {(torch.float16, torch.float32, False)}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("default", "float32"),
        ("grad_dtype", "bfloat16"),
        # torch's own default: the dtype of the gathered weights, and of the shards since 2.15.
        ("policy without reduce_dtype", "bfloat16" if torch.__version__ < "2.15" else "float32"),
    ],
)
def test_gradients_are_reduced_in_the_dtype_that_the_plan_says(two, case, dtype):
    reason = f"float32 shard, gathered in bfloat16, gradient reduced in {dtype}"
    for rank in two:
        assert rank["reductions"][case] == (reason, {dtype})


def test_norms_in_groups_of_their_own_are_gathered_in_float32(two):
    groups = two[0]["groups"]["groups"]
    assert ("FSDPLayerNorm", None, torch.bfloat16) in groups
    assert ("FSDPBlock", torch.bfloat16, torch.bfloat16) in groups
    assert two[0]["batch norm"] == ["torch.float32", True]


def test_the_plan_of_a_sharded_model_shows_its_shards(two):
    rows = two[0]["groups"]["rows"]
    reason = "float32 shard, gathered in {}, gradient reduced in float32"
    assert rows["head.weight"] == ("float32", reason.format("bfloat16"))
    assert rows["blocks.0.norm.weight"] == ("float32", reason.format("float32"))
    assert two[0]["groups"]["untouched"]


def test_a_mixed_precision_policy_of_the_user_is_kept(two):
    assert two[0]["groups"]["chosen"]


# -- errors ----------------------------------------------------------------------------------------

ORDER = "First fully_shard(model), then create the optimizer"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_that_is_sharded_after_decorate_raises_at_the_first_step(two, level):
    message = two[0]["orders"][f"decorated before, {level}"]
    assert message.startswith("UnsupportedError: 2 of the 2 parameters of this AdamW are no longer")
    assert ORDER in message


def test_a_function_step_trains_a_sharded_model(two):
    assert two[0]["function"]["falls"]


def test_a_backward_pass_that_reaches_no_shard_raises(two):
    assert "gradients of gathered copies" in two[0]["function"]["unreached"]


def test_a_scaler_step_without_gradients_raises_on_every_rank(two):
    for rank in two:
        assert "step() found no gradients" in rank["function"]["no gradients"]
        assert "first fully_shard(model)" in rank["function"]["no gradients"]


def test_shards_of_a_decorated_model_keep_their_dtype(two):
    assert "cannot be moved from torch.float32 on cpu" in two[0]["function"]["cast"]
    assert two[0]["function"]["moved"] == "no error"


def test_an_optimizer_from_before_sharding_is_refused(two):
    message = two[0]["orders"]["optimizer before"]
    assert "create the optimizer after fully_shard(model)" in message


def test_sharding_after_a_training_step_raises(two):
    message = two[0]["orders"]["step before"]
    assert message.startswith(
        "UnsupportedError: 14 of the 14 parameters of this AdamW are no longer"
    )
    assert ORDER in message


def test_a_sharded_model_that_has_run_is_refused_at_o2_only(two):
    orders = two[0]["orders"]
    assert "has run already" in orders["forward before"]
    assert ORDER in orders["forward before"]
    assert orders["forward before, O1"] == "no error"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("settings", "clip_norm: 1.0 on rank 0; 2.0 on rank 1"),
        ("O3", "Use policy 'O2'"),
        ("no master", "master='none' loses small updates of 16-bit shards"),
        ("no optimizer", "no optimizer was given"),
        ("split in float16", "master='split' needs bfloat16 parameters"),
        ("preset", "preset='apex'"),
        ("partly", "'blocks.1.norm.weight' is not sharded, while others are"),
        ("meta device", "call model.to_empty(device=...)"),
        ("other dtype", "Leave mp_policy out of fully_shard"),
        ("keep_full", "fully_shard(model.get_submodule('blocks.0.up'))"),
        ("batch norm", "fully_shard(model.get_submodule('1'))"),
        ("channels_last", "mezzo.channels_last(model) before that"),
        ("convert", "Convert a model that is not sharded"),
        ("advise", "Advise before fully_shard"),
        ("capture", "cannot be captured"),
    ],
)
def test_what_shards_do_not_support_is_refused(two, case, expected):
    message = two[0]["refused"][case]
    assert message.partition(":")[0] in ("PolicyError", "UnsupportedError")
    assert expected in message


def test_a_sharded_model_is_undecorated_before_its_first_forward_only(two):
    undone = two[0]["undecorate"]
    assert undone["restored"]
    assert undone["dtype"] == "torch.float32"
    assert "cannot be undecorated after it has run" in undone["after a forward"]
    assert undone["still decorated"] == "torch.bfloat16"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_whose_layers_were_all_replaced_raises_at_the_first_step(level):
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mezzo.decorate(model, optimizer, level, dtype="bfloat16")
    replaced, model[0] = model[0], nn.Linear(2, 2)
    for _ in range(2):
        with pytest.raises(mezzo.UnsupportedError, match=r"2 of the 2 parameters.*decorate again"):
            optimizer.step()
    model[0] = replaced
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_the_first_step_of_a_bound_optimizer_checks_its_parameters_and_no_later_one(monkeypatch):
    checks = []
    monkeypatch.setattr(sharding, "refuse_lost_parameters", lambda *checked: checks.append(checked))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mezzo.decorate(model, optimizer, "O2", dtype="bfloat16")
    model(torch.ones(1, 2)).sum().backward()
    assert not checks
    for _ in range(2):
        optimizer.step()
    assert len(checks) == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_undecorated_optimizer_steps_after_its_layers_were_replaced(level):
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mezzo.decorate(model, optimizer, level, dtype="bfloat16")
    mezzo.undecorate(model, optimizer)
    model[0] = nn.Linear(2, 2)
    optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_after_some_layers_were_replaced_is_not_refused(level):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mezzo.decorate(model, optimizer, level, dtype="bfloat16")
    model[0] = nn.Linear(2, 2, dtype=model[1].weight.dtype)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
