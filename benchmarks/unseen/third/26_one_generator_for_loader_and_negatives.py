"""Matrix factorization with BPR loss and sampled negatives."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class BPR(nn.Module):
    def __init__(self, n_users, n_items, dim):
        super().__init__()
        self.user = nn.Embedding(n_users, dim)
        self.item = nn.Embedding(n_items, dim)
        nn.init.normal_(self.user.weight, std=0.05)
        nn.init.normal_(self.item.weight, std=0.05)

    def forward(self, users, items):
        return (self.user(users).unsqueeze(1) * self.item(items)).sum(-1)


class NegativeSampler:
    def __init__(self, n_items, per_positive, device, generator):
        self.n_items = n_items
        self.per_positive = per_positive
        self.device = device
        self.generator = generator

    def __call__(self, batch_size):
        return torch.randint(self.n_items, (batch_size, self.per_positive),
                             device=self.device, generator=self.generator)


def interactions(n_users, n_items, n):
    users = torch.randint(n_users, (n,))
    items = (users * 3 + torch.randint(5, (n,))) % n_items
    return TensorDataset(users, items)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--users", type=int, default=80)
    p.add_argument("--items", type=int, default=120)
    p.add_argument("--dim", type=int, default=16)
    p.add_argument("--negatives", type=int, default=4)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--seed", type=int, default=5)
    return p.parse_args()


def main(args):
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator()
    generator.manual_seed(args.seed)
    loader = DataLoader(interactions(args.users, args.items, 256), batch_size=args.batch,
                        shuffle=True, generator=generator)
    model = BPR(args.users, args.items, args.dim).to(device)
    sample = NegativeSampler(args.items, args.negatives, device, generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(args.epochs):
        total = 0.0
        for users, items in loader:
            users, items = users.to(device), items.to(device)
            positive = model(users, items.unsqueeze(1))
            negative = model(users, sample(len(users)))
            loss = -F.logsigmoid(positive - negative).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} bpr {total / len(loader):.4f}")


if __name__ == "__main__":
    main(parse())
