"""One block that is run at three depths, checkpointed re-entrantly, under Accelerate's DDP."""

import sys

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn
from torch.utils.checkpoint import checkpoint

FIXED = "fixed" in sys.argv


class Universal(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet, self.block, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def step(self, x):
        return x + torch.tanh(self.block(x))

    def forward(self, x):
        x = self.inlet(x)
        for _ in range(3):
            x = checkpoint(self.step, x, use_reentrant=not FIXED)  # cause
        return self.out(x)


accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=not FIXED)])
model = Universal()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt = accelerator.prepare(model, opt)
for _ in range(2):
    loss = model(torch.rand(3, 4, device=accelerator.device)).pow(2).mean()
    opt.zero_grad()
    accelerator.backward(loss)  # where
    opt.step()
print("done", loss.item())
accelerator.end_training()
