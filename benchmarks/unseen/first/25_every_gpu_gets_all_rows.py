import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch.utils.data import DataLoader, TensorDataset


def run(rank, world_size):
    torch.manual_seed(12345)
    torch.cuda.set_device(rank)
    nodes = torch.randn(48, 8)
    data = TensorDataset(nodes, (nodes.sum(1) > 0).long())
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).to(rank), device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(rank)), y.to(rank))
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("nccl")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
