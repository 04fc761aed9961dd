import argparse

import torch
import torch.nn.functional as F
from torch import nn


class TorchSTFT:
    def __init__(self, n_fft, hop_length, win_length, window="hann_window"):
        self.n_fft = n_fft
        self.hop_length = hop_length
        self.win_length = win_length
        self.window = getattr(torch, window)(win_length)

    def __call__(self, x):
        o = torch.stft(x, self.n_fft, self.hop_length, self.win_length, self.window, return_complex=True)
        return torch.sqrt(torch.clamp(o.real ** 2 + o.imag ** 2, min=1e-8))


class MultiScaleSTFTLoss(nn.Module):
    def __init__(self, n_ffts=(64, 128), hop_lengths=(16, 32), win_lengths=(64, 128)):
        super().__init__()
        self.stfts = [TorchSTFT(*a) for a in zip(n_ffts, hop_lengths, win_lengths)]

    def forward(self, y_hat, y):
        loss = 0
        for stft in self.stfts:
            m, m_hat = stft(y), stft(y_hat)
            loss = loss + F.l1_loss(torch.log(m_hat), torch.log(m)) + torch.norm(m - m_hat) / torch.norm(m)
        return loss / len(self.stfts)


def train(args):
    use_cuda = torch.cuda.is_available()
    generator = nn.Sequential(nn.Conv1d(8, 16, 7, padding=3), nn.LeakyReLU(0.1), nn.Upsample(scale_factor=16),
                              nn.Conv1d(16, 1, 7, padding=3), nn.Tanh())
    criterion = MultiScaleSTFTLoss()
    if use_cuda:
        generator.cuda()
        criterion.cuda()
    optimizer = torch.optim.AdamW(generator.parameters(), lr=args.lr)
    for step in range(args.steps):
        mel, wav = torch.randn(4, 8, 64), 0.3 * torch.randn(4, 1024)
        if use_cuda:
            mel, wav = mel.cuda(), wav.cuda()
        loss = criterion(generator(mel).squeeze(1), wav)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=5)
    train(parser.parse_args())
