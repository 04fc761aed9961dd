"""A collator class, in a worker of a Trainer, that asks for a column by another name than the file gives it."""

import sys
import tempfile

import torch
from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainingArguments

COLUMN = "sentence" if "fixed" in sys.argv else "caption"


class Letters:
    def __init__(self, column, length):
        self.column, self.length = column, length

    def encode(self, sample):
        words = sample[self.column]  # where, cause
        return [ord(letter) % 50 for letter in words[: self.length]]

    def __call__(self, samples):
        ids = torch.tensor([self.encode(sample) for sample in samples])
        return {"ids": ids, "labels": torch.tensor([sample["score"] for sample in samples])}


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, ids, labels):
        logits = self.out(self.embed(ids).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


rows = Dataset.from_dict({"sentence": ["abcd", "efgh", "ijkl", "mnop"], "score": [0, 1, 2, 0]})
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=2,
    per_device_train_batch_size=2,
    remove_unused_columns=False,
    dataloader_num_workers=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(Scorer(), arguments, data_collator=Letters(COLUMN, 4), train_dataset=rows).train()
print("done")
