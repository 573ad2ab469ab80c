"""Checkpoints that were mutated in every way are refused and leave everything as it was, or load what was saved."""

from support.checkpoint_fuzzer import fuzz


def test_mutated_checkpoints_are_refused_or_load_what_was_saved(tmp_path):
    told = fuzz(tmp_path, range(500))
    assert told.total() == 500
    # The fuzzer reaches beyond the checksums, and not all that it makes is refused.
    assert told["content: refused"] > 100
    assert told["content: loaded"] > 20
    assert told["damaged: loaded"] > 5
