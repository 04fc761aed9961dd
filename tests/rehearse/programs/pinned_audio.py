"""Sounds of two channels for a network of one; pinned batches from a worker, read with NumPy."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CHANNELS = 1 if "fixed" in sys.argv else 2


class Sounds(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        wave = np.random.rand(CHANNELS, 64).astype("float32")
        return torch.from_numpy(wave), index % 2  # cause


class Ear(nn.Module):
    def __init__(self):
        super().__init__()
        self.listen, self.out = nn.Conv1d(1, 4, 8, stride=8), nn.Linear(4, 2)

    def forward(self, sound):
        channels = sound.shape[-2]
        if channels > 1:
            raise ValueError("mono please")  # where
        return self.out(self.listen(sound).mean(-1))


if __name__ == "__main__":
    ear = Ear().cuda()
    opt = torch.optim.SGD(ear.parameters(), lr=0.1)
    for sound, kind in DataLoader(Sounds(), batch_size=2, num_workers=1, pin_memory=True):
        loss = nn.functional.cross_entropy(ear(sound.cuda(non_blocking=True)), kind.cuda(non_blocking=True))
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("done", loss.item())
