"""Train a small GPT as nanoGPT's train.py does: 16 bits, a scaler, gradient accumulation."""

import argparse
import math
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--max-iters", type=int, default=12)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--device", default="cpu")
config = parser.parse_args()

BLOCK, VOCABULARY, WIDTH, HEADS, ACCUMULATE = 16, 64, 32, 4, 2
torch.manual_seed(1337)
device_type = "cuda" if "cuda" in config.device else "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ctx = (
    nullcontext()
    if config.dtype == "float32"
    else torch.amp.autocast(device_type=device_type, dtype=ptdtype[config.dtype])
)


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (one.unflatten(2, (HEADS, -1)).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList([Block(), Block()])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


data = torch.arange(4096).mul(7).remainder(VOCABULARY)


def get_batch():
    starts = torch.randint(len(data) - BLOCK - 1, (4,))
    x = torch.stack([data[i : i + BLOCK] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + BLOCK] for i in starts])
    return x.to(config.device), y.to(config.device)


model = GPT().to(config.device)
scaler = torch.amp.GradScaler(device_type, enabled=config.dtype == "float16")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
if config.compile:
    model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    with ctx:
        loss = model(*get_batch())[1].item()
    model.train()
    return loss


for iteration in range(config.max_iters):
    rate = 1e-3 * min(1.0, (iteration + 1) / 4) * (0.5 + 0.5 * math.cos(iteration / 20))
    for group in optimizer.param_groups:
        group["lr"] = rate
    if iteration % 6 == 0:
        print(f"step {iteration}: val loss {estimate_loss():.4f}")
    for _ in range(ACCUMULATE):
        with ctx:
            logits, loss = model(*get_batch())
            loss = loss / ACCUMULATE
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
print(f"done: {loss.item() * ACCUMULATE:.4f}")
