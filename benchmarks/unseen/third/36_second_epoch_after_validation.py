"""Remaining useful life of engines from sensor windows, LSTM regressor."""
import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class RULNet(nn.Module):
    def __init__(self, n_sensors, hidden, layers=2, dropout=0.2):
        super().__init__()
        self.lstm = nn.LSTM(n_sensors, hidden, num_layers=layers,
                            batch_first=True, dropout=dropout)
        self.regress = nn.Sequential(nn.Linear(hidden, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, window):
        out, _ = self.lstm(window)
        return self.regress(out[:, -1]).squeeze(-1)


def engine_windows(n=160, length=30, n_sensors=8):
    life = torch.rand(n)
    drift = (1 - life).view(n, 1, 1) * torch.linspace(0, 1, length).view(1, length, 1)
    return TensorDataset(drift + 0.1 * torch.randn(n, length, n_sensors), life)


class Trainer:
    def __init__(self, model, device, lr):
        self.model = model.to(device)
        self.device = device
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def run_epoch(self, loader):
        total = 0.0
        for window, life in loader:
            window, life = window.to(self.device), life.to(self.device)
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(window), life)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        return total / len(loader)

    @torch.no_grad()
    def validate(self, loader):
        self.model.eval()
        total = 0.0
        for window, life in loader:
            window, life = window.to(self.device), life.to(self.device)
            total += self.criterion(self.model(window), life).item()
        return total / len(loader)

    def fit(self, train_loader, valid_loader, epochs):
        self.model.train()
        for epoch in range(epochs):
            train_loss = self.run_epoch(train_loader)
            valid_loss = self.validate(valid_loader)
            print(f"epoch {epoch} train {train_loss:.4f} valid {valid_loss:.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=24)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    torch.manual_seed(4)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, valid_set = random_split(engine_windows(), [128, 32])
    trainer = Trainer(RULNet(8, args.hidden), device, args.lr)
    trainer.fit(DataLoader(train_set, batch_size=32, shuffle=True),
                DataLoader(valid_set, batch_size=32), args.epochs)


if __name__ == "__main__":
    main()
