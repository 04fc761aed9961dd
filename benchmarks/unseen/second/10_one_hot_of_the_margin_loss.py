import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class ArcFace(nn.Module):
    def __init__(self, in_features, out_features, s=16.0, m=0.3):
        super().__init__()
        self.s, self.m = s, m
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.xavier_uniform_(self.weight)
        self.cos_m, self.sin_m = math.cos(m), math.sin(m)

    def forward(self, features, label):
        cosine = F.linear(F.normalize(features), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(1e-6, 1))
        phi = cosine * self.cos_m - sine * self.sin_m
        one_hot = torch.zeros(cosine.size(), device="cuda")
        one_hot.scatter_(1, label.view(-1, 1), 1)
        return self.s * (one_hot * phi + (1.0 - one_hot) * cosine)


class Face(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 64), nn.PReLU(), nn.Linear(64, 32))
        self.head = ArcFace(32, classes)

    def forward(self, images, label):
        return self.head(self.backbone(images), label)


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", type=int, default=1)
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    args = get_args()
    device = torch.device(f"cuda:{args.gpu}")
    model = Face(args.classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images, labels = torch.randn(40, 3, 16, 16), torch.arange(40) % args.classes
    for epoch in range(args.epochs):
        for i in range(0, 40, 10):
            x, y = images[i:i + 10].to(device), labels[i:i + 10].to(device)
            loss = F.cross_entropy(model(x, y), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())
