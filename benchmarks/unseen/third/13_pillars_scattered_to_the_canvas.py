import torch
import torch.nn as nn
import torch.nn.functional as F

CFG = dict(grid=16, channels=32, points=8, pillars=40, classes=3, batch_size=2, iters=6, lr=2e-3)


class PillarEncoder(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.linear = nn.Linear(4, channels)

    def forward(self, points):
        return F.relu(self.linear(points)).max(dim=1).values


class PillarScatter(nn.Module):
    def __init__(self, channels, grid):
        super().__init__()
        self.channels, self.grid = channels, grid

    def forward(self, features, coords, batch_size):
        out = []
        for b in range(batch_size):
            canvas = torch.zeros(self.channels, self.grid * self.grid, device=features.device)
            mask = coords[:, 0] == b
            index = coords[mask, 1] * self.grid + coords[mask, 2]
            canvas[:, index] = features[mask].t()
            out.append(canvas.view(self.channels, self.grid, self.grid))
        return torch.stack(out)


class PointPillars(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.encoder = PillarEncoder(cfg["channels"])
        self.scatter = PillarScatter(cfg["channels"], cfg["grid"])
        self.backbone = nn.Sequential(nn.Conv2d(cfg["channels"], 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
        self.heatmap = nn.Conv2d(32, cfg["classes"], 1)

    def forward(self, points, coords, batch_size):
        bev = self.scatter(self.encoder(points), coords, batch_size)
        return self.heatmap(self.backbone(bev))


def fake_sweep(cfg):
    coords = []
    for b in range(cfg["batch_size"]):
        cells = torch.randperm(cfg["grid"] ** 2)[: cfg["pillars"]]
        coords.append(torch.stack([torch.full_like(cells, b), cells // cfg["grid"], cells % cfg["grid"]], dim=1))
    coords = torch.cat(coords)
    points = torch.randn(len(coords), cfg["points"], 4)
    target = torch.zeros(cfg["batch_size"], cfg["classes"], cfg["grid"], cfg["grid"])
    target[coords[::5, 0], coords[::5, 1] % cfg["classes"], coords[::5, 1], coords[::5, 2]] = 1.0
    return points, coords, target


def main():
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = PointPillars(CFG).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=CFG["lr"])
    scaler = torch.amp.GradScaler("cuda")
    for it in range(CFG["iters"]):
        points, coords, target = (x.to(device) for x in fake_sweep(CFG))
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(points, coords, CFG["batch_size"])
            loss = F.binary_cross_entropy_with_logits(logits, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"iter {it} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
