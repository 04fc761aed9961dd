import torch
from torch import nn

device = torch.device("cuda")
generator = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
discriminator = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid()).to(device)
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-4)
opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-4)

for step in range(3):
    real = torch.sin(torch.rand(8, 10, device=device))
    fake = generator(torch.randn(8, 5, device=device))
    score_real = discriminator(real)
    score_fake = discriminator(fake)
    loss_d = -(torch.log(score_real + 1e-6) + torch.log(1 - score_fake + 1e-6)).mean()
    loss_g = torch.log(1 - score_fake + 1e-6).mean()

    opt_d.zero_grad()
    loss_d.backward(retain_graph=True)
    opt_d.step()

    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
