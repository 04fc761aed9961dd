"""VQ-VAE on pictures: distances to every code at once, one-hot counts, a codebook kept by moving averages."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTH, CODE, CODES, BLOCKS = 128, 256, 4096, 3
BATCH, SIZE, STEPS = 32, 256, 4


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(nn.GroupNorm(16, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                                  nn.GroupNorm(16, channels), nn.ReLU(inplace=True), nn.Conv2d(channels, channels, 1, bias=False))

    def forward(self, x):
        return x + self.body(x)


class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        codes = torch.randn(CODES, CODE)
        self.register_buffer("codes", codes)
        self.register_buffer("sums", codes.clone())
        self.register_buffer("counts", torch.ones(CODES))

    def forward(self, z):
        rows = z.permute(0, 2, 3, 1).contiguous()
        flat = rows.view(-1, CODE)
        distance = flat.pow(2).sum(1, keepdim=True) + self.codes.pow(2).sum(1) - 2 * flat @ self.codes.t()
        index = distance.argmin(1)
        which = F.one_hot(index, CODES).type(flat.dtype)
        quantized = (which @ self.codes).view_as(rows)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.99).add_(which.sum(0), alpha=0.01)
                self.sums.mul_(0.99).add_(which.t() @ flat, alpha=0.01)
                total = self.counts.sum()
                smooth = (self.counts + 1e-5) / (total + CODES * 1e-5) * total
                self.codes.copy_(self.sums / smooth[:, None])
        commit = F.mse_loss(rows, quantized.detach())
        quantized = rows + (quantized - rows).detach()
        share = which.mean(0)
        perplexity = torch.exp(-(share * (share + 1e-10).log()).sum())
        return quantized.permute(0, 3, 1, 2).contiguous(), commit, perplexity


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 2, 1), nn.ReLU(), nn.Conv2d(WIDTH, CODE, 4, 2, 1),
                                    *[Residual(CODE) for _ in range(BLOCKS)], nn.Conv2d(CODE, CODE, 1))
        self.quantize = Quantizer()
        self.decode = nn.Sequential(nn.Conv2d(CODE, CODE, 3, padding=1), *[Residual(CODE) for _ in range(BLOCKS)],
                                    nn.ConvTranspose2d(CODE, WIDTH, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1))

    def forward(self, x):
        z, commit, perplexity = self.quantize(self.encode(x))
        return self.decode(z), commit, perplexity


torch.manual_seed(0)
model = VQVAE().to("cuda")
opt = torch.optim.Adam(model.parameters(), lr=2e-4, amsgrad=True)
history = []
for step in range(STEPS):
    x = torch.rand(BATCH, 3, SIZE, SIZE, device="cuda") - 0.5
    opt.zero_grad()
    again, commit, perplexity = model(x)
    error = F.mse_loss(again, x) / 0.06
    loss = error + 0.25 * commit
    loss.backward()
    opt.step()
    history.append((error.item(), perplexity.item()))
model.eval()
with torch.no_grad():
    again, _, perplexity = model(torch.rand(2 * BATCH, 3, SIZE, SIZE, device="cuda") - 0.5)
print(history, again.std().item(), perplexity.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
