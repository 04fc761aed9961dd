import torch
from torch import nn


class Generator(nn.Module):
    def __init__(self, latent=16, out=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(latent, 64), nn.LeakyReLU(0.2), nn.Linear(64, out), nn.Tanh())

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self, inp=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inp, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
        self.out = nn.Sigmoid()

    def forward(self, x):
        return self.out(self.net(x)).view(-1)


def train(steps=6, batch=16, latent=16, device="cuda"):
    G, D = Generator(latent).to(device), Discriminator().to(device)
    opt_g = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCELoss()
    scaler = torch.amp.GradScaler(device)
    real_label, fake_label = torch.ones(batch, device=device), torch.zeros(batch, device=device)
    for step in range(steps):
        real = torch.tanh(torch.randn(batch, 64, device=device))
        z = torch.randn(batch, latent, device=device)
        with torch.autocast(device, dtype=torch.float16):
            fake = G(z)
            loss_d = criterion(D(real), real_label) + criterion(D(fake.detach()), fake_label)
        opt_d.zero_grad()
        scaler.scale(loss_d).backward()
        scaler.step(opt_d)
        with torch.autocast(device, dtype=torch.float16):
            loss_g = criterion(D(fake), real_label)
        opt_g.zero_grad()
        scaler.scale(loss_g).backward()
        scaler.step(opt_g)
        scaler.update()
        print(f"[{step}] D {loss_d.item():.4f} G {loss_g.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(999)
    train()
