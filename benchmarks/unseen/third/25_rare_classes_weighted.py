"""Forest cover type, tabular baseline (weights against the class imbalance)."""
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

SEED = 42
N_FEATURES = 20
N_CLASSES = 4
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def seed_everything(seed):
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


class CoverDataset(Dataset):
    def __init__(self, features, target):
        self.features = torch.tensor(features, dtype=torch.float32)
        self.target = torch.tensor(target, dtype=torch.long)

    def __len__(self):
        return len(self.target)

    def __getitem__(self, idx):
        return self.features[idx], self.target[idx]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(N_FEATURES, 64), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, N_CLASSES))

    def forward(self, x):
        return self.layers(x)


def load_frame(n=300):
    target = np.random.choice(N_CLASSES, size=n, p=[0.7, 0.2, 0.07, 0.03])
    target[:N_CLASSES] = np.arange(N_CLASSES)
    features = np.random.randn(n, N_FEATURES) + target[:, None] * 0.3
    return features, target


def balanced_weights(target):
    counts = np.bincount(target, minlength=N_CLASSES)
    return torch.tensor(len(target) / (N_CLASSES * counts), dtype=torch.float32)


def validate(model, loader, criterion):
    model.eval()
    losses, hits, seen = [], 0, 0
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(DEVICE), y.to(DEVICE)
            logits = model(x)
            losses.append(criterion(logits, y).item())
            hits += (logits.argmax(1) == y).sum().item()
            seen += len(y)
    return np.mean(losses), hits / seen


def train():
    seed_everything(SEED)
    features, target = load_frame()
    train_loader = DataLoader(CoverDataset(features[:240], target[:240]), batch_size=60, shuffle=True)
    valid_loader = DataLoader(CoverDataset(features[240:], target[240:]), batch_size=60)
    model = Net().to(DEVICE)
    criterion = nn.CrossEntropyLoss(weight=balanced_weights(target[:240]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        model.train()
        for x, y in train_loader:
            x, y = x.to(DEVICE), y.to(DEVICE)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        val_loss, acc = validate(model, valid_loader, criterion)
        print(f"epoch {epoch} valid loss {val_loss:.4f} acc {acc:.3f}")


if __name__ == "__main__":
    train()
