"""Next-item model over a stream of click sessions (log shards read in order)."""
import itertools
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

N_ITEMS = 100
MAX_LEN = 10
BATCH = 32


def read_shard(number, sessions=32):
    rng = random.Random(number)
    for _ in range(sessions):
        start, stride = rng.randint(1, N_ITEMS - 1), rng.randint(1, 3)
        length = rng.randint(3, MAX_LEN + 1)
        yield [(start + stride * i) % (N_ITEMS - 1) + 1 for i in range(length)]


class ClickStream(IterableDataset):
    def __init__(self, shards):
        self.shards = list(shards)

    def __iter__(self):
        for shard in self.shards:
            for session in read_shard(shard):
                history, target = session[:-1], session[-1]
                padded = [0] * (MAX_LEN - len(history)) + history
                yield torch.tensor(padded), target


class SessionGRU(nn.Module):
    def __init__(self, n_items, dim=32):
        super().__init__()
        self.items = nn.Embedding(n_items, dim, padding_idx=0)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.score = nn.Linear(dim, n_items)

    def forward(self, history):
        _, last = self.gru(self.items(history))
        return self.score(last[-1])


def train(epochs=1):
    torch.manual_seed(10)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(ClickStream(range(4)), batch_size=BATCH, num_workers=2,
                        pin_memory=torch.cuda.is_available())
    model = SessionGRU(N_ITEMS).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    counter = itertools.count()
    for epoch in range(epochs):
        model.train()
        seen = 0
        for history, target in loader:
            history, target = history.to(device), target.to(device)
            loss = F.cross_entropy(model(history), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(target)
            print(f"step {next(counter)} loss {loss.item():.4f}")
        print(f"epoch {epoch}: {seen} sessions")


if __name__ == "__main__":
    train()
