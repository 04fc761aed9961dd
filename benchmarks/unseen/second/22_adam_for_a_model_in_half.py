import argparse

import torch
import torch.nn.functional as F
from torch import nn


class TextCondNet(nn.Module):
    def __init__(self, width=32, vocab=40):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.inp = nn.Linear(12, width)
        self.mid = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.out = nn.Linear(width, 12)

    def forward(self, x, tokens):
        h = self.inp(x) + self.token(tokens).mean(1)
        return self.out(h + self.mid(h))


def run(args):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    model = TextCondNet().to(device)
    if args.use_fp16:
        model.half()
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    for step in range(args.steps):
        x = torch.randn(16, 12, device=device)
        tokens = torch.randint(0, 40, (16, 6), device=device)
        noise = torch.randn_like(x)
        pred = model((x + noise).to(dtype), tokens)
        loss = F.mse_loss(pred.float(), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--use_fp16", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    run(parser.parse_args())
