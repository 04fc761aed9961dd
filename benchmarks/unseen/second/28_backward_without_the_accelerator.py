import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Lesions(Dataset):
    def __init__(self, n=24, size=16):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(n, 1, size, size, generator=generator)
        self.masks = (self.images > 0.5).float()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.masks[i], self.images[i]


class MedSegDiff(nn.Module):
    def __init__(self, width=16, timesteps=50):
        super().__init__()
        self.time = nn.Embedding(timesteps, width)
        self.stem = nn.Conv2d(2, width, 3, padding=1)
        self.body = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 1, 3, padding=1))
        self.register_buffer("alphas", torch.linspace(0.999, 0.01, timesteps))

    def forward(self, mask, image):
        t = torch.randint(0, len(self.alphas), (len(mask),), device=mask.device)
        a = self.alphas[t][:, None, None, None]
        noise = torch.randn_like(mask)
        x = a.sqrt() * (mask * 2 - 1) + (1 - a).sqrt() * noise
        h = self.stem(torch.cat([x, image], 1)) + self.time(t)[:, :, None, None]
        return F.mse_loss(self.body(h), noise)


def main():
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=1)
    loader = DataLoader(Lesions(), batch_size=8, shuffle=True)
    model = MedSegDiff()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        running = 0.0
        for mask, image in loader:
            with accelerator.accumulate(model):
                loss = model(mask, image)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            running += loss.item()
        accelerator.print(f"epoch {epoch} loss {running / len(loader):.4f}")


if __name__ == "__main__":
    main()
