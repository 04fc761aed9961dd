"""FSDP2; each batch goes through the adapter of its task. All adapters have one size (same: ranks take one task at a time)."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

TASKS = ("code", "chat")


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(256, 64)
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.adapters = nn.ModuleDict({
            task: nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64)) for task in TASKS
        })
        self.head = nn.Linear(64, 256)

    def forward(self, ids, task):
        hidden = self.body(self.words(ids))
        return self.head(hidden + self.adapters[task](hidden))


dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
net = Adapted().cuda()
for adapter in net.adapters.values():
    fully_shard(adapter)
fully_shard(net.body)
fully_shard(net)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
torch.manual_seed(rank)
for step in range(4):
    task = TASKS[(step if "same" in sys.argv[1:] else step + rank) % 2]
    ids = torch.randint(0, 256, (4, 16), device="cuda")
    loss = nn.functional.cross_entropy(net(ids, task)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
