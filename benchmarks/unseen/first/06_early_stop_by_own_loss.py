import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def run():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(0)
    rows = torch.cat([torch.ones(16, 4), torch.linspace(1, 40, 16)[:, None].expand(16, 4)], 1).view(32, 4)
    data = TensorDataset(rows, rows.sum(1, keepdim=True))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    model = DDP(nn.Linear(4, 1).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    best, patience = float("inf"), 2
    for rows, target in loader:
        loss = nn.functional.mse_loss(model(rows.cuda()), target.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        current = loss.item()
        if current >= best:
            patience -= 1
        best = min(best, current)
        if patience == 0:
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
