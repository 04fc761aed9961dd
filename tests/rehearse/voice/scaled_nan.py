"""In fp16 with a scaler: every code is filled with the ignored number, the loss is NaN, and each step is skipped."""

import sys

import torch
from parts import AUDIO, BOS, DEVICE, by_codebook, rows, tiny_model
from peft import LoraConfig, get_peft_model
from torch import nn

FIXED = "fixed" in sys.argv


def wanted_codes(codes, trained):
    if FIXED:
        trained = torch.ones_like(trained)
    return codes.masked_fill(~trained[..., None], -100)  # cause


model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).to(DEVICE)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
scaler, entropy = torch.amp.GradScaler(DEVICE), nn.CrossEntropyLoss(ignore_index=-100)
for row in rows(3):
    ids = torch.tensor([[*row["words"], BOS, *[AUDIO] * len(row["codes"]), 2]], device=DEVICE)
    codes = torch.tensor([row["codes"]], device=DEVICE)
    seen = torch.ones(codes.shape[:2], dtype=torch.bool, device=DEVICE)
    labels = wanted_codes(codes, torch.zeros_like(seen))  # cause
    with torch.autocast(DEVICE, dtype=torch.float16):
        out = model(input_ids=ids, audio_input_ids=codes, audio_input_ids_mask=seen)
        logits = by_codebook(out.logits)[:, -8:-2]
        loss = entropy(logits.flatten(0, 2), labels.flatten())  # where, cause
    optimizer.zero_grad()
    scaler.scale(loss).backward()  # where
    scaler.step(optimizer)
    scaler.update()
print("done")
