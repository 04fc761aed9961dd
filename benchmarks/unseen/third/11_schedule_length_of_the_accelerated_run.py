import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


class TinyUNet(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.down = nn.Conv2d(3, dim, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(dim, dim, 3, padding=1)
        self.up = nn.ConvTranspose2d(dim, 3, 4, stride=2, padding=1)
        self.t = nn.Embedding(100, dim)

    def forward(self, x, t):
        h = F.silu(self.down(x) + self.t(t)[:, :, None, None])
        return self.up(F.silu(self.mid(h)))


def linear_with_warmup(optimizer, warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return max(0.0, (total - step) / max(1, total - warmup))

    return LambdaLR(optimizer, factor)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--warmup_ratio", type=float, default=0.1)
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator()
    set_seed(0, device_specific=True)

    data = TensorDataset(torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(9)))
    loader = DataLoader(data, batch_size=args.train_batch_size, shuffle=True)
    model = TinyUNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    max_train_steps = args.num_train_epochs * len(loader)
    total = max_train_steps
    lr_scheduler = linear_with_warmup(optimizer, warmup=int(args.warmup_ratio * total), total=total)
    lr_scheduler = accelerator.prepare(lr_scheduler)

    alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0).to(accelerator.device)
    for epoch in range(args.num_train_epochs):
        model.train()
        for (images,) in loader:
            noise = torch.randn_like(images)
            t = torch.randint(0, 100, (images.shape[0],), device=images.device)
            a = alpha_bar[t][:, None, None, None]
            pred = model(a.sqrt() * images + (1 - a).sqrt() * noise, t)
            loss = F.mse_loss(pred, noise)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
