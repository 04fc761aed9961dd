import argparse
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Thresholds:
    """Confidence that a class needs before its pseudo label counts."""

    def __init__(self, classes, momentum=0.9):
        self.thresholds = torch.full((classes,), 0.2)
        self.momentum = momentum

    def accept(self, probabilities):
        confidence, label = probabilities.max(dim=1)
        return label, (confidence - self.thresholds.gather(0, label)) > 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--classes", type=int, default=5)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, args.classes)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gate = Thresholds(args.classes)
    loader = DataLoader(TensorDataset(torch.randn(32, 6)), batch_size=8)
    for (rows,) in loader:
        rows = rows.to(device)
        with torch.no_grad():
            label, mask = gate.accept(net(rows).softmax(dim=1))
        loss = (F.cross_entropy(net(rows + 0.05 * torch.randn_like(rows)), label, reduction="none") * mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
