"""A batch whose loss is not finite is left out, but the scaler is stepped all the same."""

import sys

import torch
import torch.nn.functional as F
from parts import AUDIO, BOS, DEVICE, by_codebook, rows, tiny_model
from peft import LoraConfig, get_peft_model

FIXED = "fixed" in sys.argv
model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).to(DEVICE)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
scaler = torch.amp.GradScaler(DEVICE)
for number, row in enumerate(rows(3)):
    ids = torch.tensor([[*row["words"], BOS, *[AUDIO] * len(row["codes"]), 2]], device=DEVICE)
    codes = torch.tensor([row["codes"]], device=DEVICE)
    seen = torch.ones(codes.shape[:2], dtype=torch.bool, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        out = model(input_ids=ids, audio_input_ids=codes, audio_input_ids_mask=seen)
        logits = by_codebook(out.logits)[:, -8:-2]
        if number == 1:
            logits = logits.half() * 60000 * 60000
        loss = F.cross_entropy(logits.transpose(1, 3), codes.transpose(1, 2))
    optimizer.zero_grad()
    if torch.isfinite(loss):  # cause
        scaler.scale(loss).backward()
    elif FIXED:
        continue
    scaler.step(optimizer)  # where, cause
    scaler.update()
print("done")
