"""The adapters are halved to save memory: the scaler refuses gradients that are fp16 themselves."""

import sys

import torch
import torch.nn.functional as F
from parts import AUDIO, BOS, DEVICE, by_codebook, rows, tiny_model
from peft import LoraConfig, get_peft_model

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "audio_lm_head"])
model = get_peft_model(tiny_model(), LORA).to(DEVICE)
if "fixed" not in sys.argv:
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data = parameter.data.half()  # cause
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
scaler = torch.amp.GradScaler(DEVICE)
for row in rows(2):
    ids = torch.tensor([[*row["words"], BOS, *[AUDIO] * len(row["codes"]), 2]], device=DEVICE)
    codes = torch.tensor([row["codes"]], device=DEVICE)
    seen = torch.ones(codes.shape[:2], dtype=torch.bool, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        out = model(input_ids=ids, audio_input_ids=codes, audio_input_ids_mask=seen)
        logits = by_codebook(out.logits)[:, -8:-2]
        loss = F.cross_entropy(logits.transpose(1, 3), codes.transpose(1, 2))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # where
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print("done")
