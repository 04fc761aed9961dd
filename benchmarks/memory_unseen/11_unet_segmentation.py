"""A U-Net for segmentation with dice and cross-entropy, fp16 AMP, validation after every epoch."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTH, SIZE, BATCH, CLASSES = 48, 256, 12, 4


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
                         nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        w = [WIDTH * 2**k for k in range(5)]
        self.down = nn.ModuleList([block(3, w[0])] + [block(w[k], w[k + 1]) for k in range(4)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(w[k + 1], w[k], 2, stride=2) for k in reversed(range(4))])
        self.join = nn.ModuleList([block(2 * w[k], w[k]) for k in reversed(range(4))])
        self.head = nn.Conv2d(w[0], CLASSES, 1)

    def forward(self, x):
        skips = []
        for k, layer in enumerate(self.down):
            x = layer(x if k == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def dice(logits, y):
    p = logits.float().softmax(1)
    hot = F.one_hot(y, CLASSES).permute(0, 3, 1, 2).float()
    inter = (p * hot).sum((2, 3))
    return 1 - (2 * inter / ((p + hot).sum((2, 3)) + 1e-6)).mean()


net = UNet().cuda()
opt = torch.optim.RMSprop(net.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True)
scaler = torch.amp.GradScaler("cuda")
for epoch in range(2):
    net.train()
    for _ in range(2):
        x = torch.randn(BATCH, 3, SIZE, SIZE).cuda()
        y = torch.randint(0, CLASSES, (BATCH, SIZE, SIZE)).cuda()
        with torch.autocast("cuda", torch.float16):
            logits = net(x)
            loss = F.cross_entropy(logits, y) + dice(logits, y)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
    net.eval()
    with torch.inference_mode(), torch.autocast("cuda", torch.float16):
        x = torch.randn(2 * BATCH, 3, SIZE, SIZE, device="cuda")
        print("epoch", epoch, net(x).argmax(1).float().mean().item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
