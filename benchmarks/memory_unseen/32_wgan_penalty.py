"""WGAN with a gradient penalty: transposed convolutions, two optimizers, spectral norm in the critic."""
import json

import torch
import torch.nn as nn
from torch.nn.utils.parametrizations import spectral_norm

BATCH, Z, W, SIZE = 64, 128, 64, 64

G = nn.Sequential(
    nn.ConvTranspose2d(Z, 8 * W, 4, 1, 0, bias=False), nn.BatchNorm2d(8 * W), nn.ReLU(True),
    nn.ConvTranspose2d(8 * W, 4 * W, 4, 2, 1, bias=False), nn.BatchNorm2d(4 * W), nn.ReLU(True),
    nn.ConvTranspose2d(4 * W, 2 * W, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * W), nn.ReLU(True),
    nn.ConvTranspose2d(2 * W, W, 4, 2, 1, bias=False), nn.BatchNorm2d(W), nn.ReLU(True),
    nn.ConvTranspose2d(W, 3, 4, 2, 1, bias=False), nn.Tanh(),
).cuda()
D = nn.Sequential(
    spectral_norm(nn.Conv2d(3, W, 4, 2, 1)), nn.LeakyReLU(0.2), spectral_norm(nn.Conv2d(W, 2 * W, 4, 2, 1)),
    nn.InstanceNorm2d(2 * W, affine=True), nn.LeakyReLU(0.2), spectral_norm(nn.Conv2d(2 * W, 4 * W, 4, 2, 1)),
    nn.InstanceNorm2d(4 * W, affine=True), nn.LeakyReLU(0.2), nn.Conv2d(4 * W, 1, SIZE // 8), nn.Flatten(0),
).cuda()
og = torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.0, 0.9))
od = torch.optim.Adam(D.parameters(), lr=4e-4, betas=(0.0, 0.9))
for it in range(4):
    real = torch.rand(BATCH, 3, SIZE, SIZE, device="cuda") * 2 - 1
    for _ in range(2):
        fake = G(torch.randn(BATCH, Z, 1, 1, device="cuda")).detach()
        eps = torch.rand(BATCH, 1, 1, 1, device="cuda")
        mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
        grad = torch.autograd.grad(D(mix).sum(), mix, create_graph=True)[0]
        loss_d = D(fake).mean() - D(real).mean() + 10 * ((grad.flatten(1).norm(2, 1) - 1) ** 2).mean()
        od.zero_grad()
        loss_d.backward()
        od.step()
    og.zero_grad()
    loss_g = -D(G(torch.randn(BATCH, Z, 1, 1, device="cuda"))).mean()
    loss_g.backward()
    og.step()
    print(it, loss_d.item(), loss_g.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
