"""FNet over spectrogram frames, autocast with float16. Usage: 09_frames_mixed_by_fourier.py [--single]"""
import sys

import torch
from torch import nn

FRAMES, BINS, DIM, CLASSES = 300, 80, 256, 12
SINGLE = "--single" in sys.argv


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.ff = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.norm2 = nn.LayerNorm(DIM)

    def forward(self, x):
        h = self.inside(x)
        if SINGLE:
            h = h.float()
        mixed = torch.fft.fft(torch.fft.fft(h, dim=-1), dim=-2).real
        x = self.norm(x + mixed)
        return self.norm2(x + self.ff(x))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(BINS, DIM)
        self.blocks = nn.Sequential(Mixing(), Mixing())
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, frames):
        return self.head(self.blocks(self.inp(frames)).mean(1))


torch.manual_seed(1)
net = Tagger().cuda()
opt = torch.optim.AdamW(net.parameters(), lr=5e-4)
scaler = torch.amp.GradScaler("cuda")
lossf = nn.BCEWithLogitsLoss()
for step in range(4):
    frames = torch.randn(8, FRAMES, BINS).cuda()
    tags = (torch.rand(8, CLASSES) > 0.8).float().cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = lossf(net(frames), tags)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(step, loss.item())
