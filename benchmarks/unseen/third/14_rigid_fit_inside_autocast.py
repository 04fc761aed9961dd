"""Deep-closest-point style registration: soft matches, then a closed-form rigid fit."""
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def random_rotations(n):
    angle = (torch.rand(n) - 0.5) * math.pi / 2
    c, s, z, o = angle.cos(), angle.sin(), torch.zeros(n), torch.ones(n)
    return torch.stack([c, -s, z, s, c, z, z, z, o], dim=1).view(n, 3, 3)


def make_pairs(n, points):
    src = torch.rand(n, points, 3) - 0.5
    rot, shift = random_rotations(n), (torch.rand(n, 1, 3) - 0.5) * 0.4
    return src, src @ rot.transpose(1, 2) + shift, rot, shift


class SoftMatcher(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Sequential(nn.Conv1d(3, dim, 1), nn.ReLU(), nn.Conv1d(dim, dim, 1), nn.ReLU(), nn.Conv1d(dim, dim, 1))

    def features(self, x):
        f = self.embed(x.transpose(1, 2))
        return F.normalize(f - f.mean(dim=2, keepdim=True), dim=1)

    def forward(self, src, tgt):
        fs, ft = self.features(src), self.features(tgt)
        scores = fs.transpose(1, 2) @ ft / 0.05
        return scores.softmax(dim=-1) @ tgt


def rigid_fit(src, tgt):
    cs, ct = src.mean(1, keepdim=True), tgt.mean(1, keepdim=True)
    cov = (src - cs).transpose(1, 2) @ (tgt - ct)
    u, _, vh = torch.linalg.svd(cov)
    v, ut = vh.transpose(1, 2), u.transpose(1, 2)
    sign = torch.det(v @ ut).sign()
    flip = torch.diag_embed(torch.stack([torch.ones_like(sign), torch.ones_like(sign), sign], dim=1))
    rot = v @ flip @ ut
    return rot, ct - cs @ rot.transpose(1, 2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--points", type=int, default=64)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda")
    model = SoftMatcher().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(args.steps):
        src, tgt, rot_gt, shift_gt = (x.to(device) for x in make_pairs(args.batch, args.points))
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            matched = model(src, tgt)
            rot, shift = rigid_fit(src, matched)
        loss = F.mse_loss(rot.float(), rot_gt) + F.mse_loss(shift.float(), shift_gt)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
