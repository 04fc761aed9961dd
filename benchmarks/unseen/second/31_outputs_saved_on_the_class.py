import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    activity = []

    def __init__(self, channels, growth):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x):
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        if self.training:
            Bottleneck.activity.append(out.abs().mean((0, 2, 3)))
        return torch.cat((x, out), 1)


class DenseNet(nn.Module):
    def __init__(self, growth=8, layers=3, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, 2 * growth, 3, padding=1)
        self.dense = nn.Sequential(*[Bottleneck((2 + i) * growth, growth) for i in range(layers)])
        self.fc = nn.Linear((2 + layers) * growth, classes)

    def forward(self, x):
        return self.fc(F.adaptive_avg_pool2d(self.dense(self.stem(x)), 1).flatten(1))


def train(net, device, epochs=3, batches=8):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    net.train()
    for epoch in range(epochs):
        for _ in range(batches):
            images = torch.randn(8, 3, 16, 16, device=device)
            labels = torch.randint(0, 10, (8,), device=device)
            loss = F.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = torch.stack(Bottleneck.activity).mean()
        print(f"epoch {epoch} loss {loss.item():.4f} activity {mean.item():.4f}")


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train(DenseNet().to(device), device)
