"""Train with NVIDIA Apex, as its examples/imagenet/main_amp.py does."""

import argparse

import torch
from apex import amp
from apex.optimizers import FusedAdam
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", type=str, default="O1")
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
optimizer = FusedAdam(model.parameters(), lr=1e-2)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
criterion = nn.CrossEntropyLoss()

for step in range(args.steps):
    inputs = torch.randn(16, 16, device=device)
    if step == 5:
        inputs[0, 0] = torch.inf
    target = inputs[:, :4].argmax(1)
    loss = criterion(model(inputs), target)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
print("last loss", loss.item())
