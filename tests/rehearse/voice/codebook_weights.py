"""The weights of the codebooks are a plain attribute of the loss: moving the loss leaves them where they were."""

import sys

import torch
import torch.nn.functional as F
from parts import AUDIO, BOOKS, BOS, DEVICE, by_codebook, rows, tiny_model
from torch import nn


class VoiceLoss(nn.Module):
    def __init__(self, books):
        super().__init__()
        if "fixed" in sys.argv:
            self.register_buffer("audio_codebook_weights", torch.ones(books) / books)
        else:
            self.audio_codebook_weights = torch.ones(books) / books  # cause

    def forward(self, logits, codes):
        each = F.cross_entropy(logits.transpose(1, 3), codes.transpose(1, 2), reduction="none").mean((0, 2))
        return (each * self.audio_codebook_weights).sum()  # where


model, criterion = tiny_model().to(DEVICE), VoiceLoss(BOOKS).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for row in rows(2):
    ids = torch.tensor([[*row["words"], BOS, *[AUDIO] * len(row["codes"]), 2]], device=DEVICE)
    codes = torch.tensor([row["codes"]], device=DEVICE)
    seen = torch.ones(codes.shape[:2], dtype=torch.bool, device=DEVICE)
    out = model(input_ids=ids, audio_input_ids=codes, audio_input_ids_mask=seen)
    loss = criterion(by_codebook(out.logits)[:, -8:-2], codes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done")
