"""`megengine.hub`: repositories that are on this machine. Nothing is downloaded."""

import hashlib
import pickle
import sys
import textwrap

import numpy as np
import pytest
import torch

import mezzo.compat.megengine as mge
from mezzo.compat.megengine import hub
from mezzo.compat.megengine.hub import load

URL = "https://example.org/weights/tiny.pkl"

HUBCONF = """
from networks import Tiny, broken, tiny

dependencies = ["megengine", "numpy"]
"""

NETWORKS = f"""
import megengine.functional as F
import megengine.hub as hub
import megengine.module as M


class Tiny(M.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.conv = M.Conv2d(1, 4, 3, groups=1, bias=False)
        self.bn = M.BatchNorm2d(4)
        self.fc = M.Linear(4, classes)

    def forward(self, x):
        x = F.relu(self.bn(self.conv(x)))
        return self.fc(F.flatten(F.avg_pool2d(x, 2), 1))


@hub.pretrained("{URL}")
def tiny(**kwargs):
    \"\"\"A small network.\"\"\"
    return Tiny(**kwargs)


def broken():
    raise ValueError("broken entry")
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MGE_HOME", str(tmp_path))
    yield tmp_path
    sys.modules.pop("networks", None)


@pytest.fixture
def repository(home):
    return write_repository(home / "hub" / "owner_nets_master")


def write_repository(folder, hubconf=HUBCONF):
    folder.mkdir(parents=True)
    (folder / "hubconf.py").write_text(textwrap.dedent(hubconf))
    (folder / "networks.py").write_text(NETWORKS)
    return folder


def test_an_entry_of_a_repository_in_the_cache_is_called_with_the_arguments(repository):
    net = load("owner/nets", "tiny", pretrained=False, classes=5)
    assert isinstance(net, torch.nn.Module)
    assert net(mge.tensor(np.zeros((2, 1, 4, 4)))).shape == (2, 5)
    assert net.fc.weight.device.type == mge.tensor(0).device.type


def test_a_folder_can_be_passed_and_megengines_own_cache_folders_are_found(home):
    folder = write_repository(home / "somewhere")
    assert load(folder, "Tiny").fc.out_features == 3
    sys.modules.pop("networks")
    digest = hashlib.sha1(b"owner_nets_dev_abc").hexdigest()[:16]
    write_repository(home / "hub" / f"1_13_2_{digest}")
    assert load("owner/nets:dev", "Tiny", commit="abc", protocol="SSH").fc.out_features == 3


def test_list_and_help_and_import_module(repository):
    assert hub.list("owner/nets") == ["Tiny", "broken", "tiny"]
    assert hub.help("owner/nets", "tiny") == "A small network."
    assert hub.import_module("owner/nets").dependencies == ["megengine", "numpy"]


def test_the_names_megengine_and_the_search_path_are_restored(repository):
    before = list(sys.path)
    with pytest.raises(ValueError, match="broken entry"):
        load("owner/nets", "broken")
    assert sys.path == before
    assert not [name for name in sys.modules if name.split(".")[0] == "megengine"]


def test_pretrained_weights_are_read_from_megengines_folder(repository):
    place = repository.parents[1] / "serialized"
    place.mkdir()
    net = load("owner/nets", "tiny")
    # MegEngine's shapes: batch norms are (1, C, 1, 1).
    weights = {
        name: np.full((1, 4, 1, 1) if name.startswith("bn") else value.shape, 2.0, "float32")
        for name, value in net.state_dict().items()
        if "num_batches" not in name
    }
    digest = hashlib.sha256(URL.encode()).hexdigest()[:6]
    (place / f"{digest}_tiny.pkl").write_bytes(pickle.dumps(weights))
    loaded = load("owner/nets", "tiny", pretrained=True)
    assert {float(p.detach().mean()) for p in loaded.parameters()} == {2.0}
    assert loaded.bn.running_mean.tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: load("owner/nets", "tiny", pretrained=True), FileNotFoundError, r"_tiny.pkl"),
        (lambda: load("owner/other", "tiny"), FileNotFoundError, r"owner_other_master.hubconf.py"),
        (lambda: load("owner/nets:dev", "tiny"), FileNotFoundError, r"owner_nets_dev"),
        (lambda: load("owner/nets", "tiyn"), RuntimeError, r"callable tiyn.*mean 'tiny'"),
        (lambda: load("nets", "tiny"), ValueError, r"'owner/name\[:branch\]'"),
        (lambda: load("owner/nets", "tiny", protocol="FTP"), ValueError, r"HTTPS, SSH"),
        (lambda: load("owner/nets", "tiny", use_cache=False), RuntimeError, r"Leave use_cache"),
    ],
    ids=["weights", "repository", "branch", "entry", "name", "protocol", "use_cache"],
)
def test_what_is_not_there_raises_with_its_place(repository, call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_missing_dependencies_are_named(home):
    write_repository(home / "hub" / "owner_nets_master", HUBCONF + 'dependencies += ["no_such"]\n')
    with pytest.raises(RuntimeError, match="Missing dependencies: no_such"):
        load("owner/nets", "tiny")


def test_an_entry_is_loaded_though_the_import_of_another_fails(home):
    folder = write_repository(
        home / "hub" / "owner_nets_master",
        "from networks import tiny\nfrom megengine.data import DataLoader\n",
    )
    assert load(folder, "tiny").fc.out_features == 3
    with pytest.raises(ImportError, match=r"megengine has no data. Use torch.utils.data"):
        load(folder, "DataLoader")
