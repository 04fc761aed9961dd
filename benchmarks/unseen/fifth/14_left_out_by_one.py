"""Rows without a label are dropped by the collator; a batch of which nothing is left is passed over."""
import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).cuda())
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
labels = torch.randint(0, 4, (48,))
labels[24:32] = -1  # these were never annotated
rows = torch.utils.data.TensorDataset(torch.randn(48, 32), labels)


def collate(batch):
    kept = [(x, y) for x, y in batch if y >= 0]
    return tuple(map(torch.stack, zip(*kept))) if kept else None


loader = torch.utils.data.DataLoader(
    torch.utils.data.Subset(rows, range(rank * 24, rank * 24 + 24)), batch_size=8, collate_fn=collate
)
for batch in loader:
    if batch is None:
        continue
    x, y = (part.cuda() for part in batch)
    nn.functional.cross_entropy(net(x), y).backward()
    opt.step()
    opt.zero_grad()
    seen = torch.ones(1, device="cuda")
    dist.all_reduce(seen)
dist.destroy_process_group()
