"""A training run for tests of checkpoints."""

import copy
import random

import numpy as np
import torch
from torch import nn

import mezzo

FORMATS = ("float32", "split", "kahan", "stochastic", "none")


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, 3))


class Run:
    """A model, an optimizer, a scheduler and a scaler in training."""

    def __init__(self, seed=0, dtype="bfloat16", level="O2", **options):
        torch.manual_seed(seed)
        self.model = net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.scaler = mezzo.GradScaler(
            "cpu", init_scale=2.0**8, growth_interval=3, enabled=dtype == "float16"
        )
        if level is not None:
            mezzo.decorate(self.model, self.optimizer, level, dtype=dtype, **options)

    @property
    def parts(self):
        return self.model, self.optimizer, self.scaler, self.scheduler

    def train(self, steps):
        for _ in range(steps):
            # All three generators are used.
            x = torch.randn(16, 6) * random.random() + float(np.random.rand())  # noqa: NPY002
            loss = self.model(x).float().square().mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()

    def state(self):
        return copy.deepcopy([one.state_dict() for one in self.parts])
