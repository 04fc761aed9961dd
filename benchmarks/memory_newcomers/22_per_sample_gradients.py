"""DP-SGD by torch.func: gradients of each row by vmap(grad), clipped and noised; then a jvp of the loss."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad_and_value, jvp, vmap

ROWS, SIDE, WIDTH, CLASSES, STEPS, CHUNK = 256, 64, 64, 100, 3, 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.c2 = nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1)
        self.c3 = nn.Conv2d(2 * WIDTH, 4 * WIDTH, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(8, 4 * WIDTH)
        self.l1 = nn.Linear(4 * WIDTH * 16, 4 * WIDTH)
        self.l2 = nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x):
        x = F.relu(self.c2(F.relu(self.c1(x))))
        x = F.relu(self.norm(self.c3(x)))
        x = F.adaptive_avg_pool2d(x, 4).flatten(1)
        return self.l2(F.relu(self.l1(x)))


model = Net().to("cuda")
params = {name: p.detach() for name, p in model.named_parameters()}


def loss_of(params, x, y):
    return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])


per_row = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0), chunk_size=CHUNK)
for step in range(STEPS):
    x = torch.randn(ROWS, 3, SIDE, SIDE, device="cuda")
    y = torch.randint(0, CLASSES, (ROWS,), device="cuda")
    grads, losses = per_row(params, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for name, g in grads.items():
            clipped = torch.einsum("b,b...->...", factor, g)
            params[name].sub_(0.1 * (clipped + 0.5 * torch.randn_like(clipped)) / ROWS)
    print(step, losses.mean().item())
    del grads

tangents = {name: torch.randn_like(p) for name, p in params.items()}
value, slope = jvp(lambda p: F.cross_entropy(functional_call(model, p, (x,)), y), (params,), (tangents,))
print(value.item(), slope.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
