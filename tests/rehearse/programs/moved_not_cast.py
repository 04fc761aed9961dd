"""A model is cast to bfloat16, and the function that moves batches leaves them in float32."""

import torch
from torch import nn

settings = {"device": "cuda", "dtype": torch.bfloat16}


def to_device(batch):
    return {key: value.to(settings["device"]) for key, value in batch.items()}  # cause


class Loop:
    def __init__(self):
        self.model = nn.Linear(4, 2).to(**settings)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch):
        batch = to_device(batch)
        loss = self.model(batch["x"]).square().mean()  # where
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


loop = Loop()
for _ in range(2):
    loop.step({"x": torch.randn(3, 4)})
print("done")
