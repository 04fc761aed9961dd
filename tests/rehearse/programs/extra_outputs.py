"""A model under Accelerate whose output is given what a helper gathered, key by key."""

import sys

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers.modeling_outputs import SequenceClassifierOutput


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def observe(self, opened):
        found = {}
        if "fixed" not in sys.argv:
            found["openness"] = opened.mean(-1)  # cause
        return found

    def forward(self, x, labels):
        opened = self.gate(x).sigmoid()
        logits = self.out(x * opened)
        loss = nn.functional.cross_entropy(logits, labels)
        answer = SequenceClassifierOutput(loss=loss, logits=logits)
        for key, value in self.observe(opened).items():
            answer[key] = value
        return answer


accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
model = Gated()
data = DataLoader(TensorDataset(torch.rand(16, 6), torch.arange(16) % 3), batch_size=4)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, opt, data = accelerator.prepare(model, opt, data)
for x, labels in data:
    out = model(x, labels=labels)  # where
    opt.zero_grad()
    accelerator.backward(out.loss)
    opt.step()
print("done", out.loss.item())
accelerator.end_training()
