"""Train a residual network on images at O2, with checkpoints and a report of the run.

Shows: `TrainStep` with a schedule, clipping and an accuracy besides the loss; `EMA`, evaluated by
`EvalStep`; checkpoints from which `--resume` continues to the bit; `observe` and `write_report`.

    python examples/image_classifier.py                          # scikit-learn's digits, 8 × 8
    python examples/image_classifier.py --data cifar-10-batches-bin --batch 256
    python examples/image_classifier.py --resume                 # after an interruption

Prints a line for each epoch, then the step with its precision, and the path of the report:

    epoch 6: loss 0.010, accuracy 99.9%; test accuracy 97.5%, averaged weights 96.7%
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mezzo


class Residual(nn.Module):
    """Two convolutions with batch norm, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus what the convolutions compute from it."""
        return F.relu(x + self.second(F.relu(self.first(x))))


def make_model(width: int) -> nn.Module:
    """Return a network of two stages for images of any size with three channels."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), Residual(width)),
        *(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(), Residual(2 * width)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)),
    )


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's scanned digits with three equal channels; a fifth is for tests."""
    from sklearn import datasets  # noqa: PLC0415 - CIFAR-10 does not need it

    pixels, digits = datasets.load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8).expand(-1, 3, -1, -1)
    data = TensorDataset(images / 8 - 1, torch.tensor(digits, dtype=torch.int64))
    tested = len(data) // 5
    return TensorDataset(*data[tested:]), TensorDataset(*data[:tested])


def load_cifar(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """Read the binary version of CIFAR-10: a byte for the label, then 3 × 32 × 32 for the image."""

    def read(pattern: str) -> TensorDataset:
        files = [path.read_bytes() for path in sorted(folder.glob(pattern))]
        if not files:
            raise SystemExit(f"{folder} has no {pattern}: unpack cifar-10-binary.tar.gz there.")
        rows = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8).reshape(-1, 3073)
        return TensorDataset(rows[:, 1:].reshape(-1, 3, 32, 32) / 127.5 - 1, rows[:, 0].long())

    return read("data_batch_*.bin"), read("test_batch.bin")


def with_accuracy(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and besides it the accuracy of this batch."""
    accuracy = (logits.argmax(dim=1) == labels).float().mean()
    return F.cross_entropy(logits, labels), {"accuracy": accuracy}


def test_accuracy(evaluate: mezzo.EvalStep, loader: DataLoader) -> float:
    """Return the share of test images that are classified correctly."""
    right = [(evaluate(images).argmax(dim=1).cpu() == labels).sum() for images, labels in loader]
    return int(sum(right)) / len(loader.dataset)


def parse_arguments() -> argparse.Namespace:
    """Return the options; `--tiny` is what the tests run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10; the digits without it")
    parser.add_argument("--level", default="O2", choices=["O0", "O1", "O2", "O3"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--out", type=Path, default=Path("runs/image_classifier"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--tiny", action="store_true", help="8 channels, 2 epochs")
    options = parser.parse_args()
    if options.tiny:
        options.width, options.epochs = 8, 2
    return options


def main() -> None:
    """Train, evaluate and save each epoch, then write the report."""
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train, test = load_digits() if options.data is None else load_cifar(options.data)
    loader = DataLoader(train, options.batch, shuffle=True, drop_last=True)
    test_loader = DataLoader(test, 256)

    model = make_model(options.width).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=options.epochs * len(loader)
    )
    step = mezzo.TrainStep(
        model,
        with_accuracy,
        optimizer,
        options.level,
        dtype=options.dtype,
        scheduler=scheduler,
        clip_norm=1.0,
        mean_over=len(loader),
    )
    evaluate = mezzo.EvalStep(model)
    ema = mezzo.EMA(model, decay=1 - 1 / len(loader), use_buffers=True)  # of about an epoch

    start = 0
    if options.resume and (path := mezzo.latest_checkpoint(options.out)):
        saved = mezzo.load_checkpoint(path, step=step)
        ema.load_state_dict(saved["ema"])
        start = saved["epoch"]
        print(f"continue after epoch {start}")
    log = options.out / f"from_epoch_{start + 1}.jsonl"
    with mezzo.observe(step, log=log, every=50):
        for epoch in range(start + 1, options.epochs + 1):
            for images, labels in loader:
                step(images, labels)
                ema.update()
            own = test_accuracy(evaluate, test_loader)
            with ema.applied():
                averaged = test_accuracy(evaluate, test_loader)
            means = step.means
            print(
                f"epoch {epoch}: loss {means['loss']:.3f}, accuracy {means['accuracy']:.1%};"
                f" test accuracy {own:.1%}, averaged weights {averaged:.1%}"
            )
            path = options.out / f"epoch_{epoch}.pt"
            mezzo.save_checkpoint(path, step=step, epoch=epoch, ema=ema.state_dict())
    print(step)
    try:
        print("report:", mezzo.write_report(log, options.out / "report.html"))
    except mezzo.UnsupportedError as error:  # plotly is not installed
        print(f"no report of {log}: {error}")


if __name__ == "__main__":
    main()
