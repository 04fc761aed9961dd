import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CONFIG = {"dim": 32, "depth": 2, "classes": 6, "batch": 8, "epochs": 2, "lr": 1e-3, "weight_decay": 0.05}


class MixerBlock(nn.Module):
    def __init__(self, dim, tokens):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Linear(tokens, tokens)
        self.channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, dim, depth, classes):
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 8, stride=8)
        self.blocks = nn.ModuleList([MixerBlock(dim, 16) for _ in range(depth)])
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def make_loader(cfg):
    g = torch.Generator().manual_seed(4)
    labels = torch.randint(0, cfg["classes"], (64,), generator=g)
    images = torch.randn(64, 3, 32, 32, generator=g) + labels[:, None, None, None] * 0.3
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, shuffle=True)
    return DataLoader(data, batch_size=cfg["batch"], sampler=sampler), sampler


def main(cfg):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    model = Mixer(cfg["dim"], cfg["depth"], cfg["classes"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], weight_decay=cfg["weight_decay"])
    shard(model, mesh)

    loader, sampler = make_loader(cfg)
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        total = 0.0
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(CONFIG)
