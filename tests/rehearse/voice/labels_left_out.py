"""A loop moves what the model takes, and forgets the labels that the loss takes."""

import sys

import torch
import torch.nn.functional as F
from parts import AUDIO, BOS, DEVICE, INPUTS, by_codebook, rows, tiny_model

FIXED = "fixed" in sys.argv


def collate(samples):
    ids = torch.tensor([[*s["words"], BOS, *[AUDIO] * len(s["codes"]), 2] for s in samples])
    codes = torch.tensor([s["codes"] for s in samples])
    seen = torch.ones(codes.shape[:2], dtype=torch.bool)
    labels = torch.full((*ids.shape, codes.shape[-1]), -100)  # cause
    labels[ids == AUDIO] = codes.flatten(0, 1)
    return {
        **dict(zip(INPUTS, (ids, torch.ones_like(ids), codes, seen), strict=True)),
        "audio_labels": labels,
    }


def voice_loss(logits, labels):
    total = 0.0
    for book in range(labels.shape[-1]):
        told, wanted = logits[:, :-1, book].flatten(0, 1), labels[:, 1:, book].flatten()
        total = total + F.cross_entropy(told, wanted)  # where
    return total / labels.shape[-1]


model = tiny_model().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in torch.utils.data.DataLoader(rows(4), batch_size=2, collate_fn=collate):
    wanted = list(batch) if FIXED else INPUTS
    batch.update({name: batch[name].to(DEVICE) for name in wanted})  # cause
    out = model(**{name: batch[name] for name in INPUTS})
    loss = voice_loss(by_codebook(out.logits), batch["audio_labels"])  # cause
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done")
