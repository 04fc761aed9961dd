import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {
    "steps": 8,
    "lr": 1e-3,
    "batch": 4,
    "size": 128,
    "lambda_rec": 1e-3,
    "lambda_tv": 1e-4,
}


class Denoiser(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(),
                                  nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.tail = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x):
        return self.tail(self.body(x))


def total_variation(x):
    return (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()


def criterion(output, clean, cfg):
    output = output.float()
    return cfg["lambda_rec"] * F.mse_loss(output, clean) + cfg["lambda_tv"] * total_variation(output)


def main(cfg=CONFIG):
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = Denoiser().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    for step in range(cfg["steps"]):
        clean = torch.rand(cfg["batch"], 3, cfg["size"], cfg["size"], device=device)
        noisy = clean + 0.1 * torch.randn_like(clean)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(noisy), clean, cfg)
        loss.backward()
        optimizer.step()
        print(f"{step}: {loss.item():.6f}")


if __name__ == "__main__":
    main()
