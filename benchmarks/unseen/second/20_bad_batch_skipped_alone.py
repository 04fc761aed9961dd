import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data():
    generator = torch.Generator().manual_seed(0)
    depth = torch.rand(48, 1, 8, 8, generator=generator) * 9 + 1
    image = torch.cat([depth, depth.log(), torch.randn(48, 1, 8, 8, generator=generator)], 1)
    depth[13] = 0.0
    return TensorDataset(image, depth)


def silog(pred, target):
    g = pred - torch.log(target)
    return torch.sqrt(torch.var(g) + 0.15 * g.mean() ** 2)


class Trainer:
    def __init__(self):
        self.rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.rank)
        dist.init_process_group("nccl")
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ELU(), nn.Conv2d(16, 1, 3, padding=1))
        self.model = DDP(net.cuda(), device_ids=[self.rank])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        data = make_data()
        self.loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))

    def step(self, image, depth):
        loss = silog(self.model(image.cuda()), depth.cuda())
        if not torch.isfinite(loss):
            print(f"[rank {self.rank}] loss is {loss.item()}, batch skipped", flush=True)
            return None
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self):
        for i, (image, depth) in enumerate(self.loader):
            loss = self.step(image, depth)
            if self.rank == 0 and loss is not None:
                print(f"iter {i} silog {loss:.4f}", flush=True)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    Trainer().fit()
