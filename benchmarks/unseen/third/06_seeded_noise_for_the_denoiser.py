import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class TrainConfig:
    image_size: int = 16
    batch_size: int = 8
    timesteps: int = 200
    steps: int = 8
    lr: float = 2e-4
    seed: int = 2024


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        freqs = torch.exp(-math.log(10000) * torch.arange(dim // 2) / (dim // 2))
        self.register_buffer("freqs", freqs)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        args = t.float()[:, None] * self.freqs[None]
        return self.mlp(torch.cat([args.sin(), args.cos()], dim=-1))


class Denoiser(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.time = TimeEmbedding(dim)
        self.inp = nn.Conv2d(1, dim, 3, padding=1)
        self.mid = nn.Conv2d(dim, dim, 3, padding=1)
        self.out = nn.Conv2d(dim, 1, 3, padding=1)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t)[:, :, None, None])
        return self.out(F.silu(self.mid(h)) + h)


class Diffusion:
    def __init__(self, timesteps, device):
        betas = torch.linspace(1e-4, 0.02, timesteps, device=device)
        self.alpha_bar = torch.cumprod(1 - betas, dim=0)

    def q_sample(self, x0, t, noise):
        a = self.alpha_bar[t][:, None, None, None]
        return a.sqrt() * x0 + (1 - a).sqrt() * noise


def stripes(cfg):
    phase = torch.rand(cfg.batch_size, 1, 1, 1) * math.pi
    wave = torch.sin(torch.linspace(0, 6, cfg.image_size) + phase)
    return wave.expand(-1, 1, cfg.image_size, -1).contiguous()


def train(cfg):
    torch.manual_seed(cfg.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(cfg.seed)
    model = Denoiser().to(device)
    diffusion = Diffusion(cfg.timesteps, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    for step in range(cfg.steps):
        x0 = stripes(cfg).to(device)
        noise = torch.randn(x0.shape, generator=generator, device=device)
        t = torch.randint(0, cfg.timesteps, (x0.shape[0],), device=device)
        loss = F.mse_loss(model(diffusion.q_sample(x0, t, noise), t), noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print(f"{step:03d} {loss.item():.4f}")


if __name__ == "__main__":
    train(TrainConfig())
