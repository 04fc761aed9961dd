#!/usr/bin/env python
"""CLIP-style training. DDP, autocast, checkpointed towers, features gathered with their gradients."""
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Tower(nn.Module):
    def __init__(self, width, depth, mlp, heads, inputs, length, out=1024):
        super().__init__()
        self.enter = inputs
        self.pos = nn.Parameter(torch.randn(1, length, width) * 0.02)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, heads, mlp, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(depth)]
        )
        self.exit = nn.Linear(width, out, bias=False)

    def forward(self, x):
        h = self.enter(x) + self.pos
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        return F.normalize(self.exit(h.mean(dim=1)).float(), dim=-1)


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = Tower(1664, 48, 8192, 16, nn.Linear(14 * 14 * 3, 1664), 256)
        self.text = Tower(1280, 32, 5120, 20, nn.Embedding(49408, 1280), 77)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, patches, ids):
        return self.image(patches), self.text(ids), self.scale.exp()


def contrastive(image, text, scale):
    images, texts = torch.cat(dist_fn.all_gather(image)), torch.cat(dist_fn.all_gather(text))
    n, first = image.shape[0], image.shape[0] * dist.get_rank()
    target = torch.arange(first, first + n, device=image.device)
    assert images.shape[0] == n * dist.get_world_size()
    return (F.cross_entropy(scale * image @ texts.T, target) + F.cross_entropy(scale * text @ images.T, target)) / 2


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Clip().cuda(), device_ids=[local], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, betas=(0.9, 0.98))
    torch.manual_seed(100 + dist.get_rank())
    for step in range(2):
        patches = torch.randn(64, 256, 14 * 14 * 3, device="cuda")
        ids = torch.randint(0, 49408, (64, 77), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            image, text, scale = ddp(patches, ids)
        loss = contrastive(image, text, scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            ddp.module.scale.clamp_(0, math.log(100))
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"{step} {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
