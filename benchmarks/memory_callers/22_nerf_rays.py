"""NeRF with large ray batches: a coarse and a fine net, inverse-transform sampling, then a picture in chunks."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTH, DEPTH, RAYS, COARSE, FINE, STEPS = 256, 8, 10240, 64, 128, 4
CHUNK, SIDE = 16384, 200


def encode(x, bands):
    out = [x]
    for k in range(bands):
        out += [torch.sin(2.0**k * x), torch.cos(2.0**k * x)]
    return torch.cat(out, -1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        place, view = 3 + 3 * 2 * 10, 3 + 3 * 2 * 4
        self.layers = nn.ModuleList([nn.Linear(place, WIDTH)] + [nn.Linear(WIDTH + (place if i == 4 else 0), WIDTH) for i in range(1, DEPTH)])
        self.density, self.feature = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)
        self.view, self.colour = nn.Linear(WIDTH + view, WIDTH // 2), nn.Linear(WIDTH // 2, 3)

    def forward(self, points, directions):
        place = encode(points, 10)
        h = place
        for i, layer in enumerate(self.layers):
            if i == 4:
                h = torch.cat([place, h], -1)
            h = F.relu(layer(h))
        density = self.density(h)
        h = torch.cat([self.feature(h), encode(directions, 4)], -1)
        return torch.sigmoid(self.colour(F.relu(self.view(h)))), density[..., 0]


def composite(colour, density, depth):
    gaps = torch.cat([depth[:, 1:] - depth[:, :-1], torch.full_like(depth[:, :1], 1e10)], -1)
    alpha = 1 - torch.exp(-F.relu(density + torch.randn_like(density)) * gaps)
    through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
    weights = alpha * through
    return (weights[..., None] * colour).sum(1), weights


def resample(depth, weights, count):
    middle = 0.5 * (depth[:, 1:] + depth[:, :-1])
    share = weights[:, 1:-1] + 1e-5
    cdf = torch.cumsum(share / share.sum(-1, keepdim=True), -1)
    cdf = torch.cat([torch.zeros_like(cdf[:, :1]), cdf], -1)
    u = torch.rand(depth.shape[0], count, device=depth.device)
    index = torch.searchsorted(cdf, u, right=True)
    below, above = (index - 1).clamp(min=0), index.clamp(max=cdf.shape[-1] - 1)
    low, high = cdf.gather(1, below), cdf.gather(1, above)
    left, right = middle.gather(1, below), middle.gather(1, above)
    span = torch.where(high - low < 1e-5, torch.ones_like(high), high - low)
    return left + (u - low) / span * (right - left)


def render(coarse, fine, origins, directions):
    n = origins.shape[0]
    depth = torch.linspace(2.0, 6.0, COARSE, device=origins.device).expand(n, COARSE)
    depth = depth + torch.rand_like(depth) * 4.0 / COARSE

    def ask(field, depth):
        points = origins[:, None] + directions[:, None] * depth[..., None]
        return composite(*field(points, F.normalize(directions, dim=-1)[:, None].expand_as(points)), depth)

    first, weights = ask(coarse, depth)
    more = resample(depth, weights.detach(), FINE)
    depth, _ = torch.sort(torch.cat([depth, more], -1), -1)
    return first, ask(fine, depth)[0]


torch.manual_seed(2)
coarse, fine = Field().to("cuda"), Field().to("cuda")
optimizer = torch.optim.Adam([*coarse.parameters(), *fine.parameters()], lr=5e-4, betas=(0.9, 0.999))
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
for step in range(STEPS):
    origins, directions = torch.randn(RAYS, 3, device="cuda"), torch.randn(RAYS, 3, device="cuda")
    target = torch.rand(RAYS, 3, device="cuda")
    first, second = render(coarse, fine, origins, directions)
    loss = F.mse_loss(first, target) + F.mse_loss(second, target)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    schedule.step()
    print(step, loss.item())
with torch.no_grad():
    origins, directions = torch.zeros(SIDE * SIDE, 3, device="cuda"), torch.randn(SIDE * SIDE, 3, device="cuda")
    picture = torch.cat([render(coarse, fine, o, d)[1] for o, d in zip(origins.split(CHUNK), directions.split(CHUNK))])
print(picture.view(SIDE, SIDE, 3).mean().item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
