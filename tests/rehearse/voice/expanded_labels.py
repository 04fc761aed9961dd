"""A forward that spreads the audio labels over the text's places makes the new tensor without a device."""

import sys

import torch
import torch.nn.functional as F
from parts import AUDIO, BOOKS, BOS, DEVICE, by_codebook, rows, tiny_model
from torch import nn

FIXED = "fixed" in sys.argv


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def expand(self, input_ids, audio_labels):
        device = input_ids.device if FIXED else "cpu"
        expanded_labels = torch.full((*input_ids.shape, BOOKS), -100, device=device)  # cause
        expanded_labels.index_put_((input_ids == AUDIO,), audio_labels.flatten(0, 1).to(device))  # where
        return expanded_labels

    def forward(self, audio_labels, **inputs):
        logits = by_codebook(self.model(**inputs).logits)
        labels = self.expand(inputs["input_ids"], audio_labels)
        return F.cross_entropy(logits[:, :-1].flatten(0, 2), labels[:, 1:].flatten())


model = WithLoss(tiny_model()).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for row in rows(2):
    ids = torch.tensor([[*row["words"], BOS, *[AUDIO] * len(row["codes"]), 2]])
    codes = torch.tensor([row["codes"]])
    batch = {
        "input_ids": ids,
        "audio_input_ids": codes,
        "audio_input_ids_mask": torch.ones(codes.shape[:2], dtype=torch.bool),
        "audio_labels": codes,
    }
    loss = model(**{name: tensor.to(DEVICE) for name, tensor in batch.items()})
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done")
