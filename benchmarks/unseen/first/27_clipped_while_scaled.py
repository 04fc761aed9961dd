import torch
from torch import nn


class DiffusionTrainer:
    def __init__(self, net, lr, max_norm):
        self.net, self.max_norm = net, max_norm
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)

    def step(self, latents):
        noise = torch.randn_like(latents)
        with torch.autocast("cuda", dtype=torch.float16):
            predicted = self.net(latents + noise)
            loss = nn.functional.mse_loss(predicted.float(), noise)
        self.scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.item()


trainer = DiffusionTrainer(nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 4, 3, padding=1)).to("cuda"), 1e-4, 1.0)
for _ in range(4):
    trainer.step(torch.randn(2, 4, 8, 8, device="cuda"))
