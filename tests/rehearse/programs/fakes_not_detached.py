"""The discriminator's loss goes back through the fakes, which the generator's loss needs afterwards."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
generator, judge = nn.Linear(4, 2).cuda(), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).cuda()
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
of_judge = torch.optim.Adam(judge.parameters(), lr=1e-3)
for _ in range(2):
    fake = generator(torch.randn(8, 4, device="cuda")).tanh()
    scores = judge(fake.detach()) if "fixed" in sys.argv else judge(fake)  # cause
    judge_loss = scores.sigmoid().mean()
    of_judge.zero_grad()
    judge_loss.backward()
    of_judge.step()
    of_generator.zero_grad()
    loss = -judge(fake).sigmoid().mean()
    loss.backward()  # where
    of_generator.step()
print("done")
