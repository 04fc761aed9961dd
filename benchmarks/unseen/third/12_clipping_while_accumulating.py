import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class SuperResolution(nn.Module):
    def __init__(self, scale=2, width=16):
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
        self.tail = nn.Sequential(nn.Conv2d(width, 3 * scale**2, 3, padding=1), nn.PixelShuffle(scale))

    def forward(self, x):
        h = self.head(x)
        return self.tail(h + self.body(h))


class Trainer:
    def __init__(self, model, args):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.args = args
        self.use_amp = self.device.type == "cuda"
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.use_amp)

    def train_one_epoch(self, loader):
        self.model.train()
        running = 0.0
        for i, (low, high) in enumerate(loader):
            low, high = low.to(self.device), high.to(self.device)
            with torch.autocast(self.device.type, dtype=torch.float16, enabled=self.use_amp):
                loss = F.l1_loss(self.model(low), high) / self.args.accum
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
            if (i + 1) % self.args.accum == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
            running += loss.item() * self.args.accum
        return running / len(loader)


def build_data():
    g = torch.Generator().manual_seed(21)
    high = F.interpolate(torch.rand(32, 3, 8, 8, generator=g), size=32, mode="bicubic", align_corners=False)
    return TensorDataset(F.avg_pool2d(high, 2), high)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.manual_seed(0)
    trainer = Trainer(SuperResolution(), args)
    loader = DataLoader(build_data(), batch_size=8, shuffle=True, drop_last=True)
    for epoch in range(args.epochs):
        print(f"epoch {epoch} L1 {trainer.train_one_epoch(loader):.4f}")
