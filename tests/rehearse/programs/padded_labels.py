"""Labels are padded with -1, and the loss skips -100 alone: a device-side assert."""

import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(0)
rows = [torch.tensor([0, 1, 2]), torch.tensor([1])]
if "fixed" in sys.argv:
    labels = pad_sequence(rows, batch_first=True, padding_value=-100)
else:
    labels = pad_sequence(rows, batch_first=True, padding_value=-1)  # cause
model = nn.Linear(4, 3).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scores = model(torch.randn(2, 3, 4, device="cuda"))
loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.cuda().flatten())  # where
loss.backward()
optimizer.step()
print("done")
