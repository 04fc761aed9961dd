"""A U-Net that takes noise out of pictures, trained by hand with autocast and a scaler; the batch is an argument."""

import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, before), nn.GroupNorm(32, after)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.short = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + self.short(x)


class UNet(nn.Module):
    def __init__(self, width=128, rises=(1, 2, 4, 8)):
        super().__init__()
        sizes = [width * rise for rise in rises]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Block(a, b) for a, b in zip([width, *sizes], sizes))
        self.middle = nn.ModuleList([Block(sizes[-1], sizes[-1]) for _ in range(2)])
        back = list(reversed(sizes))
        self.up = nn.ModuleList(Block(a + b, b) for a, b in zip([back[0], *back], back))
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x):
        kept, h = [], self.first(x)
        for block in self.down:
            h = block(h)
            kept.append(h)
            h = F.avg_pool2d(h, 2)
        for block in self.middle:
            h = block(h)
        for block in self.up:
            h = F.interpolate(h, scale_factor=2, mode="nearest")
            h = block(torch.cat([h, kept.pop()], 1))
        return self.last(h)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--size", type=int, default=512)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = UNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(3):
        clean = torch.randn(args.batch_size, 3, args.size, args.size).to(device)
        noise = torch.randn_like(clean)
        with torch.autocast("cuda", torch.float16):
            loss = F.mse_loss(model(clean + noise), noise)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(step, float(loss))
    peaks = ("max_memory_allocated", "max_memory_reserved")
    print(json.dumps({name: getattr(torch.cuda, name)() for name in peaks}))


if __name__ == "__main__":
    main()
