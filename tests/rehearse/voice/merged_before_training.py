"""An adapter is merged into the weights before training: what the optimizer holds is no part of the model any more."""

import sys

import torch
import torch.nn.functional as F
from parts import AUDIO, BOS, DEVICE, by_codebook, rows, tiny_model
from peft import LoraConfig, get_peft_model

model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).to(DEVICE)
adapter = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(adapter, lr=1e-3)  # cause
if "fixed" not in sys.argv:
    model = model.merge_and_unload().to(DEVICE)  # cause
    model.enable_input_require_grads()
scaler = torch.amp.GradScaler(DEVICE)
for row in rows(2):
    ids = torch.tensor([[*row["words"], BOS, *[AUDIO] * len(row["codes"]), 2]], device=DEVICE)
    codes = torch.tensor([row["codes"]], device=DEVICE)
    seen = torch.ones(codes.shape[:2], dtype=torch.bool, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        out = model(input_ids=ids, audio_input_ids=codes, audio_input_ids_mask=seen)
        logits = by_codebook(out.logits)[:, -8:-2]
        loss = F.cross_entropy(logits.transpose(1, 3), codes.transpose(1, 2))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # where
    scaler.update()
print("done")
