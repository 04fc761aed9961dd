import torch
import torch.nn as nn
import torch.nn.functional as F

CFG = {"size": 64, "stride": 8, "classes": 3, "batch": 4, "steps": 6, "lr": 1e-3, "seed": 11}


def make_anchors(size, stride, side=16.0):
    c = torch.arange(0, size, stride) + stride / 2
    cy, cx = torch.meshgrid(c, c, indexing="ij")
    centre = torch.stack([cx, cy], -1).reshape(-1, 2)
    return torch.cat([centre - side / 2, centre + side / 2], dim=1)


def iou(a, b):
    lt = torch.max(a[:, None, :2], b[None, :, :2])
    rb = torch.min(a[:, None, 2:], b[None, :, 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    area = lambda x: (x[:, 2:] - x[:, :2]).prod(-1)
    return inter / (area(a)[:, None] + area(b)[None] - inter)


class Matcher:
    def __init__(self, high=0.4):
        self.high = high

    def __call__(self, quality):
        if quality.shape[0] == 0:
            return -1 * torch.ones(quality.shape[1], dtype=torch.long)
        best, index = quality.max(dim=0)
        return torch.where(best >= self.high, index, torch.full_like(index, -1))


class Head(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.cls = nn.Conv2d(32, classes + 1, 1)

    def forward(self, x):
        return self.cls(self.body(x)).flatten(2).transpose(1, 2)


def sample_batch(cfg):
    images = torch.rand(cfg["batch"], 3, cfg["size"], cfg["size"])
    targets = []
    for i in range(cfg["batch"]):
        n = (i + 1) % cfg["batch"]
        corner = torch.rand(n, 2) * (cfg["size"] - 20)
        targets.append({"boxes": torch.cat([corner, corner + 16], 1), "labels": torch.randint(1, cfg["classes"] + 1, (n,))})
    return images, targets


def assign(anchors, targets, matcher):
    labels = []
    for t in targets:
        matched = matcher(iou(t["boxes"], anchors))
        padded = torch.cat([t["labels"], t["labels"].new_zeros(1)])
        labels.append(torch.where(matched < 0, torch.zeros_like(matched), padded[matched]))
    return torch.stack(labels)


def train(cfg):
    torch.manual_seed(cfg["seed"])
    device = torch.device("cuda")
    anchors = make_anchors(cfg["size"], cfg["stride"]).to(device)
    model, matcher = Head(cfg["classes"]).to(device), Matcher()
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=0.9)
    for step in range(cfg["steps"]):
        images, targets = sample_batch(cfg)
        images = images.to(device)
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
        logits = model(images)
        loss = F.cross_entropy(logits.flatten(0, 1), assign(anchors, targets, matcher).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: {loss.item():.4f}")


if __name__ == "__main__":
    train(CFG)
