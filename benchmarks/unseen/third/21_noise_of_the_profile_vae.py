"""Variational autoencoder over listening profiles (play counts per artist)."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class ProfileVAE(nn.Module):
    def __init__(self, n_artists, hidden=64, latent=16):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(n_artists, hidden), nn.Tanh())
        self.to_mean = nn.Linear(hidden, latent)
        self.to_logvar = nn.Linear(hidden, latent)
        self.decode = nn.Sequential(
            nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, n_artists))

    def reparameterize(self, mean, logvar):
        if not self.training:
            return mean
        std = torch.exp(0.5 * logvar)
        noise = torch.randn(std.size())
        return mean + noise * std

    def forward(self, plays):
        h = self.encode(F.normalize(plays, dim=1))
        mean, logvar = self.to_mean(h), self.to_logvar(h)
        return self.decode(self.reparameterize(mean, logvar)), mean, logvar


def elbo(logits, plays, mean, logvar, beta):
    nll = -(F.log_softmax(logits, dim=1) * plays).sum(1).mean()
    kl = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum(1).mean()
    return nll + beta * kl


def make_profiles(n_users, n_artists):
    taste = torch.rand(n_users, 4) @ torch.rand(4, n_artists)
    return torch.poisson(taste)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.manual_seed(7)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    profiles = make_profiles(160, 120)
    train, held = profiles[:128], profiles[128:]
    loader = DataLoader(TensorDataset(train), batch_size=args.batch_size, shuffle=True)

    model = ProfileVAE(profiles.size(1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    step = 0
    for epoch in range(args.epochs):
        model.train()
        for (plays,) in loader:
            plays = plays.to(device)
            logits, mean, logvar = model(plays)
            loss = elbo(logits, plays, mean, logvar, beta=min(1.0, step / 100))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        model.eval()
        with torch.no_grad():
            plays = held.to(device)
            logits, mean, logvar = model(plays)
            val = elbo(logits, plays, mean, logvar, beta=1.0)
        print(f"epoch {epoch} train {loss.item():.3f} val {val.item():.3f}")


if __name__ == "__main__":
    main()
