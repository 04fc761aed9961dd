"""A Fourier neural operator for flow on a grid: rfft2, complex weights of the low modes, irfft2; a loss in frequencies."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTH, MODES, LAYERS, BATCH, GRID, STEPS, UNROLL = 96, 48, 4, 16, 256, 3, 2


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        scale = 1 / WIDTH**2
        self.low = nn.Parameter(scale * torch.rand(WIDTH, WIDTH, MODES, MODES, dtype=torch.cfloat))
        self.high = nn.Parameter(scale * torch.rand(WIDTH, WIDTH, MODES, MODES, dtype=torch.cfloat))

    def forward(self, x):
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros(x.shape[0], WIDTH, x.shape[-2], x.shape[-1] // 2 + 1, dtype=torch.cfloat, device=x.device)
        out[:, :, :MODES, :MODES] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :MODES, :MODES], self.low)
        out[:, :, -MODES:, :MODES] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -MODES:, :MODES], self.high)
        return torch.fft.irfft2(out, s=x.shape[-2:])


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Conv2d(3, WIDTH, 1)
        self.spectral = nn.ModuleList(Spectral() for _ in range(LAYERS))
        self.local = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.InstanceNorm2d(WIDTH) for _ in range(LAYERS))
        self.project = nn.Sequential(nn.Conv2d(WIDTH, 128, 1), nn.GELU(), nn.Conv2d(128, 1, 1))

    def forward(self, field):
        line = torch.linspace(0, 1, field.shape[-1], device=field.device)
        y, x = torch.meshgrid(line, line, indexing="ij")
        h = self.lift(torch.cat([field, torch.stack([x, y]).expand(field.shape[0], -1, -1, -1)], 1))
        for i, (spectral, local, norm) in enumerate(zip(self.spectral, self.local, self.norms)):
            h = norm(spectral(norm(h))) + local(h)
            if i + 1 < LAYERS:
                h = F.gelu(h)
        return self.project(h)


def sobolev(guess, truth):
    k = torch.fft.fftfreq(guess.shape[-1], d=1 / guess.shape[-1], device=guess.device)
    weight = 1 + k[:, None] ** 2 + k[None, :] ** 2
    difference, size = torch.fft.fft2(guess - truth), torch.fft.fft2(truth)
    return ((weight * difference.abs() ** 2).sum((-2, -1)) / (weight * size.abs() ** 2).sum((-2, -1))).sqrt().mean()


torch.manual_seed(1)
model = Operator().to("cuda")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.5)
for step in range(STEPS):
    field = torch.randn(BATCH, 1, GRID, GRID, device="cuda")
    loss = 0
    for _ in range(UNROLL):
        truth = torch.roll(field.detach(), 1, -1) * 0.9
        field = model(field)
        loss = loss + sobolev(field, truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    print(step, loss.item())
with torch.no_grad():
    fine = model(torch.randn(BATCH // 2, 1, 2 * GRID, 2 * GRID, device="cuda"))
print(fine.std().item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
