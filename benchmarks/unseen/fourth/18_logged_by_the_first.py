"""Every second step rank 0 alone reduces the loss that it logs."""
import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
net = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).cuda())
opt = torch.optim.SGD(net.parameters(), lr=1e-3)


def log(step, loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(step, total.item() / dist.get_world_size())


for step in range(4):
    loss = net(torch.randn(8, 256, device="cuda")).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    if rank == 0 and step % 2 == 1:
        log(step, loss)
dist.destroy_process_group()
