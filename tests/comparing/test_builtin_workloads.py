"""Test the built-in workloads: their sizes, that they train, and their data."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
from typing import ClassVar

import pytest
import torch

import mezzo
from mezzo.comparing.builtin_workloads import WORKLOADS, load_workload
from mezzo.comparing.workload import Documented, Preset, Workload

np = pytest.importorskip("numpy")

TITLES = {
    "linears": "9 × Linear(8192), batch 2048, SGD",
    "mlp": "MLP 256-128-10, batch 128, SGD",
    "resnet18": "ResNet-18, 224 × 224, batch 64, SGD",
    "cifar": "ResNet-50, batch 128, SGD",
    "ssd": "SSD-512 on ResNet-50, 6132 anchors, batch 8, SGD",
    "gpt": "GPT-2, 12 layers of 768, batch 8 × 1024, AdamW",
}


@pytest.fixture(scope="module")
def small() -> dict[str, Workload]:
    return {name: load_workload(name, Preset.SMALL) for name in WORKLOADS}


def train(workload: Workload, level: str, steps: int) -> tuple[float, float]:
    """Return the loss of the first batch before and after some steps."""
    torch.manual_seed(0)
    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    if level != "float32":
        model, optimizer = mezzo.decorate(model, optimizer, level, dtype="bfloat16")
    losses = []
    for number in [*range(steps), 0]:
        with mezzo.autocast("cpu", torch.bfloat16, enabled=level != "float32"):
            loss = workload.loss(model, workload.make_batch(number))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses[0], losses[-1]


@pytest.mark.parametrize("name", WORKLOADS)
def test_small_workloads_train_in_float32_and_at_o2(small, name):
    steps = min(small[name].steps, 8)
    first, last = train(small[name], "float32", steps)
    half_first, half_last = train(small[name], "O2", steps)
    assert last < 0.99 * first
    assert half_last < 0.99 * half_first
    assert half_first == pytest.approx(first, rel=0.02)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_number_gives_the_same_batch_in_every_run_and_another_number_another(small, name):
    one, again = small[name].make_batch(3), load_workload(name, Preset.SMALL).make_batch(3)
    assert all(torch.equal(left, right) for left, right in zip(one, again, strict=True))
    assert not torch.equal(one[0], small[name].make_batch(4)[0])
    assert len(one[0]) == small[name].samples


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_the_same_weights(small, name):
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(small[name].make_model().state_dict())
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_full_workloads_have_the_sizes_of_their_documents():
    full = {name: load_workload(name, Preset.FULL) for name in WORKLOADS}
    assert {name: one.title for name, one in full.items()} == TITLES
    assert [full[name].steps for name in ("linears", "mlp", "ssd")] == [20, 100, 200]
    assert full["ssd"].epoch_steps == 50
    assert {name for name, one in full.items() if one.evaluate} == {"cifar"}
    assert {name for name, one in full.items() if one.channels_last} == {"resnet18", "cifar", "ssd"}
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    options = full["ssd"].make_optimizer(model).defaults
    assert [options[one] for one in ("lr", "momentum", "weight_decay")] == [0.001, 0.9, 0.0005]
    assert full["linears"].make_optimizer(model).defaults["lr"] == 1e-4
    images, classes, offsets = full["ssd"].make_batch(0)
    assert images.shape == (8, 3, 512, 512)
    assert (classes.shape, offsets.shape) == ((8, 6132), (8, 6132, 4))
    assert ((classes > 0).sum(1) > 0).all()
    tokens, following = full["gpt"].make_batch(0)
    assert tokens.shape == following.shape == (8, 1024)
    assert torch.equal(tokens[:, 1:], following[:, :-1])


def test_the_numbers_of_the_documents_are_attached():
    documented = {
        name: {(one.mode, one.speedup) for one in load_workload(name, Preset.SMALL).documented}
        for name in ("linears", "resnet18", "ssd")
    }
    assert documented == {
        "linears": {("O1", 4.5), ("O2", 5.2), ("O2 captured", 5.4), ("O2", 8.0)},
        "resnet18": {("O1", 2.0), ("O1", 3.0)},
        "ssd": {("O1", 1.6)},
    }
    assert (
        Documented("O1", 4.5, "PaddlePaddle, V100")
        in load_workload("linears", Preset.FULL).documented
    )


def test_an_unknown_workload_is_refused_with_the_choices():
    with pytest.raises(mezzo.PolicyError, match=r"Unknown workload 'cifr'.*linears.*'cifar'\?"):
        load_workload("cifr", Preset.SMALL)


# -- CIFAR-10 --------------------------------------------------------------------------------------


class Constant(torch.nn.Module):
    """Predict one class for every image, and record the sizes of batches."""

    def __init__(self, answer: int) -> None:
        super().__init__()
        self.scores = torch.nn.Parameter(torch.eye(10)[answer])
        self.sizes = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(images))
        return self.scores.expand(len(images), -1)


class Python2Pickler(pickle._Pickler):
    """Write bytes as strings of Python 2, as the files of CIFAR-10 have them."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch[bytes] = save_string


def write_cifar(folder, count=160):
    """Write six files as those of CIFAR-10, whose pixels are the label of the image."""
    for number in range(1, 7):
        labels = [(place * number) % 10 for place in range(count)]
        data = np.repeat(np.array(labels, dtype=np.uint8)[:, None], 3072, axis=1)
        content = {b"batch_label": b"a batch", b"labels": labels, b"data": data}
        name = "test_batch" if number == 6 else f"data_batch_{number}"
        written = io.BytesIO()
        Python2Pickler(written, protocol=2).dump(content)
        # The module had this name in NumPy 1.
        renamed = written.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        (folder / name).write_bytes(renamed)


class Pickled:
    """Write a file when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def cifar_folder(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    write_cifar(folder)
    return folder


def test_cifar10_is_read_from_its_folder_or_the_one_above(cifar_folder):
    for folder in (cifar_folder, cifar_folder.parent):
        workload = load_workload("cifar", Preset.FULL, folder)
        assert (workload.data, workload.epoch_steps, workload.steps) == ("CIFAR-10", 6, 60)
    images, labels = workload.make_batch(0)
    assert images.shape == (128, 3, 32, 32)
    assert torch.equal(((images[:, 0, 0, 0] * 0.25 + 0.47) * 255).round().long(), labels)


def test_every_epoch_has_each_image_once_in_an_order_of_its_own(cifar_folder):
    workload = load_workload("cifar", Preset.SMALL, cifar_folder)
    epochs = [
        torch.cat([workload.make_batch(epoch * 12 + step)[1] for step in range(12)])
        for epoch in range(2)
    ]
    assert workload.epoch_steps == 12
    assert not torch.equal(*epochs)
    assert torch.equal(epochs[0].sort().values, epochs[1].sort().values)


def test_accuracy_counts_each_test_image_once_in_batches_of_one_size(cifar_folder):
    workload = load_workload("cifar", Preset.FULL, cifar_folder)
    model = Constant(answer=0)
    # The label of test image i is 6 i % 10: a fifth have class 0.
    assert workload.evaluate(model) == 0.2
    assert model.sizes == [128, 128]


def test_a_file_that_could_run_code_is_refused_and_not_run(cifar_folder, tmp_path):
    made = tmp_path / "made"
    (cifar_folder / "data_batch_3").write_bytes(pickle.dumps(Pickled(made)))
    with pytest.raises(mezzo.PolicyError, match=r"data_batch_3 is no batch.*could run code"):
        load_workload("cifar", Preset.SMALL, cifar_folder)
    assert not made.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "EOFError"),
        (pickle.dumps([1, 2]), "TypeError"),
        (pickle.dumps({b"data": np.zeros((2, 3072)), b"labels": [0, 1]}), "torch.float64 images"),
        (pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}), r"\[1\] labels"),
    ],
)
def test_a_damaged_file_of_cifar10_is_named(cifar_folder, content, message):
    (cifar_folder / "test_batch").write_bytes(content)
    with pytest.raises(
        mezzo.PolicyError, match=rf"test_batch is no batch of CIFAR-10: .*{message}"
    ):
        load_workload("cifar", Preset.SMALL, cifar_folder)


def test_missing_files_and_folders_are_named(cifar_folder, tmp_path):
    (cifar_folder / "data_batch_2").unlink()
    with pytest.raises(mezzo.PolicyError, match="no CIFAR-10, for data_batch_2 are missing"):
        load_workload("cifar", Preset.SMALL, cifar_folder)
    with pytest.raises(mezzo.PolicyError, match=r"there is no such folder\. Pass cifar-10"):
        load_workload("cifar", Preset.SMALL, tmp_path / "nowhere")


def test_digits_stand_in_for_cifar10_and_are_labeled_so(small):
    workload = small["cifar"]
    assert workload.data == "scikit-learn's digits, 32 × 32 × 3"
    assert workload.make_batch(0)[0].shape == (32, 3, 32, 32)
    torch.manual_seed(0)
    assert 0.0 <= workload.evaluate(workload.make_model().eval()) < 0.4


def test_missing_scikit_learn_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(mezzo.UnsupportedError, match=r"sklearn.* pip install 'mezzo\[demo\]'"):
        load_workload("cifar", Preset.SMALL)


# -- text ------------------------------------------------------------------------------------------


def test_gpt_takes_the_bytes_of_text_files(tmp_path):
    (tmp_path / "one.txt").write_text("abcdefghij" * 20, encoding="utf-8")
    (tmp_path / "two.txt").write_text("abcdefghij" * 20, encoding="utf-8")
    workload = load_workload("gpt", Preset.SMALL, tmp_path)
    assert workload.data == "401 bytes of 2 text files"
    tokens, following = workload.make_batch(0)
    assert bytes(tokens[0].tolist()) in b"abcdefghij" * 20 + b"\n" + b"abcdefghij" * 20
    assert torch.equal(tokens[:, 1:], following[:, :-1])


def test_a_folder_without_enough_text_is_refused(tmp_path):
    with pytest.raises(mezzo.PolicyError, match=r"no \.txt files"):
        load_workload("gpt", Preset.SMALL, tmp_path)
    (tmp_path / "one.txt").write_text("short", encoding="utf-8")
    with pytest.raises(mezzo.PolicyError, match=r"have 5 bytes\. .* more than 64"):
        load_workload("gpt", Preset.SMALL, tmp_path)


def test_workloads_with_synthetic_data_only_refuse_a_folder(tmp_path):
    with pytest.raises(mezzo.PolicyError, match=r"ssd has synthetic data only.*cifar .* gpt"):
        load_workload("ssd", Preset.SMALL, tmp_path)
