import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Distillation:
    def __init__(self, config):
        dist.init_process_group("nccl")
        self.rank = dist.get_rank()
        torch.cuda.set_device(self.rank)
        torch.manual_seed(config["seed"] + self.rank)
        data = TensorDataset(torch.arange(40, dtype=torch.float32)[:, None].repeat(1, 4))
        self.sampler = DistributedSampler(data, shuffle=True, seed=config["seed"] * self.rank)
        self.loader = DataLoader(data, batch_size=5, sampler=self.sampler)
        self.student = DDP(nn.Linear(4, 1).cuda(), device_ids=[self.rank])
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=1e-4)

    def train(self, epochs=2):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for (rows,) in self.loader:
                loss = (self.student(rows.cuda()) - rows.cuda().mean(1, keepdim=True)).pow(2).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        dist.destroy_process_group()


Distillation({"seed": 17}).train()
