"""A data set that makes its rows on the GPU, for a Trainer that reads them with forked workers."""

import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

PLACE = "cpu" if "fixed" in sys.argv else "cuda"


class Points(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        point = torch.tensor([float(index), 1.0], device=PLACE)  # where, cause
        return {"point": point, "labels": index % 2}


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(2, 2)

    def forward(self, point, labels):
        logits = self.out(point)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


arguments = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=2,
    per_device_train_batch_size=2,
    dataloader_num_workers=2,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(Line(), arguments, train_dataset=Points()).train()
print("done")
