"""The prompt is masked up to a token that no row has: all labels are ignored, and the mean of none is NaN."""

import sys

import torch
import torch.nn.functional as F
from parts import AUDIO, BOS, DEVICE, rows, tiny_model

TURN = BOS if "fixed" in sys.argv else 59
"""The token after which the trained turn begins."""


def mask_prompt(ids):
    labels = ids.clone()
    for row in labels:
        begins = (row == TURN).nonzero()
        end = int(begins[-1]) if len(begins) else len(row)
        row[:end] = -100  # cause
    return labels


model = tiny_model().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for row in rows(2):
    ids = torch.tensor([[*row["words"], BOS, *[AUDIO] * len(row["codes"]), 2]], device=DEVICE)
    codes = torch.tensor([row["codes"]], device=DEVICE)
    seen = torch.ones(codes.shape[:2], dtype=torch.bool, device=DEVICE)
    labels = mask_prompt(ids)
    hidden = model.model(input_ids=ids, audio_input_ids=codes, audio_input_ids_mask=seen).last_hidden_state
    text = model.text_lm_head(hidden)
    loss = F.cross_entropy(text[:, :-1].flatten(0, 1), labels[:, 1:].flatten())  # where, cause
    optimizer.zero_grad()
    loss.backward()  # where
    optimizer.step()
print("done")
