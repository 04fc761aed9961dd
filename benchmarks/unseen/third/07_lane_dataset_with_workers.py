import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class LaneDataset(Dataset):
    """Images with one lane; the label is the lane's column at each row anchor."""

    def __init__(self, length=24, size=32, rows=8):
        rng = np.random.default_rng(5)
        self.offsets = rng.uniform(8, 20, size=length).astype(np.float32)
        self.slopes = rng.uniform(-0.3, 0.3, size=length).astype(np.float32)
        self.size, self.rows = size, rows

    def __len__(self):
        return len(self.offsets)

    def interpolate(self, i):
        ys = torch.linspace(0, self.size - 1, self.rows)
        return float(self.offsets[i]) + float(self.slopes[i]) * ys

    def __getitem__(self, i):
        ys = torch.arange(self.size).float()[:, None]
        xs = torch.arange(self.size).float()[None]
        centre = float(self.offsets[i]) + float(self.slopes[i]) * ys
        image = torch.exp(-((xs - centre) ** 2) / 4).unsqueeze(0)
        points = self.interpolate(i) / self.size
        return image.cuda(), points.cuda()


class LaneNet(nn.Module):
    def __init__(self, rows=8):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(16 * 8 * 8, rows)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def run_epoch(net, loader, optimizer):
    net.train()
    losses = []
    for images, points in loader:
        loss = F.smooth_l1_loss(net(images), points)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def main():
    torch.manual_seed(0)
    net = LaneNet().cuda()
    loader = DataLoader(LaneDataset(), batch_size=8, shuffle=True, num_workers=2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(2):
        print(f"epoch {epoch}: {run_epoch(net, loader, optimizer):.4f}")


if __name__ == "__main__":
    main()
