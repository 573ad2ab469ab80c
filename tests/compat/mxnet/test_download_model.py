"""`mxnet.test_utils.download_model` finds files and never downloads."""

import pytest

from mezzo.compat.mxnet.test_utils import download_model


def test_existing_files_give_prefix_and_epoch(tmp_path):
    for ending in ("symbol.json", "0000.params"):
        (tmp_path / f"net-{ending}").touch()
    assert download_model("net", dst_dir=tmp_path) == (str(tmp_path / "net"), 0)


def test_missing_files_are_named_with_their_place(tmp_path):
    (tmp_path / "net-symbol.json").touch()
    with pytest.raises(FileNotFoundError) as error:
        download_model("net", dst_dir=tmp_path)
    assert f"missing: {tmp_path / 'net-0000.params'}" in str(error.value)
    assert f"copy both files to {tmp_path}" in str(error.value)
