import torch
import torch.nn.functional as F
from torch import nn


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, classes, width=8):
        super().__init__()
        self.down1 = block(3, width)
        self.down2 = block(width, 2 * width)
        self.middle = block(2 * width, 2 * width)
        self.up2 = block(4 * width, width)
        self.up1 = block(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def parallelize(self, first, second):
        self.first, self.second = first, second
        for part in (self.down1, self.down2, self.middle):
            part.to(first)
        for part in (self.up2, self.up1, self.head):
            part.to(second)
        return self

    def forward(self, x):
        d1 = self.down1(x.to(self.first))
        d2 = self.down2(F.max_pool2d(d1, 2))
        m = self.middle(F.max_pool2d(d2, 2)).to(self.second)
        d2 = d2.to(self.second)
        u2 = self.up2(torch.cat([F.interpolate(m, scale_factor=2), d2], dim=1))
        u1 = self.up1(torch.cat([F.interpolate(u2, scale_factor=2), d1], dim=1))
        return self.head(u1)


def dice_loss(logits, target, eps=1.0):
    p = logits.softmax(1)
    t = F.one_hot(target, p.size(1)).permute(0, 3, 1, 2).float()
    inter = (p * t).sum((2, 3))
    return 1 - ((2 * inter + eps) / ((p + t).sum((2, 3)) + eps)).mean()


def main():
    torch.manual_seed(0)
    model = UNet(classes=3).parallelize("cuda:0", "cuda:1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for it in range(5):
        image = torch.randn(2, 3, 32, 32)
        mask = (image.sum(1) > 0).long().to("cuda:1")
        logits = model(image)
        loss = F.cross_entropy(logits, mask) + dice_loss(logits, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(it, float(loss))


if __name__ == "__main__":
    main()
