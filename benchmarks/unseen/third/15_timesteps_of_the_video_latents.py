import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def sinusoid(t, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, device=t.device, dtype=torch.float32) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([args.cos(), args.sin()], dim=-1)


class DiTBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.mod = nn.Linear(dim, 2 * dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, c):
        shift, scale = self.mod(c)[:, None].chunk(2, dim=-1)
        return x + self.mlp(self.norm(x) * (1 + scale) + shift)


class VideoDiT(nn.Module):
    def __init__(self, channels=8, dim=32, depth=2):
        super().__init__()
        self.dim = dim
        self.inp = nn.Linear(channels, dim)
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList([DiTBlock(dim) for _ in range(depth)])
        self.out = nn.Linear(dim, channels)

    def forward(self, x, t):
        c = self.time(sinusoid(t, self.dim))
        x = self.inp(x)
        for block in self.blocks:
            x = block(x, c)
        return self.out(x)


class FlowMatchTrainer:
    def __init__(self, args):
        self.device = torch.device("cuda")
        self.weight_dtype = torch.bfloat16
        self.model = VideoDiT().to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.num_train_timesteps = 1000

    def step(self, latents):
        latents = latents.to(self.device)
        noise = torch.randn_like(latents)
        timesteps = torch.randint(1, self.num_train_timesteps, (latents.shape[0],), device=self.device)
        sigma = (timesteps / self.num_train_timesteps)[:, None, None]
        noisy = (1 - sigma) * latents + sigma * noise
        noisy = noisy.to(self.weight_dtype)
        timesteps = timesteps.to(self.weight_dtype)
        with torch.autocast("cuda", dtype=self.weight_dtype):
            pred = self.model(noisy, timesteps)
        loss = F.mse_loss(pred.float(), noise - latents)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max_steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    trainer = FlowMatchTrainer(args)
    for i in range(args.max_steps):
        latents = torch.randn(args.batch, 1, 8) + 0.3 * torch.randn(args.batch, 24, 8)
        print(f"step {i} loss {trainer.step(latents):.4f}")
