import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def cycle(loader):
    while True:
        yield from loader


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(24, 3))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))
    model = DDP(nn.Linear(3, 1).cuda(), device_ids=[local])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = cycle(loader)
    for step in range(9):
        (rows,) = next(batches)
        loss = model(rows.cuda()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
