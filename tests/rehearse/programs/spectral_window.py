"""The window of a spectrum is a plain attribute; torch.stft itself refuses it."""

import torch
from torch import nn


class SpectralLoss(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.size = size
        self.window = torch.hann_window(size)  # cause

    def spectrum(self, wave):
        return torch.stft(wave, self.size, window=self.window, return_complex=True).abs()  # where

    def forward(self, a, b):
        a, b = self.spectrum(a), self.spectrum(b)
        return (a - b).abs().mean()


model, criterion = nn.Linear(64, 64).cuda(), SpectralLoss().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wave = torch.randn(2, 64).cuda()
criterion(model(wave), wave).backward()
optimizer.step()
print("done")
