import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.device = torch.device("cuda")
        self.net = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda")

    def validate(self):
        self.net.eval()
        self.net.to(torch.float16)
        with torch.no_grad():
            score = self.net(torch.randn(4, 6, device=self.device, dtype=torch.float16)).float().mean().item()
        self.net.train()
        return score

    def fit(self, steps):
        for step in range(steps):
            x = torch.randn(8, 6, device=self.device)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = (self.net(x) - x).pow(2).mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            if step % 2 == 1:
                print("validation", self.validate())


Trainer().fit(5)
