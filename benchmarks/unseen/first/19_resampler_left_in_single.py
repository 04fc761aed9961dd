import torch
from torch import nn


class Seeing(nn.Module):
    def __init__(self):
        super().__init__()
        self.resampler = nn.Linear(6, 8)
        self.llm = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 20))
        self.llm.half()

    def forward(self, pixels):
        vision = self.resampler(pixels)
        return self.llm(vision)


class Finetune:
    def __init__(self, model, device):
        self.model = model.to(device)
        for p in self.model.llm.parameters():
            p.requires_grad_(False)
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.resampler.parameters(), lr=1e-3)

    def compute_loss(self, batch):
        logits = self.model(batch["pixels"].to(self.device))
        return nn.functional.cross_entropy(logits.float(), batch["labels"].to(self.device))

    def train(self, steps=3):
        for _ in range(steps):
            batch = {"pixels": torch.rand(4, 6), "labels": torch.randint(0, 20, (4,))}
            loss = self.compute_loss(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


Finetune(Seeing(), "cuda").train()
