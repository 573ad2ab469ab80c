"""Train an image classifier, as torchvision's references and PyTorch's examples do."""

import os
import sys
import time

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def train_one_epoch(model, criterion, optimizer, loader, scaler, device):
    model.train()
    for images, target in loader:
        images, target = images.to(device), target.to(device)
        with torch.autocast(device, dtype=torch.bfloat16 if device == "cpu" else torch.float16):
            loss = criterion(model(images), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    model = Net().to(device)
    if distributed:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    images = torch.randn(48, 3, 12, 12)
    target = images.mean((1, 2, 3)).argsort().argsort().mul(4).div(48, rounding_mode="floor")
    loader = DataLoader(TensorDataset(images, target), batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = GradScaler() if device == "cuda" else torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with autocast(enabled=False):
        pass
    for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2):
        loss = train_one_epoch(model, nn.CrossEntropyLoss(), optimizer, loader, scaler, device)
        scheduler.step()
        print(f"epoch {epoch} loss {loss:.3f}")
    if "fail" in sys.argv and int(os.environ.get("RANK", 0)) == int(sys.argv[-1]):
        raise RuntimeError("the disk is full")
    if distributed:
        # gloo's threads still drop tensors, which takes the GIL: torch may hang or abort here.
        time.sleep(0.2)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
