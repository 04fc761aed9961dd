import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.laterals = nn.ModuleList(nn.Conv2d(2, 4, 1) for _ in range(5))
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        maps = [lateral(x) for lateral in self.laterals]
        return [self.head(m) for m in maps[:4]]


dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
model = DDP(Pyramid().cuda(), device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    outputs = model(torch.rand(2, 2, 4, 4).cuda())
    loss = sum(o.pow(2).mean() for o in outputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
