"""A vocoder as HiFi-GAN: weight norm as a parametrization, judges of several periods and scales, a mel loss by stft."""
import itertools
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

CHANNELS, MELS, HOP, BATCH, SEGMENT, STEPS, THIN = 512, 80, 256, 64, 16384, 3, 1
RATES, KERNELS, DILATIONS = (8, 8, 2, 2), (3, 7, 11), (1, 3, 5)


class Residual(nn.Module):
    def __init__(self, channels, kernel):
        super().__init__()
        self.first = nn.ModuleList(weight_norm(nn.Conv1d(channels, channels, kernel, dilation=d, padding=d * (kernel - 1) // 2)) for d in DILATIONS)
        self.second = nn.ModuleList(weight_norm(nn.Conv1d(channels, channels, kernel, padding=kernel // 2)) for _ in DILATIONS)

    def forward(self, x):
        for first, second in zip(self.first, self.second):
            x = x + second(F.leaky_relu(first(F.leaky_relu(x, 0.1)), 0.1))
        return x


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = weight_norm(nn.Conv1d(MELS, CHANNELS, 7, padding=3))
        self.ups, self.mix = nn.ModuleList(), nn.ModuleList()
        channels = CHANNELS
        for rate in RATES:
            self.ups.append(weight_norm(nn.ConvTranspose1d(channels, channels // 2, 2 * rate, rate, rate // 2)))
            channels //= 2
            self.mix.append(nn.ModuleList(Residual(channels, k) for k in KERNELS))
        self.out = weight_norm(nn.Conv1d(channels, 1, 7, padding=3))

    def forward(self, mel):
        x = self.into(mel)
        for up, mix in zip(self.ups, self.mix):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(block(x) for block in mix) / len(mix)
        return torch.tanh(self.out(F.leaky_relu(x)))


class Period(nn.Module):
    def __init__(self, period):
        super().__init__()
        self.period, sizes = period, [1] + [c // THIN for c in (32, 128, 512, 1024, 1024)]
        self.convs = nn.ModuleList(weight_norm(nn.Conv2d(a, b, (5, 1), (3 if i < 4 else 1, 1), (2, 0)))
                                   for i, (a, b) in enumerate(zip(sizes, sizes[1:])))
        self.last = weight_norm(nn.Conv2d(sizes[-1], 1, (3, 1), padding=(1, 0)))

    def forward(self, x):
        if x.shape[-1] % self.period:
            x = F.pad(x, (0, self.period - x.shape[-1] % self.period), "reflect")
        x, kept = x.view(x.shape[0], 1, -1, self.period), []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            kept.append(x)
        return self.last(x).flatten(1), kept


class Scale(nn.Module):
    def __init__(self, pools):
        super().__init__()
        norm = weight_norm if pools else spectral_norm
        self.pools = pools
        plan = [(1, 128, 15, 1, 1), (128, 128, 41, 2, 4), (128, 256, 41, 2, 16), (256, 512, 41, 4, 16), (512, 1024, 41, 4, 16), (1024, 1024, 5, 1, 1)]
        self.convs = nn.ModuleList(norm(nn.Conv1d(max(1, a // THIN), b // THIN, k, s, k // 2, groups=max(1, g // THIN))) for a, b, k, s, g in plan)
        self.last = norm(nn.Conv1d(1024 // THIN, 1, 3, padding=1))

    def forward(self, x):
        for _ in range(self.pools):
            x = F.avg_pool1d(x, 4, 2, 2)
        kept = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            kept.append(x)
        return self.last(x).flatten(1), kept


torch.manual_seed(7)
generator = Generator().to("cuda")
judges = nn.ModuleList([*(Period(p) for p in (2, 3, 5, 7, 11)), *(Scale(n) for n in range(3))]).to("cuda")
filters = torch.rand(MELS, 513, device="cuda") / 513
window = torch.hann_window(1024, device="cuda")


def mel_of(wave):
    spectrum = torch.stft(F.pad(wave.squeeze(1), (384, 384), "reflect"), 1024, HOP, 1024, window, center=False, return_complex=True)
    return torch.log((filters @ (spectrum.abs() + 1e-9)).clamp(min=1e-5))


settings = {"lr": 2e-4, "betas": (0.8, 0.99)}
of_generator = torch.optim.AdamW(generator.parameters(), **settings)
of_judges = torch.optim.AdamW(itertools.chain(*(j.parameters() for j in judges)), **settings)
for step in range(STEPS):
    wave = torch.rand(BATCH, 1, SEGMENT, device="cuda") * 2 - 1
    mel = mel_of(wave)
    fake = generator(mel)
    of_judges.zero_grad()
    loss_judges = sum(((1 - j(wave)[0]) ** 2).mean() + (j(fake.detach())[0] ** 2).mean() for j in judges)
    loss_judges.backward()
    of_judges.step()
    of_generator.zero_grad()
    loss = 45 * F.l1_loss(mel_of(fake), mel)
    for judge in judges:
        (_, real_kept), (score, kept) = judge(wave), judge(fake)
        loss = loss + ((1 - score) ** 2).mean() + 2 * sum((a - b).abs().mean() for a, b in zip(real_kept, kept))
    loss.backward()
    of_generator.step()
    print(step, loss.item(), loss_judges.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
