"""datasets.map in two processes, batched, over a column that has another name."""

import sys

import torch
from datasets import Dataset
from torch import nn

NAME = "utterance" if "fixed" in sys.argv else "uterance"
data = Dataset.from_dict({"utterance": ["abc", "bcd", "cde", "def"], "speaker": [0, 1, 0, 1]})


def letters(batch):
    return {"ids": [[ord(c) % 40 for c in text] for text in batch[NAME]]}  # where, cause


if __name__ == "__main__":
    data = data.map(letters, batched=True, num_proc=2).with_format("torch", columns=["ids", "speaker"])
    bag = nn.EmbeddingBag(40, 2).cuda()
    opt = torch.optim.SGD(bag.parameters(), lr=0.1)
    for rows in data.iter(batch_size=2):
        loss = nn.functional.cross_entropy(bag(rows["ids"].cuda()), rows["speaker"].cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("done", loss.item())
