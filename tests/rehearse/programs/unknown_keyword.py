"""A model that constructs transformers' output class with a field that it does not have."""

import sys

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 5)

    def forward(self, x):
        hidden = self.body(x)
        if "fixed" in sys.argv:
            return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=hidden.mean(1))
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooled=hidden.mean(1))  # where, cause


encoder = Encoder().cuda()
opt = torch.optim.SGD(encoder.parameters(), lr=0.1)
for _ in range(2):
    loss = encoder(torch.rand(2, 3, 5, device="cuda")).pooler_output.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done", loss.item())
