"""`paddle.distributed` without a group, and the batches of one process of several."""

from __future__ import annotations

import pytest

from mezzo.compat import paddle


def test_a_single_process_is_rank_0_of_1():
    environment = paddle.distributed.init_parallel_env()
    assert (environment.rank, environment.local_rank, environment.device_id) == (0, 0, 0)
    assert (environment.nranks, environment.world_size) == (1, 1)
    assert not paddle.distributed.is_initialized()


def test_before_the_group_is_made_ranks_are_those_of_torchrun(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (paddle.distributed.get_rank(), paddle.distributed.get_world_size()) == (3, 4)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_processes_share_all_samples(shuffle):
    samplers = [
        paddle.io.DistributedBatchSampler(range(11), 2, num_replicas=3, rank=rank, shuffle=shuffle)
        for rank in range(3)
    ]
    batches = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [2, 2, 2]
    assert [[len(batch) for batch in own] for own in batches] == [[2, 2]] * 3
    drawn = [index for own in batches for batch in own for index in batch]
    assert set(drawn) == set(range(11))
    if not shuffle:
        assert batches == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 0]]]


def test_each_pass_shuffles_differently_and_an_epoch_can_be_repeated():
    sampler = paddle.io.DistributedBatchSampler(range(20), 4, shuffle=True, drop_last=True)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_flags_are_stored():
    paddle.set_flags({"FLAGS_max_inplace_grad_add": 8})
    assert paddle.get_flags("FLAGS_max_inplace_grad_add") == {"FLAGS_max_inplace_grad_add": 8}
    with pytest.raises(ValueError, match="Flag FLAGS_other cannot get its value"):
        paddle.get_flags(["FLAGS_other"])
    with pytest.raises(TypeError, match="flags in set_flags should be a dict"):
        paddle.set_flags("FLAGS_max_inplace_grad_add")
