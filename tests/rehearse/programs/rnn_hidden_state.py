"""A recurrent network whose first hidden state is made on the CPU."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.zeros(1, x.size(0), 8, device=x.device if FIXED else "cpu")  # cause
        out, _ = self.rnn(x, hidden)  # where
        return self.out(out)


model = Tagger().to("cuda:0")
opt = torch.optim.AdamW(model.parameters())
for _ in range(2):
    loss = model(torch.randn(2, 5, 4, device="cuda:0")).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done")
