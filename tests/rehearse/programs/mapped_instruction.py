"""Rows that are tokenised by datasets.map, with a column that the set does not have."""

import sys

import torch
from datasets import Dataset
from torch import nn

COLUMN = "instruction" if "fixed" in sys.argv else "prompt"
data = Dataset.from_dict({"instruction": ["add", "sum", "mul"] * 2, "output": ["1234", "5678", "9012"] * 2})


def tokenise(example):
    text = example[COLUMN]  # where, cause
    return {"ids": [ord(c) % 40 for c in text], "target": int(example["output"]) % 5}


data = data.map(tokenise).with_format("torch", columns=["ids", "target"])
model = nn.EmbeddingBag(40, 5).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for row in data.iter(batch_size=3):
    loss = nn.functional.cross_entropy(model(row["ids"].cuda()), row["target"].cuda())
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done", loss.item())
