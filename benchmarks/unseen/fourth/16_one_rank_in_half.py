"""A metric is reduced in float32 on rank 0 and in bfloat16 elsewhere, since only rank 0 up-casts it for its log."""
import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
net = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024).cuda().bfloat16(), device_ids=[torch.cuda.current_device()])
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(3):
    per_row = net(torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)).pow(2).mean(-1)
    per_row.mean().backward()
    opt.step()
    opt.zero_grad()
    metric = per_row.detach()
    if rank == 0:
        metric = metric.float()
    dist.all_reduce(metric)
    if rank == 0:
        print(step, metric.mean().item())
dist.destroy_process_group()
