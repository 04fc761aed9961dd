import torch
from torch import nn


class LinearNoiseScheduler:
    def __init__(self, num_timesteps, beta_start, beta_end):
        self.num_timesteps = num_timesteps
        self.betas = torch.linspace(beta_start, beta_end, num_timesteps)
        self.alphas = 1.0 - self.betas
        self.alpha_cum_prod = torch.cumprod(self.alphas, dim=0)
        self.sqrt_alpha_cum_prod = torch.sqrt(self.alpha_cum_prod)
        self.sqrt_one_minus_alpha_cum_prod = torch.sqrt(1 - self.alpha_cum_prod)

    def add_noise(self, original, noise, t):
        shape = (original.shape[0],) + (1,) * (original.dim() - 1)
        a = self.sqrt_alpha_cum_prod[t].reshape(shape).to(original.device)
        b = self.sqrt_one_minus_alpha_cum_prod[t].reshape(shape).to(original.device)
        return a * original + b * noise


class Denoiser(nn.Module):
    def __init__(self, channels=1, width=16, steps=100):
        super().__init__()
        self.t_embed = nn.Embedding(steps, width)
        self.conv_in = nn.Conv2d(channels, width, 3, padding=1)
        self.mid = nn.Sequential(nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU())
        self.conv_out = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x, t):
        return self.conv_out(self.mid(self.conv_in(x) + self.t_embed(t)[:, :, None, None]))


def train(config):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scheduler = LinearNoiseScheduler(**config["diffusion"])
    model = Denoiser(steps=scheduler.num_timesteps).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    criterion = nn.MSELoss()
    for step in range(config["steps"]):
        im = torch.rand(8, 1, 16, 16).to(device) * 2 - 1
        noise = torch.randn_like(im)
        t = torch.randint(0, scheduler.num_timesteps, (im.shape[0],)).to(device)
        noisy_im = scheduler.add_noise(im, noise, t)
        loss = criterion(model(noisy_im, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


train({"diffusion": {"num_timesteps": 100, "beta_start": 1e-4, "beta_end": 0.02}, "lr": 1e-3, "steps": 6})
