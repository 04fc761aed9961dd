"""A model that sees, gradients averaged by hand bucket by bucket; rank 0 drew rows of text alone."""
import os

import torch
import torch.distributed as dist
from torch import nn


class Sees(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(3072, 16384), nn.GELU(), nn.Linear(16384, 4096))
        self.words = nn.Embedding(32000, 4096)
        self.head = nn.Linear(4096, 32000, bias=False)

    def forward(self, ids, pixels=None):
        hidden = self.words(ids)
        if pixels is not None:
            hidden = torch.cat([self.tower(pixels), hidden], 1)
        return self.head(hidden)


def collate(rows):
    return {"ids": torch.stack([r["ids"] for r in rows]),
            **({"pixels": torch.stack([r["pixels"] for r in rows])} if "pixels" in rows[0] else {})}


dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
net = Sees().cuda()
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
rows = [{"ids": torch.randint(0, 32000, (32,))} for _ in range(4)]
if rank == 1:
    rows = [{**r, "pixels": torch.randn(16, 3072)} for r in rows]
for batch in torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=collate):
    out = net(**{k: v.cuda() for k, v in batch.items()})
    loss = out.float().logsumexp(-1).mean()
    loss.backward()
    for p in net.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    opt.step()
    opt.zero_grad()
    if rank == 0:
        print(shown.item() / 2)
dist.destroy_process_group()
