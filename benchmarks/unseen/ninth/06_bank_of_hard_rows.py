"""DDP encoder with a bank of hard negatives, kept as a buffer so that it lands in the checkpoint.

torchrun --nproc-per-node 2 06_bank_of_hard_rows.py [--own-bank]
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Encoder(nn.Module):
    def __init__(self, dim=48, keep=512):
        super().__init__()
        self.keep = keep
        self.net = nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, dim))
        self.register_buffer("bank", torch.zeros(0, dim))

    def forward(self, left, right):
        a, b = F.normalize(self.net(left), dim=-1), F.normalize(self.net(right), dim=-1)
        others = torch.cat([b, self.bank])
        scores = a @ others.t() / 0.1
        target = torch.arange(a.shape[0], device=a.device)
        each = F.cross_entropy(scores, target, reduction="none")
        if self.training:
            hard = b.detach()[each.detach() > each.detach().mean()]
            self.bank = torch.cat([self.bank, hard])[-self.keep:]
        return each.mean()


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    encoder = DDP(
        Encoder().to(device),
        device_ids=[device.index],
        broadcast_buffers="--own-bank" not in sys.argv,
    )
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    for step in range(6):
        x = torch.randn(64, 40, device=device)
        loss = encoder(x, x + 0.3 * torch.randn_like(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(step, loss.item(), tuple(encoder.module.bank.shape))
    dist.destroy_process_group()


main()
