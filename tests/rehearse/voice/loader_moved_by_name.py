"""A loop of one's own moves the fields of its batch one by one, and the labels of the sound are not among them."""

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from parts import AUDIO, BOS, DEVICE, by_codebook, rows, tiny_model


@dataclass
class Batch:
    ids: torch.Tensor
    codes: torch.Tensor
    audio_labels: torch.Tensor


def collate(samples):
    ids = torch.tensor([[*s["words"], BOS, *[AUDIO] * len(s["codes"]), 2] for s in samples])
    codes = torch.tensor([s["codes"] for s in samples])
    return Batch(ids, codes, codes.clone())  # cause


def run(model, batch):
    ids, codes = batch.ids.to(DEVICE), batch.codes.to(DEVICE)  # cause
    seen = torch.ones(codes.shape[:2], dtype=torch.bool, device=DEVICE)
    logits = by_codebook(model(input_ids=ids, audio_input_ids=codes, audio_input_ids_mask=seen).logits)
    wanted = batch.audio_labels.to(DEVICE) if "fixed" in sys.argv else batch.audio_labels  # cause
    return F.cross_entropy(logits[:, -8:-2].transpose(1, 3), wanted.transpose(1, 2))  # where


model = tiny_model().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in torch.utils.data.DataLoader(rows(4), batch_size=2, collate_fn=collate):
    loss = run(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done")
