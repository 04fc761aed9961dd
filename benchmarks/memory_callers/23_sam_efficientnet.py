"""An EfficientNet of one's own (inverted bottlenecks, squeeze and excite, batch norm) under sharpness-aware minimisation."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH, SIZE, CLASSES, STEPS = 128, 260, 1000, 3
# expansion, channels, layers, stride, kernel
STAGES = [(1, 16, 2, 1, 3), (6, 24, 3, 2, 3), (6, 48, 3, 2, 5), (6, 88, 4, 2, 3), (6, 120, 4, 1, 5), (6, 208, 5, 2, 5), (6, 352, 2, 1, 3)]


class SqueezeExcite(nn.Module):
    def __init__(self, channels, squeezed):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.expand(F.silu(self.reduce(F.adaptive_avg_pool2d(x, 1)))))


class MBConv(nn.Module):
    def __init__(self, inside, outside, expansion, stride, kernel, drop):
        super().__init__()
        mid, parts = inside * expansion, []
        if expansion != 1:
            parts += [nn.Conv2d(inside, mid, 1, bias=False), nn.BatchNorm2d(mid, eps=1e-3), nn.SiLU(inplace=True)]
        parts += [nn.Conv2d(mid, mid, kernel, stride, kernel // 2, groups=mid, bias=False), nn.BatchNorm2d(mid, eps=1e-3),
                  nn.SiLU(inplace=True), SqueezeExcite(mid, max(1, inside // 4)), nn.Conv2d(mid, outside, 1, bias=False),
                  nn.BatchNorm2d(outside, eps=1e-3)]
        self.body, self.skip, self.drop = nn.Sequential(*parts), stride == 1 and inside == outside, drop

    def forward(self, x):
        y = self.body(x)
        if not self.skip:
            return y
        if self.training and self.drop:
            keep = torch.rand(x.shape[0], 1, 1, 1, device=x.device) >= self.drop
            y = y / (1 - self.drop) * keep
        return x + y


def build():
    layers, inside = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU(inplace=True)], 32
    total, at = sum(s[2] for s in STAGES), 0
    for expansion, channels, count, stride, kernel in STAGES:
        for i in range(count):
            layers.append(MBConv(inside, channels, expansion, stride if i == 0 else 1, kernel, 0.2 * at / total))
            inside, at = channels, at + 1
    layers += [nn.Conv2d(inside, 1408, 1, bias=False), nn.BatchNorm2d(1408), nn.SiLU(inplace=True), nn.AdaptiveAvgPool2d(1),
               nn.Flatten(), nn.Dropout(0.3), nn.Linear(1408, CLASSES)]
    return nn.Sequential(*layers)


class SAM:
    def __init__(self, params, base, rho=0.05):
        self.params, self.base, self.rho, self.old = [p for p in params if p.requires_grad], base, rho, {}

    @torch.no_grad()
    def climb(self):
        norm = torch.norm(torch.stack([p.grad.norm(2) for p in self.params]), 2)
        scale = self.rho / (norm + 1e-12)
        for p in self.params:
            self.old[p] = p.data.clone()
            p.add_(p.grad * scale)
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p in self.params:
            p.data = self.old[p]
        self.base.step()
        self.base.zero_grad()


def running(model, on):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1 if on else 0.0


torch.manual_seed(9)
torch.backends.cudnn.benchmark = False
model = build().to("cuda", memory_format=torch.channels_last)
base = torch.optim.RMSprop(model.parameters(), lr=0.016, alpha=0.9, eps=1e-3, momentum=0.9, weight_decay=1e-5)
sam = SAM(model.parameters(), base)
for step in range(STEPS):
    x = torch.randn(BATCH, 3, SIZE, SIZE, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, CLASSES, (BATCH,), device="cuda")
    running(model, True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    loss.backward()
    sam.climb()
    running(model, False)
    with torch.autocast("cuda", torch.bfloat16):
        F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
    sam.descend()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
