"""A collator that moves token ids to the model's device, in workers that were forked after CUDA was started."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

device = torch.device("cuda")
model = nn.Embedding(50, 8).to(device)
rows = [{"input_ids": torch.arange(n, n + 4), "pixels": torch.rand(3, 4, 4)} for n in range(8)]


def collate(samples):
    ids = torch.stack([sample["input_ids"] for sample in samples])
    if "fixed" not in sys.argv:
        ids = ids.to(device)  # where, cause
    return {"input_ids": ids, "pixels": torch.stack([sample["pixels"] for sample in samples])}


opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in DataLoader(rows, batch_size=2, num_workers=2, collate_fn=collate):
    loss = model(batch["input_ids"].to(device)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done", loss.item())
