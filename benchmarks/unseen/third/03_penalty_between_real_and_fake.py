import torch
import torch.nn as nn

torch.manual_seed(42)
device = "cuda" if torch.cuda.is_available() else "cpu"
LR, BATCH, Z_DIM, CRITIC_ITERS, LAMBDA_GP, STEPS = 1e-4, 8, 16, 2, 10, 4


class Critic(nn.Module):
    def __init__(self, channels=1, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(channels, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, width * 2, 4, 2, 1),
            nn.InstanceNorm2d(width * 2, affine=True),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width * 2, 1, 4),
        )

    def forward(self, x):
        return self.net(x).flatten()


class Generator(nn.Module):
    def __init__(self, z_dim, channels=1, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.ConvTranspose2d(z_dim, width * 2, 4),
            nn.BatchNorm2d(width * 2),
            nn.ReLU(),
            nn.ConvTranspose2d(width * 2, width, 4, 2, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, channels, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.net(z)


def gradient_penalty(critic, real, fake):
    n, c, h, w = real.shape
    alpha = torch.rand((n, 1, 1, 1)).repeat(1, c, h, w)
    mixed = (real * alpha + fake * (1 - alpha)).requires_grad_(True)
    score = critic(mixed)
    grad = torch.autograd.grad(
        inputs=mixed, outputs=score, grad_outputs=torch.ones_like(score), create_graph=True, retain_graph=True
    )[0]
    return ((grad.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def real_images(n):
    base = torch.linspace(-1, 1, 16)
    return (base[None, None, :, None] * torch.rand(n, 1, 1, 1) + base * torch.rand(n, 1, 1, 1)).clamp(-1, 1)


gen, critic = Generator(Z_DIM).to(device), Critic().to(device)
opt_gen = torch.optim.Adam(gen.parameters(), lr=LR, betas=(0.0, 0.9))
opt_critic = torch.optim.Adam(critic.parameters(), lr=LR, betas=(0.0, 0.9))

for step in range(STEPS):
    for _ in range(CRITIC_ITERS):
        real = real_images(BATCH).to(device)
        noise = torch.randn(BATCH, Z_DIM, 1, 1, device=device)
        fake = gen(noise).detach()
        loss_critic = critic(fake).mean() - critic(real).mean() + LAMBDA_GP * gradient_penalty(critic, real, fake)
        opt_critic.zero_grad()
        loss_critic.backward()
        opt_critic.step()

    noise = torch.randn(BATCH, Z_DIM, 1, 1, device=device)
    loss_gen = -critic(gen(noise)).mean()
    opt_gen.zero_grad()
    loss_gen.backward()
    opt_gen.step()
    print(f"step {step} critic {loss_critic.item():.3f} gen {loss_gen.item():.3f}")
