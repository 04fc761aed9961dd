import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn


class MatrixFactorization(nn.Module):
    def __init__(self, users, items, dim=16):
        super().__init__()
        self.users = nn.Embedding(users, dim)
        self.items = nn.Embedding(items, dim)
        self.bias = nn.Embedding(items, 1)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(-1) + self.bias(item).squeeze(-1)


def make_ratings(users, items, n=512):
    generator = torch.Generator().manual_seed(3)
    user = torch.randint(0, users, (n,), generator=generator)
    item = torch.randint(0, items, (n,), generator=generator)
    rating = ((user + item) % 5 + 1).float()
    return user, item, rating


def main():
    config = {"users": 60, "items": 40, "dim": 16, "lr": 0.05, "epochs": 5}
    accelerator = Accelerator()
    accelerator.print(f"device: {accelerator.device}")
    user, item, rating = make_ratings(config["users"], config["items"])
    model = MatrixFactorization(config["users"], config["items"], config["dim"])
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    model, optimizer, user, item, rating = accelerator.prepare(model, optimizer, user, item, rating)
    model.train()
    for epoch in range(config["epochs"]):
        loss = F.mse_loss(model(user, item), rating)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
