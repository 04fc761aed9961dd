import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Spheres, boxes and discs as point clouds."""

    def __init__(self, n, points):
        self.n, self.points = n, points

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        label = i % 3
        cloud = torch.randn(self.points, 3, generator=g)
        if label == 0:
            cloud = F.normalize(cloud, dim=1)
        elif label == 1:
            cloud = cloud / cloud.abs().amax(dim=1, keepdim=True)
        else:
            cloud = F.normalize(cloud, dim=1) * torch.tensor([1.0, 1.0, 0.05])
        return cloud.t(), label


class PointNetCls(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64), nn.ReLU()
        )
        self.fc1 = nn.Linear(64, 32)
        self.bn1 = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.3)
        self.fc2 = nn.Linear(32, classes)

    def forward(self, x):
        x = self.mlp(x).max(dim=2).values
        x = self.drop(F.relu(self.bn1(self.fc1(x))))
        return self.fc2(x)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    hits = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in loader)
    return hits / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--epoch", type=int, default=2)
    parser.add_argument("--num_point", type=int, default=128)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(Shapes(33, args.num_point), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(Shapes(12, args.num_point), batch_size=args.batch_size)
    model = PointNetCls(3).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    for epoch in range(args.epoch):
        model.train()
        for points, target in train_loader:
            points, target = points.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(points), target)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f} acc {evaluate(model, test_loader, device):.2f}")


if __name__ == "__main__":
    main()
