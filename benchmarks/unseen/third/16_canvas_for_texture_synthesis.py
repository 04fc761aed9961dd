import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class RandomFeatures(nn.Module):
    """Frozen random filters whose Gram matrices describe a texture."""

    def __init__(self, widths=(16, 32)):
        super().__init__()
        layers, previous = [], 3
        for w in widths:
            layers.append(nn.Conv2d(previous, w, 3, stride=2, padding=1))
            previous = w
        self.layers = nn.ModuleList(layers)
        for p in self.parameters():
            p.requires_grad_(False)

    def forward(self, x):
        maps = []
        for layer in self.layers:
            x = F.relu(layer(x))
            maps.append(x)
        return maps


def gram(feature):
    b, c, h, w = feature.shape
    f = feature.view(b, c, h * w)
    return f @ f.transpose(1, 2) / (c * h * w)


def texture(size):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    checks = ((yy // 4 + xx // 4) % 2).float()
    return torch.stack([checks, 1 - checks, checks * 0.5]).unsqueeze(0)


def total_variation(x):
    return (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()


def synthesise(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = RandomFeatures().to(device).eval()
    wanted = [gram(f) for f in net(texture(args.size).to(device))]

    canvas = torch.rand(1, 3, args.size, args.size, requires_grad=True).to(device)
    optimizer = torch.optim.Adam([canvas], lr=args.lr)
    for step in range(args.steps):
        optimizer.zero_grad()
        style = sum(F.mse_loss(gram(f), g) for f, g in zip(net(canvas), wanted))
        loss = args.style_weight * style + args.tv_weight * total_variation(canvas)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            canvas.clamp_(0, 1)
        print(f"step {step} loss {loss.item():.5f}")
    return canvas.detach().cpu()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--style-weight", type=float, default=1e3)
    parser.add_argument("--tv-weight", type=float, default=1e-3)
    torch.manual_seed(0)
    result = synthesise(parser.parse_args())
    print("mean colour", [round(v, 3) for v in result.mean(dim=(0, 2, 3)).tolist()])
