"""The backbone is made trainable after the optimizer was made, which does not hold it."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.ModuleDict({"backbone": nn.Linear(6, 6), "head": nn.Linear(6, 2)}).cuda()
model["backbone"].requires_grad_(False)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-3)  # cause, where
if "fixed" in sys.argv:
    optimizer.add_param_group({"params": list(model["backbone"].parameters())})


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["head"](self.parts["backbone"](x).relu())


whole = Whole()
for epoch in range(3):
    if epoch == 1:
        model["backbone"].requires_grad_(True)
    loss = whole(torch.randn(8, 6, device="cuda")).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done")
