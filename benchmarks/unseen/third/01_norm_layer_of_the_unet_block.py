"""Small U-Net for cell segmentation on synthetic blobs."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Blobs(Dataset):
    def __init__(self, n, size):
        g = torch.Generator().manual_seed(3)
        self.centres = torch.randint(8, size - 8, (n, 2), generator=g)
        self.size = size

    def __len__(self):
        return len(self.centres)

    def __getitem__(self, i):
        yy, xx = torch.meshgrid(torch.arange(self.size), torch.arange(self.size), indexing="ij")
        cy, cx = self.centres[i]
        mask = ((yy - cy) ** 2 + (xx - cx) ** 2 < 36).float()[None]
        return mask.repeat(3, 1, 1) * 0.7 + 0.2 * torch.rand(3, self.size, self.size), mask


class DoubleConv(nn.Module):
    def __init__(self, in_channels, features):
        super().__init__()
        self.features = features
        self.conv1 = nn.Conv2d(in_channels, features, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(features, features, 3, padding=1)

    def forward(self, x):
        x = self.conv1(x)
        x = nn.BatchNorm2d(self.features)(x)
        x = F.relu(x, inplace=True)
        return F.relu(self.conv2(x))


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.enc = DoubleConv(3, width)
        self.mid = DoubleConv(width, width * 2)
        self.up = nn.ConvTranspose2d(width * 2, width, 2, stride=2)
        self.dec = DoubleConv(width * 2, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        skip = self.enc(x)
        x = self.up(self.mid(F.max_pool2d(skip, 2)))
        return self.head(self.dec(torch.cat([skip, x], dim=1)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(Blobs(32, 32), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = UNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for images, masks in loader:
            images, masks = images.to(device), masks.to(device)
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(images), masks)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
