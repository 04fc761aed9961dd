"""ViT-style backbone, activation checkpointing, an auxiliary head used on every second step."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Backbone(nn.Module):
    def __init__(self, dim=32, depth=3, classes=5, use_checkpoint=True):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 8, stride=8)
        self.blocks = nn.ModuleList([Block(dim, 4) for _ in range(depth)])
        self.head = nn.Linear(dim, classes)
        self.aux_head = nn.Linear(dim, 4)
        self.use_checkpoint = use_checkpoint

    def forward(self, x, with_aux=False):
        x = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.use_checkpoint else block(x)
        x = x.mean(1)
        return self.head(x), self.aux_head(x) if with_aux else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    torch.manual_seed(0)

    data = TensorDataset(torch.randn(32, 3, 32, 32), torch.randint(0, 5, (32,)), torch.randint(0, 4, (32,)))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = DDP(Backbone().to(device), device_ids=[local_rank], find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (images, labels, rotations) in enumerate(loader):
            images, labels, rotations = images.to(device), labels.to(device), rotations.to(device)
            logits, aux = model(images, with_aux=step % 2 == 0)
            loss = F.cross_entropy(logits, labels)
            if aux is not None:
                loss = loss + 0.5 * F.cross_entropy(aux, rotations)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
