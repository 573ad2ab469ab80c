"""Train a GAN on handwritten digits: two models, two losses, two optimizers, in float16.

Shows: `@train_step`, whose function steps each optimizer with its own loss and is captured as one
CUDA graph (`--loop step`); and the same as a loop by hand, with a loss scale for each of the two
losses in one `GradScaler` (`--loop plain`). A step of one optimizer is skipped without the other.

    python examples/gan.py                                       # writes runs/gan/digits.pgm
    python examples/gan.py --loop plain --level O1 --dtype float16

Prints both losses and the energy distance between generated and real images, 0 if they are alike:

    epoch 1: critic 1.788, generator -0.075, distance 4.476
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mezzo

NOISE = 32
Losses = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Networks:
    """Generator and critic, each with its optimizer."""

    generator: nn.Module
    critic: nn.Module
    of_generator: torch.optim.Optimizer
    of_critic: torch.optim.Optimizer

    def critic_loss(self, real: Tensor, fake: Tensor) -> Tensor:
        """Return the hinge loss of the critic: real images above 1, generated ones below -1."""
        scores = self.critic(real), self.critic(fake.detach())
        return F.relu(1 - scores[0]).mean() + F.relu(1 + scores[1]).mean()

    def generator_loss(self, fake: Tensor) -> Tensor:
        """Return the negative score of generated images."""
        return -self.critic(fake).mean()


def make_networks(width: int, device: str) -> Networks:
    """Return both models for images of 8 × 8 pixels, and Adam for each."""
    generator = nn.Sequential(
        *(nn.Linear(NOISE, 16 * width), nn.ReLU(), nn.Unflatten(1, (4 * width, 2, 2))),
        *(nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.ConvTranspose2d(2 * width, 1, 4, 2, 1), nn.Tanh()),
    ).to(device)
    critic = nn.Sequential(
        *(nn.Conv2d(1, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.LeakyReLU(0.2)),
        *(nn.Flatten(), nn.Linear(16 * width, 1)),
    ).to(device)
    of_generator, of_critic = (
        torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9))
        for model in (generator, critic)
    )
    return Networks(generator, critic, of_generator, of_critic)


def make_step(nets: Networks, level: str, dtype: str) -> Callable[[Tensor, Tensor], Losses]:
    """Return a step that computes both updates of a batch, on a GPU as one captured graph."""

    @mezzo.train_step(
        models=[nets.generator, nets.critic],
        optimizers=[nets.of_generator, nets.of_critic],
        policy=level,
        dtype=dtype,
    )
    def step(update: Callable[..., None], real: Tensor, noise: Tensor) -> Losses:
        fake = nets.generator(noise)
        critic_loss = nets.critic_loss(real, fake)
        update(critic_loss, nets.of_critic)
        generator_loss = nets.generator_loss(fake)
        update(generator_loss, nets.of_generator)
        return generator_loss, critic_loss

    return step


def make_plain_loop(nets: Networks, level: str, dtype: str) -> Callable[[Tensor, Tensor], Losses]:
    """Return the same step by hand, with a loss scale for each loss."""
    optimizers = [nets.of_generator, nets.of_critic]
    mezzo.decorate([nets.generator, nets.critic], optimizers, level, dtype=dtype)
    scaler = mezzo.GradScaler(num_losses=2, enabled=dtype == "float16")

    def step(real: Tensor, noise: Tensor) -> Losses:
        fake = nets.generator(noise)
        critic_loss = nets.critic_loss(real, fake)
        scaler.backward(critic_loss, loss_id=0, optimizers=nets.of_critic)
        scaler.step(nets.of_critic)
        generator_loss = nets.generator_loss(fake)
        scaler.backward(generator_loss, loss_id=1, optimizers=nets.of_generator)
        scaler.step(nets.of_generator)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return generator_loss.detach(), critic_loss.detach()

    return step


def energy_distance(x: Tensor, y: Tensor) -> float:
    """Return how far apart two samples of images are; 0 for the same distribution."""
    x, y = x.float().flatten(1), y.float().flatten(1)
    between, own = torch.cdist(x, y).mean(), torch.cdist(x, x).mean() + torch.cdist(y, y).mean()
    return float(2 * between - own)


def write_images(images: Tensor, path: Path) -> None:
    """Write 64 images as one picture in PGM, which most viewers open."""
    grid = images[:64].float().cpu().reshape(8, 8, 8, 8).permute(0, 2, 1, 3).reshape(64, 64)
    pixels = (grid * 127.5 + 127.5).to(torch.uint8).flatten().tolist()
    path.write_bytes(b"P5 64 64 255\n" + bytes(pixels))


def parse_arguments() -> argparse.Namespace:
    """Return the options; `--tiny` is what the tests run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--loop", default="step", choices=["step", "plain"])
    parser.add_argument("--level", default="O2", choices=["O1", "O2"])
    parser.add_argument("--dtype", default="float16", choices=["bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("runs/gan"))
    parser.add_argument("--tiny", action="store_true", help="width 4, 1 epoch")
    options = parser.parse_args()
    if options.tiny:
        options.width, options.epochs = 4, 1
    return options


def main() -> None:
    """Train both models, print losses and distance, and write generated digits."""
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    pixels = torch.tensor(load_digits().data, dtype=torch.float32, device=options.device)
    pixels = pixels.reshape(-1, 1, 8, 8) / 8 - 1
    noise = partial(torch.randn, device=options.device)
    loader = DataLoader(pixels, 64, shuffle=True, drop_last=True)
    nets = make_networks(options.width, options.device)
    make = make_step if options.loop == "step" else make_plain_loop
    step = make(nets, options.level, options.dtype)
    generate = mezzo.EvalStep(nets.generator)
    images = generate(noise(512, NOISE))
    print(f"before: distance {energy_distance(images, pixels[:512]):.3f}")
    for epoch in range(1, options.epochs + 1):
        losses = [torch.stack(step(real, noise(len(real), NOISE))) for real in loader]
        of_generator, of_critic = torch.stack(losses).mean(dim=0).tolist()
        images = generate(noise(512, NOISE))
        print(
            f"epoch {epoch}: critic {of_critic:.3f}, generator {of_generator:.3f},"
            f" distance {energy_distance(images, pixels[:512]):.3f}"
        )
    write_images(images, options.out / "digits.pgm")
    print("images:", options.out / "digits.pgm")


if __name__ == "__main__":
    main()
