"""The text head has an optimizer of its own, which is stepped also after a batch without any trained word."""

import sys

import torch
import torch.nn.functional as F
from parts import AUDIO, BOS, DEVICE, by_codebook, rows, tiny_model

FIXED = "fixed" in sys.argv
model = tiny_model().to(DEVICE)
text = torch.optim.AdamW(model.text_lm_head.parameters(), lr=1e-3)
audio = torch.optim.AdamW([*model.model.parameters(), *model.audio_lm_head.parameters()], lr=1e-3)
scaler = torch.amp.GradScaler(DEVICE)
for number, row in enumerate(rows(3)):
    ids = torch.tensor([[*row["words"], BOS, *[AUDIO] * len(row["codes"]), 2]], device=DEVICE)
    codes = torch.tensor([row["codes"]], device=DEVICE)
    seen = torch.ones(codes.shape[:2], dtype=torch.bool, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        hidden = model.model(
            input_ids=ids, audio_input_ids=codes, audio_input_ids_mask=seen
        ).last_hidden_state
        logits = by_codebook(model.audio_lm_head(hidden))[:, -8:-2]
        loss = F.cross_entropy(logits.transpose(1, 3), codes.transpose(1, 2))
        spoken = number != 1
        if spoken:
            loss = loss + F.cross_entropy(model.text_lm_head(hidden[:, -2]), ids[:, -1])
    for optimizer in (audio, text):
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(audio)
    if spoken or not FIXED:
        scaler.step(text)  # where, cause
    scaler.update()
print("done")
