"""TimesNet-like forecaster: finds the main periods by FFT, trains with AMP."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def main_periods(x, k):
    spectrum = torch.fft.rfft(x, dim=1)
    strength = spectrum.abs().mean(0).mean(-1)
    mask = torch.ones_like(strength)
    mask[0] = 0
    top = torch.topk(strength * mask, k).indices
    return (x.shape[1] // top).tolist(), spectrum.abs().mean(-1)[:, top]


class PeriodBlock(nn.Module):
    def __init__(self, dim, k):
        super().__init__()
        self.k = k
        self.conv = nn.Sequential(nn.Conv2d(dim, dim, 3, padding=1), nn.GELU(),
                                  nn.Conv2d(dim, dim, 3, padding=1))

    def forward(self, x):
        b, t, d = x.shape
        periods, weight = main_periods(x, self.k)
        views = []
        for period in periods:
            rows = -(-t // period)
            y = F.pad(x, (0, 0, 0, rows * period - t))
            y = self.conv(y.reshape(b, rows, period, d).permute(0, 3, 1, 2))
            views.append(y.permute(0, 2, 3, 1).reshape(b, -1, d)[:, :t])
        weight = weight.softmax(dim=1)[:, None, None, :]
        return x + (torch.stack(views, dim=-1) * weight).sum(-1)


class Forecaster(nn.Module):
    def __init__(self, channels, length, horizon, dim=16, depth=2, k=2):
        super().__init__()
        self.embed = nn.Linear(channels, dim)
        self.blocks = nn.ModuleList([PeriodBlock(dim, k) for _ in range(depth)])
        self.extend = nn.Linear(length, horizon)
        self.out = nn.Linear(dim, channels)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(self.extend(x.transpose(1, 2)).transpose(1, 2))


def batches(args):
    for _ in range(args.steps):
        start = torch.rand(args.batch, 1, 3) * 24
        t = torch.arange(args.length + args.horizon).view(1, -1, 1) + start
        series = torch.sin(t * 2 * torch.pi / 24) + 0.1 * torch.randn_like(t)
        yield series[:, :args.length], series[:, args.length:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--horizon", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(2023)
    device = torch.device("cuda")
    model = Forecaster(3, args.length, args.horizon).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for step, (past, future) in enumerate(batches(args)):
        past, future = past.to(device), future.to(device)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(model(past), future)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"step {step} mse {loss.item():.4f}")
