"""House prices, k-fold neural baseline."""
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

SEED = 2024
FOLDS = 2
EPOCHS = 1
BATCH_SIZE = 32


def seed_all(seed=SEED):
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def make_table(rows=258, n_num=10, n_cat=3, levels=6):
    num = np.random.randn(rows, n_num).astype(np.float32)
    cat = np.random.randint(0, levels, (rows, n_cat))
    price = num[:, 0] * 2 + cat[:, 0] * 0.5 + 0.1 * np.random.randn(rows)
    return num, cat, price.astype(np.float32)


def folds(rows):
    order = np.random.permutation(rows)
    parts = np.array_split(order, FOLDS)
    for i in range(FOLDS):
        rest = np.concatenate([p for j, p in enumerate(parts) if j != i])
        yield rest, parts[i]


class PriceNet(nn.Module):
    def __init__(self, n_num, n_cat, levels, emb=4):
        super().__init__()
        self.embs = nn.ModuleList([nn.Embedding(levels, emb) for _ in range(n_cat)])
        width = n_num + n_cat * emb
        self.body = nn.Sequential(
            nn.Linear(width, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, num, cat):
        parts = [emb(cat[:, i]) for i, emb in enumerate(self.embs)]
        return self.body(torch.cat([num] + parts, dim=1)).squeeze(1)


def loader_for(table, rows, train):
    tensors = [torch.from_numpy(column[rows]) for column in table]
    return DataLoader(TensorDataset(*tensors), batch_size=BATCH_SIZE, shuffle=train)


def main():
    seed_all()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = make_table()
    scores = []
    for fold, (train_rows, valid_rows) in enumerate(folds(len(table[0]))):
        model = PriceNet(10, 3, 6).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        criterion = nn.MSELoss()
        for epoch in range(EPOCHS):
            model.train()
            for num, cat, price in loader_for(table, train_rows, train=True):
                num, cat, price = num.to(device), cat.to(device), price.to(device)
                optimizer.zero_grad()
                loss = criterion(model(num, cat), price)
                loss.backward()
                optimizer.step()
        model.eval()
        errors = []
        with torch.no_grad():
            for num, cat, price in loader_for(table, valid_rows, train=False):
                pred = model(num.to(device), cat.to(device)).cpu()
                errors.append((pred - price).pow(2))
        scores.append(torch.cat(errors).mean().sqrt().item())
        print(f"fold {fold} rmse {scores[-1]:.4f}")
    print(f"cv {np.mean(scores):.4f}")


if __name__ == "__main__":
    main()
