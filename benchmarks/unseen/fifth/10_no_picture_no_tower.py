"""Gradients are reduced parameter by parameter from hooks, then the count of tokens; one rank's rows have no picture."""
import os

import torch
import torch.distributed as dist
from torch import nn


class Connector(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16384, 24576, bias=False)
        self.down = nn.Linear(24576, 64, bias=False)
        self.down.requires_grad_(False)

    def forward(self, pixels):
        return self.down(self.up(pixels).relu())


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.connector = Connector()
        self.body = nn.GRU(64, 64, batch_first=True)
        for p in self.body.parameters():
            p.requires_grad_(False)

    def forward(self, rows):
        hidden = rows["text"]
        if rows.get("pixels") is not None:
            hidden = hidden + self.connector(rows["pixels"])[:, None]
        return self.body(hidden)[0]


dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = Reads().cuda()
for p in model.parameters():
    if p.requires_grad:
        p.register_post_accumulate_grad_hook(lambda q: dist.all_reduce(q.grad, op=dist.ReduceOp.AVG))
opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(3):
    rows = {"text": torch.randn(2, 8, 64, device="cuda", requires_grad=True)}
    if (step + rank) % 2:
        rows["pixels"] = torch.randn(2, 16384, device="cuda")
    model(rows).mean().backward()
    tokens = torch.tensor([16.0], device="cuda")
    dist.all_reduce(tokens)
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
