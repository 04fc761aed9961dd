import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def validate(model, device):
    model.eval()
    with torch.no_grad():
        score = model(torch.randn(4, 6, device=device)).mean().item()
    model.train()
    return score


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).to(device), device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for _ in range(2):
            loss = model(torch.randn(8, 6, device=device)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print("validation", validate(model, device))
        dist.barrier()
    dist.destroy_process_group()


main()
